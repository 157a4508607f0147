"""``target=vllm`` from the command line: what is printed, how a start fails, and what is left behind.

The server is ``program.py``, which has children and real deaths; ``tests/vllm`` has the real one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from lab import Lab

from sm70lab.cli import main

PROGRAM = Path(__file__).with_name("program.py")
GONE_SECONDS = 15.0


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def start_words(lab: Lab, *words: str) -> list[str]:
    command = ",".join([sys.executable, str(PROGRAM), *(f"'{word}'" for word in words)])
    return ["target=vllm", "model=web", f"target.command=[{command}]", "name=t", "tracking=off"]


def tree_of(lab: Lab) -> list[int]:
    """The four processes of the server, once they are there."""
    file, deadline = lab.folder / "pids", time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [int(line) for line in file.read_text().split()] if file.exists() else []
        if len(found) == 4:
            return found
        time.sleep(0.02)
    raise AssertionError("the server did not start")


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)],
)
def test_a_start_that_is_stopped_leaves_no_process(number: signal.Signals, code: int, lab: Lab) -> None:
    run = lab.start(*start_words(lab, "never=1", f"children={lab.folder / 'pids'}"), engine=True)
    tree = tree_of(lab)
    assert alive(tree) == tree
    run.send_signal(number)
    _, error = run.communicate(timeout=60)
    assert alive(tree) == []  # by the time the command has ended
    assert run.returncode == code
    assert "Traceback" not in error
    assert not list((lab.folder / "runs" / "t").glob("*/RUNNING"))


def test_a_run_killed_during_the_start_leaves_no_process(lab: Lab) -> None:
    run = lab.start(*start_words(lab, "never=1", f"children={lab.folder / 'pids'}"), engine=True)
    tree = tree_of(lab)
    run.kill()
    run.communicate(timeout=60)
    deadline = time.monotonic() + GONE_SECONDS
    while alive(tree) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(tree) == []


def test_a_failed_start_is_one_line_and_a_log(lab: Lab) -> None:
    said = "api_server.py: error: unrecognized arguments: --no-such-flag"
    done = lab.run(*start_words(lab, f"say={said}", "exit=2"), engine=True)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("sm70lab: target=vllm")]
    assert "the server did not start: unknown argument --no-such-flag" in line
    log = Path(line.rpartition("log: ")[2])
    assert said in log.read_text()
    assert not (lab.folder / "runs" / "t").exists()  # nothing was generated, so there is no record


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["target=vllm", "model=web", "target.python=/nowhere/python"],
            "target.python=/nowhere/python: no such",
        ),
        (["target=vllm", "model=web", "target.pythonpath=."], "target.pythonpath=.: no vllm/ in it"),
        (["target=vllm", "model=web", "target.python=/bin/true"], "not a Python interpreter"),
        (["target=vllm", "model=web", "target.command=[no-such-program]"], "no such program"),
    ],
)
def test_what_is_not_there_is_told_before_anything_starts(
    words: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, "tracking=off"]) == 2
    error = capsys.readouterr().err
    assert line in error and "Traceback" not in error
    assert not (tmp_path / "runs" / ".servers").exists()


def test_a_dry_run_prints_the_command_and_starts_nothing(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(lab.folder)
    given = [*start_words(lab, f"children={lab.folder / 'pids'}"), "target.dry_run=true"]
    assert main(["-m", *given, "route=full_forward,split"]) == 0
    first, second = capsys.readouterr().out.split("not applied: route.proposal", 1)
    assert "VLLM_SM70_QWEN_GDN_FULL_FORWARD=1 \\\n" in first
    assert "VLLM_SM70_QWEN_GDN_FULL_FORWARD=0 \\\n" in second
    assert "--speculative-config" in first and "--port" in first
    assert main([*given, "route=split", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["exit_code"] == 0
    assert made["launch"]["environment"]["VLLM_SM70_QWEN_GDN_DISABLE_FULL_FORWARD"] == "1"
    assert not (lab.folder / "pids").exists() and not (lab.folder / "runs").exists()


@pytest.mark.long
def test_variables_that_happen_to_be_exported_do_not_reach_the_server(lab: Lab) -> None:
    code = "import os; print(sorted(k for k in os.environ if k.startswith(('VLLM_', 'PYTHONPATH'))))"
    show = lab.folder / "show.py"
    show.write_text(f"{code}\nraise SystemExit(3)\n")
    command = f"target.command=[{sys.executable},{show}]"
    mine = {
        **os.environ,
        "VLLM_SM70_QWEN_GDN_FULL_FORWARD": "1",
        "VLLM_OTHER": "1",
        "PYTHONPATH": str(lab.folder),
    }
    words = ["target=vllm", "model=web", "tracking=off", command, "target.env.VLLM_SM70_FLA_WARPS=4"]
    done = lab.run(*words, engine=True, env=mine)
    assert "ended with exit code 3: ['VLLM_SM70_FLA_WARPS']" in done.stderr
    assert "not passed on to the server: VLLM_OTHER, VLLM_SM70_QWEN_GDN_FULL_FORWARD" in done.stderr
