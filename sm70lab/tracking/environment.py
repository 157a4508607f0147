"""The machine and the software a run happened on. Nothing here imports torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm70lab.addresses import without_password
from sm70lab.raw_text import shown_override

PACKAGES = (
    "sm70lab",
    "torch",
    "triton",
    "numpy",
    "scipy",
    "safetensors",
    "tokenizers",
    "hydra-core",
    "mlflow",
)
GIT_SECONDS = 10
CONFIG_DIR = "--config-dir="  # so ``run`` adds the shipped folder; the user's own is two words there
NOT_TYPED = ("hydra.", "tracking.sweep=auto-", CONFIG_DIR)  # what ``run`` adds to its user's arguments


@dataclass(frozen=True)
class Gpu:
    """One CUDA device as the driver reports it."""

    name: str
    capability: str  # "7.0" on a V100
    memory_bytes: int


def gpus() -> list[Gpu]:
    """CUDA devices visible to this process, asked of the driver itself; empty where there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_gpu(cuda, index) for index in range(count.value)]


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, memory = ctypes.create_string_buffer(128), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # compute capability, major
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # and minor
    return Gpu(name.value.decode(errors="replace"), f"{major.value}.{minor.value}", memory.value)


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide results; those not installed are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def cpu_name() -> str:
    """The processor's own name, or the architecture where that cannot be read."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def git_state() -> dict[str, Any] | None:
    """Commit and dirty flag of the checkout this package runs from; None for an installed package.

    Only a ``.git`` beside the package counts: an environment inside somebody's own repository
    must not report that repository's commit.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=normal")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def describe() -> dict[str, Any]:
    """Everything that goes into ``environment.json``."""
    import psutil

    return {
        "git": git_state(),
        "packages": package_versions(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": {"name": cpu_name(), "cores": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total},
        "gpus": [vars(gpu) for gpu in gpus()],
        "driver": _driver(),
        "command": [without_password(shown_override(w)) for w in sys.argv if not w.startswith(NOT_TYPED)],
    }


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    return text.splitlines()[0].strip()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
