"""Run folders sent to MLflow: at the end of a run, or later by ``sm70lab sync``.

A folder is sent from its own files alone, so sending now, later or twice is one function. MLflow is
imported here and only when something is sent: never inside the timed region.
"""

from __future__ import annotations

import getpass
import json
import logging
import math
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from sm70lab.addresses import split_address, without_password
from sm70lab.errors import UsageError
from sm70lab.raw_text import load_yaml
from sm70lab.schema import Tracking
from sm70lab.tracking import mlflow_rows, mlflow_sweep, tables
from sm70lab.tracking.run_folder import (
    CONFIG,
    ENVIRONMENT,
    FIGURES,
    GENERATIONS,
    RESULT,
    SERVER_LOG,
    SUMMARY,
    RunFolder,
    all_runs,
)

T = TypeVar("T")
METRICS_A_CALL, PARAMS_A_CALL, TAGS_A_CALL = 1000, 100, 100
LOCK_SECONDS = 600.0
STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}
ARTIFACTS = (CONFIG, RESULT, SUMMARY, ENVIRONMENT, SERVER_LOG, tables.ROUNDS, tables.AUDIT)
DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}


class StoreError(Exception):
    """MLflow could not take a run; the message is one line."""


def store_uri(tracking: Tracking) -> str:
    """The address of the store: the configured one, or sqlite under ``runs_dir``."""
    return tracking.uri or f"sqlite:///{Path(tracking.runs_dir) / 'mlflow.db'}"


def record(folder: RunFolder, tracking: Tracking) -> str | None:
    """Send one run. Returns None, or why it could not be sent: then ``MLFLOW_PENDING`` is there.

    The marker is set before the first byte goes out, so a run cut off half-way is sent again.
    """
    folder.set_pending("being sent")
    try:
        reach(tracking)
        _send_locked(folder, tracking)
    except StoreError as error:
        reason = without_password(str(error))
        folder.set_pending(reason)
        return reason
    return None


def send_pending(tracking: Tracking) -> Iterator[tuple[RunFolder, str | None]]:
    """Send every pending run under ``runs_dir`` that nobody is still writing.

    Yields each with None, or with why it stays pending. Sending twice changes nothing.
    """
    for folder in all_runs(Path(tracking.runs_dir)):
        if folder.pending and folder.owner() is None:
            try:
                folder.close_dead()
                reason = record(folder, tracking)
            except UsageError as error:  # this folder cannot be written: no reason to leave the others
                reason = str(error)
            yield folder, reason


def reach(tracking: Tracking) -> None:
    """Find out within ``timeout_s`` whether a server answers. Raises ``StoreError``."""
    uri = store_uri(tracking)
    parts = split_address(uri)
    if parts.hostname is None:
        return
    try:
        if parts.scheme in ("http", "https"):
            _reach_http(uri, tracking.timeout_s)
        else:
            port = parts.port or DATABASE_PORTS.get(parts.scheme.split("+")[0], 0)
            socket.create_connection((parts.hostname, port), timeout=tracking.timeout_s).close()
    except OSError as error:
        raise StoreError(f"{without_password(uri)} cannot be reached ({error})") from error


def _reach_http(uri: str, seconds: float) -> None:
    import httpx

    try:
        answer = httpx.get(f"{uri.rstrip('/')}/health", timeout=seconds, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise StoreError(f"{without_password(uri)} cannot be reached ({reason})") from error
    if answer.status_code == 403:
        raise StoreError(f"{without_password(uri)} refused this host name; start it with --allowed-hosts")


def _send_locked(folder: RunFolder, tracking: Tracking) -> None:
    """Send under a lock beside the records: MLflow breaks when several start on a fresh database."""
    try:
        lock = FileLock(Path(tracking.runs_dir) / ".mlflow.lock", timeout=LOCK_SECONDS)
        with lock, _mlflow_settings(tracking):
            if folder.pending:  # else another process sent it while this one waited
                _send(folder, tracking)
                folder.clear_pending()
    except Timeout as error:
        raise StoreError(f"another process has held {error.lock_file} for {LOCK_SECONDS:.0f} s") from error
    except OSError as error:
        reason = error.strerror or error
        raise StoreError(f"{tracking.runs_dir}/.mlflow.lock cannot be used ({reason})") from error


def _send(folder: RunFolder, tracking: Tracking) -> None:
    uri = store_uri(tracking)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mlflow.tracking import MlflowClient

            for name in ("mlflow", "alembic", "sqlalchemy", "urllib3"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
            _send_with(MlflowClient(tracking_uri=uri), folder, tracking)
    except Exception as error:  # mlflow, SQLAlchemy, urllib3, a driver that is not installed, …
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise StoreError(f"{without_password(uri)}: {without_password(first)}") from error


def _send_with(client: Any, folder: RunFolder, tracking: Tracking) -> None:
    from mlflow.entities import Metric, Param, RunTag

    config: dict[str, Any] = load_yaml(folder.path / CONFIG)
    environment = _read_json(folder.path / ENVIRONMENT)
    result = folder.result() or _killed(folder, config, environment["started"])
    name = f"{config['name']}/{folder.path.name}"
    tags = mlflow_rows.tags(result, environment, name, _read_text(folder.path / SUMMARY))
    tags["mlflow.user"] = getpass.getuser()
    tags["mlflow.loggedArtifacts"] = json.dumps([{"path": mlflow_rows.TABLE, "type": "table"}])
    experiment = _experiment_id(client, str(config["name"]), tracking)
    when = mlflow_rows.milliseconds(result["finished"])  # the run's own time: sent twice, it is one value
    parent = _parent(client, experiment, config, environment, result, when)
    if parent is not None:
        tags[mlflow_sweep.PARENT_TAG] = parent
    run_id = _run_id(client, experiment, tags, result, folder.path.name)

    for some in _chunks(list(tags.items()), TAGS_A_CALL):
        client.log_batch(run_id, tags=[RunTag(*tag) for tag in some])
    for some in _chunks(list(mlflow_rows.params(config).items()), PARAMS_A_CALL):
        client.log_batch(run_id, params=[Param(*param) for param in some])
    rounds = tables.read_rounds(folder.path / tables.ROUNDS)
    points = [*mlflow_rows.metrics(result), *mlflow_rows.series(rounds, config["gate"]["window_tokens"])]
    for some_points in _chunks(points, METRICS_A_CALL):
        client.log_batch(run_id, metrics=[Metric(p.key, p.value, when, p.step) for p in some_points])
    for artifact in ARTIFACTS:
        if (folder.path / artifact).exists():
            client.log_artifact(run_id, str(folder.path / artifact))
    for artifacts in (GENERATIONS, FIGURES):
        if any((folder.path / artifacts).iterdir()):
            client.log_artifacts(run_id, str(folder.path / artifacts), artifacts)
    table = mlflow_rows.generation_table(result, folder.texts(), rounds)
    client.log_text(run_id, table, mlflow_rows.TABLE)  # MLflow's own log_table would append when sent twice
    client.set_terminated(run_id, STATUS[result["status"]], when)
    if parent is not None:
        mlflow_sweep.tell_parent(client, experiment, parent)


def _parent(
    client: Any,
    experiment: str,
    config: dict[str, Any],
    environment: dict[str, Any],
    result: dict[str, Any],
    when: int,
) -> str | None:
    """The parent run of the sweep that this run belongs to, if it does."""
    sweep = config["tracking"].get("sweep")  # not in records of earlier versions
    if sweep is None:
        return None
    start = mlflow_rows.milliseconds(result["started"])
    command = environment.get("command") or []
    return mlflow_sweep.parent_run(client, experiment, config["name"], sweep, start, when, command)


def _experiment_id(client: Any, name: str, tracking: Tracking) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        # a server keeps its own artifacts; a database alone would put them into the working folder
        http = store_uri(tracking).startswith("http")
        root = None if http else (Path(tracking.runs_dir) / "mlflow-artifacts" / name).as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=root))
        except Exception:  # another machine made it in the meantime, or it truly cannot be made
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise StoreError(f"the MLflow experiment {name} is deleted; restore it or set name=")
    return str(found.experiment_id)


def _run_id(client: Any, experiment: str, tags: dict[str, str], result: dict[str, Any], name: str) -> str:
    """This folder's MLflow run: the one an earlier sending began, else a new one."""
    found = client.search_runs([experiment], f"tags.`sm70lab.uid` = '{tags['sm70lab.uid']}'", max_results=1)
    if found:
        return str(found[0].info.run_id)
    start = mlflow_rows.milliseconds(result["started"])
    uid = {"sm70lab.uid": tags["sm70lab.uid"]}  # from the first moment, so that it is found again
    return str(client.create_run(experiment, start_time=start, tags=uid, run_name=name).info.run_id)


def _killed(folder: RunFolder, config: dict[str, Any], started: str) -> dict[str, Any]:
    """What is known of a run that was killed before it could write a result."""
    ended = folder.interruption()
    return {
        "status": "interrupted",
        "interrupted": ended.get("what", "killed"),
        "started": started,
        "finished": ended.get("when", started),
        "route": config["route"]["name"],
        "seed": config["seed"],
        "generations": [],
    }


@contextmanager
def _mlflow_settings(tracking: Tracking) -> Iterator[None]:
    """MLflow reads these from the environment only: bounded waiting, no telemetry, no progress bar."""
    wanted = {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(math.ceil(tracking.timeout_s)),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _chunks(items: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _read_json(path: Path) -> dict[str, Any]:
    value = json.loads(_read_text(path) or "{}")
    assert isinstance(value, dict)
    return value
