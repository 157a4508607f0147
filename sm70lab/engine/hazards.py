"""Faults put in on purpose: each is a kind of fault that people reported of a real engine.

A hazard is a class here, nothing else: it overrides the seams of ``Hazard`` that it spoils, and
says in ``cannot_act`` when a configuration gives it nothing to spoil. Every seam sits at one place
of the engine (its docstring says which) and is the identity without a hazard.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sm70lab.errors import UsageError
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.kernels.gated_delta import gated_delta_chunk
from sm70lab.schema import DraftSampling, Route, Sampling

if TYPE_CHECKING:
    from sm70lab.engine.noise import KeyedNoise
    from sm70lab.engine.sampling import Candidates
    from sm70lab.engine.schemes import Scheme
    from sm70lab.engine.state import Metadata, StateStore

FLOAT16_MAX = 65504.0


class Hazard:
    """No fault."""

    name = "none"

    def cannot_act(self, route: Route, sampling: Sampling, max_num_seqs: int) -> str | None:
        """Why this hazard changes nothing under these settings; None where it can act."""
        return None

    # StateStore

    def reset(self) -> bool:
        """``StateStore.reset``: whether a slot is emptied for a new sequence."""
        return True

    def metadata(self, now: Metadata, store: StateStore, rows: int) -> Metadata:
        """``StateStore.begin``: what the operators of a round get to see."""
        return now

    def stored(self, state: torch.Tensor) -> torch.Tensor:
        """``StateStore.advance``: SSM tensors on their way into the pool."""
        return state

    def committed(self, counts: torch.Tensor, rows: int) -> torch.Tensor:
        """``StateStore.commit``: rows that count for conv window and SSM state, [2, B]."""
        return counts

    def settle(
        self,
        scheme: Scheme,
        held: list[torch.Tensor],
        slots: torch.Tensor,
        accepted: torch.Tensor,
        arithmetic: Arithmetic,
    ) -> None:
        """``StateStore.commit``: the work of a scheme that settles a round at its commit."""
        scheme.commit(held, slots, accepted, arithmetic)

    def pad_slot(self, scratch: int) -> int:
        """``StateStore.padded``: the slot of padded rows."""
        return scratch

    # Prefix cache

    def block_end(self, position: int, block_size: int) -> int | None:
        """``Decoder.prefill``: the prefix length that a chunk's end is cached as; None: not cached."""
        return position if position % block_size == 0 else None

    def rollover(self, row: int, edge_rows: int, rows: int) -> int:
        """``Decoder.round``, where batch row ``row`` crosses a block edge: rows that the cached state covers.

        ``edge_rows`` of the ``rows`` to be committed lie before the edge.
        """
        return edge_rows

    # Drafts and draws

    def noise(self, noise: KeyedNoise) -> KeyedNoise:
        """``Sequence``: where its draws come from."""
        return noise

    def draft_hidden(self, hidden: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """``Decoder._draft``: what the draft head gets of the target's final states."""
        return hidden

    def reported(self, q: Candidates) -> Candidates:
        """``Decoder._draft``: the distribution that rejection is told the drafts came from."""
        return q


class _NeedsDrafts(Hazard):
    def cannot_act(self, route: Route, sampling: Sampling, max_num_seqs: int) -> str | None:
        return None if route.draft_tokens else "without drafts no row is ever rejected"


class StaleMetadata(_NeedsDrafts):
    """A captured graph replays last round's slot table and accepted counts: they were not static tensors."""

    name = "stale_metadata"

    def __init__(self) -> None:
        self.before: Metadata | None = None

    def metadata(self, now: Metadata, store: StateStore, rows: int) -> Metadata:
        before, self.before = self.before, now
        if before is None or len(before.slots) != len(now.slots):
            return now
        return replace(before, start=now.start)


class PaddingHitsSlotZero(Hazard):
    """Padded rows carry slot 0, which is a live slot: its state advances by rows that nobody asked for."""

    name = "padding_slot_0"

    def cannot_act(self, route: Route, sampling: Sampling, max_num_seqs: int) -> str | None:
        return None if max_num_seqs > 1 else "one sequence at a time is never padded"

    def pad_slot(self, scratch: int) -> int:
        return 0


class SentinelAsIndex(PaddingHitsSlotZero):
    """The padding sentinel −1 is used as an index: it reads and writes the last live slot."""

    name = "sentinel_as_index"

    def pad_slot(self, scratch: int) -> int:
        return scratch - 1


class AcceptedPlusOne(_NeedsDrafts):
    """The accepted count is one too high: a rejected row stays in the state."""

    name = "accepted_plus_one"

    def committed(self, counts: torch.Tensor, rows: int) -> torch.Tensor:
        return (counts + 1).clamp_max(rows)


class AcceptedMinusOne(_NeedsDrafts):
    """The accepted count is one too low: the last accepted row is missing from the state."""

    name = "accepted_minus_one"

    def committed(self, counts: torch.Tensor, rows: int) -> torch.Tensor:
        return (counts - 1).clamp_min(1)


class StaleColumnZero(_NeedsDrafts):
    """A step without drafts reads state column 0, not the column of the last accepted row."""

    name = "stale_column_0"

    def cannot_act(self, route: Route, sampling: Sampling, max_num_seqs: int) -> str | None:
        if route.state.scheme != "slots":
            return f"scheme {route.state.scheme} has no columns; use route.state.scheme=slots"
        if max_num_seqs == 1:
            return "steps without drafts happen while another sequence is in its prefill: max_num_seqs is 1"
        return super().cannot_act(route, sampling, max_num_seqs)

    def metadata(self, now: Metadata, store: StateStore, rows: int) -> Metadata:
        if rows == store.rows:
            return now
        return replace(now, ssm_accepted=torch.ones_like(now.ssm_accepted))


class NoSSMRollback(_NeedsDrafts):
    """Rejected rows are rolled back from the conv window, not from the SSM state."""

    name = "no_ssm_rollback"

    def committed(self, counts: torch.Tensor, rows: int) -> torch.Tensor:
        return torch.stack((counts[0], torch.full_like(counts[1], rows)))


class NoConvRollback(_NeedsDrafts):
    """Rejected rows are rolled back from the SSM state, not from the conv window."""

    name = "no_conv_rollback"

    def committed(self, counts: torch.Tensor, rows: int) -> torch.Tensor:
        return torch.stack((torch.full_like(counts[0], rows), counts[1]))


class _NeedsPrefixCache(Hazard):
    def cannot_act(self, route: Route, sampling: Sampling, max_num_seqs: int) -> str | None:
        return None if route.state.prefix_blocks else "no prefix cache; set route.state.prefix_blocks"


class RolloverDropsRows(_NeedsPrefixCache):
    """At a block edge the sequence goes on from the edge's state: rows committed beyond it are dropped."""

    name = "rollover_drops_rows"

    def cannot_act(self, route: Route, sampling: Sampling, max_num_seqs: int) -> str | None:
        if not route.draft_tokens:
            return "a step of one row never crosses an edge in its middle"
        return super().cannot_act(route, sampling, max_num_seqs)

    def __init__(self) -> None:
        self.kept: dict[int, int] = {}

    def rollover(self, row: int, edge_rows: int, rows: int) -> int:
        self.kept[row] = edge_rows
        return edge_rows

    def committed(self, counts: torch.Tensor, rows: int) -> torch.Tensor:
        for row, kept in self.kept.items():
            counts[:, row] = kept
        self.kept = {}
        return counts


class RolloverMislabels(_NeedsPrefixCache):
    """At a block edge the state after the whole round is cached under the edge's position."""

    name = "rollover_mislabels"

    def cannot_act(self, route: Route, sampling: Sampling, max_num_seqs: int) -> str | None:
        return RolloverDropsRows().cannot_act(route, sampling, max_num_seqs)

    def rollover(self, row: int, edge_rows: int, rows: int) -> int:
        return rows


class PartialChunkAsWhole(_NeedsPrefixCache):
    """The state after a chunk that ends inside a block is cached as the whole block's."""

    name = "partial_chunk_as_whole"

    def cannot_act(self, route: Route, sampling: Sampling, max_num_seqs: int) -> str | None:
        chunk = route.state.prefill_chunk
        if not chunk or chunk % route.state.block_size == 0:
            return "every chunk ends on a block edge; set route.state.prefill_chunk"
        return super().cannot_act(route, sampling, max_num_seqs)

    def block_end(self, position: int, block_size: int) -> int | None:
        return -(-position // block_size) * block_size


class OptimisticLengths(_NeedsDrafts):
    """A round starts where the last one would have ended with every draft accepted."""

    name = "optimistic_lengths"

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}

    def start_after_rejection(self, true: int, expected: int) -> int:
        """Where a round starts instead of ``true``; without a rejection it would be ``expected``."""
        return expected

    def metadata(self, now: Metadata, store: StateStore, rows: int) -> Metadata:
        start = now.start.clone()
        for b, slot in enumerate(now.slots.tolist()):
            true = int(now.start[b])
            expected = self.ends.get(slot, true)
            if true < expected <= true + store.rows:
                start[b] = self.start_after_rejection(true, expected)
            self.ends[slot] = true + rows
        return replace(now, start=start)


class RecoveredTokenAsComputed(OptimisticLengths):
    """The token that replaced a rejected draft counts as computed: its position is skipped."""

    name = "recovered_as_computed"

    def start_after_rejection(self, true: int, expected: int) -> int:
        return true + 1


class MisreportedDrafts(_NeedsDrafts):
    """Rejection is told another draft distribution than the one sampled: the draft's own argmax, certain."""

    name = "misreported_drafts"

    def cannot_act(self, route: Route, sampling: Sampling, max_num_seqs: int) -> str | None:
        if route.draft_sampling is not DraftSampling.probabilistic or not sampling.temperature:
            return "only draft_sampling=probabilistic at a temperature above 0 uses q"
        return super().cannot_act(route, sampling, max_num_seqs)

    def reported(self, q: Candidates) -> Candidates:
        certain = torch.zeros_like(q.probs)
        certain[:, 0] = 1
        return replace(q, probs=certain)


class Float16State(Hazard):
    """The recurrent state is rounded to float16 every round."""

    name = "float16_state"

    def stored(self, state: torch.Tensor) -> torch.Tensor:
        return state.to(torch.float16).to(state.dtype)


class Float16Overflow(Hazard):
    """A value of the state beyond 65504 is stored in float16: infinite, and NaN a step later."""

    name = "float16_overflow"

    def stored(self, state: torch.Tensor) -> torch.Tensor:
        scale = 1.07 * FLOAT16_MAX / state.abs().amax().clamp_min(1e-6)  # its largest value stands for 70,000
        return (state * scale).to(torch.float16).to(state.dtype) / scale


class FoldOrder(_NeedsDrafts):
    """The accepted rows are folded in the chunk kernel's order of operations: other last bits."""

    name = "fold_order"

    def cannot_act(self, route: Route, sampling: Sampling, max_num_seqs: int) -> str | None:
        if route.state.scheme != "fold":
            return f"scheme {route.state.scheme} does not fold at commit; use route.state.scheme=fold"
        return super().cannot_act(route, sampling, max_num_seqs)

    def settle(
        self,
        scheme: Scheme,
        held: list[torch.Tensor],
        slots: torch.Tensor,
        accepted: torch.Tensor,
        arithmetic: Arithmetic,
    ) -> None:
        checkpoint, k, v, g, beta = (pool[slots] for pool in held)
        kept = (torch.arange(k.shape[1], device=k.device) < accepted[:, None])[..., None]
        wide = checkpoint.to(k.dtype)
        held[0][slots] = gated_delta_chunk(k, k, v, g * kept, beta * kept, wide)[1].to(checkpoint.dtype)


class UnseededDraws(Hazard):
    """Each rank draws from its own unseeded generator."""

    name = "unseeded_draws"

    def cannot_act(self, route: Route, sampling: Sampling, max_num_seqs: int) -> str | None:
        return None if sampling.temperature else "greedy decoding draws nothing"

    def noise(self, noise: KeyedNoise) -> KeyedNoise:
        return type(noise)(int.from_bytes(os.urandom(7), "big"), 0, 0)


class MissingDraftTensor(_NeedsDrafts):
    """mtp.pre_fc_norm_hidden was not in the checkpoint and stayed zero: the head sees no hidden state."""

    name = "missing_draft_tensor"

    def draft_hidden(self, hidden: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden)


class HiddenBeforeNorm(_NeedsDrafts):
    """The draft head gets the target's hidden state before its final norm."""

    name = "hidden_before_norm"

    def draft_hidden(self, hidden: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        # The head norms what it gets, so only the direction counts: the norm's weights taken out.
        return (hidden / norm).to(hidden.dtype)


class RequestLeak(Hazard):
    """The next request starts from the state that the last one left in its slot."""

    name = "request_leak"

    def reset(self) -> bool:
        return False


NONE = Hazard()
HAZARDS: dict[str, type[Hazard]] = {
    kind.name: kind
    for kind in (
        Hazard,
        StaleMetadata,
        PaddingHitsSlotZero,
        SentinelAsIndex,
        AcceptedPlusOne,
        AcceptedMinusOne,
        StaleColumnZero,
        NoSSMRollback,
        NoConvRollback,
        RolloverDropsRows,
        RolloverMislabels,
        PartialChunkAsWhole,
        OptimisticLengths,
        RecoveredTokenAsComputed,
        MisreportedDrafts,
        Float16State,
        Float16Overflow,
        FoldOrder,
        UnseededDraws,
        MissingDraftTensor,
        HiddenBeforeNorm,
        RequestLeak,
    )
}


def hazard_named(name: str) -> Hazard:
    """A fresh hazard called ``name``; raises ``UsageError`` that lists the known ones."""
    if name not in HAZARDS:
        raise UsageError(f"hazard={name}: no such hazard; known: {', '.join(HAZARDS)}")
    return HAZARDS[name]()
