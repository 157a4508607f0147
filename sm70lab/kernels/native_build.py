"""Build ``native.cpp`` with the C++ compiler at hand, or take it from the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("native.cpp")
# No fused multiply-add but those written out: the order of operations is what the source says.
FLAGS = ("-O2", "-march=native", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-w")


class NativeUnavailable(Exception):  # noqa: N818 - a state of the machine
    """No library here, with the reason in one line."""


def library() -> ctypes.CDLL:
    """The loaded library. Raises ``NativeUnavailable``."""
    compiler = _compiler()
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as problem:
        raise NativeUnavailable(f"the C++ compiler {shlex.join(compiler)} does not run: {problem}") from None
    sources = [path.read_text(encoding="utf-8") for path in sorted(SOURCE.parent.glob("native*.[ch]*"))]
    facts = "\n".join((*sources, version, *compiler, *FLAGS, _cpu()))
    name = f"native-{hashlib.sha256(facts.encode()).hexdigest()[:20]}"
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache = Path(root) / "sm70lab"
        cache.mkdir(parents=True, exist_ok=True)
        for path in cache.glob(f"{name}-*.so"):
            # The name has the size: loading a file that was cut short would end the process.
            if path.stem.endswith(f"-{path.stat().st_size}"):
                return ctypes.CDLL(str(path))
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            # Renamed when whole, so that two processes may build at once.
            built = _compile(compiler, Path(folder) / f"{name}.so")
            return ctypes.CDLL(str(built.replace(cache / f"{name}-{built.stat().st_size}.so")))
    except (OSError, RuntimeError):  # no home; a cache folder that is read-only, full or mounted noexec
        with tempfile.TemporaryDirectory() as folder:
            try:
                return ctypes.CDLL(str(_compile(compiler, Path(folder) / f"{name}.so")))
            except OSError as problem:
                raise NativeUnavailable(f"the built library does not load: {problem}") from None


def _compiler() -> list[str]:
    if chosen := os.environ.get("CXX"):
        try:
            return shlex.split(chosen)
        except ValueError as problem:
            raise NativeUnavailable(f"CXX={chosen}: {problem}") from None
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise NativeUnavailable("no C++ compiler: neither g++ nor clang++ is on the path, and CXX is not set")


def _compile(compiler: list[str], path: Path) -> Path:
    for openmp in (["-fopenmp"], []):  # without it one thread runs everything
        command = [*compiler, *FLAGS, *openmp, str(SOURCE), "-o", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return path
    lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
    error = next((line for line in lines if "error" in line), lines[0])
    raise NativeUnavailable(f"{shlex.join(compiler)} could not compile {SOURCE.name}: {error.strip()}")


def _cpu() -> str:
    """What -march=native depends on, in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
