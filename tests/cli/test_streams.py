"""Standard output and error that are closed or full never end a run."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess

import pytest
from lab import SECONDS, Lab

from sm70lab.cli.run import _finish

FAST = ("experiment=tiny", "name=t", "tracking=off", "workload.max_tokens=120")


@pytest.mark.parametrize(
    "redirection",
    [
        "2>/dev/full",
        ">/dev/full",
        ">/dev/full 2>&1",
        "2>&-",
        ">&- 2>&-",
        "2>&1 | head -1; exit ${PIPESTATUS[0]}",
    ],
)
@pytest.mark.parametrize("mode", ["display=rich", "display=json"])
def test_a_run_without_its_streams_is_finished_and_recorded(lab: Lab, redirection: str, mode: str) -> None:
    command = shlex.join(lab.command(*FAST, mode, "+model.shape.delay_ms=5"))
    done = subprocess.run(
        ["bash", "-c", f"{command} {redirection}"], cwd=lab.folder, capture_output=True, timeout=SECONDS
    )
    (folder,) = lab.folders()
    assert (folder / "DONE").exists()
    assert not (folder / "RUNNING").exists()
    assert lab.result(folder)["verdict"]["kind"] == "pass"
    assert done.returncode == 0
    assert b"Traceback" not in done.stdout + done.stderr


def test_a_live_terminal_line_that_breaks(lab: Lab) -> None:
    """The rich display: a terminal that goes away in the middle of a run."""
    code = (
        "import os, pty, subprocess, sys, time\n"
        "master, slave = pty.openpty()\n"
        "run = subprocess.Popen(sys.argv[1:], stdin=slave, stdout=slave, stderr=slave)\n"
        "os.close(slave)\n"
        "os.read(master, 100)\n"
        "os.close(master)\n"
        "sys.exit(run.wait())\n"
    )
    command = lab.command(*FAST, "+model.shape.delay_ms=5")
    done = subprocess.run([command[0], "-c", code, *command], cwd=lab.folder, timeout=SECONDS)
    (folder,) = lab.folders()
    assert (done.returncode, (folder / "DONE").exists()) == (0, True)


def test_a_closed_terminal_interrupts_as_sigterm_does(lab: Lab) -> None:
    run = lab.start(*FAST, "+model.shape.delay_ms=40")
    lab.wait_for("generations/page-r0.tokens.json")
    run.send_signal(signal.SIGHUP)
    run.communicate(timeout=30)
    assert run.returncode == 129
    (folder,) = lab.folders()
    assert json.loads((folder / "INTERRUPTED").read_text())["what"] == "SIGHUP"


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = {"display": "json", "exit_code": 0, "result": {"a": float("inf"), "b": [float("nan"), 1.5]}}
    assert _finish([outcome], multirun=False) == 0

    def refuse(name: str) -> None:
        raise AssertionError(name)

    said = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert said["result"] == {"a": None, "b": [None, 1.5]}
