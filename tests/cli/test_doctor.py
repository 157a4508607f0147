"""``sm70lab doctor`` tells what is wrong with a machine, and never falls over it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lab import Lab

from sm70lab.cli.doctor import V100, driver
from sm70lab.cli.doctor_probe import carries

HIDDEN = """
import importlib.abc, importlib.metadata, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'")

sys.meta_path.insert(0, Hide())
found = importlib.metadata.version

def version(name):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)

importlib.metadata.version = version
"""


def doctor(
    lab: Lab, *arguments: str, **environ: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    done = lab.run("doctor", *arguments, "--json", engine=True, env=os.environ | environ)
    assert "Traceback" not in done.stderr
    return done, json.loads(done.stdout)


def with_torch(lab: Lab, source: str) -> str:
    """A PYTHONPATH on which ``torch`` is this."""
    (lab.folder / "path" / "torch").mkdir(parents=True)
    (lab.folder / "path" / "torch" / "__init__.py").write_text(source)
    return str(lab.folder / "path")


def test_a_sound_machine_can_run_the_default_route(lab: Lab) -> None:
    done, report = doctor(lab)
    assert done.returncode == report["exit_code"] == 0
    assert report["route"]["name"] == "spec_core_003" and report["route"]["reason"] is None
    assert {"no_mtp", "split", "whole_round"} <= {route["name"] for route in report["routes"]}
    assert report["cpu"]["cores"] >= 1 and report["torch"]["version"]
    assert report["v100"] == V100


def test_the_words_name_route_and_reason(lab: Lab) -> None:
    done = lab.run("doctor", "route=full_forward", "target.device=cuda:7", engine=True)
    assert done.returncode == 2 and not done.stderr
    assert done.stdout.splitlines()[-1].startswith("route=full_forward cannot run here: target.device=cuda:7")
    assert V100 in done.stdout


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("import sys; sys.exit(3)", "status 3"),
        ("__version__ = '1.0'", "_C"),
    ],
)
def test_a_broken_torch_is_a_finding(lab: Lab, source: str, said: str) -> None:
    done, report = doctor(lab, PYTHONPATH=with_torch(lab, source))
    assert done.returncode == 2
    assert said in report["torch"]["reason"]
    assert report["route"]["reason"] == report["torch"]["reason"]
    assert report["native_kernels"]["reason"] is None or shutil.which("g++") is None


def test_no_torch_at_all(lab: Lab) -> None:
    (lab.folder / "path").mkdir()
    (lab.folder / "path" / "sitecustomize.py").write_text(HIDDEN)
    done, report = doctor(lab, PYTHONPATH=str(lab.folder / "path"))
    assert done.returncode == 2
    assert report["torch"]["reason"] == "torch is not installed; pip install 'torch>=2.10'"


def test_without_a_compiler_the_route_runs_in_pytorch(lab: Lab) -> None:
    done, report = doctor(lab, CXX="/nowhere/g++")
    assert done.returncode == 0
    assert "/nowhere/g++" in report["native_kernels"]["reason"]
    reasons = {route["name"]: route["reason"] for route in report["routes"]}
    assert "/nowhere/g++" in reasons["whole_round"] and reasons["split"] is None


def test_help_and_unknown_settings(lab: Lab) -> None:
    assert "Exit codes: 0 the route can run, 2 it cannot" in lab.run("doctor", "--help", engine=True).stdout
    done = lab.run("doctor", "rout=split", engine=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "rout" in done.stderr


@pytest.mark.parametrize(
    ("architectures", "capability", "found"),
    [
        (["sm_70", "sm_75", "sm_80"], (7, 0), "sm_70"),
        (["sm_75", "sm_80", "sm_90"], (7, 0), None),  # CUDA 13 builds
        (["sm_80", "sm_90"], (8, 6), "sm_80"),
        (["sm_80"], (9, 0), None),
        (["sm_90a"], (9, 0), None),
        (["sm_80", "compute_80"], (9, 0), "compute_80"),
        (["sm_50", "compute_90"], (7, 0), None),
        ([], (7, 0), None),
    ],
)
def test_which_code_a_card_can_run(
    architectures: list[str], capability: tuple[int, int], found: str | None
) -> None:
    assert carries(architectures, capability) == found


def test_the_driver_and_its_branch(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver(file) is None
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\n"
    )
    assert driver(file) == {"version": "580.95.05", "branch": "R580"}
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n")
    assert driver(file) == {"version": "570.86.15", "branch": "R570"}
