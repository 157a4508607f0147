"""From a model specification to a model and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sm70lab.engine.architecture import Architecture, read_config
from sm70lab.engine.checkpoint import FolderWeights, RandomWeights, Weights
from sm70lab.engine.model import HybridModel
from sm70lab.engine.text import NumberText, Text, TokenizerText
from sm70lab.errors import UsageError
from sm70lab.schema import ModelDtype, ModelSpec

COLUMN_MAJOR = ("in_proj", "out_proj", "gate_up", "down", "fc")
EMBEDDED = Path(__file__).parent.parent / "models" / "web"


@dataclass
class Source:
    """A model found and checked, its weights not read yet."""

    arch: Architecture
    weights: Weights
    text: Text

    def build(self, dtype: ModelDtype, device: torch.device) -> HybridModel:
        """Read the weights. Raises ``UsageError`` for damaged files."""
        with torch.inference_mode():
            model = HybridModel(self.arch, self.weights, getattr(torch, dtype.value)).to(device)
            if device.type == "cpu":
                _store_by_columns(model)
        return model


def _store_by_columns(model: HybridModel) -> None:
    """Lay the matrices out in memory as their transposes: MKL multiplies a few rows a quarter faster so."""
    for module in model.modules():
        for name, matrix in module.named_buffers(recurse=False):
            if matrix.ndim == 2 and name in COLUMN_MAJOR:
                setattr(module, name, matrix.t().contiguous().t())
    model.head = model.head.t().contiguous().t()  # a copy of its own where it is tied: rows are looked up


def find(spec: ModelSpec) -> Source:
    """Locate and check a model: configuration, tensor names and shapes, tokenizer.

    Raises ``UsageError`` for everything that can be known without reading the weights.
    """
    if spec.name in ("random", "tiny"):
        arch = Architecture.from_dict(dict(spec.shape), f"model={spec.name}: shape")
        return Source(arch, RandomWeights(arch, spec.seed), NumberText(arch.vocab_size))
    folder = Path(spec.path).expanduser() if spec.path else EMBEDDED
    if not folder.is_dir():
        raise UsageError(f"model.path={folder}: no such folder; give a Hugging Face folder with config.json")
    raw = read_config(folder)
    weights = FolderWeights(folder)
    arch = Architecture.from_dict(
        raw, str(folder / "config.json"), mtp_stored="mtp.fc.weight" in weights.shapes
    )
    weights.check(arch)
    return Source(arch, weights, TokenizerText(folder, arch.vocab_size))
