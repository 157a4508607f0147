"""The same command line over the real engine."""

from __future__ import annotations

import json
import signal

import pytest
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


def test_a_fault_is_named_by_its_token_and_shown_in_its_text(lab: Lab) -> None:
    done = lab.run(*TINY, "route=split", "hazard=no_ssm_rollback", "display=json", engine=True)
    result = json.loads(done.stdout)["result"]
    assert (done.returncode, result["verdict"]["kind"]) == (1, "route_fault"), done.stderr
    (audit,) = [e for e in result["verdict"]["evidence"] if e["kind"] == "audit"]
    first = audit["details"]["first_bad"]
    assert first["rule"] in ("noise", "top_k", "top_p") and first["index"] < 40
    assert first["gap"] > 0 and "round" in first["place"]
    assert first["context"]["token"].strip() == str(first["token"])
    likeliest = first["alternatives"][0]
    assert likeliest["token"] != first["token"] and likeliest["probability"] > 0
    drawn = first["drawn"]
    assert drawn["token"] != first["token"] and 0 < drawn["probability"] <= likeliest["probability"]
    assert audit["details"]["curve"][0]["faults"][0] == first["index"]


@pytest.mark.long
def test_a_loop_of_the_models_own_is_not_the_routes_fault(lab: Lab) -> None:
    """Greedily the embedded model runs into a loop, and the reference agrees with every token of it."""
    settings = ("route=whole_round", "sampling=greedy", "workload.max_tokens=1500", "tracking=off")
    done = lab.run(*settings, "display=json", engine=True)
    result = json.loads(done.stdout)["result"]
    assert (done.returncode, result["verdict"]["kind"]) == (1, "model_degenerate"), done.stderr
    assert "a loop to the end" in result["verdict"]["reason"]
    assert result["speed"]["valid"] is False
