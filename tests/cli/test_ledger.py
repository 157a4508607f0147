"""``sm70lab ledger``, and what it makes of starting a run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import overrides

from sm70lab.cli import main
from sm70lab.tracking.published import Needs, matrix


def ledger(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["ledger", "--json", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    value: dict[str, Any] = json.loads(out)
    return value


def test_the_table_fits_a_hundred_columns(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "tiny" / "broken").mkdir()
    (runs / "tiny" / "broken" / "config.yaml").write_text("[")
    (runs / "ledger.jsonl").write_text("half a li")
    assert main(["ledger"]) == 0
    out, _ = capsys.readouterr()
    assert max(len(line) for line in out.splitlines()) <= 100
    words = " ".join(out.split())
    for part in ("2 pass", "seeds 1", "tok/s", "HAZARD no_conv_rollback", "route.draft_tokens=2", "open"):
        assert part in words
    assert "damaged: " in out and "tiny/broken" in out
    assert "ledger.jsonl: 1 lines cannot be read" in out


def test_json_has_every_variant_and_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = ledger(capsys)
    assert sorted(len(row["runs"]) for row in book["variants"]) == [1, 1, 2]
    both = next(row for row in book["variants"] if len(row["runs"]) == 2)
    assert both["seeds"] == [1, 2]
    assert both["verdicts"] == {"pass": 2}
    assert both["state"] == "open"
    assert {run["folder"].split("/")[1] for run in both["runs"]} == {"tiny", "again"}
    assert both["speed"][0]["tokens_per_second"] > 0
    assert book["damaged"] == []


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["route.draft_tokens=2"], 1),
        (["hazard=none", "route.draft_tokens=4"], 1),
        (["route=spec_core_003"], 3),
        (["model=tiny", "gate=fixed_quality"], 3),
        (["state=open"], 3),
        (["state=accepted"], 0),
    ],
)
def test_settings_choose_rows(
    given: list[str], found: int, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(ledger(capsys, *given)["variants"]) == found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ledger", "tracking.runs_dir=nowhere"], "no runs there; run an experiment"),
        (["ledger", "state=good"], "state=good: must be one of accepted, rejected, open, superseded"),
        (["ledger", "seed=1"], "makes no variant of its own"),
        (["ledger", "--all"], "no such option"),
        (["ledger", "rote=split"], "did you mean route?"),
        (["ledger", "accepted=nowhere.yaml"], "nowhere.yaml: no such file; write it with sm70lab pin RUN"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], words: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_the_matrix_labels_what_is_published(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A run of row J's own configuration, on the tiny model: found when the matrix is asked for that model.
    tiny = [
        "model=tiny",
        "workload=quick",
        "gate=fixed_quality",
        "workload.max_tokens=100",
        "route.compile=false",
    ]
    assert main(["experiment=J", "repeats=1", *tiny, "tracking=off", "display=quiet"]) == 0
    capsys.readouterr()
    assert main(["ledger", "--matrix", *tiny]) == 0
    out, _ = capsys.readouterr()
    assert max(len(line) for line in out.splitlines()) <= 100
    assert out.startswith("PUBLISHED: 2 × V100, Qwen3.6-27B-AWQ; not measured here.")
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "not run" in lines["A"] and "pass" in lines["A"]
    assert "1 pass" in lines["J"] and "fail" in lines["J"]
    assert "needs vllm" in lines["K"]


@pytest.mark.long
def test_the_matrix_as_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ledger(capsys, "--matrix")
    assert said["published"]["measured_here"] is False
    table = {row["id"]: row for row in said["rows"]}
    assert len(table) == 36
    assert all(row["here"] is None for row in table.values())
    assert table["AF"]["published"]["tokens_per_second"] == [85.65, 91.61]
    assert (table["K"]["needs"], table["J"]["needs"]) == ("vllm", "engine")
    assert table["AI"]["published"]["hardware"].startswith("2 × RTX 2080 Ti")


def test_a_finished_run_shows_its_row(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = overrides(runs, "seed=1")
    (other,) = (runs / "again").iterdir()
    assert main(["note", other.name, "sound as far as it goes"]) == 0
    capsys.readouterr()
    assert main(again) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ledger: ")]
    assert "open (2 pass)" in line and '"sound as far as it goes"' in line
    assert main([*again, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ledger"] == line.removeprefix("ledger: ")


def test_a_rejected_variant_is_not_started_unless_forced(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = overrides(runs, "seed=5", "route.draft_tokens=2", "display=quiet")
    (loser,) = [row for row in ledger(capsys)["variants"] if "route.draft_tokens=2" in row["differs"]]
    assert main(["note", loser["variant"], "slower than four drafts", "state=rejected"]) == 0
    capsys.readouterr()
    folders = sorted(runs.glob("*/*"))
    assert main(fresh) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    for part in (loser["variant"], "rejected (1 pass)", '"slower than four drafts"', "force=true"):
        assert part in err
    assert sorted(runs.glob("*/*")) == folders
    assert main(overrides(runs, "seed=1", "display=quiet")) == 0  # another variant
    assert main([*fresh, "force=true"]) == 0
    assert len(sorted(runs.glob("*/*"))) == len(folders) + 1


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [row.id for row in matrix()[1] if row.needs is Needs.engine])
def test_every_engine_row_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["repeats=1", "model=tiny", "workload=quick", "workload.max_tokens=40", "tracking=off"]
    assert main([f"experiment={name}", *small, "display=quiet"]) in (0, 3)
    out, err = capsys.readouterr()
    assert err == "" and "rounds/s" in out
    assert [path.parents[1].name for path in (tmp_path / "runs").glob("*/*/DONE")] == [name]


def test_a_preset_for_the_fork_asks_for_weights_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["experiment=K"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "target=vllm needs weights to serve; set model=/a/folder" in err
    assert list(tmp_path.iterdir()) == []
