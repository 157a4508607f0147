"""``sm70lab ui``: the MLflow pages over the records."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sm70lab.addresses import without_password
from sm70lab.cli.simple import SimpleOptions, parse
from sm70lab.errors import UsageError
from sm70lab.schema import Display

HOST = "127.0.0.1"
PORT = 5000
START_SECONDS = 120.0

HELP = f"""sm70lab ui [port={PORT}] [tracking.uri=…] [tracking.runs_dir=runs] [-cd DIR] [--json]

Start MLflow's pages on {HOST} over the store of tracking.uri (sqlite under runs_dir where none is
given), print their address and stay until Ctrl-C. For an http store only its address is printed.
"""


def main(arguments: list[str]) -> int:
    """Serve the store's pages until interrupted."""
    options = parse(arguments, HELP, own=("port",))
    if options is None:
        return 0
    from sm70lab.tracking import mlflow_store

    tracking = options.config.tracking
    uri = mlflow_store.store_uri(tracking)
    if uri.startswith("http"):
        _announce(options, without_password(uri), None)
        return 0
    port = _free_port(options.own.get("port", str(PORT)))
    if tracking.uri is None and not Path(tracking.runs_dir, "mlflow.db").exists():
        raise UsageError(f"tracking.runs_dir={tracking.runs_dir}: no MLflow store there; run an experiment")
    from sm70lab.stop_signals import StopSignals

    with StopSignals(), tempfile.TemporaryDirectory(prefix="sm70lab-ui-") as scratch:
        return _serve(options, uri, port, Path(scratch))


def _serve(options: SimpleOptions, uri: str, port: int, scratch: Path) -> int:
    address = f"http://{HOST}:{port}"
    root = (Path(options.config.tracking.runs_dir) / "mlflow-artifacts").as_uri()
    log = scratch / "server.log"
    server_command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port)]
    server_command += ["--backend-store-uri", uri, "--default-artifact-root", root, "--workers", "1"]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("wb") as output:
        server = subprocess.Popen(
            server_command,
            cwd=scratch,  # MLflow writes into its working folder
            env={**os.environ, **quiet},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the whole group
        )
    try:
        _wait_until_up(server, address, log)
        _announce(options, address, server.pid)
        server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        _end(server)
    raise UsageError(f"{address}: MLflow's server ended by itself: {_last_line(log)}")


def _wait_until_up(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    import httpx

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{address}/health", timeout=2).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise UsageError(f"{address}: MLflow's server did not start: {_last_line(log)}")


def _announce(options: SimpleOptions, address: str, pid: int | None) -> None:
    if options.config.display == Display.json:
        print(json.dumps({"url": address, "pid": pid}), flush=True)
    else:
        print(f"{address}" + ("  (Ctrl-C ends it)" if pid else ""), flush=True)


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and its workers: the process group that this command started."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _free_port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise UsageError(f"port={text}: must be 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, int(text)))
        except OSError as error:
            raise UsageError(f"port={text}: cannot be used ({error.strerror}); choose another") from error
    return int(text)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
