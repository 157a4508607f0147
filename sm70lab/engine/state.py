"""Recurrent state of the Gated DeltaNet layers: kept, advanced and rolled back in one place.

A verify round runs T = k + 1 rows; only the first n of them are committed. ``StateStore`` alone
owns what that means: ``begin`` opens a round, ``advance`` takes what each layer's operator
returned, ``commit(n)`` keeps n rows. Two schemes hold the same state differently:

* slots: the state after every row is kept; the next round reads slot n − 1.
* replay: the rows' inputs (k, v, g, β) are kept; the next round folds the first n of them into
  the checkpoint, in the recurrent kernel's own order of operations, before its own rows.

The convolution window needs the same rollback: both schemes keep the raw input rows
[B, W − 1 + T, C] and read the window at row n.

A layer's state is a list of tensors, and the accepted counts are a tensor, because they pass
through opaque operators as explicit inputs.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sm70lab.engine.architecture import Architecture
from sm70lab.kernels.gated_delta import gated_delta_chunk, gated_delta_recurrent

LayerState = list[torch.Tensor]  # [conv rows, *the scheme's tensors]


class Scheme(Protocol):
    """How one layer's SSM state lives between rounds. B sequences, H heads, state [B, H, K, V]."""

    accepted_after_prefill: int  # what the accepted count reads when the state is whole

    def hold(self, state: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        """The scheme's tensors for a whole state; ``tokens`` rows a round at most."""

    def committed(self, held: list[torch.Tensor], accepted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The state after the committed rows, [B, H, K, V] in ``dtype``."""

    def round(
        self, held: list[torch.Tensor], accepted: torch.Tensor, rows: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run T rows (q, k, v, g, beta) from the committed state: outputs [B, T, H, V], new tensors."""


class Slots:
    """One state slot a row: held = [states [B, T, H, K, V]]."""

    accepted_after_prefill = 1

    def hold(self, state: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        return [state[:, None]]

    def committed(self, held: list[torch.Tensor], accepted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        (slots,) = held
        return slots[torch.arange(slots.shape[0], device=slots.device), accepted - 1].to(dtype)

    def round(
        self, held: list[torch.Tensor], accepted: torch.Tensor, rows: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        start = self.committed(held, accepted, rows[0].dtype)
        outputs, states = gated_delta_recurrent(*rows, start)
        return outputs, [states.to(held[0].dtype)]


class Replay:
    """A checkpoint and the last round's inputs: held = [state [B, H, K, V], k, v, g, beta]."""

    accepted_after_prefill = 0

    def hold(self, state: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        batch, heads, key, value = state.shape
        wide = torch.promote_types(state.dtype, torch.float32)
        shapes = ((heads, key), (heads, value), (heads,), (heads,))
        return [state, *(state.new_zeros((batch, tokens, *shape), dtype=wide) for shape in shapes)]

    def committed(self, held: list[torch.Tensor], accepted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        state, k, v, g, beta = held
        folded = state.to(dtype)
        for b, n in enumerate(accepted.tolist()):
            if n:
                rows = (x[b : b + 1, :n] for x in (k, k, v, g, beta))  # outputs are not needed: q = k
                after = gated_delta_recurrent(*rows, state[b : b + 1].to(dtype))[1][:, -1]
                folded = after if len(state) == 1 else torch.cat((folded[:b], after, folded[b + 1 :]))
        return folded

    def round(
        self, held: list[torch.Tensor], accepted: torch.Tensor, rows: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        start = self.committed(held, accepted, rows[0].dtype)
        checkpoint = start.to(held[0].dtype)
        outputs, _ = gated_delta_recurrent(*rows, checkpoint.to(start.dtype))
        return outputs, [checkpoint, *rows[1:]]


SCHEMES: dict[str, Scheme] = {"slots": Slots(), "replay": Replay()}


def conv_window(conv_rows: torch.Tensor, accepted: torch.Tensor, width: int) -> torch.Tensor:
    """The W − 1 inputs before the next row, [B, W − 1, C], from rows [B, W − 1 + T, C]."""
    if len(conv_rows) == 1:
        n = int(accepted[0])
        return conv_rows[:, n : n + width - 1]
    columns = accepted[:, None] + torch.arange(width - 1, device=conv_rows.device)
    return conv_rows[torch.arange(len(conv_rows), device=conv_rows.device)[:, None], columns]


def run_rows(
    scheme: str,
    layer_state: LayerState,
    accepted: torch.Tensor,
    rows: tuple[torch.Tensor, ...],
    prefill: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Advance one layer's SSM state by T rows; a prefill commits all of them at once.

    rows: q, k, v, g, beta as in ``kernels.gated_delta``. Returns outputs [B, T, H, V] and the
    scheme's new tensors (without the convolution's).
    """
    kind, held = SCHEMES[scheme], layer_state[1:]
    if not prefill:
        return kind.round(held, accepted, rows)
    outputs, final = gated_delta_chunk(*rows, kind.committed(held, accepted, rows[0].dtype))
    return outputs, kind.hold(final.to(held[0].dtype), 0)


class StateStore:
    """The recurrent state of ``batch`` sequences that advance in step.

    ``layers`` holds one ``LayerState`` a GDN layer; ``accepted`` [B] int64 says how many rows
    of the last round count. Both are handed to the model; nothing else may write them.
    """

    def __init__(
        self,
        arch: Architecture,
        scheme: str,
        state_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        batch: int = 1,
    ) -> None:
        self.scheme = scheme
        self.kind = SCHEMES[scheme]
        self.width = arch.conv_kernel
        self.compute_dtype = torch.promote_types(dtype, torch.float32)
        empty = torch.zeros(
            batch, arch.gdn_value_heads, arch.gdn_key_dim, arch.gdn_value_dim, dtype=state_dtype, device=device
        )
        whole = self.kind.accepted_after_prefill
        rows = torch.zeros(batch, self.width - 1 + whole, arch.gdn_conv_dim, dtype=dtype, device=device)
        count = arch.layer_types.count("linear_attention")
        self.layers: list[LayerState] = [[rows.clone(), *self.kind.hold(empty.clone(), 0)] for _ in range(count)]
        self.accepted = torch.full((batch,), whole, dtype=torch.int64, device=device)
        self.position = [0] * batch  # committed tokens
        self._open_rows = 0
        self._open_prefill = False

    def begin(self, rows: int, prefill: bool) -> None:
        """Open a round of ``rows`` verify rows, or a prefill chunk of as many tokens."""
        if self._open_rows:
            raise RuntimeError(f"a round of {self._open_rows} rows is still open; commit it first")
        self._open_rows, self._open_prefill = rows, prefill

    def advance(self, layers: list[LayerState]) -> None:
        """Take the states that the model's layers returned for the open round."""
        self.layers = layers

    def commit(self, counts: list[int]) -> None:
        """Keep the first n rows of the open round, one n a sequence: 1 ≤ n ≤ rows, all of a prefill."""
        rows = self._open_rows
        if any(not 1 <= n <= rows or (self._open_prefill and n != rows) for n in counts):
            raise ValueError(f"commit {counts}: each must be 1..{rows}, and all rows of a prefill")
        if self._open_prefill:
            self.accepted.fill_(self.kind.accepted_after_prefill)
        else:
            self.accepted.copy_(torch.tensor(counts))
        self.position = [p + n for p, n in zip(self.position, counts, strict=True)]
        self._open_rows = 0

    def snapshot(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(conv window [B, W − 1, C], SSM state [B, H, K, V]) of each layer at the last commit."""
        return [
            (
                conv_window(layer[0], self.accepted, self.width),
                self.kind.committed(layer[1:], self.accepted, self.compute_dtype),
            )
            for layer in self.layers
        ]
