"""Run the engine along a plan of prefills and verify rounds, as the decoder does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from sm70lab.engine.kv_cache import KVCache
from sm70lab.engine.loading import find
from sm70lab.engine.model import HybridModel
from sm70lab.engine.routes import REFERENCE, Boundary
from sm70lab.engine.state import StateStore
from sm70lab.schema import ModelDtype, ModelSpec

CPU = torch.device("cpu")
DTYPES = {torch.float32: ModelDtype.float32, torch.float64: ModelDtype.float64}
ABSOLUTE = {torch.float32: 5e-4, torch.float64: 1e-9}  # largest difference of a logit
RMS = {torch.float32: 2e-5, torch.float64: 1e-11}


@cache
def load(folder: Path, dtype: torch.dtype) -> HybridModel:
    """The engine's model of a folder."""
    return find(ModelSpec(name="checkpoint", path=str(folder))).build(DTYPES[dtype], CPU)


@dataclass(frozen=True)
class Step:
    """Rows to run after the ``position`` committed tokens, and how many of them to commit."""

    rows: tuple[int, ...]
    keep: int
    prefill: bool


def plan(seed: int, tokens: int, layout: Sequence[int], room: int) -> list[Step]:
    """Steps over random tokens: a positive entry of ``layout`` is a prefill of that many rows.

    An entry −n is n verify rounds of ``room`` rows; each keeps a random 1..room of them and the
    rejected ones are drawn apart from the sequence, as wrong drafts are.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(tokens, (count,), generator=generator).tolist())

    steps: list[Step] = []
    for entry in layout:
        if entry > 0:
            steps.append(Step(draw(entry), entry, prefill=True))
            continue
        for _ in range(-entry):
            keep = int(torch.randint(1, room + 1, (1,), generator=generator))
            steps.append(Step(draw(room), keep, prefill=False))
    return steps


def branches(steps: Sequence[Step]) -> list[list[int]]:
    """The whole sequence that each step's rows end: committed tokens, then the rows."""
    committed: list[int] = []
    sequences = []
    for step in steps:
        sequences.append(committed + list(step.rows))
        committed = committed + list(step.rows[: step.keep])
    return sequences


class Run:
    """The engine's caches and state for sequences that advance in step."""

    def __init__(
        self, model: HybridModel, scheme: str, room: int, capacity: int = 256, batch: int = 1
    ) -> None:
        self.model = model
        wide = torch.promote_types(model.dtype, torch.float32)
        self.store = StateStore(model.arch, scheme, wide, model.dtype, CPU, rows=room, slots=batch)
        layers = model.arch.layer_types.count("full_attention")
        self.kv = KVCache(model.arch, layers, capacity, model.dtype, CPU, slots=batch)
        for keys, values in self.kv.layers:  # rows never written must never be read
            keys.fill_(torch.nan)
            values.fill_(torch.nan)

    def step(self, steps: Sequence[Step], boundary: Boundary = REFERENCE) -> torch.Tensor:
        """Run and commit one step of each sequence; the rows' logits [B, T, V]."""
        with torch.inference_mode():
            rows = torch.tensor([s.rows for s in steps])
            hidden = self.model.run(rows, range(len(steps)), self.store, self.kv, steps[0].prefill, boundary)
            self.store.commit([s.keep for s in steps])
            return self.model.logits(hidden)
