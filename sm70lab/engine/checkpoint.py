"""Weights by canonical name: a Hugging Face folder (strict) or random draws for tests and benchmarks."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from sm70lab.engine.architecture import Architecture, expected_tensors
from sm70lab.errors import UsageError

LANGUAGE_PREFIX = "model.language_model."  # of multimodal checkpoints, beside model.visual.*
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NAMES_SHOWN = 6


class Weights(Protocol):
    """Where a model's tensors come from."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor of a canonical name (``expected_tensors``), as stored."""


class FolderWeights:
    """One or many safetensors files of a Hugging Face folder; ``shapes`` has what they hold.

    Raises ``UsageError`` for a truncated file and a tensor stored twice; ``check`` for missing,
    left-over or wrongly shaped tensors; ``read`` for a tensor with values that are not finite.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _safetensors_files(folder)
        self._file_of: dict[str, Path] = {}
        self._raw_name: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file, raw, shape in _headers(self.files):
            if raw.startswith("model.visual."):
                continue
            name = raw.replace(LANGUAGE_PREFIX, "model.", 1) if raw.startswith(LANGUAGE_PREFIX) else raw
            if name in self.shapes:
                where = f"{self._file_of[name].name} as {self._raw_name[name]}"
                raise UsageError(f"{file}: {raw} is stored twice; also in {where}")
            self._file_of[name], self._raw_name[name], self.shapes[name] = file, raw, shape
        self._experts = _group_experts(self.shapes)

    def check(self, arch: Architecture) -> None:
        """Compare names and shapes with what ``arch`` must have, before anything is read."""
        _compare(self.folder, expected_tensors(arch), self.shapes)

    def read(self, name: str) -> torch.Tensor:
        if name in self._experts:
            return torch.stack(
                [torch.cat([self._read_stored(part) for part in parts]) for parts in self._experts[name]]
            )
        return self._read_stored(name)

    def _read_stored(self, name: str) -> torch.Tensor:
        file = self._file_of[name]
        try:
            with safe_open(file, framework="pt") as handle:
                tensor: torch.Tensor = handle.get_tensor(self._raw_name[name])
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file}: cannot read {self._raw_name[name]} ({error})") from error
        if tensor.dtype not in WEIGHT_DTYPES:
            raise UsageError(
                f"{file}: {self._raw_name[name]} is {tensor.dtype}; "
                "only float16, bfloat16, float32 and float64 weights are supported"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise UsageError(
                f"{file}: {self._raw_name[name]} holds NaN or infinite values; the checkpoint is damaged"
            )
        return tensor


class RandomWeights:
    """Weights drawn from a seed, each tensor from its own stream, so that shapes do not shift draws."""

    def __init__(self, arch: Architecture, seed: int) -> None:
        self.shapes = expected_tensors(arch)
        self.seed = seed

    def read(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        key = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        if name.endswith("A_log"):
            return torch.empty(shape, dtype=torch.float64).uniform_(1, 16, generator=generator).log()
        normal = torch.randn(shape, dtype=torch.float64, generator=generator)
        if name.endswith("dt_bias"):
            return normal - 3.0  # softplus(−3) · A keeps a memory of tens of tokens
        if "norm" in name:
            return 0.1 * normal + (1.0 if "linear_attn.norm" in name else 0.0)
        fan_in = shape[-1]
        return normal / math.sqrt(fan_in) if "embed" not in name else normal


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [folder / name for name in names]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(f"{index}: not a safetensors index ({error})") from error
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [f.name for f in files if not f.exists()]
    if missing or not files:
        raise UsageError(
            f"{folder}: no safetensors weights there"
            if not files
            else f"{folder}: missing {', '.join(missing)}"
        )
    return files


def _headers(files: list[Path]) -> Iterator[tuple[Path, str, tuple[int, ...]]]:
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    yield file, name, tuple(handle.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file}: not a whole safetensors file ({error}); download it again") from error


def _group_experts(shapes: dict[str, tuple[int, ...]]) -> dict[str, list[list[str]]]:
    """Replace per-expert tensors in ``shapes`` by the stacked ones; return their parts by stacked name."""
    count: dict[str, int] = {}
    for name in list(shapes):
        if match := EXPERT.fullmatch(name):
            count[match[1]] = max(count.get(match[1], 0), int(match[2]) + 1)
    groups: dict[str, list[list[str]]] = {}
    for prefix, experts in count.items():
        for stacked, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            names = [[f"{prefix}.{e}.{part}.weight" for part in parts] for e in range(experts)]
            if any(name not in shapes for row in names for name in row):
                continue  # the gap shows as left-over and missing tensors
            first = [shapes[name] for name in names[0]]
            if any(shapes[name] != wanted for row in names for name, wanted in zip(row, first, strict=True)):
                continue  # experts of unlike shapes show as left-over tensors
            groups[f"{prefix}.{stacked}"] = names
            shapes[f"{prefix}.{stacked}"] = (experts, sum(s[0] for s in first), *first[0][1:])
            for row in names:
                for name in row:
                    del shapes[name]
    return groups


def _compare(folder: Path, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    missing = sorted(expected.keys() - found.keys())
    left_over = sorted(found.keys() - expected.keys())
    wrong = [
        f"{n} is {list(found[n])}, not {list(s)}" for n, s in expected.items() if n in found and found[n] != s
    ]
    problems = [
        f"{title} {_some(names)}"
        for title, names in (("missing", missing), ("left over", left_over), ("wrong shape:", wrong))
        if names
    ]
    if problems:
        raise UsageError(f"{folder}: tensors do not fit config.json: {'; '.join(problems)}")


def _some(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
