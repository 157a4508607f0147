"""Checkpoints of every supported form, each built once, and random token sequences."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoints import RECIPES, Checkpoint, Checkpoints, build


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The checkpoint of a recipe by its name."""
    built: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in built:
            torch.set_num_threads(1)
            built[name] = build(RECIPES[name], tmp_path_factory.mktemp(name))
        return built[name]

    return get
