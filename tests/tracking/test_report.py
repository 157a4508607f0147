"""``sm70lab report``: pages over real run folders, in every state a run can be in."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from scripted import ScriptedTarget

from sm70lab.cli import main
from sm70lab.cli.display import Silent, panel_lines
from sm70lab.config import compose, plain
from sm70lab.experiment import Outcome, build_target, run_experiment
from sm70lab.schema import ExperimentConfig, Generation, Prompt, TokenScores, Tracking
from sm70lab.targets.base import OnProgress, Target
from sm70lab.tracking.report import records, reproduce
from sm70lab.tracking.run_folder import RunFolder

HOSTILE = (
    "</pre></code></script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
    "<style>*{display:none}</style>&lt;b&gt; {{ 7*7 }} {% raw %} \x00\x1b[31m \u202eevil\u202c <!-- "
)
Build = Callable[[ExperimentConfig], Target]


class HostileTarget(ScriptedTarget):
    """Its outputs are a page that would take over the report."""

    def _one(self, prompt: Prompt, repeat: int, on_progress: OnProgress) -> Generation:
        generation = super()._one(prompt, repeat, on_progress)
        generation.text = HOSTILE + generation.text
        return generation


class LoopingTarget(ScriptedTarget):
    """Says one thing for ever, faster than anybody."""

    def _one(self, prompt: Prompt, repeat: int, on_progress: OnProgress) -> Generation:
        generation = super()._one(prompt, repeat, on_progress)
        generation.token_ids = [generation.token_ids[0]] * len(generation.token_ids)
        generation.text = "a good beginning " + "!" * len(generation.token_ids)
        return generation

    def score(self, generation: Generation) -> TokenScores:
        """The reference is sure of every token of it."""
        n = len(generation.token_ids)
        zero, one = np.zeros(n), np.ones(n)
        sure = {"logprob": zero, "entropy": zero, "cdf_low": zero, "cdf_high": one, "collision": one}
        return replace(super().score(generation), **sure)


def run(folder: Path, *overrides: str, build: Build = ScriptedTarget) -> RunFolder:
    given = ["experiment=tiny", "name=t", "tracking=off", f"tracking.runs_dir={folder}", *overrides]
    if not any(o.startswith("workload.max_tokens") for o in overrides):
        given.append("workload.max_tokens=300")
    return RunFolder(run_experiment(compose(given), Silent(), build).folder)


def report(folder: Path, *arguments: str) -> str:
    assert main(["report", f"tracking.runs_dir={folder}", *arguments]) == 0
    found = [a for a in arguments if a.startswith("out=")]
    page = Path(found[0][4:]) if found else next(folder.rglob("report.html"))
    return page.read_text(encoding="utf-8")


class Page(HTMLParser):
    """Elements, ids, addresses and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.words: list[str] = []
        self._skip = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.words.append(" ")
        self._skip = tag == "style"
        for name, value in attrs:
            assert not name.startswith("on"), f"<{tag} {name}>"
            if name == "id":
                self.ids[value or ""] += 1
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.addresses.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        self._skip = False

    def handle_data(self, data: str) -> None:
        if not self._skip:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def make_runs(folder: Path) -> dict[str, RunFolder]:
    """A sweep with an output that is a page, a loop, and a hazard that one route shows and one hides."""
    return {
        "hostile": run(folder, "route=split", build=HostileTarget),
        "honest": run(folder, "route=input_core", "seed=2"),
        "loop": run(folder, "route=full_forward", build=LoopingTarget),
        "caught": run(folder, "route=split", "hazard=stale_column_0", build=LoopingTarget),
        "missed": run(folder, "route=input_core", "hazard=stale_column_0"),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def hostile(runs: dict[str, RunFolder]) -> str:
    """The page of the run whose output is a page."""
    folder = runs["hostile"].path
    return report(folder.parents[1], folder.name)


def copies(run: RunFolder, folder: Path, count: int) -> list[RunFolder]:
    """The run several times over, as if it had been repeated."""
    paths = [folder / "t" / f"{run.path.name}-{number}" for number in range(2, count + 2)]
    return [RunFolder(Path(shutil.copytree(run.path, path))) for path in paths]


def test_verdict_first_then_evidence_then_pictures(runs: dict[str, RunFolder], hostile: str) -> None:
    page = Page(hostile)
    order = ["pass", "the text is sound", "Evidence", "Pictures", "Outputs", "Configuration", "Environment"]
    places = [page.text.index(word, page.text.index("pass")) for word in order]
    assert places == sorted(places)
    assert page.tags["svg"] >= 6  # three pictures, wide and narrow
    result = runs["hostile"].result()
    assert result is not None
    assert result["fingerprint"] in page.text
    assert (runs["hostile"].path / "summary.md").read_text().startswith("# t: split")


def test_nothing_comes_from_elsewhere(hostile: str) -> None:
    page = Page(hostile)
    assert page.tags["script"] == 0
    assert all(a.startswith(("#", "data:")) for a in page.addresses), page.addresses
    assert set(re.findall(r"url\((.)", hostile)) <= {"#"}
    assert "default-src 'none'" in hostile
    assert [name for name, count in page.ids.items() if count > 1] == []
    used = {a[1:] for a in page.addresses if a.startswith("#")} | set(re.findall(r"url\(#([^)]*)\)", hostile))
    assert used <= set(page.ids)


def test_an_output_that_is_a_page_is_inert(hostile: str) -> None:
    page = Page(hostile)
    assert (page.tags["script"], page.tags["img"], page.tags["style"]) == (0, 0, 1)  # the page's own
    assert "<script>document.title='owned'</script>" in page.text
    assert "{{ 7*7 }}" in page.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", hostile)
    assert "␀␛[31m ⟨U+202E⟩evil" in page.text


def test_a_loop_is_fast_and_never_ranked(runs: dict[str, RunFolder], tmp_path: Path) -> None:
    loop = runs["loop"].path
    result = runs["loop"].result()
    assert result is not None
    assert result["verdict"]["kind"] == "model_degenerate"
    page = Page(report(loop.parents[1], loop.name, f"out={tmp_path}/loop.html"))
    assert "invalid, not ranked" in page.text
    assert "Where the text's shape fails first" in page.text
    assert page.tags["mark"] == 1


def test_a_sweep_ranks_what_passes_and_counts_hazards_apart(runs: dict[str, RunFolder]) -> None:
    text = report(runs["loop"].path.parents[1], "t")
    page = Page(text)
    assert "2 of 3 judged runs pass" in page.text
    assert "Fastest of the routes that pass every run: input_core" in page.text
    assert "Too few runs for an interval of the speed: repeat them before you choose." in page.text
    assert "full_forward 0 of 1 0 to 98 % no valid speed" in page.text
    assert "2 of 5 runs have a HAZARD" in page.text
    heat = text[text.index('<table class="heat">') :]
    heat = heat[: heat.index("</table>")]
    assert re.findall(r'class="cell-(\w+)"', heat) == ["fault", "clean", "clean", "missed", "caught"]
    summary = (runs["loop"].path.parent / "summary.md").read_text()
    assert "| stale_column_0 |  | 0/1 missed | 1/1 caught |" in summary
    assert "| full_forward | 0 of 1 | 0% to 98% | no valid speed |" in summary


def test_a_route_without_a_whole_run_is_no_pass(runs: dict[str, RunFolder], tmp_path: Path) -> None:
    (first,) = copies(runs["hostile"], tmp_path, 1)
    (other,) = copies(runs["honest"], tmp_path, 1)
    assert "all pass" in Page(report(tmp_path, "t")).text
    (other.path / "result.json").unlink()
    other.interrupt("SIGTERM")
    page = Page(report(tmp_path, "t"))
    assert "all pass" not in page.text
    assert page.text.count("1 of 2 routes pass, 1 has no finished run") == 3  # title, badge, reason
    summary = (first.path.parent / "summary.md").read_text()
    assert "**1 of 2 routes pass, 1 has no finished run**: 1 of 1 judged runs pass." in summary
    (other.path / "config.yaml").write_text("- 1\n")  # nobody knows which route it was of
    assert "1 of 1 routes passes, 1 run cannot be read" in Page(report(tmp_path, "t")).text


def test_curves_are_named_by_route(runs: dict[str, RunFolder], tmp_path: Path) -> None:
    for name in ("hostile", "honest", "loop"):
        copies(runs[name], tmp_path, 2)
    text = report(tmp_path, "t")
    figure = text[text.index('<figure id="evidence">') :]
    legend = figure[figure.index('<div class="legend">') : figure.index("</div>")]
    assert Page(legend).text == "● A: input_core ■ B: split ▲ C: full_forward"
    colours = set(re.findall(r"stroke: var\(--(c\d)\)", figure[: figure.index("</figure>")]))
    assert colours == {"c0", "c1", "c2"}
    assert "At 0 no bet on changed draws has gained anything" in Page(figure).text
    alone = report(tmp_path, runs["honest"].path.name + "-2", f"out={tmp_path}/alone.html")
    assert '<div class="legend">' not in alone[alone.index('<figure id="evidence">') :].split("</figure>")[0]


def test_the_noises_token_stands_beside_the_first_fault(runs: dict[str, RunFolder], tmp_path: Path) -> None:
    (folder,) = copies(runs["honest"], tmp_path, 1)
    result = folder.result()
    assert result is not None
    audit = next(e for e in result["verdict"]["evidence"] if e["kind"] == "audit")
    audit["details"]["first_bad"] = {
        "generation": "page-r0", "index": 7, "token": 3, "rule": "noise", "gap": 1.5, "place": "round 2",
        "context": {"before": "a", "token": "b", "after": "c"},
        "alternatives": [{"token": 9, "text": "the", "probability": 0.5}],
        "drawn": {"token": 4, "text": " <i>", "probability": 0.0312},
    }  # fmt: skip
    (folder.path / "result.json").write_text(json.dumps(result))
    words = "With the run's noise the reference draws ␣<i> here, of probability 3.12 %."
    assert words in Page(report(tmp_path)).text
    audit["details"]["first_bad"]["drawn"] = None  # no noise of its own, or an earlier version's record
    (folder.path / "result.json").write_text(json.dumps(result))
    assert "With the run's noise" not in Page(report(tmp_path)).text


@pytest.mark.parametrize(
    ("tracking", "command"),
    [
        (Tracking(mlflow=False), "sm70lab report {folder}"),
        (Tracking(), "sm70lab ui"),
        (Tracking(runs_dir=str(Path("runs").absolute())), "sm70lab ui"),
        (Tracking(runs_dir="/data/my runs"), "sm70lab ui 'tracking.runs_dir=/data/my runs'"),
        (Tracking(uri="http://me:secret@host:5000"), "sm70lab ui 'tracking.uri=http://***@host:5000'"),
    ],
)
def test_the_panel_names_a_command_that_shows_this_record(
    runs: dict[str, RunFolder], tracking: Tracking, command: str
) -> None:
    result, folder = runs["honest"].result(), runs["honest"].path
    assert result is not None
    lines = {name: line for name, line, _ in panel_lines(Outcome(result, folder, 0, tracking=tracking))}
    assert lines["look"] == command.format(folder=folder)


@pytest.mark.long
def test_the_first_fault_of_a_real_run(tmp_path: Path) -> None:
    folder = run(
        tmp_path, "route=split", "hazard=accepted_plus_one", "workload.max_tokens=150", build=build_target
    )
    result = folder.result()
    assert result is not None
    assert result["verdict"]["kind"] == "route_fault"
    first = next(e for e in result["verdict"]["evidence"] if e["kind"] == "audit")["details"]["first_bad"]
    page = Page(report(tmp_path))
    assert "HAZARD accepted_plus_one: a fault put in on purpose" in page.text
    assert f"token {first['index']:,} (id {first['token']})" in page.text
    assert page.tags["mark"] == 1
    assert "The reference's choices at this place" in page.text
    assert f"{100 * first['alternatives'][0]['probability']:.3g} %" in page.text


def test_runs_that_did_not_end(runs: dict[str, RunFolder], tmp_path: Path) -> None:
    interrupted, damaged, killed, alive = copies(runs["honest"], tmp_path, 4)
    (interrupted.path / "result.json").unlink()
    interrupted.interrupt("SIGTERM")
    (damaged.path / "result.json").write_text('{"status": "finished", "gener')
    (killed.path / "result.json").write_text('{"schema_version": 1, "status": "finished", "generations": []}')
    (alive.path / "DONE").unlink()
    fresh = RunFolder.claim(compose(["experiment=tiny", f"tracking.runs_dir={tmp_path}"]), "0" * 64)
    (fresh.path / "RUNNING").rename(alive.path / "RUNNING")
    for folder, state, words in (
        (interrupted, "interrupted", "SIGTERM"),
        (damaged, "damaged", "result.json: cannot be read"),
        (killed, "damaged", "result.json: finished without a verdict"),
        (alive, "running", "its process is still at work"),
    ):
        assert records.read(folder).state == state
        page = Page(report(tmp_path, folder.path.name, f"out={tmp_path}/x.html"))
        assert f"{state} {words}" in page.text
        assert f"**{state}**: {words}" in (tmp_path / "x.md").read_text()
    (damaged.path / "config.yaml").unlink()
    page = Page(report(tmp_path, "t"))
    assert "None of 4 runs has a verdict" in page.text
    assert damaged.path.name in page.text


def test_the_command_gives_the_configuration_again(tmp_path: Path) -> None:
    hostile = 'it\'s "${x}"\\ {a: [b]}\n<html>é'
    config = compose(
        ["experiment=tiny", "route=full_forward", "route.draft_tokens=3", "sampling=greedy", "seed=5"]
    )
    config.workload.prompts[0].text = hostile
    config.sampling.stop_strings = ["</html>", "a,b"]
    config.sampling.logit_bias = {3: -1.5}
    command = reproduce.command(plain(config), plain(compose()))
    assert command is not None
    words = shlex.split(command)
    assert words[0] == "sm70lab"
    again = plain(compose(words[1:]))
    assert again | {"tracking": None} == plain(config) | {"tracking": None}
    assert "route.draft_tokens=3" in words
    assert not any(word.startswith("gate") for word in words)


@pytest.mark.long
def test_a_sweep_shows_only_what_differs(tmp_path: Path) -> None:
    for drafts in (3, 4):
        for seed in (1, 2, 3):
            run(tmp_path, "route=split", f"route.draft_tokens={drafts}", f"seed={seed}")
    page = Page(report(tmp_path, "t"))
    settings = page.text[page.text.index("Settings that differ") : page.text.index("Environment")]
    assert settings.strip() == "Settings that differ route.draft_tokens seeds 3 1, 2, 3 4 1, 2, 3"
    assert "split route.draft_tokens=3" in page.text
    assert "a tie" in page.text  # scripted rounds all take the same time


def test_newest_json_and_one_line_complaints(
    runs: dict[str, RunFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"tracking.runs_dir={tmp_path}"
    assert main(["report", where]) == 2
    _, second, _ = copies(runs["honest"], tmp_path, 3)
    (second.path / "result.json").unlink()
    environment = json.loads((second.path / "environment.json").read_text())
    later = environment | {"started": "2999-01-01T00:00:00+00:00"}
    (second.path / "environment.json").write_text(json.dumps(later))
    capsys.readouterr()
    assert main(["report", where, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {
        "exit_code": 0,
        "report": str(second.path / "report.html"),
        "summary": str(second.path / "summary.md"),
    }
    for wrong in (["nosuch"], ["a", "b"], [f"out={tmp_path}"], ["out=/nosuch/x.html"], ["out=x.txt"], ["-x"]):
        assert main(["report", where, *wrong]) == 2
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1, printed.err
        assert printed.out == ""
