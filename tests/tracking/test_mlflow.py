"""Records in MLflow: a real sqlite store, a real server, and neither."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from lab import Lab

FAST = ("experiment=tiny", "name=t", "workload.max_tokens=1200")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
]  # real stores and servers, on machines that may be busy


def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def sqlite(lab: Lab) -> str:
    return f"sqlite:///{lab.folder}/runs/mlflow.db"


def runs_of(store: Any, experiment: str = "t") -> list[Any]:
    found = store.get_experiment_by_name(experiment)
    return list(store.search_runs([found.experiment_id])) if found else []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """An ``mlflow server`` process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        where = [
            "--backend-store-uri",
            f"sqlite:///{self.folder}/m.db",
            "--artifacts-destination",
            "artifacts",
        ]
        address = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *where, *address],
            cwd=self.folder,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for _ in range(600):
            try:
                if httpx.get(f"{self.uri}/health", timeout=1).is_success:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise AssertionError("the MLflow server did not start")

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "server")
    yield made
    made.stop()


def test_a_run_in_sqlite(lab: Lab) -> None:
    done = lab.run(*FAST)
    assert done.returncode == 0, done.stderr
    assert "mlflow." not in done.stderr.lower().replace("mlflow.db", "")  # none of its chatter
    assert sorted(p.name for p in lab.folder.iterdir()) == ["runs"]
    (folder,) = [f for f in lab.folders() if f.is_dir()]
    store = client(sqlite(lab))
    (run,) = runs_of(store)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == folder.name
    assert run.data.params["route.state.block_size"] == "8"
    assert run.data.params["workload.prompts.0.name"] == "page"
    assert run.data.tags["verdict"] == "pass"
    assert run.data.tags["sm70lab.fingerprint"] == lab.result(folder)["fingerprint"]
    assert run.data.metrics["speed.tokens_per_second"] > 0
    assert run.data.metrics["tokens"] == 2400
    history = store.get_metric_history(run.info.run_id, "window.acceptance_length")
    assert [point.step for point in history] == [500, 1000, 1500]
    assert run.info.artifact_uri.startswith(f"file://{lab.folder}/runs/mlflow-artifacts/")
    artifacts = {a.path for a in store.list_artifacts(run.info.run_id)}
    assert {"result.json", "rounds.parquet", "audit.parquet", "figures", "generations"} <= artifacts
    show_in_ui(lab)
    assert sorted(p.name for p in lab.folder.iterdir()) == ["runs"]


def show_in_ui(lab: Lab) -> None:
    port = free_port()
    ui = lab.start("ui", f"port={port}", "--json")
    assert ui.stdout is not None
    try:
        said = json.loads(ui.stdout.readline())
        assert said["url"] == f"http://127.0.0.1:{port}"
        found = httpx.post(
            f"{said['url']}/api/2.0/mlflow/experiments/search", json={"max_results": 5}, timeout=30
        )
        assert "t" in [e["name"] for e in found.json()["experiments"]]
        busy = lab.run("ui", f"port={port}")
        assert (busy.returncode, busy.stderr.count("\n")) == (2, 1)
    finally:
        ui.send_signal(signal.SIGINT)
        ui.communicate(timeout=30)
    assert ui.returncode == 0
    with pytest.raises(httpx.HTTPError):
        httpx.get(said["url"], timeout=2)


def test_four_at_once_on_a_fresh_store_and_a_killed_one_is_closed(lab: Lab) -> None:
    killed = lab.start(*FAST, "seed=99", "+model.shape.delay_ms=100")
    dead = lab.wait_for("RUNNING").parent
    killed.kill()
    killed.communicate(timeout=30)
    together = [lab.start(*FAST, f"seed={seed}") for seed in range(4)]
    ends = [process.communicate(timeout=300)[1] for process in together]
    assert [process.returncode for process in together] == [0] * 4, ends
    assert not list(lab.folder.glob("runs/*/*/MLFLOW_PENDING"))
    runs = {run.info.run_name: run.info.status for run in runs_of(client(sqlite(lab)))}
    assert len(runs) == 5
    assert runs.pop(dead.name) == "KILLED"
    assert set(runs.values()) == {"FINISHED"}


def test_an_absent_server_then_sync_twice(lab: Lab, server: Server) -> None:
    absent = (f"tracking.uri={server.uri}", "tracking.timeout_s=2")
    done = lab.run(*FAST, *absent)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be reached") == 1
    (folder,) = lab.folders()
    assert (folder / "DONE").exists()
    assert "cannot be reached" in json.loads((folder / "MLFLOW_PENDING").read_text())["reason"]
    still = lab.run("sync", *absent)
    assert still.returncode == 2
    assert "stays pending" in still.stdout

    server.start()
    sent = lab.run("sync", *absent, "tracking.timeout_s=30", "--json")
    report = json.loads(sent.stdout)
    assert (sent.returncode, [row["sent"] for row in report["runs"]]) == (0, [True]), sent.stdout
    assert not (folder / "MLFLOW_PENDING").exists()
    (folder / "MLFLOW_PENDING").write_text("{}")  # as if the answer had been lost
    assert lab.run("sync", *absent, "tracking.timeout_s=30").returncode == 0
    store = client(server.uri)
    (run,) = runs_of(store)
    assert run.info.status == "FINISHED"
    assert len(store.get_metric_history(run.info.run_id, "window.acceptance_length")) == 3
    assert "result.json" in {a.path for a in store.list_artifacts(run.info.run_id)}

    direct = lab.run(*FAST, "seed=2", f"tracking.uri={server.uri}", "tracking.timeout_s=30")
    assert direct.returncode == 0, direct.stderr
    assert len(runs_of(store)) == 2
    assert not list(lab.folder.glob("mlruns*"))
    assert "nothing is pending" in lab.run("sync", *absent).stdout


def test_a_killed_sweep_started_again_goes_on_under_its_parent(lab: Lab) -> None:
    sweep = ("-m", "experiment=tiny", "name=t", "workload.max_tokens=600", "seed=1,2,3", "display=json")
    slow = (*sweep, "+model.shape.delay_ms=10")
    first = lab.start(*slow)
    lab.wait_for("DONE")
    lab.wait_for("RUNNING")
    first.kill()
    first.communicate(timeout=60)
    done = lab.run(*slow)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)["runs"]
    assert [o["skipped"] for o in outcomes] == [True, False, False]  # only what was missing
    assert not any("tracking.sweep" in override for o in outcomes for override in o["overrides"])
    runs = runs_of(client(sqlite(lab)))
    (parent,) = (run for run in runs if run.info.run_name == "t")
    children = [run for run in runs if run.info.run_name != "t"]
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parent.info.run_id}
    assert sorted(child.info.status for child in children) == ["FINISHED"] * 3 + ["KILLED"]
    assert parent.info.status == "FINISHED"
    assert parent.info.end_time >= max(child.info.end_time for child in children)
    assert parent.data.tags["verdicts"] == "1 interrupted, 3 pass"
    assert "-m" in parent.data.tags["command"].split() or "--multirun" in parent.data.tags["command"]
    assert "speed.tokens_per_second" not in parent.data.metrics


def test_four_sweeps_at_once_and_a_late_run_share_one_parent(lab: Lab) -> None:
    shared = (*FAST, "tracking.sweep=shared")
    together = [lab.start("-m", *shared, f"seed={seed},{seed + 10}") for seed in range(4)]
    ends = [process.communicate(timeout=300)[1] for process in together]
    assert [process.returncode for process in together] == [0] * 4, ends
    absent = f"tracking.uri=http://127.0.0.1:{free_port()}"
    assert lab.run(*shared, "seed=99", absent, "tracking.timeout_s=1").returncode == 0
    assert lab.run("sync").returncode == 0
    (late,) = (f for f in lab.folders() if "-s99-" in f.name)
    (late / "MLFLOW_PENDING").write_text("{}")  # as if the answer had been lost
    assert lab.run("sync").returncode == 0
    store = client(sqlite(lab))
    runs = runs_of(store)
    (parent,) = (run for run in runs if run.info.run_name == "t")
    assert len(runs) == 10
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert parent.data.tags["runs"] == "9"
    (child,) = (run for run in runs if run.info.run_name == late.name)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    table = json.loads(Path(store.download_artifacts(child.info.run_id, "generations.json")).read_text())
    assert [row[0] for row in table["data"]] == ["page-r0", "style-r0"]  # sent twice, one table
    assert table["data"][0][2] == (late / "generations" / "page-r0.txt").read_text()
