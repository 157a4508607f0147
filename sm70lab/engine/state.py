"""Recurrent state of the Gated DeltaNet layers: kept, advanced and rolled back in one place.

A verify round runs T = k + 1 rows; only the first n of them are committed. ``StateStore`` alone
owns what that means: ``begin`` opens a round, ``advance`` takes what each layer's operator
returned, ``commit(n)`` keeps n rows. Two schemes hold the same state differently:

* slots: the state after every row is kept; the next round reads slot n − 1.
* replay: the rows' inputs (k, v, g, β) are kept; the next round folds the first n of them into
  the checkpoint, in the recurrent kernel's own order of operations, before its own rows.

The convolution window needs the same rollback: both schemes keep the raw input rows
[B, W − 1 + T, C] and read the window at row n.

A layer's state is a list of tensors of constant shapes, and the accepted counts are a tensor:
both pass through opaque operators as explicit inputs.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from sm70lab.engine.architecture import Architecture
from sm70lab.kernels.gated_delta import gated_delta_chunk, gated_delta_recurrent, gated_delta_states

LayerState = list[torch.Tensor]  # [conv rows, *the scheme's tensors]


class Rows(NamedTuple):
    """Inputs of T rows to the gated delta rule; shapes as in ``kernels.gated_delta``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


class Scheme(Protocol):
    """How one layer's SSM state lives between rounds. B sequences, H heads, state [B, H, K, V]."""

    accepted_when_whole: int  # the accepted count that reads a state put in by ``hold``

    def hold(self, state: torch.Tensor, rows: int) -> list[torch.Tensor]:
        """The scheme's tensors for a whole state, with room for rounds of ``rows`` rows."""

    def committed(self, held: list[torch.Tensor], accepted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The state after the committed rows, [B, H, K, V] in ``dtype``."""

    def round(
        self, held: list[torch.Tensor], accepted: torch.Tensor, rows: Rows
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run T rows from the committed state: outputs [B, T, H, V] and the scheme's new tensors."""


class Slots:
    """One state slot a row: held = [states [B, T, H, K, V]]."""

    accepted_when_whole = 1

    def hold(self, state: torch.Tensor, rows: int) -> list[torch.Tensor]:
        slots = state.new_zeros(state.shape[0], rows, *state.shape[1:])
        slots[:, 0] = state
        return [slots]

    def committed(self, held: list[torch.Tensor], accepted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        (slots,) = held
        return torch.stack([slots[b, n - 1] for b, n in enumerate(accepted.tolist())]).to(dtype)

    def round(
        self, held: list[torch.Tensor], accepted: torch.Tensor, rows: Rows
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        start = self.committed(held, accepted, rows.q.dtype)
        outputs, states = gated_delta_recurrent(*rows, state=start)
        return outputs, [states.to(held[0].dtype)]


class Replay:
    """A checkpoint and the last round's inputs: held = [state [B, H, K, V], k, v, g, beta]."""

    accepted_when_whole = 0

    def hold(self, state: torch.Tensor, rows: int) -> list[torch.Tensor]:
        batch, heads, key, value = state.shape
        wide = torch.promote_types(state.dtype, torch.float32)
        shapes = ((heads, key), (heads, value), (heads,), (heads,))
        return [state, *(state.new_zeros((batch, rows, *shape), dtype=wide) for shape in shapes)]

    def committed(self, held: list[torch.Tensor], accepted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        state, *inputs = held
        folded = []
        for b, n in enumerate(accepted.tolist()):
            checkpoint = state[b : b + 1].to(dtype)
            rows = [*(x[b : b + 1, :n] for x in inputs), checkpoint]
            folded.append(gated_delta_states(*rows)[-1] if n else checkpoint)
        return torch.cat(folded)

    def round(
        self, held: list[torch.Tensor], accepted: torch.Tensor, rows: Rows
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        checkpoint = self.committed(held, accepted, rows.q.dtype).to(held[0].dtype)
        outputs, _ = gated_delta_recurrent(*rows, state=checkpoint.to(rows.q.dtype))
        return outputs, [checkpoint, *rows[1:]]


SCHEMES: dict[str, Scheme] = {"slots": Slots(), "replay": Replay()}


def conv_window(conv_rows: torch.Tensor, accepted: torch.Tensor, width: int) -> torch.Tensor:
    """The W − 1 inputs before the next row, [B, W − 1, C], from rows [B, W − 1 + T, C]."""
    return torch.stack([conv_rows[b, n : n + width - 1] for b, n in enumerate(accepted.tolist())])


def run_rows(
    scheme: str,
    state: LayerState,
    accepted: torch.Tensor,
    conv_rows: torch.Tensor,
    rows: Rows,
    prefill_room: int,
) -> tuple[torch.Tensor, LayerState]:
    """Advance one layer by T rows.

    conv_rows [B, W − 1 + T, C]: the window before, then the T raw inputs. ``prefill_room`` 0 is a
    verify or decode round; otherwise all T rows are committed at once and the new state gets
    room for rounds of that many rows. Returns outputs [B, T, H, V] and the layer's new state.
    """
    kind, (old_conv, *held) = SCHEMES[scheme], state
    if not prefill_room:
        outputs, held = kind.round(held, accepted, rows)
        return outputs, [conv_rows, *held]
    outputs, final = gated_delta_chunk(*rows, state=kind.committed(held, accepted, rows.q.dtype))
    first = kind.accepted_when_whole
    tokens = rows.q.shape[1]
    window = conv_rows[:, tokens:]
    new_conv = torch.zeros_like(old_conv)
    new_conv[:, first : first + window.shape[1]] = window
    return outputs, [new_conv, *kind.hold(final.to(held[0].dtype), prefill_room)]


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
        rows: int = 1,
        batch: int = 1,
    ) -> None:
        self.scheme, self.rows = scheme, rows
        self.kind = SCHEMES[scheme]
        self.width = arch.conv_kernel
        self.compute_dtype = torch.promote_types(dtype, torch.float32)
        shape = (batch, arch.gdn_value_heads, arch.gdn_key_dim, arch.gdn_value_dim)
        conv_shape = (batch, self.width - 1 + rows, arch.gdn_conv_dim)
        self.layers: list[LayerState] = [
            [
                torch.zeros(conv_shape, dtype=dtype, device=device),
                *self.kind.hold(torch.zeros(shape, dtype=state_dtype, device=device), rows),
            ]
            for _ in range(arch.layer_types.count("linear_attention"))
        ]
        self.accepted = torch.full((batch,), self.kind.accepted_when_whole, dtype=torch.int64, device=device)
        self.position = [0] * batch  # committed tokens
        self._open_rows = 0
        self._prefill = False

    def begin(self, rows: int, prefill: bool) -> None:
        """Open a round of ``self.rows`` verify rows, or a prefill chunk of any length."""
        if self._open_rows:
            raise RuntimeError(f"a round of {self._open_rows} rows is still open; commit it first")
        if not prefill and rows != self.rows:
            raise ValueError(f"a round of {rows} rows; this store has rounds of {self.rows}")
        self._open_rows, self._prefill = rows, prefill

    def advance(self, layers: list[LayerState]) -> None:
        """Take the states that the model's layers returned for the open round."""
        self.layers = layers

    def commit(self, counts: list[int]) -> None:
        """Keep the first n rows of the open round, one n a sequence: 1 ≤ n ≤ rows, all of a prefill."""
        rows = self._open_rows
        if any(not 1 <= n <= rows or (self._prefill and n != rows) for n in counts):
            raise ValueError(f"commit {counts}: each must be 1..{rows}, and all rows of a prefill")
        if self._prefill:
            self.accepted.fill_(self.kind.accepted_when_whole)
        else:
            self.accepted.copy_(torch.tensor(counts))
        self.position = [p + n for p, n in zip(self.position, counts, strict=True)]
        self._open_rows = 0

    def snapshot(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(conv window [B, W − 1, C], SSM state [B, H, K, V]) of each layer at the last commit."""
        return [
            (
                conv_window(conv_rows, self.accepted, self.width),
                self.kind.committed(held, self.accepted, self.compute_dtype),
            )
            for conv_rows, *held in self.layers
        ]
