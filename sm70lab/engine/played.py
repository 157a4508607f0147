"""``graph=full``: the steps of a round between two decisions of the host, each played back from a recording.

All metadata lives in tensors that stay where they are and are read when a step plays, so nothing can go
stale in it. What a recording is depends on the device: a list of native calls (``engine.recorded``) or a
CUDA graph (``CapturedSteps``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from sm70lab.engine.draft_head import DraftHead
from sm70lab.engine.kv_cache import KVCache
from sm70lab.engine.model import HybridModel
from sm70lab.engine.routes import Boundary
from sm70lab.engine.state import Metadata, StateStore

Outputs = tuple[torch.Tensor, ...]


class PlayedSteps(ABC):
    """The verify step and the draft steps of one decoder, for batches of ``width`` rows."""

    def __init__(
        self, model: HybridModel, store: StateStore, kv: KVCache, mtp_kv: KVCache, head: DraftHead, width: int
    ) -> None:
        self.model, self.store, self.kv, self.mtp_kv, self.head = model, store, kv, mtp_kv, head
        self.width, device = width, model.device

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.metadata = Metadata(*integers(4, width).unbind(0))
        self.draft_slots, self.draft_start = integers(2, width).unbind(0)
        self.tokens = integers(width, store.rows)
        hidden = (model.arch.hidden_size,)
        self._rows_in = torch.zeros((width, store.rows, *hidden), dtype=model.dtype, device=device)
        self._row_in = torch.zeros((width, 1, *hidden), dtype=model.dtype, device=device)

    def verify(self, tokens: torch.Tensor, metadata: Metadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [B, T] of an open round: hidden states [B, T, H] and logits [B, T, V], the pools written."""
        for mine, given in zip(vars(self.metadata).values(), vars(metadata).values(), strict=True):
            mine.copy_(given)
        rows = tokens.shape[1]
        ids = self.tokens.view(-1)[: tokens.numel()].view(tokens.shape).copy_(tokens)
        hidden, logits = self._play("verify", rows, lambda: self._verify(ids))
        return hidden.clone(), logits

    def catch_up(
        self, tokens: torch.Tensor, hidden: torch.Tensor, slots: torch.Tensor, start: torch.Tensor
    ) -> torch.Tensor:
        """The draft head on rows [B', k + 1] of B' ≤ B sequences: [B', k + 1, H]."""
        count = len(tokens)
        self._place(slots, start)
        self.tokens[:count] = tokens
        self._rows_in[:count] = hidden
        (out,) = self._play("catch up", 0, lambda: (self._draft(self.tokens, self._rows_in),))
        return out[:count]

    def first_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits [B', V′] of the rows [B', 1, H] that the drafts go on from."""
        self._row_in[: len(hidden)] = hidden
        (logits,) = self._play("head", 0, lambda: (self.head.logits(self._row_in[:, 0]),))
        return logits[: len(hidden)]

    def next_logits(self, tokens: torch.Tensor, slots: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Draft logits after the drafts ``tokens`` [B']; the step's output is the next step's input."""
        count = len(tokens)
        self._place(slots, start)
        ids = self.tokens.view(-1)[: self.width].view(self.width, 1)
        ids[:count, 0] = tokens
        (logits,) = self._play("draft", 0, lambda: self._draft_one(ids))
        return logits[:count]

    def _place(self, slots: torch.Tensor, start: torch.Tensor) -> None:
        """Padded rows draft in the scratch slot, at its beginning."""
        count = len(slots)
        self.draft_slots[:count], self.draft_start[:count] = slots, start
        if count < self.width and self.store.scratch is not None:
            self.draft_slots[count:] = self.store.scratch
            self.draft_start[count:] = 0

    @abstractmethod
    def _play(self, name: str, rows: int, run: Callable[[], Outputs]) -> Outputs:
        """Run a step and record it, or play what was recorded before."""

    @abstractmethod
    def _verify(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits of the rows ``ids`` at ``metadata``; writes the pools."""

    @abstractmethod
    def _draft(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The draft head on rows at ``draft_slots``, ``draft_start``."""

    @abstractmethod
    def _draft_one(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        """Logits behind one row of the draft head, whose output becomes ``_row_in``."""


class CapturedSteps(PlayedSteps):
    """A GPU's steps as CUDA graphs of the route's own functions, compiled or not."""

    def __init__(
        self,
        model: HybridModel,
        store: StateStore,
        kv: KVCache,
        mtp_kv: KVCache,
        head: DraftHead,
        width: int,
        boundary: Boundary,
    ) -> None:
        super().__init__(model, store, kv, mtp_kv, head, width)
        self.boundary = boundary
        self._graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, Outputs]] = {}

    def _play(self, name: str, rows: int, run: Callable[[], Outputs]) -> Outputs:
        if self.model.device.type != "cuda":
            return run()
        recorded = self._graphs.get((name, rows))
        if recorded is not None:
            recorded[0].replay()
            return recorded[1]
        outputs = run()  # this step's, and whatever a first run compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            later = run()
        self._graphs[name, rows] = (graph, later)
        return outputs

    def _verify(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.model.run_rows(ids, self.store, self.kv, self.metadata, 0, self.boundary)
        return hidden, self.model.logits(hidden, self.boundary.arithmetic)

    def _draft(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        place = (self.draft_slots, self.draft_start, self.mtp_kv, self.boundary)
        return self.model.draft(ids, hidden, *place)

    def _draft_one(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        out = self._draft(ids, self._row_in)
        self._row_in.copy_(out)
        return (self.head.logits(self._row_in[:, 0]),)
