"""MLflow's own pages over a store with two routes: the sweep's parent, and both routes compared."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import Lab

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(600)]
ROUTES = ("split", "no_mtp")
RUNS = (
    "experiment=tiny",
    "name=pair",
    "workload.max_tokens=300",
    f"route={','.join(ROUTES)}",
    "display=quiet",
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    made = Lab(tmp_path_factory.mktemp("ui"))
    done = made.run("-m", *RUNS, engine=True)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def address(lab: Lab) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ui = lab.start("ui", f"port={port}", "--json")
    assert ui.stdout is not None
    try:
        yield json.loads(ui.stdout.readline())["url"]
    finally:
        ui.send_signal(signal.SIGINT)
        ui.communicate(timeout=60)


@pytest.fixture(scope="module")
def stored(lab: Lab) -> dict[str, Any]:
    """Run name → MLflow's run, the parent's name being the experiment's."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{lab.folder}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("pair")
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def test_the_comparison_of_two_routes(
    address: str, stored: dict[str, Any], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    children = {name: run for name, run in stored.items() if name != "pair"}
    assert sorted(name.split("-s")[0] for name in children) == sorted(ROUTES)
    experiment = stored["pair"].info.experiment_id
    ids = json.dumps([run.info.run_id for run in children.values()])
    page = open_page(f'{address}/#/compare-runs?runs={ids}&experiments=["{experiment}"]', width=1500)
    page.get_by_text("Comparing 2 Runs").first.wait_for(timeout=60_000)
    for name, run in children.items():
        page.get_by_text(name).first.wait_for()
        value = run.data.metrics["acceptance.rounds"]
        page.get_by_text(f"{value:g}", exact=True).first.wait_for()
    page.get_by_text("acceptance.rounds", exact=True).first.wait_for()
    page.get_by_text("route.draft_tokens", exact=True).first.wait_for()
    page.screenshot(path=str(tmp_path / "compare.png"), full_page=True)  # for a person


def test_the_table_of_outputs_and_the_sweeps_parent(
    address: str, stored: dict[str, Any], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    parent = stored["pair"]
    experiment = parent.info.experiment_id
    assert parent.info.status == "FINISHED"
    page = open_page(f"{address}/#/experiments/{experiment}/runs", width=1500)
    rows = page.get_by_role("row")
    rows.get_by_text("pair", exact=True).first.wait_for(timeout=60_000)
    page.screenshot(path=str(tmp_path / "runs.png"))
    child = next(run for name, run in stored.items() if name.startswith("split"))
    page = open_page(
        f"{address}/#/experiments/{experiment}/runs/{child.info.run_id}/artifacts/generations.json",
        width=1500,
    )
    page.get_by_text("page-r0").first.wait_for(timeout=60_000)
    page.get_by_text("passed").first.wait_for()
    page.screenshot(path=str(tmp_path / "table.png"))
