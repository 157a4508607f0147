"""Load a folder as a run does, and read the one line that refuses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sm70lab.engine.loading import find
from sm70lab.engine.model import HybridModel
from sm70lab.errors import UsageError
from sm70lab.schema import ModelDtype, ModelSpec

MakeFolder = Callable[[str], Path]  # by the name of a recipe


def load(folder: Path, dtype: ModelDtype = ModelDtype.float32) -> HybridModel:
    """Check the folder, then read its weights."""
    return find(ModelSpec(name="checkpoint", path=str(folder), dtype=dtype)).build(dtype, torch.device("cpu"))


def refused(folder: Path, *named: str) -> str:
    """The message of the ``UsageError`` that loading raises: one line with every one of ``named``."""
    with pytest.raises(UsageError) as caught:
        load(folder)
    message = str(caught.value)
    assert message
    assert "\n" not in message, message
    for text in named:
        assert text in message, f"{text!r} is not named in: {message}"
    return message
