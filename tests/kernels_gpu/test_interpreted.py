"""Every kernel in Triton's interpreter on CPU tensors: a process a file, as the switch is read at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
FILES = sorted(path.name for path in FOLDER.glob("kernels_*.py"))
QUICK = "kernels_norm.py"  # the interpreter runs here at all; the others take a quarter of a minute each
NOTHING_COLLECTED = 5


def interpret(file: str, marker: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        marker,
        str(FOLDER / file),
    ]
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[] if file == QUICK else pytest.mark.long) for file in FILES]
)
def test_kernels_in_the_interpreter(file: str) -> None:
    done = interpret(file, "not long")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_kernels_at_sizes_that_take_long(file: str) -> None:
    done = interpret(file, "long")
    assert done.returncode in (0, NOTHING_COLLECTED), done.stdout[-6000:] + done.stderr[-2000:]
