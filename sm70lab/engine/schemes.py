"""How one layer's SSM state lives between rounds: slots, snapshot, fold, replay.

A verify round runs T = k + 1 rows; the first n of them are kept. Adding a scheme is one class here
and one entry in ``SCHEMES``. All four compute the same states in the recurrent kernel's own order
of operations, so they agree bit for bit; they differ in what is written in a round and in when.

| scheme | a round writes | a commit of n rows | the next round reads |
|---|---|---|---|
| slots | T states | – | state n − 1 |
| snapshot | T states to a scratch buffer | copies state n − 1 to the live one | the live state |
| fold | the T rows' inputs | folds n of them into the live state | the live state |
| replay | the T rows' inputs, the folded state | – | the state, and folds n rows first |
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from sm70lab.errors import UsageError
from sm70lab.kernels import gated_delta, native
from sm70lab.kernels.arithmetic import Arithmetic


class Rows(NamedTuple):
    """Inputs of T rows to the gated delta rule; shapes as in ``kernels.gated_delta``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


class Scheme(Protocol):
    """One way to keep the SSM states [H, K, V] of N slots.

    ``held`` tensors are pools with N as their first dimension; a batch of B rows names its pool
    rows in ``slots`` [B] and the rows of the last round that count in ``accepted`` [B].
    """

    accepted_when_whole: int  # the accepted count that reads a state put in by ``hold``
    settles: bool  # whether ``commit`` has work to do, after which the state is whole

    def hold(self, state: torch.Tensor, rows: int, wide: torch.dtype) -> list[torch.Tensor]:
        """The scheme's tensors for whole states [N, H, K, V], with room for rounds of ``rows`` rows.

        ``wide`` is the dtype that the rule is computed in.
        """

    def committed(
        self,
        held: list[torch.Tensor],
        slots: torch.Tensor,
        accepted: torch.Tensor,
        dtype: torch.dtype,
        arithmetic: Arithmetic,
    ) -> torch.Tensor:
        """The states after the accepted rows, [B, H, K, V] in ``dtype``."""

    def round(
        self,
        held: list[torch.Tensor],
        slots: torch.Tensor,
        accepted: torch.Tensor,
        rows: Rows,
        arithmetic: Arithmetic,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run T rows from the committed states: outputs [B, T, H, V] and the new pool rows [B, ...]."""

    def in_place(
        self, held: list[torch.Tensor], slots: torch.Tensor, accepted: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        """``round`` in native calls that read and write the pools themselves, to be recorded: outputs."""

    def commit(
        self, held: list[torch.Tensor], slots: torch.Tensor, accepted: torch.Tensor, arithmetic: Arithmetic
    ) -> None:
        """Settle the last round in place, where the scheme does that at commit."""


class Slots:
    """One state slot a row: held = [states [N, T, H, K, V]]."""

    accepted_when_whole = 1
    settles = False

    def hold(self, state: torch.Tensor, rows: int, wide: torch.dtype) -> list[torch.Tensor]:
        states = state.new_zeros(state.shape[0], rows, *state.shape[1:])
        states[:, 0] = state
        return [states]

    def committed(
        self,
        held: list[torch.Tensor],
        slots: torch.Tensor,
        accepted: torch.Tensor,
        dtype: torch.dtype,
        arithmetic: Arithmetic,
    ) -> torch.Tensor:
        return held[0][slots, accepted - 1].to(dtype)

    def round(
        self,
        held: list[torch.Tensor],
        slots: torch.Tensor,
        accepted: torch.Tensor,
        rows: Rows,
        arithmetic: Arithmetic,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        start = self.committed(held, slots, accepted, rows.q.dtype, arithmetic)
        outputs, states = gated_delta.recurrent(*rows, start, arithmetic)
        return outputs, [states.to(held[0].dtype)]

    def in_place(
        self, held: list[torch.Tensor], slots: torch.Tensor, accepted: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        outputs, states = native.gated_delta_recurrent(*rows, native.read_rows(held[0], slots, accepted))
        native.write_rows(held[0], slots, states)
        return outputs

    def commit(
        self, held: list[torch.Tensor], slots: torch.Tensor, accepted: torch.Tensor, arithmetic: Arithmetic
    ) -> None:
        """Nothing: the next round reads state ``accepted`` − 1."""


class Snapshot:
    """A live state and scratch room for a round's states: held = [state [N, H, K, V], [N, T, H, K, V]]."""

    accepted_when_whole = 0
    settles = True

    def hold(self, state: torch.Tensor, rows: int, wide: torch.dtype) -> list[torch.Tensor]:
        return [state, state.new_zeros(state.shape[0], rows, *state.shape[1:])]

    def committed(
        self,
        held: list[torch.Tensor],
        slots: torch.Tensor,
        accepted: torch.Tensor,
        dtype: torch.dtype,
        arithmetic: Arithmetic,
    ) -> torch.Tensor:
        live, scratch = held
        found = scratch[slots, (accepted - 1).clamp_min(0)]
        return torch.where(accepted[:, None, None, None] > 0, found, live[slots]).to(dtype)

    def round(
        self,
        held: list[torch.Tensor],
        slots: torch.Tensor,
        accepted: torch.Tensor,
        rows: Rows,
        arithmetic: Arithmetic,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        live = held[0][slots]
        outputs, states = gated_delta.recurrent(*rows, live.to(rows.q.dtype), arithmetic)
        return outputs, [live, states.to(held[1].dtype)]

    def in_place(
        self, held: list[torch.Tensor], slots: torch.Tensor, accepted: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        live, scratch = held
        outputs, states = native.gated_delta_recurrent(*rows, native.read_rows(live, slots, None))
        native.write_rows(scratch, slots, states)
        return outputs

    def commit(
        self, held: list[torch.Tensor], slots: torch.Tensor, accepted: torch.Tensor, arithmetic: Arithmetic
    ) -> None:
        live, scratch = held
        live[slots] = scratch[slots, accepted - 1]


class Replay:
    """A checkpoint and the last round's inputs: held = [state [N, H, K, V], k, v, g, beta].

    The next round folds the accepted rows into the checkpoint before its own rows.
    """

    accepted_when_whole = 0
    settles = False

    def hold(self, state: torch.Tensor, rows: int, wide: torch.dtype) -> list[torch.Tensor]:
        slots, heads, key, value = state.shape
        shapes = ((heads, key), (heads, value), (heads,), (heads,))
        return [state, *(state.new_zeros((slots, rows, *shape), dtype=wide) for shape in shapes)]

    def committed(
        self,
        held: list[torch.Tensor],
        slots: torch.Tensor,
        accepted: torch.Tensor,
        dtype: torch.dtype,
        arithmetic: Arithmetic,
    ) -> torch.Tensor:
        checkpoint, k, v, g, beta = (x[slots] for x in held)
        counts = torch.arange(k.shape[1], device=k.device) < accepted[:, None]
        # A row with g = 0 and β = 0 leaves a state exactly as it is, so every sequence folds T rows.
        g, beta = (x * counts[..., None] for x in (g, beta))
        return gated_delta.fold(k, v, g, beta, checkpoint.to(dtype), arithmetic)

    def round(
        self,
        held: list[torch.Tensor],
        slots: torch.Tensor,
        accepted: torch.Tensor,
        rows: Rows,
        arithmetic: Arithmetic,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        checkpoint = self.committed(held, slots, accepted, rows.q.dtype, arithmetic).to(held[0].dtype)
        outputs = gated_delta.outputs(*rows, checkpoint.to(rows.q.dtype), arithmetic)
        return outputs, [checkpoint, *rows[1:]]

    def in_place(
        self, held: list[torch.Tensor], slots: torch.Tensor, accepted: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        k, v, g, beta = held[1:]
        checkpoint = native.replay(held[0], k, v, g, beta, slots, accepted)
        outputs = native.gated_delta_outputs(*rows, checkpoint)
        for pool, new in zip(held, (checkpoint, *rows[1:]), strict=True):
            native.write_rows(pool, slots, new)
        return outputs

    def commit(
        self, held: list[torch.Tensor], slots: torch.Tensor, accepted: torch.Tensor, arithmetic: Arithmetic
    ) -> None:
        """Nothing: the next round folds the rows."""


class Fold(Replay):
    """As replay, but the accepted rows are folded into the checkpoint at commit."""

    settles = True

    def round(
        self,
        held: list[torch.Tensor],
        slots: torch.Tensor,
        accepted: torch.Tensor,
        rows: Rows,
        arithmetic: Arithmetic,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        live = held[0][slots]
        return gated_delta.outputs(*rows, live.to(rows.q.dtype), arithmetic), [live, *rows[1:]]

    def in_place(
        self, held: list[torch.Tensor], slots: torch.Tensor, accepted: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        outputs = native.gated_delta_outputs(*rows, native.read_rows(held[0], slots, None))
        for pool, new in zip(held[1:], rows[1:], strict=True):
            native.write_rows(pool, slots, new)
        return outputs

    def commit(
        self, held: list[torch.Tensor], slots: torch.Tensor, accepted: torch.Tensor, arithmetic: Arithmetic
    ) -> None:
        held[0][slots] = self.committed(held, slots, accepted, held[1].dtype, arithmetic).to(held[0].dtype)


SCHEMES: dict[str, Scheme] = {
    "slots": Slots(),
    "snapshot": Snapshot(),
    "fold": Fold(),
    "replay": Replay(),
}


def scheme_named(name: str) -> Scheme:
    """The scheme called ``name``; raises ``UsageError`` that lists the known ones."""
    if name not in SCHEMES:
        raise UsageError(f"route.state.scheme={name}: no such scheme; known: {', '.join(SCHEMES)}")
    return SCHEMES[name]
