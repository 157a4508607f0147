"""The same command line over the real engine."""

from __future__ import annotations

import json
import signal

from lab import Lab

TINY = ("experiment=tiny", "name=t", "tracking=off", "workload.max_tokens=80")


def test_a_run_and_its_repetition(lab: Lab) -> None:
    done = lab.run(*TINY, "display=json", engine=True)
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"]
    assert report["result"]["verdict"]["kind"] in ("pass", "inconclusive"), done.stderr
    again = json.loads(lab.run(*TINY, "display=json", "force=true", engine=True).stdout)
    assert again["result"]["reproduces"]["equal"] is True


def test_the_no_draft_run(lab: Lab) -> None:
    done = lab.run(*TINY, "route=no_mtp", "display=json", engine=True)
    result = json.loads(done.stdout)["result"]
    assert done.returncode in (0, 3), done.stderr
    assert result["verdict"]["kind"] in ("pass", "inconclusive")
    assert (result["route"], result["draft_tokens"]) == ("no_mtp", 0)
    assert [g["tokens"] for g in result["generations"]] == [80, 80]


def test_ctrl_c(lab: Lab) -> None:
    run = lab.start(*TINY, "workload.max_tokens=6000", engine=True)
    lab.wait_for("RUNNING")
    assert run.stderr is not None
    while "loading" not in run.stderr.readline():
        pass
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 130
    (folder,) = lab.folders()
    assert (folder / "INTERRUPTED").exists()
