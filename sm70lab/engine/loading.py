"""From a model specification to a model and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sm70lab.engine.architecture import Architecture, read_config
from sm70lab.engine.checkpoint import FolderWeights, RandomWeights, Weights
from sm70lab.engine.draft_head import read_frequency
from sm70lab.engine.model import HybridModel
from sm70lab.engine.text import NumberText, Text, TokenizerText
from sm70lab.errors import UsageError
from sm70lab.kernels import native
from sm70lab.schema import KernelSet, ModelDtype, ModelSpec

EMBEDDED = Path(__file__).parent.parent / "models" / "web"


@dataclass
class Source:
    """A model found and checked, its weights not read yet."""

    arch: Architecture
    weights: Weights
    text: Text
    frequent: list[int] | None = None  # token ids by falling frequency, where the folder says

    def build(
        self, dtype: ModelDtype, device: torch.device, kernels: KernelSet = KernelSet.auto
    ) -> HybridModel:
        """Read the weights. Raises ``UsageError`` for damaged files, and for kernels that cannot run."""
        with torch.inference_mode():
            model = HybridModel(self.arch, self.weights, getattr(torch, dtype.value)).to(device)
            if self.arch.tie_word_embeddings:
                model.head = model.embedding  # moved twice, it would be there twice
        model.native = _native(kernels, model)
        return model


def _native(kernels: KernelSet, model: HybridModel) -> bool:
    """Whether rounds run the C++ kernels."""
    if kernels is KernelSet.plain:
        return False
    reason = no_native(model.device, model.dtype)
    if reason and kernels is KernelSet.native:
        raise UsageError(f"target.kernels=native: {reason}; use target.kernels=plain")
    return reason is None


def no_native(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the C++ kernels cannot run there; None where they can."""
    if device.type != "cpu":
        return f"native kernels run on a CPU, not on {device.type}"
    if dtype not in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        return f"native kernels compute in float32 and float64, not in {name}"
    return native.available()


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
    text = TokenizerText(folder, arch.vocab_size)
    return Source(arch, weights, text, read_frequency(folder, arch.vocab_size))
