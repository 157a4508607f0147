"""A whole tiny checkpoint, copied for each test to be damaged."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
sys.path.insert(0, str(Path(__file__).parent))
from refusal import MakeFolder
from tiny_checkpoints import RECIPES, build


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """The folder of a recipe, built once; not to be changed."""
    built: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in built:
            built[name] = build(RECIPES[name], tmp_path_factory.mktemp(name)).folder
        return built[name]

    return get


@pytest.fixture
def copy_of(originals: MakeFolder, tmp_path: Path) -> MakeFolder:
    """A private copy of a recipe's folder."""

    def get(name: str) -> Path:
        target = tmp_path / name
        shutil.copytree(originals(name), target)
        return target

    return get


@pytest.fixture
def folder(copy_of: MakeFolder) -> Path:
    """A private copy of a dense checkpoint with a draft head."""
    return copy_of("dense")
