"""``sm70lab doctor``: what this machine can do, why not more, and what a V100 needs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from sm70lab.cli.options import Options
from sm70lab.cli.simple import parse
from sm70lab.kernels import native_build
from sm70lab.schema import EXIT_USAGE, Display
from sm70lab.tracking import environment

HELP = """sm70lab doctor [key=value …] [-cd DIR] [--json]

Say what this machine can do: processor, C++ kernels, GPUs, torch, Triton and driver, which routes run
here, and what to install for a V100. Settings choose the route that must run (the default one where
none is given), its model and its device. torch is tried in a process of its own, so a broken one is
reported, too.
Exit codes: 0 the route can run, 2 it cannot.
"""
V100 = (
    "NVIDIA driver R580 (the last branch with Volta), then "
    "pip install torch==2.10.0 triton==3.6.0 (PyPI's wheels, CUDA 12.8)"
)
PROBE_SECONDS = 240
GIB = 1 << 30


def main(arguments: list[str]) -> int:
    """Print the report and return the exit code."""
    options = parse(arguments, HELP)
    if options is None:
        return 0
    report = examine(options.given)
    if options.config.display == Display.json:
        print(json.dumps(report, allow_nan=False))
    else:
        show(report)
    code: int = report["exit_code"]
    return code


def examine(given: Options) -> dict[str, Any]:
    """The whole report as plain data."""
    probed = probe(given)
    route = probed.get("route") or {"name": None, "device": None, "reason": probed["torch"]["reason"]}
    return {
        "exit_code": EXIT_USAGE if route["reason"] else 0,
        "cpu": {
            "name": environment.cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
            "free_gib": round(psutil.virtual_memory().available / GIB, 1),
        },
        "native_kernels": {"reason": _no_native()},
        "driver": driver(),
        "gpus": [vars(gpu) for gpu in environment.gpus()],
        **probed,
        "route": route,
        "v100": V100,
    }


def _no_native() -> str | None:
    try:
        native_build.library()
    except native_build.NativeUnavailable as problem:
        return str(problem)
    return None


def driver(version_file: Path = Path("/proc/driver/nvidia/version")) -> dict[str, str] | None:
    """Version and branch of the NVIDIA kernel driver; None without one."""
    try:
        text = version_file.read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\b(\d{3})\.\d+(?:\.\d+)?\b", text)
    return {"version": found[0], "branch": f"R{found[1]}"} if found else {"version": text[:80], "branch": ""}


def probe(given: Options) -> dict[str, Any]:
    """What ``doctor_probe`` finds in a process of its own, or how that process ended."""
    # The same modules as here, whatever folder this was started in.
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    asked = json.dumps([given.overrides, str(given.config_dir) if given.config_dir else None])
    command = [sys.executable, "-P", "-m", "sm70lab.cli.doctor_probe", asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"torch": {"reason": f"trying torch took more than {PROBE_SECONDS} s"}}
    except OSError as error:
        return {"torch": {"reason": f"{sys.executable} cannot be started: {error}"}}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        code = done.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        lines = done.stderr.splitlines()
        said = f": {lines[-1].strip()}" if lines else ""
        return {"torch": {"reason": f"the process that tried torch {how}{said}"}}
    return found


# ---------------------------------------------------------------- the report in words


def show(report: dict[str, Any]) -> None:
    """A few lines a person reads."""
    cpu, route = report["cpu"], report["route"]
    memory = f"{cpu['memory_gib']} GiB, {cpu['free_gib']} GiB free"
    _line("processor", f"{cpu['name']}, {cpu['cores']} cores, {memory}")
    native = report["native_kernels"]["reason"]
    _line("C++ kernels", f"no: {native}" if native else "built for this processor")
    _line("driver", " ".join(report["driver"].values()) if report["driver"] else "no NVIDIA driver")
    for number, gpu in enumerate(report["gpus"]):
        memory = f"{gpu['memory_bytes'] / GIB:.0f} GiB"
        _line(f"GPU {number}", f"{gpu['name']}, capability {gpu['capability']}, {memory}")
    if not report["gpus"]:
        _line("GPU", "none")
    _line("torch", _torch(report["torch"]))
    for device in report["torch"].get("devices", ()):
        _line(
            f"  cuda:{device['index']}",
            device["reason"] or f"runs; its code is in this torch as {device['code']}",
        )
    _line("Triton", _triton(report.get("triton")))
    for other in report.get("routes", ()):
        _line(
            f"route {other['name']}",
            f"no: {other['reason']}" if other["reason"] else f"runs on {other['device']}",
        )
    _line("for a V100", report["v100"])
    chosen = f"route={route['name']} " if route["name"] else ""
    print(
        f"{chosen}cannot run here: {route['reason']}"
        if route["reason"]
        else f"{chosen}runs here on {route['device']}"
    )


def _torch(found: dict[str, Any]) -> str:
    if found["reason"]:
        return f"no: {found['reason']}"
    built = f"CUDA {found['cuda']}" if found["cuda"] else "no CUDA"
    codes = f", code for {' '.join(found['architectures'])}" if found["architectures"] else ""
    unseen = f"; {found['no_gpu']}" if found["cuda"] and found["no_gpu"] else ""
    return f"{found['version']}, built with {built}{codes}{unseen}"


def _triton(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not tried"
    if found["reason"]:
        return f"no: {found['reason']}"
    able = [f"{name} {'yes' if works else 'no'}" for name, works in found["assembles"].items()]
    return f"{found['version']}, ptxas {found['ptxas']}; assembles {', '.join(able)}"


def _line(name: str, text: str) -> None:
    print(f"{name:24}{text}")
