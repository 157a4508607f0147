"""Recurrent state of the Gated DeltaNet layers: kept, advanced and rolled back in one place.

``StateStore`` owns the state of N slots, one a running sequence and one scratch slot for padded
rows. ``begin`` opens a round for a batch of slots, ``advance`` takes what each layer's operator
returned, ``commit`` keeps the first n rows of each sequence. How an SSM state lives between rounds
is the scheme's (``engine.schemes``); the convolution window needs the same rollback in every
scheme: the raw input rows [W − 1 + T, C] are kept, and the window is read at row n.

Everything an operator needs of this passes through it as explicit tensors, the metadata too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sm70lab.engine.architecture import Architecture
from sm70lab.engine.hazards import NONE, Hazard
from sm70lab.engine.schemes import Rows, scheme_named
from sm70lab.kernels import gated_delta
from sm70lab.kernels.arithmetic import Arithmetic

LayerState = list[torch.Tensor]  # pools [N, ...]: conv rows, then the scheme's tensors
LayerSnapshot = tuple[torch.Tensor, torch.Tensor]  # conv window [B, W − 1, C], SSM state [B, H, K, V]


@dataclass
class Metadata:
    """Where a batch of B rows reads and writes. Explicit inputs of every operator that needs them."""

    slots: torch.Tensor  # [B] int64: the pool row of each batch row
    start: torch.Tensor  # [B] int64: the position of its first token
    conv_accepted: torch.Tensor  # [B] int64: rows of its last round that the conv window counts
    ssm_accepted: torch.Tensor  # [B] int64: and the SSM state


def conv_window(
    conv_rows: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, width: int
) -> torch.Tensor:
    """The W − 1 inputs before the next row, [B, W − 1, C], from the pool [N, W − 1 + T, C]."""
    return conv_rows[slots[:, None], accepted[:, None] + torch.arange(width - 1, device=slots.device)]


def run_rows(
    scheme: str,
    state: LayerState,
    slots: torch.Tensor,
    ssm_accepted: torch.Tensor,
    conv_rows: torch.Tensor,
    rows: Rows,
    prefill_room: int,
    arithmetic: Arithmetic,
) -> tuple[torch.Tensor, LayerState]:
    """Advance one layer by T rows.

    conv_rows [B, W − 1 + T, C]: the window before, then the T raw inputs. ``prefill_room`` 0 is a
    verify or decode round; otherwise all T rows are committed at once and the new state gets
    room for rounds of that many rows. Returns outputs [B, T, H, V] and the layer's new pool rows
    [B, ...].
    """
    kind, (old_conv, *held) = scheme_named(scheme), state
    if not prefill_room:
        outputs, held = kind.round(held, slots, ssm_accepted, rows, arithmetic)
        return outputs, [conv_rows, *held]
    start = kind.committed(held, slots, ssm_accepted, rows.q.dtype, arithmetic)
    outputs, final = gated_delta.prefill(*rows, start)
    window = conv_rows[:, rows.q.shape[1] :]
    new_conv = window.new_zeros(len(window), *old_conv.shape[1:])
    first = kind.accepted_when_whole
    new_conv[:, first : first + window.shape[1]] = window
    return outputs, [new_conv, *kind.hold(final.to(held[0].dtype), prefill_room, rows.q.dtype)]


class StateStore:
    """The recurrent state of up to ``slots`` sequences; with more than one, a scratch slot beside them.

    ``layers`` holds one ``LayerState`` a GDN layer; ``position[slot]`` counts committed tokens.
    Nothing else may write them.
    """

    def __init__(
        self,
        arch: Architecture,
        scheme: str,
        state_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        rows: int = 1,
        slots: int = 1,
        arithmetic: Arithmetic = Arithmetic.plain,
        hazard: Hazard = NONE,
    ) -> None:
        self.arithmetic = arithmetic
        self.scheme, self.rows, self.live = scheme, rows, slots
        self.kind = scheme_named(scheme)
        self.hazard = hazard
        self.width = arch.conv_kernel
        self.compute_dtype = torch.promote_types(dtype, torch.float32)
        self.scratch = slots if slots > 1 else None  # a batch of one is never padded
        total = slots + (self.scratch is not None)
        shape = (total, arch.gdn_value_heads, arch.gdn_key_dim, arch.gdn_value_dim)
        conv_shape = (total, self.width - 1 + rows, arch.gdn_conv_dim)
        self.layers: list[LayerState] = [
            [
                torch.zeros(conv_shape, dtype=dtype, device=device),
                *self.kind.hold(
                    torch.zeros(shape, dtype=state_dtype, device=device), rows, self.compute_dtype
                ),
            ]
            for _ in range(arch.layer_types.count("linear_attention"))
        ]
        self.accepted = torch.full(
            (2, total), self.kind.accepted_when_whole, dtype=torch.int64, device=device
        )  # of conv window and SSM state
        self.position = [0] * total
        self._open: list[int] = []
        self._open_rows = 0
        self._prefill = False

    def reset(self, slot: int) -> None:
        """Empty one slot for a new sequence."""
        self.position[slot] = 0
        if self.hazard.reset():
            self.accepted[:, slot] = self.kind.accepted_when_whole
            for layer in self.layers:
                for pool in layer:
                    pool[slot].zero_()

    def padded(self, slots: Sequence[int], width: int) -> list[int]:
        """The slots of a batch of ``width`` rows: the scratch slot fills it up."""
        if self.scratch is None or len(slots) == width:
            return list(slots)
        return [*slots, *[self.hazard.pad_slot(self.scratch)] * (width - len(slots))]

    def begin(self, slots: Sequence[int], rows: int, prefill: bool) -> Metadata:
        """Open a round of up to ``self.rows`` rows, or a prefill chunk of any length, of these slots.

        A slot that stands twice must be the scratch slot. Returns what the operators need.
        """
        if self._open_rows:
            raise RuntimeError(f"a round of {self._open_rows} rows is still open; commit it first")
        if not prefill and not 1 <= rows <= self.rows:
            raise ValueError(f"a round of {rows} rows; this store has rounds of 1..{self.rows}")
        self._open, self._open_rows, self._prefill = list(slots), rows, prefill
        device = self.accepted.device
        table = torch.tensor(self._open, device=device)
        start = torch.tensor([self.position[slot] for slot in self._open], device=device)
        conv_accepted, ssm_accepted = self.accepted[:, table]
        metadata = Metadata(table, start, conv_accepted, ssm_accepted)
        return metadata if prefill else self.hazard.metadata(metadata, self, rows)

    def advance(self, layers: list[LayerState], metadata: Metadata) -> None:
        """Take the pool rows that the model's layers returned for the open round."""
        for pools, new in zip(self.layers, layers, strict=True):
            for i, rows in enumerate(new):
                rows = self.hazard.stored(rows) if i else rows
                if rows.shape[1:] == pools[i].shape[1:]:
                    pools[i][metadata.slots] = rows
                else:  # a round of fewer rows than there is room for
                    pools[i][metadata.slots, : rows.shape[1]] = rows

    def advance_in_place(self) -> None:
        """The open round wrote the pools itself, as a recorded round does."""
        if self.hazard is not NONE:
            for _, *held in self.layers:
                for pool in held:
                    pool[self._open] = self.hazard.stored(pool[self._open])

    def commit(self, counts: Sequence[int]) -> None:
        """Keep the first n rows of the open round, one n a sequence: 1 ≤ n ≤ rows, all of a prefill.

        Padded rows have no count.
        """
        rows, slots = self._open_rows, self._open[: len(counts)]
        if any(not 1 <= n <= rows or (self._prefill and n != rows) for n in counts):
            raise ValueError(f"commit {list(counts)}: each must be 1..{rows}, and all rows of a prefill")
        if self._open != self.padded(slots, len(self._open)):
            raise ValueError(f"commit {list(counts)}: one count for each of the slots {self._open}")
        for slot, n in zip(slots, counts, strict=True):
            self.position[slot] += n
        self._open_rows = 0
        whole = self.kind.accepted_when_whole
        if self.scratch is not None:
            self.accepted[:, self.scratch] = whole
        if self._prefill:
            self.accepted[:, slots] = whole
            return
        kept = self.hazard.committed(torch.tensor([counts, counts]), rows).to(self.accepted.device)
        self.accepted[:, slots] = kept
        if self.kind.settles:
            table = torch.tensor(slots, device=self.accepted.device)
            conv_accepted, ssm_accepted = self.accepted[:, table]
            for conv_rows, *held in self.layers:
                conv_rows[table, : self.width - 1] = conv_window(conv_rows, table, conv_accepted, self.width)
                self.hazard.settle(self.kind, held, table, ssm_accepted, self.arithmetic)
            self.accepted[:, slots] = whole

    def snapshot(self, slots: Sequence[int], counts: Sequence[int] | None = None) -> list[LayerSnapshot]:
        """The states of each layer at the last commit, or after ``counts`` rows of the open round."""
        table = torch.tensor(slots, device=self.accepted.device)
        conv_accepted, ssm_accepted = self.accepted[:, table]
        if counts is not None:
            conv_accepted = ssm_accepted = torch.tensor(counts, device=self.accepted.device)
        return [
            (
                conv_window(conv_rows, table, conv_accepted, self.width),
                self.kind.committed(held, table, ssm_accepted, self.compute_dtype, self.arithmetic),
            )
            for conv_rows, *held in self.layers
        ]

    def restore(self, slot: int, snapshot: list[LayerSnapshot], position: int) -> None:
        """Put a snapshot of one sequence [1, ...] into a slot, as of ``position`` committed tokens."""
        self.position[slot] = position
        first = self.kind.accepted_when_whole
        self.accepted[:, slot] = first
        for (conv_rows, *held), (window, state) in zip(self.layers, snapshot, strict=True):
            conv_rows[slot, first : first + window.shape[1]] = window[0]
            whole = self.kind.hold(state.to(held[0].dtype), self.rows, self.compute_dtype)
            for pool, one in zip(held, whole, strict=True):
                pool[slot] = one[0]
