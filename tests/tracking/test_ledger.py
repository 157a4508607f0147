"""The ledger over real run folders: grouping, states, damage; and the published matrix beside it."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
from tiny_runs import make_running, overrides

from sm70lab.config import compose, conf_dir, plain
from sm70lab.errors import UsageError
from sm70lab.schema import ExperimentConfig
from sm70lab.tracking import ledger, notes
from sm70lab.tracking.accepted import Accepted, load, save
from sm70lab.tracking.fingerprint import code_revision, model_hash
from sm70lab.tracking.notes import Note
from sm70lab.tracking.published import Needs, PublishedResult, PublishedRow, matrix
from sm70lab.tracking.run_folder import RunFolder
from sm70lab.tracking.variant import NOT_A_VARIANT, difference, settings_of, variant_id


def run_of(runs: Path, pattern: str) -> Path:
    (found,) = runs.glob(pattern)
    return found


def rows(runs: Path) -> dict[str, ledger.Row]:
    """By what makes the three variants of the fixture different."""
    book = ledger.build(runs)
    by_name = {}
    for row in book.rows:
        name = "hazard" if row.hazard else "two" if "route.draft_tokens=2" in row.differs else "four"
        assert name not in by_name
        by_name[name] = row
    return by_name


# ----------------------------------------------------------------------------------- grouping


def test_runs_are_grouped_by_what_differs(runs: Path) -> None:
    found = rows(runs)
    assert {name: len(row.runs) for name, row in found.items()} == {"four": 2, "two": 1, "hazard": 1}
    assert found["four"].seeds == [1, 2]
    assert found["four"].verdicts == {"pass": 2}
    assert found["hazard"].hazard == "no_conv_rollback"
    assert "hazard=no_conv_rollback" in found["hazard"].differs
    for row in found.values():
        assert not any(part.startswith(("seed", "repeats", "name", "tracking")) for part in row.differs)
    assert {part for part in found["two"].differs if part not in found["four"].differs} == {
        "route.draft_tokens=2"
    }
    assert all(row.state == "open" for row in found.values())


def test_speed_is_of_valid_runs_alone_and_names_its_hardware(runs: Path) -> None:
    found = rows(runs)
    (speed,) = found["four"].speeds
    valid = [run.result["speed"]["tokens_per_second"] for run in found["four"].runs]
    assert speed.runs == 2
    assert speed.tokens_per_second == pytest.approx(sum(valid) / 2)  # the median of two
    assert speed.hardware == found["four"].runs[0].environment["cpu"]["name"]
    assert found["hazard"].speeds == []


def test_the_worst_evidence_is_shown(runs: Path) -> None:
    path = run_of(runs, "again/*")
    result = json.loads((path / "result.json").read_text())
    next(e for e in result["verdict"]["evidence"] if e["kind"] == "shape").update(
        status="bad", line="it loops"
    )
    (path / "result.json").write_text(json.dumps(result))
    worst = rows(runs)["four"].worst
    assert worst is not None
    assert (worst[0].name, worst[1:]) == (path.name, ("shape", "bad", "it loops"))


def test_a_variant_outlives_new_settings_and_a_moved_model() -> None:
    config = compose(["experiment=tiny"])
    recorded = plain(config)
    older = json.loads(json.dumps(recorded))
    del older["route"]["draft_head"], older["gate"]["window_tokens"], older["audit"]
    moved = json.loads(json.dumps(recorded)) | {"seed": 7, "name": "x", "repeats": 5}
    renamed = json.loads(json.dumps(recorded))
    renamed["route"]["name"] = "mine"
    ids = {variant_id(settings_of(values, None)) for values in (recorded, older, moved, renamed)}
    assert ids == {ledger.variant_of(config, "of a drawn model, so it does not count")}
    path = settings_of(recorded | {"model": {"name": "checkpoint", "path": "/a"}}, "w" * 64)
    assert variant_id(path) == variant_id(
        settings_of(recorded | {"model": {"name": "checkpoint", "path": "/b"}}, "w" * 64)
    )
    assert variant_id(path) != variant_id(
        settings_of(recorded | {"model": {"name": "checkpoint", "path": "/a"}}, "v" * 64)
    )


@pytest.mark.parametrize(
    ("given", "differs"),
    [
        (["route=full_forward", "seed=3", "force=true"], ["route.full_forward=true"]),
        (["workload=quick"], ["workload=quick"]),
        (["workload=quick", "workload.max_tokens=9"], ["workload=quick", "workload.max_tokens=9"]),
        (["model=tiny"], ["model=tiny"]),
        (["sampling=greedy"], [f"sampling.{s}" for s in ("temperature=0.0", "top_p=1.0", "top_k=0")]),
        (["workload.prompts=[{name: a,text: x}]"], ['workload.prompts=["a"]']),
        (["route.state.scheme=fold", "audit=false"], ["route.state.scheme=fold", "audit=false"]),
    ],
)
def test_only_the_differing_settings_are_named(given: list[str], differs: list[str]) -> None:
    base, found = compose(["route=split"]), compose(["route=split", *given])
    weights = {config.model.name: model_hash(config.model, config.target) for config in (base, found)}
    parts = difference(
        settings_of(plain(found), weights[found.model.name]),
        settings_of(plain(base), weights[base.model.name]),
    )
    assert parts == differs


# ------------------------------------------------------------------------------------- states


def test_a_rejection_holds_at_its_code_revision(runs: Path) -> None:
    def conclude(state: str | None, revision: str | None, text: str = "no") -> ledger.Row:
        row = rows(runs)["two"]
        name = row.runs[0].folder.full_name
        notes.append(runs, Note(row.variant, name, text, state, revision, "note"))
        return rows(runs)["two"]

    config = compose(overrides(runs, "route.draft_tokens=2", "seed=99"))
    assert ledger.rejection(config, "") is None
    row = conclude("rejected", code_revision())
    assert (row.state, row.state_words, row.blocks) == ("rejected", "rejected", True)
    refused = ledger.rejection(config, "")
    assert refused is not None and refused.variant == row.variant
    other = compose(overrides(runs, "seed=99"))
    assert ledger.rejection(other, "") is None
    row = conclude(None, code_revision(), "and again")  # words alone leave the state
    assert (row.state, row.conclusion) == ("rejected", "and again")
    row = conclude("rejected", "another")
    assert (row.state_words, row.blocks) == ("rejected at another revision", False)
    assert ledger.rejection(config, "") is None
    assert conclude("rejected", None).state_words == "rejected at an unknown revision"
    assert conclude("open", code_revision()).state_words == "open"


def test_a_note_follows_its_run_and_outlives_it(runs: Path) -> None:
    row = rows(runs)["two"]
    (run,) = row.runs
    notes.append(runs, Note("v0000000", run.folder.full_name, "an older id", None, None, "note"))
    assert rows(runs)["two"].conclusion == "an older id"
    notes.append(runs, Note(row.variant, run.folder.full_name, "gone", "rejected", code_revision(), "note"))
    shutil.rmtree(run.folder.path)
    book = ledger.build(runs)
    kept = book.row(row.variant)
    assert kept is not None and kept.runs == [] and kept.blocks
    assert "gone" in kept.line
    config = compose(overrides(runs, "route.draft_tokens=2"))
    assert ledger.rejection(config, "") is not None


def test_rows_are_found_by_id_and_by_run(runs: Path) -> None:
    book = ledger.build(runs)
    row = rows(runs)["two"]
    name = row.runs[0].name
    assert book.find(row.variant[:5])[0].variant == row.variant
    assert book.find(name) == book.holding(RunFolder(runs / "tiny" / name))
    for text, words in [("vfffffff", "no such variant"), ("nothing", "no such run folder")]:
        with pytest.raises(UsageError, match=words):
            book.find(text)


# ------------------------------------------------------------------------------------- damage


def test_what_is_not_whole_is_shown_as_such(runs: Path) -> None:
    base = rows(runs)["two"].runs[0].folder.path
    copies = {}
    for name in ("running", "dead", "interrupted", "result", "config", "null", "bare"):
        copies[name] = runs / "tiny" / f"copy-{name}"
        shutil.copytree(base, copies[name])
    make_running(copies["running"])
    make_running(copies["dead"])
    (copies["dead"] / "RUNNING").write_text('{"pid": 1, "host": "x", "created": 0')
    (copies["interrupted"] / "DONE").unlink()
    (copies["interrupted"] / "result.json").unlink()
    (copies["interrupted"] / "INTERRUPTED").write_text('{"what": "Ctrl-C", "when": ""}')
    (copies["result"] / "result.json").write_text('{"verdict": {')
    (copies["config"] / "config.yaml").write_text("route: [a\n")
    (copies["null"] / "config.yaml").write_text("model: null\nroute: {draft_tokens: 2}\n")
    (copies["bare"] / "config.yaml").unlink()
    (runs / "tiny" / "notes").mkdir()  # somebody's own folder
    book = ledger.build(runs)
    row = rows(runs)["two"]
    assert row.verdicts == {"pass": 1, "running": 1, "interrupted": 2, "damaged": 1}
    assert {run.name for run in book.damaged} == {"copy-config", "copy-null", "copy-bare"}
    assert row.line
    with pytest.raises(UsageError, match="cannot be read"):
        book.holding(RunFolder(copies["null"]))


def test_an_accepted_file_reads_back_as_written(tmp_path: Path) -> None:
    config = compose(["experiment=tiny"])
    values = {
        "run": "t/x",
        "variant": "v1",
        "fingerprint": "12345678901234567890e5",  # text, though it reads like a number
        "route": plain(config.route),
        "conditions": {k: v for k, v in plain(config).items() if k not in ("route", *NOT_A_VARIANT)},
        "weights": "1e5",
        "evidence": {"p_values": {"t/x": 0.5}},
        "greedy": {"outputs": [{"token_ids": list(range(300))}]},
    }
    path = save(tmp_path / "accepted.yaml", values).path
    found = load(path)
    assert found == Accepted(path, values)
    assert path.read_text().count("\n") < 300  # token ids do not take a line each
    assert variant_id(found.settings) == variant_id(settings_of(plain(config), None))


@pytest.mark.parametrize(
    ("text", "words"),
    [("run: [x", "damaged"), ("run: x\n", "no variant"), ("- 1\n", "damaged"), (None, "no such file")],
)
def test_a_damaged_accepted_file_is_one_line(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "accepted.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=words) as raised:
        load(path)
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------------------- published matrix

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
AUDIT_ROWS = [*LETTERS[:9], "I2", *LETTERS[9:], *(f"A{letter}" for letter in "ABCDEFGHI")]


def test_the_published_table_has_the_audits_rows() -> None:
    source, published = matrix()
    assert [row.id for row in published] == AUDIT_ROWS
    assert [row.line for row in published] == list(range(131, 131 + len(AUDIT_ROWS)))
    assert source.hardware == "2 × V100"
    passed = {row.id for row in published if row.result is PublishedResult.passed}
    assert passed == {"A", "I", "I2", "AA", "AC", "AF", "AG"}
    assert {row.id: row.tok_s for row in published if row.tok_s} == {
        "AF": (85.65, 91.61),
        "AG": (86.25,),
        "AH": (35.62, 34.89),
        "AI": (60, 61),
    }
    assert all(row.variation and row.remark for row in published)


@cache
def preset(name: str) -> ExperimentConfig:
    return compose([f"experiment={name}"])


@pytest.mark.parametrize("row", matrix()[1], ids=lambda row: row.id)
def test_every_row_has_a_preset_that_runs_or_says_what_it_needs(row: PublishedRow, tmp_path: Path) -> None:
    lines = (conf_dir() / "experiment" / f"{row.id}.yaml").read_text(encoding="utf-8").splitlines()
    assert 3 <= len(lines) <= 6
    assert lines[1].startswith(f"# Row {row.id}: ") and lines[1].endswith(f"sm70lab experiment={row.id}")
    assert ("needs: vllm" in lines[1]) is (row.needs is Needs.vllm)
    if row.needs is Needs.vllm:
        (tmp_path / "config.json").write_text("{}")
        config = compose([f"experiment={row.id}", "model=checkpoint", f"model.path='{tmp_path}'"])
        assert (config.name, config.target.name, config.workload.name) == (row.id, "vllm", "macos")
        assert row.id == "AI" or config.target.arguments["tensor_parallel_size"] == 2
        with pytest.raises(UsageError, match="target=vllm needs weights to serve"):
            compose([f"experiment={row.id}"])
    else:
        config = preset(row.id)
        assert (config.name, config.target.name, config.workload.max_tokens) == (row.id, "engine", 6000)
        assert config.route.compile  # the audit's routes are all compiled


def test_rows_that_repeat_a_variant_are_one_variant_here() -> None:
    same = [("I", "I2"), ("P", "X"), ("V", "Z"), ("AA", "AF", "AG"), ("AC", "AE")]
    engine_rows = [row.id for row in matrix()[1] if row.needs is Needs.engine]
    ids = {name: variant_id(settings_of(plain(preset(name)), "weights")) for name in engine_rows}
    for group in same:
        assert len({ids[name] for name in group}) == 1
    assert len(set(ids.values())) == len(ids) - sum(len(group) - 1 for group in same)
