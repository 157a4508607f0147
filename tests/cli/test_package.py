"""What an installed user gets: the wheel and the source archive hold all that a run needs."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_the_wheel_holds_configuration_and_the_embedded_model(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(ROOT)], check=True, timeout=280, cwd=tmp_path)
    (wheel,) = tmp_path.glob("sm70lab-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        assert "Description-Content-Type: text/markdown" in archive.read(metadata).decode()
    for file in (ROOT / "conf").rglob("*.yaml"):
        name = f"sm70lab/conf/{file.relative_to(ROOT / 'conf').as_posix()}"
        assert (name in names) is (file.parent.name != "local"), name
    model = {f"sm70lab/models/web/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")}
    assert model <= names
    assert "sm70lab/cli/run.py" in names
    assert {f"sm70lab/tracking/report/templates/{name}" for name in ("run.html", "report.css")} <= names


def test_the_source_archive_holds_the_readme(tmp_path: Path) -> None:
    built = next(SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "conf/config.yaml", "sm70lab/models/web/config.json", "pyproject.toml"} <= names
