"""``sm70lab compare`` and ``repeats=auto`` over real run folders: order, refusals, damage, exit codes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripted import ScriptedTarget

from sm70lab import experiment
from sm70lab.cli import main
from sm70lab.cli.display import print_sweep
from sm70lab.experiment import build_target
from sm70lab.tracking.marker import this_process

TINY = ("experiment=tiny", "name=t", "tracking=off", "workload.max_tokens=120")
PROMPTS = 2

Command = Callable[..., tuple[int, str, str]]


class Scripted(ScriptedTarget):
    """The scripted target; a hazard makes it repeat one character, which the gate must see."""

    def _one(self, *arguments: Any) -> Any:
        generation = super()._one(*arguments)
        if self.config.hazard != "none":
            generation.text = "!" * 200
        return generation


def scripted(patch: pytest.MonkeyPatch) -> None:
    """Runs over the scripted target; their figures, which take most of a second, are not compared."""
    patch.setattr(experiment, "build_target", lambda config: Scripted(config))
    patch.setattr("sm70lab.tracking.figures.write_figures", lambda *arguments: None)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line inside this process, in a working folder of its own, over the scripted target."""
    monkeypatch.chdir(tmp_path)
    scripted(monkeypatch)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with full_forward and split, seeds 1 and 2, over the scripted target."""
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        scripted(patch)
        assert main(["compare", "full_forward", "split", *TINY, "seed=1,2", "--json"]) == 0
    return folder / "runs"


@pytest.fixture
def runs(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it in this test's working folder."""
    shutil.copytree(recorded, tmp_path / "runs")
    return tmp_path / "runs" / "t"


def folder_of(runs: Path, name: str) -> Path:
    (found,) = runs.glob(f"{name}-*")
    return found


def started(runs: Path) -> list[tuple[str, int, int]]:
    """(route, seed, first repeat) of every run, in the order they started."""
    results = [json.loads(file.read_text()) for file in runs.glob("*/result.json")]
    results.sort(key=lambda r: r["started"])
    return [(r["route"], r["seed"], r["generations"][0]["repeat"]) for r in results]


def edit(run: Path, **settings: Any) -> None:
    """Change settings of a recorded configuration: ``sampling__temperature=0.5``."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    for key, value in settings.items():
        *sections, name = key.split("__")
        place = config
        for section in sections:
            place = place[section]
        place[name] = value
    (run / "config.yaml").write_text(yaml.safe_dump(config))


# ---------------------------------------------------------------------------------------- order


def test_missing_runs_are_made_in_abba_order_and_no_run_twice(command: Command, tmp_path: Path) -> None:
    code, out, err = command("compare", "full_forward", "split", *TINY, "seed=1,2,3")
    assert code == 0, err
    runs = tmp_path / "runs" / "t"
    seeds = [
        ("full_forward", 1),
        ("split", 1),
        ("split", 2),
        ("full_forward", 2),
        ("full_forward", 3),
        ("split", 3),
    ]
    assert started(runs) == [(*run, 0) for run in seeds]
    assert "run 6 of 6: split, seed 3, repeat 0: pass" in err
    assert out.splitlines()[-1].startswith("split: no regression: 6 of 6 generations pass, baseline 6 of 6; ")
    assert (
        command("compare", "full_forward", "split", *TINY, "seed=1,2,3")[0] == 0
    )  # all finished: nothing runs
    assert command("compare", "full_forward", "split", *TINY)[1] == out  # without seed=, what has been run
    assert len(started(runs)) == 6
    assert command("compare", "full_forward", "split", *TINY, "seed=3,4")[0] == 0
    assert started(runs)[6:] == [("split", 4, 0), ("full_forward", 4, 0)]


def test_repeats_are_interleaved_and_give_the_draws_of_one_run(command: Command, tmp_path: Path) -> None:
    assert command("compare", "full_forward", "split", *TINY, "seed=1", "repeats=2")[0] == 0
    runs = tmp_path / "runs" / "t"
    order = [("full_forward", 1, 0), ("split", 1, 0), ("split", 1, 1), ("full_forward", 1, 1)]
    assert started(runs) == order
    command(*TINY, "route=split", "seed=1", "repeats=2", "name=whole")
    (whole,) = (tmp_path / "runs" / "whole").iterdir()
    for repeat in (0, 1):
        (own,) = runs.glob(f"split-*/generations/page-r{repeat}.txt")
        assert own.read_text() == (whole / "generations" / own.name).read_text()
    code, out, _ = command(
        "compare", "full_forward", "split", *TINY[:1], *TINY[2:], "seed=1", "repeats=2", "--json"
    )
    found = json.loads(out)
    assert (code, len(started(runs))) == (0, 4)  # the whole run of another name serves as well
    assert found["routes"][0]["tokens"]["equal"] == found["routes"][0]["tokens"]["pairs"] == 4


def test_an_unfair_comparison_is_refused_before_anything_runs(command: Command, tmp_path: Path) -> None:
    command(*TINY, "route=full_forward", "sampling.temperature=0.5")
    (run,) = (tmp_path / "runs" / "t").iterdir()
    code, _, err = command("compare", str(run), "split", *TINY)
    assert (code, err.count("\n")) == (2, 1)
    assert "sampling.temperature 0.5 against 1.0" in err
    assert started(run.parent) == [("full_forward", 20260620, 0)]


def test_no_run_takes_what_there_is(command: Command, runs: Path) -> None:
    shutil.rmtree(folder_of(runs, "split-s2"))
    code, out, _ = command("compare", "full_forward", "split", *TINY, "--no-run")
    assert code == 0
    assert "note: 1 runs are missing (split)" in out
    assert "split: 2 generations without a partner" in out
    code, _, err = command("compare", "full_forward", "input_core", *TINY, "--no-run")
    assert (code, err.count("\n")) == (2, 1)
    assert "input_core: no finished run with these settings" in err
    code, _, err = command("compare", "full_forward", "split", *TINY, "--no-run", "sampling.top_p=0.9")
    assert (code, err.count("\n")) == (2, 1)
    assert (
        f"({folder_of(runs, 'full_forward-s1').name} has sampling.top_p 0.95 against 0.9); leave out" in err
    )
    assert len(list(runs.iterdir())) == 3


# ------------------------------------------------------------------------------- what it prints


def test_json_holds_what_the_table_shows(command: Command, runs: Path) -> None:
    code, out, _ = command("compare", "full_forward", "split", *TINY, "--no-run", "--json")
    found = json.loads(out)
    assert found["exit_code"] == code == 0
    assert found["baseline"] == "full_forward"
    (route,) = found["routes"]
    assert route["test"] == "McNemar, 4 pairs"
    assert (route["rate"]["passed"], route["rate"]["judged"]) == (4, 4)
    assert route["tokens"] == {"pairs": 4, "equal": 4, "comparable": True, "words": "all 4 equal"}
    assert route["runs_needed"] == 72
    assert route["ratio"]["ratio"] == pytest.approx(1.0)
    assert route["ratio"]["words"] == "the same ratio in all 4 pairs: nothing to resample"
    shown = command("compare", "full_forward", "split", *TINY, "--no-run")[1]
    for words in ("full_forward", "baseline", "4 of 4", "0.40–1.00", "1.00×", "72", "tokens all 4 equal"):
        assert words in shown
    assert max(map(len, shown.split("split: tokens")[0].splitlines())) <= 80


@pytest.mark.parametrize("other", ["split-s1", "t/{}", "{}", "path"])
def test_runs_by_path_name_and_fingerprint(command: Command, runs: Path, other: str) -> None:
    split = folder_of(runs, "split-s1")
    fingerprint = json.loads((split / "result.json").read_text())["fingerprint"]
    text = str(split) if other == "path" else other.format(split.name)
    for named in (text, fingerprint[:12]):
        code, out, err = command("compare", "full_forward-s1", named)
        assert code == 0, err
        assert "tokens all 2 equal; McNemar, 2 pairs" in out


# ------------------------------------------------------------------------------------ unfairness


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampling__top_p": 0.9}, "sampling.top_p 0.95 against 0.9"),
        ({"sampling__min_tokens": 120}, "sampling.min_tokens 0 against 120"),
        ({"workload__max_tokens": 99}, "workload.max_tokens 120 against 99"),
        ({"hazard": "off_by_one"}, "hazard none against off_by_one"),
        ({"gate__repeat20": 5}, "gate.repeat20 80 against 5"),
        ({"model__dtype": "float32"}, "model.dtype float64 against float32"),
        ({"audit": False}, "audit True against False"),
    ],
)
def test_unfair_runs_cost_one_line(command: Command, runs: Path, settings: Any, words: str) -> None:
    edit(folder_of(runs, "split-s1"), **settings)
    code, out, err = command("compare", "full_forward-s1", "split-s1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    code, out, _ = command("compare", "full_forward-s1", "split-s1", f"allow={words.split(' ')[0]}")
    assert code == 0
    assert f"differs on purpose in {words}" in out


def test_routes_of_one_server_are_but_names(
    command: Command, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "http://127.0.0.1:9"
    code, out, err = command("compare", "no_mtp", "split", "target=openai", f"target.base_url={url}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"route=no_mtp, split: both arms ask the same server at {url}" in err
    result = json.loads((folder_of(runs, "split-s1") / "result.json").read_text())
    swept = [
        {"overrides": [f"target.base_url={url}"], "result": result | {"target": target, "route": route}}
        for target, route in (("openai", "no_mtp"), ("openai", "split"), ("engine", "split"))
    ]
    print_sweep(swept)
    assert capsys.readouterr().out.count(f"no_mtp, split asked the same server (target.base_url={url})") == 1
    print_sweep(swept[1:])
    assert "asked the same server" not in capsys.readouterr().out


def test_another_machine_costs_the_speed_alone(command: Command, runs: Path) -> None:
    environment = folder_of(runs, "split-s1") / "environment.json"
    environment.write_text(environment.read_text().replace('"cpu": {"name": "', '"cpu": {"name": "other '))
    before = json.loads(environment.read_text())
    before["cpu"]["name"] = "other"
    environment.write_text(json.dumps(before))
    code, out, _ = command("compare", "full_forward-s1", "split-s1")
    assert code == 0
    assert "speed not compared: differs in hardware " in out
    assert "×" not in out


# --------------------------------------------------------------------------------------- damage


INTERRUPTED_RESULT = json.dumps(
    {
        "schema_version": 1,
        "status": "interrupted",
        "generations": [],
        "verdict": None,
        "interrupted": "Ctrl-C",
    }
)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("result.json", "{", "result.json: damaged"),
        ("result.json", "[" * 100_000, "result.json: damaged"),
        ("result.json", None, "result.json: missing: the run did not finish"),
        ("result.json", '{"verdict": {"kind": "pass"}, "finished": "x"}', "result.json: damaged"),
        ("result.json", INTERRUPTED_RESULT, "not finished (Ctrl-C); run it again"),
        ("config.yaml", "a: [", "config.yaml: damaged"),
        ("config.yaml", "3", "config.yaml: damaged (no settings in it)"),
        ("rounds.parquet", "x", "rounds.parquet: damaged"),
        ("rounds.parquet", None, "rounds.parquet: missing"),
        ("environment.json", "[]", "environment.json: damaged"),
        ("generations/page-r0.tokens.json", '{"token_ids": [1]}', "damaged (not the tokens of result.json)"),
        ("generations/page-r0.tokens.json", None, "page-r0.tokens.json: missing"),
    ],
)
def test_damaged_and_unfinished_runs_cost_one_line(
    command: Command, runs: Path, file: str, content: str | None, words: str
) -> None:
    split = folder_of(runs, "split-s1")
    (split / file).unlink() if content is None else (split / file).write_text(content)
    code, out, err = command("compare", "full_forward-s1", str(split))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert words in err
    assert "Traceback" not in err


def test_a_run_that_is_going_on_is_refused(command: Command, runs: Path) -> None:
    split = folder_of(runs, "split-s1")
    for file in ("DONE", "result.json"):
        (split / file).unlink()
    (split / "RUNNING").write_text(json.dumps(this_process()))
    code, out, err = command("compare", str(split), "full_forward-s1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"still going on as process {os.getpid()}" in err


MISTAKES = [
    ("full_forward", "two or more routes or runs"),
    ("full_forward full_forward", "full_forward: named twice"),
    ("full_forward splt", "splt: no such run folder, and no run of that name"),
    ("full_forward splt", "nor a route: did you mean split?"),
    ("full_forward split-s", "split-s: 2 runs fit (t/split-s1-"),
    ("full_forward split route=split", "name the routes as arguments"),
    ("full_forward split repeats=auto", "a comparison needs a number"),
    ("full_forward split first_repeat=1", "repeats are counted from 0 here"),
    ("full_forward split seed=1,x", "seed=1,x: must be whole numbers"),
    ("full_forward split seed=1,1", "names a seed twice"),
    ("full_forward split seed=99999999999999999999", "seed=99999999999999999999: must be"),
    ("full_forward split sampling.top_q=1", "no such setting"),
    ("full_forward split --norun", "no such option"),
    ("full_forward-s1 split-s1 seed=1", "seed=1: every side is a run that is finished"),
    ("full_forward-s1 split-s1 sampling.top_p=0.9", "every side is a run that is finished"),
    ("full_forward-s1 split-s1 allow=hazard", "allow=hazard: does not differ"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_mistakes_cost_one_line(command: Command, runs: Path, arguments: str, words: str) -> None:
    extra = [] if "-s1 " in arguments else ["experiment=tiny"]
    code, out, err = command("compare", *arguments.split(" "), *extra)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert words in err
    assert len(list(runs.iterdir())) == 4


def test_help_names_it(command: Command) -> None:
    code, out, _ = command("compare", "--help")
    assert (code, "ABBA" in out) == (0, True)


# ----------------------------------------------------------------------------- the real engine


def test_a_real_regression_is_refused_and_then_found(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "build_target", build_target)
    command(*TINY, "route=split", "hazard=no_conv_rollback", "name=broken")
    (broken,) = (tmp_path / "runs" / "broken").iterdir()
    code, _, err = command("compare", "no_mtp", broken.name, *TINY)
    assert (code, "hazard none against no_conv_rollback" in err) == (2, True)
    routes = ("no_mtp", "split", "spec_core_003", broken.name)
    code, out, _ = command("compare", *routes, *TINY, "allow=hazard")
    assert code == 1
    assert "split: tokens all 2 equal; McNemar, 2 pairs" in out
    assert "spec_core_003: tokens not comparable: spec_core_003 draws its own" in out
    assert f"{broken.name}: tokens 0 of 2 equal; first difference page-r0 seed 20260620, token " in out
    *_, split, spec, last = out.splitlines()
    assert split.startswith("split: no regression: ")
    assert spec.startswith("spec_core_003: no regression: ")
    assert last.startswith(f"{broken.name}: worse: route_fault in broken/{broken.name}: ")
    assert last.endswith("a worse route's speed does not count")


# ---------------------------------------------------------------------------------- repeats=auto


def auto(command: Command, tmp_path: Path, *settings: str) -> tuple[int, str, dict[str, Any]]:
    code, out, err = command(*TINY, "repeats=auto", *settings)
    (folder,) = (tmp_path / "runs" / "t").iterdir()
    assert "repeat" in (folder / "summary.md").read_text()
    return code, out + err, json.loads((folder / "result.json").read_text())


def test_repeats_end_when_the_route_is_good(command: Command, tmp_path: Path) -> None:
    code, said, result = auto(command, tmp_path)
    found = result["sequential"]
    assert (code, found["decision"], found["repeats"], found["passed"]) == (0, "good", 9, 18)
    assert len(result["generations"]) == 9 * PROMPTS
    assert (found["upper"], found["lower"]) == (
        pytest.approx(2.944, abs=1e-3),
        pytest.approx(-2.944, abs=1e-3),
    )
    assert "repeats: pass rate 0.95 rather than 0.8 after 9 repeats (18 passed, 0 failed;" in said


def test_repeats_end_when_the_route_is_bad(command: Command, tmp_path: Path) -> None:
    code, said, result = auto(command, tmp_path, "hazard=no_conv_rollback", "gate=fixed_quality")
    found = result["sequential"]
    assert (code, found["decision"], found["repeats"], found["failed"]) == (1, "bad", 2, 4)
    assert all(g["passed"] is False and "character run" in g["failure"] for g in result["generations"])
    assert "pass rate 0.8 rather than 0.95 after 2 repeats" in said


def test_an_undecided_end_says_so(command: Command, tmp_path: Path) -> None:
    code, said, result = auto(command, tmp_path, "sprt.max_repeats=2", "first_repeat=3")
    assert (code, result["sequential"]["decision"]) == (0, "undecided")
    assert [g["repeat"] for g in result["generations"]] == [3, 3, 4, 4]
    assert "undecided at max_repeats=2 after 2 repeats (4 passed, 0 failed;" in said
    assert "14 more passes in a row would decide" in said
