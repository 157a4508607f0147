"""The check that kernels fit a V100 finds those that do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sm70lab.kernels.gpu.compile_check import Fit, faults_of, missing, show

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sm70lab.kernels.gpu.compile_check", *arguments]
    environ = os.environ | environ
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=110)


@pytest.fixture(scope="module")
def unfit() -> dict[str, dict[str, Any]]:
    if reason := missing():
        pytest.skip(reason)
    done = run(str(FOLDER / "unfit.py"), "--json")
    assert done.returncode == 1, done.stderr
    return {case["label"]: case for case in json.loads(done.stdout)["cases"]}


@pytest.mark.parametrize(
    ("label", "word"),
    [
        ("spills", "spills"),
        ("shared memory", "shared memory"),
        ("bfloat16", "bf16"),
        ("aborts", "SIGABRT"),
        ("no type for y", "no type for y"),
    ],
)
def test_an_unfit_kernel_is_named_with_its_reason(unfit: dict[str, Any], label: str, word: str) -> None:
    assert word in " ".join(unfit[label]["faults"])


def test_a_fit_kernel_passes_beside_them(unfit: dict[str, Any]) -> None:
    assert unfit["fits"]["faults"] == []
    assert unfit["fits"]["registers"] > 0


@pytest.mark.parametrize(
    ("fit", "word"),
    [
        (Fit("", 4, registers=64, spilled=8), "spills 8"),
        (Fit("", 4, registers=64, stack=16), "stack 16"),
        (Fit("", 4, registers=64, shared=98_305), "98305"),
        (Fit("", 16, registers=129), "129 registers"),
    ],
)
def test_each_limit(fit: Fit, word: str) -> None:
    assert word in " ".join(faults_of(fit, "module {}"))
    assert faults_of(Fit("", 16, registers=128, shared=98_304), "module {}") == []


@pytest.mark.parametrize("kind", ["bf16", "f8E4M3FN"])
def test_types_that_sm_70_lacks(kind: str) -> None:
    assert kind in faults_of(Fit("", 4), f"tt.func @k(%x: !tt.ptr<{kind}>)")[0]


def test_without_the_right_triton_it_says_what_to_install(tmp_path: Path) -> None:
    """An older release's metadata, first on the path."""
    metadata = tmp_path / "triton-3.4.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: triton\nVersion: 3.4.0\n")
    done = run(PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "Triton 3.4.0 is installed" in done.stderr and "pip install triton==3.6.0" in done.stderr


def test_the_table_has_a_line_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    show([Fit("good", 4, registers=40, shared=512), Fit("bad", 8, faults=["spills"])])
    head, good, bad, ending = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["case", "warps", "registers", "shared"]
    assert good.split()[:4] == ["good", "4", "40", "512"] and bad.endswith("spills")
    assert ending == "2 cases for sm_70 with Triton 3.6.0: 1 do not fit"
