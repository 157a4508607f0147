"""A run and its record, through the real command line over a scripted target."""

from __future__ import annotations

import json

from lab import Lab

QUICK = ("experiment=tiny", "name=t", "tracking=off", "workload.max_tokens=120")


def test_record_skip_and_force(lab: Lab) -> None:
    first = lab.run(*QUICK)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("verdict: pass\n")
    assert "\x1b" not in first.stdout + first.stderr
    (folder,) = lab.folders()
    assert sorted(p.name for p in lab.folder.iterdir()) == ["runs"]
    assert sorted(p.name for p in folder.iterdir()) == [
        "DONE",
        "audit.parquet",
        "config.yaml",
        "environment.json",
        "figures",
        "generations",
        "result.json",
        "rounds.parquet",
        "summary.md",
    ]
    assert {p.name for p in (folder / "generations").iterdir()} == {
        f"{name}-r0.{kind}" for name in ("page", "style") for kind in ("txt", "tokens.json")
    }
    assert {p.name for p in (folder / "figures").iterdir()} == {"acceptance.png", "speed.png", "audit.png"}
    result = lab.result(folder)
    assert (result["schema_version"], result["verdict"]["kind"], result["reproduces"]) == (1, "pass", None)
    assert folder.name == f"spec_core_003-s20260620-{result['fingerprint'][:8]}"

    again = lab.run(*QUICK, "display=quiet")  # display is not part of the fingerprint
    assert again.returncode == 0
    assert again.stdout.count("\n") == 1
    assert again.stdout.startswith("pass  spec_core_003 s20260620")
    assert lab.folders() == [folder]
    assert "force=true" in lab.run(*QUICK).stdout

    forced = lab.run(*QUICK, "force=true", "--json")
    report = json.loads(forced.stdout)
    assert report["exit_code"] == forced.returncode == 0
    assert report["result"]["reproduces"] == {"run": folder.name, "equal": True, "first_difference": None}
    assert [f.name for f in lab.folders()] == [folder.name, f"{folder.name}-2"]


def test_a_run_that_does_not_repeat_itself_says_so_loudly(lab: Lab) -> None:
    drifting = (*QUICK, "+model.shape.drift=true")
    lab.run(*drifting)
    done = lab.run(*drifting, "force=true")
    assert "reproduces: NOT the tokens of spec_core_003-s20260620-" in done.stdout
    assert lab.result(lab.folders()[1])["reproduces"]["equal"] is False


def test_too_little_is_inconclusive(lab: Lab) -> None:
    done = lab.run(*QUICK, "workload.max_tokens=20")
    assert done.returncode == 3
    assert "verdict: inconclusive" in done.stdout
    assert "invalid" in done.stdout
    assert lab.run(*QUICK, "workload.max_tokens=20").returncode == 3  # the recorded verdict's code


def test_a_sweep_goes_on_after_a_bad_job_and_returns_the_worst(lab: Lab) -> None:
    done = lab.run("-m", *QUICK, "seed=1,-1,2", "display=json")
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"] == 2
    assert [run["exit_code"] for run in report["runs"]] == [0, 2, 0]
    assert report["runs"][1]["error"].startswith("seed=-1")
    assert "Traceback" not in done.stderr
    assert [f.name.split("-")[1] for f in lab.folders()] == ["s1", "s2"]
    assert sorted(p.name for p in lab.folder.iterdir()) == ["runs"]


def test_the_same_run_twice_at_once_is_refused(lab: Lab) -> None:
    slow = (*QUICK, "+model.shape.delay_ms=40")
    first = lab.start(*slow)
    lab.wait_for("RUNNING")
    second = lab.run(*slow)
    first.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 2)
    assert "going on as process" in second.stderr
    assert len(lab.folders()) == 1
