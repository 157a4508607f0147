"""Small parts of tracking by themselves."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from sm70lab.addresses import without_password
from sm70lab.config import compose
from sm70lab.errors import UsageError
from sm70lab.schema import Generation, Prompt, Round
from sm70lab.tracking import atomic, mlflow_rows, tables
from sm70lab.tracking.fingerprint import fingerprint, model_hash
from sm70lab.tracking.result import compare_tokens, incomplete
from sm70lab.tracking.run_folder import RunFolder, finished_run, same_runs


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic.write_json(path, {"n": 1})

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UsageError, match="disk is full"):
        atomic.write_with(path, fail)
    assert json.loads(path.read_text()) == {"n": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_json_is_strict_and_text_never_fails(tmp_path: Path) -> None:
    atomic.write_json(tmp_path / "a", {"x": [float("nan"), float("inf"), 1.5]})
    assert json.loads((tmp_path / "a").read_text()) == {"x": [None, None, 1.5]}
    atomic.write_text(tmp_path / "b", "lone \ud800 surrogate")
    assert "surrogate" in (tmp_path / "b").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ("display=quiet", True),
        ("tracking.runs_dir=elsewhere", True),
        ("tracking=off", True),
        ("force=true", True),
        ("seed=2", False),
        ("route.draft_tokens=2", False),
        ("workload.max_tokens=9", False),
        ("target.device=cpu", False),
        ("model.seed=1", False),
    ],
)
def test_what_counts_in_a_fingerprint(change: str, same: bool) -> None:
    plain, changed = compose(["experiment=tiny"]), compose(["experiment=tiny", change])
    marks = [fingerprint(config, model_hash(config.model, config.target)) for config in (plain, changed)]
    assert (marks[0] == marks[1]) is same


def test_a_models_hash_follows_its_files_and_not_its_place(tmp_path: Path) -> None:
    hashes = []
    for name, weights in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
        config = compose(["model=checkpoint", f"model.path={folder}"])
        hashes.append(fingerprint(config, model_hash(config.model, config.target)))
    assert hashes[0] == hashes[1] != hashes[2]


def test_folders_are_claimed_once_and_numbered(tmp_path: Path) -> None:
    config = compose(
        ["experiment=tiny", f"tracking.runs_dir={tmp_path}", "tracking.uri=http://me:secret@host"]
    )
    mark = "0123456789abcdef"
    first, second = RunFolder.claim(config, mark), RunFolder.claim(config, mark)
    assert second.path.name == f"{first.path.name}-2"
    assert [f.path for f in same_runs(config, mark)] == [first.path, second.path]
    assert first.owner() is not None
    assert finished_run(config, mark) is None
    whole = {"schema_version": 1, "status": "finished", "generations": [], "speed": {}}
    verdict = {"kind": "pass", "reason": "", "evidence": []}
    first.save_result({"fingerprint": mark, "verdict": verdict, **whole}, "")
    first.finish()
    found = finished_run(config, mark)
    assert found is not None
    assert found.path == first.path
    assert finished_run(config, "01234567ffff") is None  # the same eight digits are not the same run
    assert "secret" not in (first.path / "config.yaml").read_text()


def test_params_fit_mlflow() -> None:
    config: dict[str, Any] = {"a": {"b": [1, 2], "c": "x" * 9000}, "p": [{"n": None}], "k" * 300: True}
    params = mlflow_rows.params(config)
    assert params["a.b"] == "[1, 2]"
    assert params["p.0.n"] == "null"
    assert max(map(len, params.values())) == 6000
    assert max(map(len, params)) == 250


def test_series_pool_generations_by_window() -> None:
    rounds = {"a": [Round(0, 3, 3, 4, 1.0), Round(600, 3, 0, 1, 1.0)], "b=1": [Round(10, 3, 1, 2, 1.0)]}
    points = {(p.key, p.step): p.value for p in mlflow_rows.series(rounds, 500)}
    assert points["window.acceptance_length", 500] == 3.0
    assert points["window.rate_1", 500] == 1.0
    assert points["window.rate_2", 500] == 0.5
    assert points["window.tokens_per_second", 1000] == 1.0
    assert points["window.b_1.acceptance_length", 500] == 2.0


def test_rounds_survive_their_table(tmp_path: Path) -> None:
    prompt = Prompt(0, "p", "", [1], 9)
    rounds = [Round(0, 3, 2, 3, 0.5), Round(3, 3, 0, 1, 0.25)]
    generation = Generation(prompt, 0, 1, [1, 2, 3, 4], "abcd", "stop", rounds, 0.0, 0.75)
    tables.write_rounds(tmp_path / "r.parquet", [generation])
    assert tables.read_rounds(tmp_path / "r.parquet") == {"p-r0": rounds}


def test_where_two_runs_part() -> None:
    assert compare_tokens("x", {"a": [1, 2]}, {"a": [1, 2]})["equal"]
    assert compare_tokens("x", {"a": [1, 2]}, {"a": [1, 3]})["first_difference"] == "a, token 1"
    assert compare_tokens("x", {"a": [1, 2]}, {"a": [1]})["first_difference"] == "a, token 1"
    assert compare_tokens("x", {"a": [1]}, {})["first_difference"] == "a is in one run only"


def test_passwords_are_not_written_down() -> None:
    assert without_password("postgresql://me:pa@host/db") == "postgresql://***@host/db"
    assert without_password("sqlite:////a/b.db") == "sqlite:////a/b.db"


WHOLE = {
    "schema_version": 1,
    "status": "finished",
    "generations": [],
    "verdict": {"kind": "pass", "reason": "", "evidence": []},
    "speed": {"tokens_per_second": 1.0},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"verdict": "pass"}, "finished without a verdict"),
        ({"verdict": {"kind": "good", "reason": "", "evidence": []}}, "no such verdict"),
        ({"verdict": {"kind": "pass", "reason": "", "evidence": [1]}}, "evidence without"),
        ({"speed": {"tokens_per_second": "x"}}, "speed is not a number"),
        ({"speed": {"tokens_per_second": 1.0, "valid": "no"}}, "neither valid nor invalid"),
        ({"generations": None}, "an output lacks"),
        ({"generations": [{"key": "a"}]}, "an output lacks"),
        ({"schema_version": 99}, "written by a later sm70lab"),
    ],
)
def test_a_result_of_the_wrong_form_is_damaged(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Valid JSON that some reader would fall over counts as no result at all."""
    folder = RunFolder(tmp_path)
    (tmp_path / "result.json").write_text(json.dumps(WHOLE))
    assert folder.result() == WHOLE
    (tmp_path / "result.json").write_text(json.dumps(WHOLE | change))
    assert folder.result() is None
    assert words in (incomplete(WHOLE | change) or "")


OUTPUT = {
    "key": "a-r0", "tokens": 200, "decoded": 199, "finish_reason": "length", "prefill_seconds": 0.1,
    "decode_seconds": 1.5, "passed": True, "seed": 1, "repeat": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": -3}, "tokens are no count"),
        ({"tokens": "x"}, "tokens are no count"),
        ({"decoded": 199.5}, "decoded are no count"),
        ({"decoded": True}, "decoded are no count"),
        ({"decoded": 10**400, "tokens": 10**400}, "tokens are no count"),
        ({"decoded": 201}, "decoded tokens are more than its tokens"),
        ({"decode_seconds": -1}, "decode_seconds are no time"),
        ({"decode_seconds": "1.2"}, "decode_seconds are no time"),
        ({"decode_seconds": float("inf")}, "decode_seconds are no time"),
        ({"decode_seconds": float("nan")}, "decode_seconds are no time"),
        ({"decode_seconds": 5e-324}, "less than a clock can tell"),
        ({"prefill_seconds": None}, "prefill_seconds are no time"),
        ({"passed": "yes"}, "passed is neither"),
        ({"passed": 1}, "passed is neither"),
        ({"seed": "x"}, "seed is no whole number"),
    ],
)
def test_an_output_that_cannot_be_true_is_damaged(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Impossible counts and times were added up, shown and ranked."""
    assert incomplete(WHOLE | {"generations": [OUTPUT]}) is None
    changed = WHOLE | {"generations": [OUTPUT, OUTPUT | change]}
    assert words in (incomplete(changed) or "")
    (tmp_path / "result.json").write_text(json.dumps(changed))
    assert RunFolder(tmp_path).result() is None
