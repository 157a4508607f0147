"""Records that survive what goes wrong around them: markers, MLflow, damaged files, passwords."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lab import Lab

from sm70lab.addresses import without_password
from sm70lab.config import compose
from sm70lab.errors import UsageError
from sm70lab.tracking import run_folder
from sm70lab.tracking.fingerprint import fingerprint, model_hash
from sm70lab.tracking.marker import Heartbeat
from sm70lab.tracking.run_folder import RunFolder, dead_runs, finished_run

pytestmark = pytest.mark.long

FAST = ("experiment=tiny", "name=t", "workload.max_tokens=120")
OFF = (*FAST, "tracking=off")
MARK = "0123456789abcdef"


def claim(folder: Path, **running: Any) -> RunFolder:
    """A run folder at work; ``running`` changes what its marker says."""
    run = RunFolder.claim(compose(["experiment=tiny", f"tracking.runs_dir={folder}"]), MARK)
    marker = run.path / "RUNNING"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | running))
    return run


# --------------------------------------------------------------------- MLflow never costs a run


def test_a_lock_that_cannot_be_opened(lab: Lab) -> None:
    (lab.folder / "runs" / ".mlflow.lock").mkdir(parents=True)
    done = lab.run(*FAST)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (folder,) = lab.folders()
    assert (folder / "DONE").exists()
    assert not (folder / "RUNNING").exists()
    assert ".mlflow.lock" in json.loads((folder / "MLFLOW_PENDING").read_text())["reason"]


def test_a_fault_while_sending_leaves_a_finished_run(lab: Lab) -> None:
    program = lab.folder / "broken.py"
    scripted = Path(__file__).parents[1] / "cli"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(scripted)!r})\n"
        "from sm70lab import cli, experiment\n"
        "from sm70lab.tracking import mlflow_store\n"
        "experiment.TARGETS['engine'] = ('scripted', 'ScriptedTarget')\n"
        "def fail(*_): raise RuntimeError('no such thing')\n"
        "mlflow_store.record = fail\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, str(program), *FAST], cwd=lab.folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    (folder,) = lab.folders()
    assert (folder / "DONE").exists()
    assert "no such thing" in json.loads((folder / "MLFLOW_PENDING").read_text())["reason"]


# ------------------------------------------------------------------------------------- markers


def test_a_marker_of_another_host_counts_as_dead_after_ten_minutes(tmp_path: Path) -> None:
    run = claim(tmp_path, host="elsewhere")
    assert run.owner() is not None
    assert dead_runs(tmp_path) == []
    old = time.time() - 601
    os.utime(run.path / "RUNNING", (old, old))
    assert run.owner() is None
    assert [folder.path for folder in dead_runs(tmp_path)] == [run.path]
    assert (run.path / "INTERRUPTED").exists()


def test_the_marker_is_touched_while_running(tmp_path: Path) -> None:
    run = claim(tmp_path)
    marker = run.path / "RUNNING"
    os.utime(marker, (0, 0))
    with Heartbeat(marker, seconds=0.02):
        deadline = time.monotonic() + 10
        while marker.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert marker.stat().st_mtime > time.time() - 60
    marker.unlink()
    with Heartbeat(marker, seconds=0.02):  # a marker that is gone is not made again
        time.sleep(0.1)
    assert not marker.exists()


def test_the_refusal_names_the_file_to_delete(lab: Lab) -> None:
    assert lab.run(*OFF).returncode == 0
    (folder,) = lab.folders()
    (folder / "DONE").unlink()
    (folder / "RUNNING").write_text(json.dumps({"pid": 1, "host": "elsewhere", "created": 0}))
    done = lab.run(*OFF)
    assert done.returncode == 2
    assert f"delete runs/t/{folder.name}/RUNNING" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_failing_done_leaves_a_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = claim(tmp_path)
    run.save_result({"fingerprint": MARK, "status": "finished"}, "")

    def full(path: Path, text: str) -> None:
        raise UsageError(f"{path.name}: the disk is full")

    monkeypatch.setattr(run_folder, "write_text", full)
    with pytest.raises(UsageError, match="DONE: the disk is full"):
        run.finish()
    assert (run.path / "RUNNING").exists()


def test_done_and_running_is_a_finished_run(tmp_path: Path) -> None:
    run = claim(tmp_path, pid=2**22 + 1)
    (run.path / "DONE").write_text("")  # killed between the two steps of its end
    assert [folder.path for folder in dead_runs(tmp_path)] == [run.path]
    assert sorted(p.name for p in run.path.iterdir() if p.name.isupper()) == ["DONE"]


# ------------------------------------------------------------------------------ damaged records


@pytest.mark.parametrize("damage", ["not json", '{"token_ids": [1, 2]}', "[]", None])
def test_a_damaged_earlier_record_never_costs_the_new_verdict(lab: Lab, damage: str | None) -> None:
    lab.run(*OFF)
    (first,) = lab.folders()
    file = first / "generations" / "page-r0.tokens.json"
    if damage is None:
        file.unlink()
    else:
        file.write_text(damage)
    done = lab.run(*OFF, "force=true")
    assert done.returncode == 0, done.stderr
    result = lab.result(lab.folders()[1])
    assert result["verdict"]["kind"] == "pass"
    assert result["reproduces"]["equal"] is None
    assert "page-r0" in result["reproduces"]["reason"]
    assert f"reproduces: unknown against {first.name}" in done.stdout
    assert (lab.folders()[1] / "DONE").exists()


def test_a_record_without_a_verdict_is_not_a_finished_run(tmp_path: Path) -> None:
    run = claim(tmp_path)
    run.save_result({"fingerprint": MARK, "status": "finished", "verdict": None}, "")
    run.finish()
    assert finished_run(compose(["experiment=tiny", f"tracking.runs_dir={tmp_path}"]), MARK) is None


# ------------------------------------------------------------------------------------ passwords

ADDRESSES = [
    "postgresql://me:p@SECRETss@127.0.0.1:1/db",
    "postgresql://me:pa/SECRETss@127.0.0.1:1/db",
    "postgresql://127.0.0.1:1/db?password=aSECRETb&token=SECRET@x",
    "postgresql://me:pa?SECRETss@127.0.0.1:1/db?sslpassword=SECRET",
    "http://me:SECRET@127.0.0.1:1",
    "http://127.0.0.1:1/?api_key=SECRET",
]


@pytest.mark.parametrize("uri", ADDRESSES)
def test_no_password_is_written_down(lab: Lab, uri: str) -> None:
    assert "SECRET" not in without_password(f"see {uri} for more")
    where = f"tracking.uri='{uri}'"
    done = lab.run(*FAST, where, "tracking.timeout_s=1")
    assert done.returncode == 0, done.stderr
    (folder,) = lab.folders()
    assert (folder / "MLFLOW_PENDING").exists()
    sync = lab.run("sync", where, "tracking.timeout_s=1")
    wrong = lab.run(*FAST, where.replace("uri", "urri"))
    said = [run.stdout + run.stderr for run in (done, sync, wrong)]
    kept = [file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file()]
    assert "SECRET" not in "".join(said + kept)
    assert "127.0.0.1" in sync.stdout or "***" in sync.stdout


# --------------------------------------------------------------------------------- odd folders


@pytest.mark.parametrize("name", ["a#b", "a%b", "a%", "blank ß"])
def test_a_folder_name_that_an_address_can_hold(lab: Lab, name: str) -> None:
    done = lab.run(*FAST, f"tracking.runs_dir='{name}'")
    assert done.returncode == 0, done.stderr
    assert (lab.folder / name / "mlflow.db").is_file()
    assert not list((lab.folder / name).rglob("MLFLOW_PENDING"))
    assert sorted(p.name for p in lab.folder.iterdir()) == [name]


@pytest.mark.parametrize("name", ["a?b", "a%20b"])
def test_a_folder_name_that_no_address_can_hold(lab: Lab, name: str) -> None:
    done = lab.run(*FAST, f"tracking.runs_dir='{name}'")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "tracking.runs_dir" in done.stderr
    assert lab.run(*OFF, f"tracking.runs_dir='{name}'").returncode == 0  # no address needed


def test_a_dangling_link(lab: Lab) -> None:
    (lab.folder / "runs").symlink_to(lab.folder / "unmounted")
    done = lab.run(*OFF)
    assert done.returncode == 2
    assert "runs: a link to" in done.stderr
    assert "unmounted" in done.stderr


# --------------------------------------------------------------------------------- fingerprint


def test_weights_named_by_an_index_count_wherever_they_are(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "parts/one.safetensors", "b": "parts/one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = compose(["model=checkpoint", f"model.path={tmp_path}"])
    hashes = []
    for weights in (b"one", b"two"):
        (tmp_path / "parts" / "one.safetensors").write_bytes(weights)
        hashes.append(model_hash(config.model, config.target))
    assert hashes[0] != hashes[1]
    (tmp_path / "model.safetensors.index.json").write_text("[]")  # loading says what is wrong with it
    assert model_hash(config.model, config.target)


@pytest.mark.parametrize("package", ["torch", "triton", "numpy", "tokenizers"])
def test_versions_that_change_numbers_or_tokens_count(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["experiment=tiny"])
    before = fingerprint(config, "x")
    monkeypatch.setattr("sm70lab.tracking.fingerprint.package_versions", lambda: {package: "0"})
    only = fingerprint(config, "x")
    monkeypatch.setattr("sm70lab.tracking.fingerprint.package_versions", lambda: {package: "1"})
    assert len({before, only, fingerprint(config, "x")}) == 3
