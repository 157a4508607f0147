"""Runs that end early: by Ctrl-C, SIGTERM, SIGKILL, a full disk, a folder that cannot be written."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest
from lab import Lab

FAST = ("experiment=tiny", "name=t", "workload.max_tokens=120")
SLOW = (*FAST, "+model.shape.delay_ms=40")


@pytest.mark.parametrize(
    ("number", "code", "what"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_a_signal_keeps_what_is_there(lab: Lab, number: signal.Signals, code: int, what: str) -> None:
    run = lab.start(*SLOW)
    lab.wait_for("generations/page-r0.tokens.json")
    run.send_signal(number)
    _, stderr = run.communicate(timeout=30)
    assert run.returncode == code
    assert "Traceback" not in stderr
    (folder,) = lab.folders()
    assert f"interrupted ({what}): 2 outputs" in stderr
    assert json.loads((folder / "INTERRUPTED").read_text())["what"] == what
    assert not (folder / "DONE").exists()
    assert not (folder / "RUNNING").exists()
    assert not list(folder.rglob("*.tmp"))
    reasons = [g["finish_reason"] for g in lab.result(folder)["generations"]]
    assert reasons == ["length", "interrupted"]
    assert (folder / "generations" / "style-r0.txt").exists()


def test_ctrl_c_ends_a_whole_sweep(lab: Lab) -> None:
    run = lab.start("-m", *SLOW, "seed=1,2,3", "tracking=off")
    lab.wait_for("RUNNING")
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=30)
    assert run.returncode == 130
    assert len(lab.folders()) == 1


def test_a_killed_run_is_closed_by_the_next(lab: Lab) -> None:
    run = lab.start(*SLOW)
    running = lab.wait_for("RUNNING")
    run.kill()
    run.communicate(timeout=30)
    folder = running.parent
    assert running.exists()
    assert not (folder / "DONE").exists()
    done = lab.run(*FAST, "seed=2", "tracking=off")
    assert done.returncode == 0, done.stderr
    assert "its process is gone; closed as interrupted" in done.stderr
    assert not running.exists()
    assert json.loads((folder / "INTERRUPTED").read_text())["what"].startswith("killed")


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.startswith("sm70lab:")]
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return lines[-1]


def test_a_folder_that_cannot_be_written_is_found_before_the_model_loads(lab: Lab) -> None:
    runs = lab.folder / "runs"
    runs.mkdir()
    if os.geteuid() == 0:  # root writes anywhere but on a read-only mount
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", runs]).returncode:
            pytest.skip("mounting is not allowed here")
    else:
        runs.chmod(0o555)
    try:
        done = lab.run(*SLOW)
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", runs], check=True)
    assert "cannot be written" in one_line(done)
    assert "loading" not in done.stderr


def test_a_file_in_the_way(lab: Lab) -> None:
    (lab.folder / "runs").mkdir()
    (lab.folder / "runs" / "t").write_text("mine")
    assert "in the way" in one_line(lab.run(*SLOW))


def test_a_full_disk_ends_in_one_line_and_no_done(lab: Lab) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, 16_000))

    runs: Path = lab.folder / "runs"
    runs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", runs]
    mounted = os.geteuid() == 0 and subprocess.run(mount).returncode == 0
    try:
        limit = {} if mounted else {"preexec_fn": small_files}
        done = lab.run(*FAST, "workload.max_tokens=9000", **limit)
        assert "the disk is full" in one_line(done)
        assert not list(runs.rglob("DONE"))
        assert not list(runs.rglob("*.tmp"))
    finally:
        if mounted:
            subprocess.run(["umount", runs], check=True)


def test_a_run_killed_while_mlflow_was_told_is_finished(lab: Lab) -> None:
    """Its record was whole: the next start closes it, and does not run it again."""
    settings = ("experiment=tiny", "name=t", "tracking=off")
    lab.run(*settings)
    (folder,) = lab.folders()
    (folder / "DONE").unlink()
    host = json.loads((folder / "environment.json").read_text())["host"]
    (folder / "RUNNING").write_text(json.dumps({"pid": 2**22 - 3, "host": host, "created": 0.0}))
    again = lab.run(*settings, "display=json")
    assert json.loads(again.stdout)["skipped"] is True, again.stderr
    assert lab.folders() == [folder]
    assert (folder / "DONE").exists() and not (folder / "RUNNING").exists()
