"""``sm70lab pin`` and ``sm70lab.testing.assert_accepted``."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import make_running

from sm70lab.cli import main
from sm70lab.config import compose, conf_dir
from sm70lab.errors import UsageError
from sm70lab.judge import tolerance
from sm70lab.schema import Route
from sm70lab.testing import assert_accepted
from sm70lab.tracking import accepted, ledger
from sm70lab.tracking.result import token_hash

TOKENS = 24


def tiny_route(*given: str) -> Route:
    return compose(["experiment=tiny", *given]).route


def run_of(runs: Path, pattern: str) -> Path:
    (found,) = runs.glob(pattern)
    return found


def first(runs: Path) -> Path:
    """The passing run of seed 1 with four drafts and no hazard."""
    row = next(row for row in ledger.build(runs).rows if len(row.runs) == 2)
    return next(run.folder.path for run in row.runs if run.seed == 1)


@pytest.fixture(scope="module")
def pinned_once(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which seed 1 was pinned."""
    folder = tmp_path_factory.mktemp("pinned")
    shutil.copytree(recorded, folder / "runs")
    run = first(folder / "runs")
    where = [f"tracking.runs_dir={folder / 'runs'}", f"into={folder / 'accepted.yaml'}", f"tokens={TOKENS}"]
    assert main(["pin", str(run), *where]) == 0
    return folder


@pytest.fixture
def pinned(pinned_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``accepted.yaml`` and its runs, in a working folder of their own."""
    shutil.copytree(pinned_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "accepted.yaml"


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    values = accepted.load(path).values
    edit(values)
    accepted.save(path, values)


# -------------------------------------------------------------------------------------- pinning


def test_the_file_holds_route_conditions_and_evidence(pinned: Path) -> None:
    values = accepted.load(pinned).values
    assert values["route"]["spec_core_003"] is True
    assert (values["route"]["draft_tokens"], values["route"]["state"]["scheme"]) == (4, "slots")
    assert values["conditions"]["workload"]["max_tokens"] == 100
    assert (
        not {"seed", "repeats", "tracking", "display", "force", "name", "route"} & values["conditions"].keys()
    )
    evidence = values["evidence"]
    assert (evidence["runs"], evidence["passed"], evidence["inconclusive"]) == (2, 2, 0)
    # Clopper–Pearson for 2 of 2 at 95 %: the lower end is 0.025 ** (1 / 2)
    assert evidence["pass_rate"]["low"] == pytest.approx(0.025**0.5, abs=1e-4)
    assert evidence["pass_rate"]["high"] == 1
    assert len(evidence["p_values"]) == 2
    assert all(0 < p <= 1 for p in evidence["p_values"].values())
    assert evidence["audited_tokens"] == 2 * 100 + 2 * 2 * 100  # two prompts, one and two repeats
    assert evidence["speed"]["tokens_per_second"] > 0
    assert evidence["speed"]["hardware"] == values["greedy"]["hardware"] != ""
    assert values["greedy"]["dtype"] == "float64"
    for output in values["greedy"]["outputs"]:
        assert len(output["token_ids"]) == TOKENS
        assert output["sha256"] == token_hash(output["token_ids"])
        assert output["smallest_margin"]["logits"] > 0


def test_the_ledger_says_accepted_and_differs_from_it(pinned: Path) -> None:
    rows = ledger.build(pinned.parent / "runs").rows
    assert (rows[0].state, rows[0].differs) == ("accepted", [])
    assert rows[0].conclusion == "pinned: 2 of 2 passed (95 %: 0.16 to 1.00)"
    assert sorted(row.differs for row in rows[1:]) == [["hazard=no_conv_rollback"], ["route.draft_tokens=2"]]
    (pinned.parent / "runs" / "ledger.jsonl").unlink()  # a fresh clone has the file and not the notes
    assert ledger.build(pinned.parent / "runs").rows[0].state == "accepted"


def test_another_pin_supersedes_the_first(pinned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = pinned.parent / "runs"
    other = next(row for row in ledger.build(runs).rows if row.differs == ["route.draft_tokens=2"])
    assert main(["pin", other.runs[0].name, "tokens=8", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["variant"], said["file"]) == (other.variant, str(pinned))
    rows = ledger.build(runs).rows
    assert (rows[0].variant, rows[0].state) == (other.variant, "accepted")
    (before,) = [row for row in rows if row.state == "superseded"]
    assert before.differs == ["route.draft_tokens=4"]
    assert before.conclusion == f"superseded by {other.variant}"


def test_where_the_file_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert accepted.place(None) == tmp_path / "accepted.yaml"
    assert accepted.place("x/y.yaml") == tmp_path / "x" / "y.yaml"
    monkeypatch.chdir(conf_dir().parent / "tests")
    assert accepted.place(None) == conf_dir() / "accepted.yaml"


@pytest.mark.parametrize(
    ("into", "words"),
    [
        (".", "is a folder; name a file in it"),
        ("no/such/accepted.yaml", "no such folder"),
        ("file/accepted.yaml", "no such folder"),
        ("/proc/accepted.yaml", "/proc cannot be written"),  # not even by root
    ],
)
def test_a_place_that_cannot_be_written_is_refused_first(
    into: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert main(["pin", "norun", f"into={into}"]) == 2  # not: no such run
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def unaudited(runs: Path) -> Path:
    return edited(runs, lambda result: evidence_of(result, "audit")["metrics"].update(audited=0))


def not_passed(runs: Path) -> Path:
    return edited(runs, lambda result: result["verdict"].update(kind="inconclusive"))


def edited(runs: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    path = first(runs)
    result = json.loads((path / "result.json").read_text())
    edit(result)
    (path / "result.json").write_text(json.dumps(result))
    return path


def evidence_of(result: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(e for e in result["verdict"]["evidence"] if e["kind"] == kind)
    return found


def hazardous(runs: Path) -> Path:
    return next(row for row in ledger.build(runs).rows if row.hazard).runs[0].folder.path


def running(runs: Path) -> Path:
    make_running(first(runs))
    return run_of(runs, "*/*/RUNNING").parent


def interrupted(runs: Path) -> Path:
    (first(runs) / "DONE").unlink()
    ended = {"status": "interrupted", "interrupted": "Ctrl-C", "verdict": None, "speed": None}
    return edited(runs, lambda result: result.update(ended))


def damaged(runs: Path) -> Path:
    path = first(runs)
    (path / "result.json").write_text("{")
    return path


def of_other_code(runs: Path) -> Path:
    return edited(runs, lambda result: result.update(fingerprint="0" * 64))


def beside_a_fault(runs: Path) -> Path:
    file = run_of(runs, "again/*/result.json")
    result = json.loads(file.read_text())
    result["verdict"]["kind"] = "route_fault"
    file.write_text(json.dumps(result))
    return first(runs)


def not_closed(runs: Path) -> Path:
    (first(runs) / "DONE").unlink()
    return first(runs)


def without(pattern: str) -> Callable[[Path], Path]:
    def make(runs: Path) -> Path:
        path = first(runs)
        next(path.glob(pattern)).unlink()
        return path

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (not_closed, "not closed (no DONE)"),
        (without("audit.parquet"), "audit.parquet: missing"),
        (without("generations/*.tokens.json"), "tokens.json: missing"),
        (unaudited, "without an audit; run it with audit=true"),
        (not_passed, "its verdict is inconclusive, not pass"),
        (hazardous, "hazard=no_conv_rollback put a fault in on purpose"),
        (running, "still going on as process"),
        (interrupted, "not finished (Ctrl-C)"),
        (damaged, "result.json: damaged"),
        (of_other_code, "made by other code, packages, weights or hardware"),
        (beside_a_fault, "a run of the same variant and code, is route_fault"),
    ],
)
def test_what_is_not_pinned(
    make: Callable[[Path], Path], words: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(runs)
    capsys.readouterr()
    assert main(["pin", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert not (runs.parent / "accepted.yaml").exists()
    assert not (runs / "ledger.jsonl").exists()


def test_a_rejected_variant_is_not_pinned(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = first(runs)
    assert main(["note", str(path), "Too slow.", "state=rejected", f"tracking.runs_dir={runs}"]) == 0
    capsys.readouterr()
    assert main(["pin", str(path), f"tracking.runs_dir={runs}"]) == 2
    assert "is rejected (Too slow.); first: sm70lab note" in capsys.readouterr().err


def test_the_same_run_again_is_no_new_evidence(runs: Path, tmp_path: Path) -> None:
    path, file = first(runs), tmp_path / "a.yaml"
    shutil.copytree(path, path.with_name(f"{path.name}-2"))
    assert main(["pin", str(path), f"tracking.runs_dir={runs}", f"into={file}", f"tokens={TOKENS}"]) == 0
    assert accepted.load(file).values["evidence"]["runs"] == 2  # seeds 1 and 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one run"),
        (["a", "b"], "(2 given)"),
        (["nobody"], "no such run folder"),
        (["a", "tokens=0"], "tokens=0: must be a whole number, 1 or more"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], words: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pin", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


# ---------------------------------------------------------------------------------------- drift


def test_the_pinned_route_is_accepted(pinned: Path) -> None:
    assert_accepted(tiny_route())
    assert_accepted(tiny_route("route.name=mine"), pinned)


def test_configuration_drift_names_the_field(pinned: Path) -> None:
    with pytest.raises(AssertionError) as raised:
        assert_accepted(tiny_route("route.draft_tokens=3", "route.state.scheme=fold"))
    lines = str(raised.value).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "route.draft_tokens: pinned 4, now 3",
        "route.state.scheme: pinned slots, now fold",
    ]
    change(pinned, lambda values: values["route"].pop("draft_head"))
    with pytest.raises(AssertionError, match="draft_head: not pinned, now full"):
        assert_accepted(tiny_route(), outputs=False)
    change(pinned, lambda values: values["route"].update(draft_head="full", warps=4))
    with pytest.raises(AssertionError, match="warps: pinned 4, no longer a setting"):
        assert_accepted(tiny_route(), outputs=False)


def another_token(values: dict[str, Any]) -> None:
    output = values["greedy"]["outputs"][1]
    output["token_ids"][5] = (output["token_ids"][5] + 1) % 64
    output["sha256"] = token_hash(output["token_ids"])


def test_output_drift_names_the_first_differing_token(pinned: Path) -> None:
    change(pinned, another_token)
    with pytest.raises(AssertionError, match=r"prompt style, token 5: pinned \d+, now \d+$"):
        assert_accepted(tiny_route())
    assert_accepted(tiny_route(), outputs=False)


@pytest.mark.long
def test_other_weights_and_prompts_are_drift(pinned: Path) -> None:
    change(pinned, lambda values: values["greedy"]["outputs"][0].update(prompt_sha256="0"))
    with pytest.raises(AssertionError, match="prompt page: its token ids are not the pinned ones"):
        assert_accepted(tiny_route())
    change(pinned, lambda values: values.update(weights="0" * 64))
    with pytest.raises(AssertionError, match="model=tiny: the weights are not the pinned ones"):
        assert_accepted(tiny_route())


@pytest.mark.long
def test_elsewhere_a_near_tie_is_a_warning_and_a_clear_choice_is_drift(
    pinned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(pinned, another_token)
    change(pinned, lambda values: values["greedy"].update(hardware="another processor"))
    with pytest.raises(AssertionError, match=r"on other hardware or torch; .* apart"):
        assert_accepted(tiny_route())
    wide = tolerance.Tolerance(logit=100.0, mass=1.0, edge_share=1.0)
    monkeypatch.setattr(tolerance, "tolerance_for", lambda dtype, rounding: wide)
    with pytest.warns(UserWarning, match="prompt style, token 5"):
        assert_accepted(tiny_route())


def test_nothing_pinned_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file; write it with sm70lab pin RUN"):
        assert_accepted("split", tmp_path / "accepted.yaml")


# ------------------------------------------------------------- this project's own accepted route

OWN = conf_dir() / "accepted.yaml"


def test_the_default_route_is_the_accepted_one() -> None:
    assert_accepted("spec_core_003", OWN, outputs=False)
    assert compose().route.name == accepted.load(OWN).route["name"]
    assert (
        accepted.load(OWN).values["evidence"]["passed"] == accepted.load(OWN).values["evidence"]["runs"] >= 1
    )


@pytest.mark.long
def test_the_accepted_route_gives_its_pinned_outputs() -> None:
    with warnings.catch_warnings(record=True) as seen:  # a near tie on other hardware is worth a line
        assert_accepted("spec_core_003", OWN)
    for warning in seen:
        print(warning.message)
