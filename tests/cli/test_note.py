"""``sm70lab note``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sm70lab.cli import main
from sm70lab.tracking import ledger
from sm70lab.tracking.notes import read


def two_drafts(runs: Path) -> ledger.Row:
    return next(row for row in ledger.build(runs).rows if "route.draft_tokens=2" in row.differs)


@pytest.mark.parametrize("by", ["run", "fingerprint", "beginning"])
def test_a_note_goes_to_the_variant(by: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = two_drafts(runs)
    (run,) = row.runs
    target = {
        "run": run.name,
        "fingerprint": str(run.result["fingerprint"])[:10],
        "beginning": row.variant[:5],
    }[by]
    assert main(["note", target, "k=2 loses to k=4", "state=rejected"]) == 0
    out, err = capsys.readouterr()
    assert (err, out.count("\n")) == ("", 1)
    assert out.startswith(f"noted on {row.variant} rejected (1 pass)")
    (note,), unreadable = read(runs)
    assert (note.variant, note.text, note.state, note.by) == (
        row.variant,
        "k=2 loses to k=4",
        "rejected",
        "note",
    )
    assert note.run == f"tiny/{run.name}"
    assert note.code_revision == run.environment["code_revision"]
    assert unreadable == 0
    assert two_drafts(runs).state == "rejected"


def test_words_alone_leave_the_state(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = two_drafts(runs).runs[0].name
    assert main(["note", name, "first", "state=superseded"]) == 0
    capsys.readouterr()
    assert main(["note", "--json", name, "-3 % is noise"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["exit_code"], said["state"], said["note"]["state"]) == (0, "superseded", None)
    row = two_drafts(runs)
    assert (row.state, row.conclusion, len(row.notes)) == ("superseded", "-3 % is noise", 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a run or variant and one text"),
        (["RUN"], "(1 given)"),
        (["RUN", "two", "three"], "(3 given)"),
        (["RUN", ""], "the text is empty"),
        (["RUN", "x" * 2001], "2,001 characters; at most 2,000"),
        (["RUN", "x", "state=fine"], "state=fine: must be one of accepted, rejected, open, superseded"),
        (["RUN", "x", "--loud"], "no such option"),
        (["nobody", "x"], "no such run folder"),
        (["v0000000", "x"], "no such variant"),
        (["spec_core_003", "x"], "runs fit"),
        (["RUN", "x", "tracking.runs_dir=elsewhere"], "no run of that name"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], words: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = two_drafts(runs).runs[0].name
    assert main(["note", *(name if word == "RUN" else word for word in arguments)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert not (runs / "ledger.jsonl").exists()
