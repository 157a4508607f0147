"""The round loop: draft k tokens, verify k + 1 rows, accept, commit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import torch

from sm70lab.engine import draft_head
from sm70lab.engine.capturable import no_captured_request
from sm70lab.engine.hazards import NONE, Hazard
from sm70lab.engine.kv_cache import KVCache
from sm70lab.engine.model import HybridModel
from sm70lab.engine.noise import Stream
from sm70lab.engine.played import CapturedSteps, PlayedSteps
from sm70lab.engine.prefix_cache import PrefixCache
from sm70lab.engine.recorded import Recorded
from sm70lab.engine.rejection import Drafts, accept, one_hot
from sm70lab.engine.routes import graph_is_whole, resolve
from sm70lab.engine.sampling import Candidates, concatenate, sample, truncate
from sm70lab.engine.sequence import Request, Sequence, Step
from sm70lab.engine.state import LayerSnapshot, StateStore
from sm70lab.errors import NonFiniteError, UsageError
from sm70lab.schema import DraftSampling, Proposal, Route, StateConfig, StateDtype

if TYPE_CHECKING:
    from sm70lab.engine.captured import Told, WholeRound

# Which noise draws the drafts; modes that are not here draft the draft head's argmax.
DRAFT_STREAM = {DraftSampling.probabilistic: Stream.draft, DraftSampling.coupled: Stream.target}


def state_dtype(route: Route, dtype: torch.dtype) -> torch.dtype:
    """``auto`` is float32, and float64 for a float64 model."""
    if route.state.dtype == StateDtype.auto:
        return torch.promote_types(dtype, torch.float32)
    resolved: torch.dtype = getattr(torch, route.state.dtype.value)
    return resolved


def captures(device: torch.device) -> bool:
    """Whether rounds can be CUDA graphs there."""
    return device.type == "cuda"


def chunk_end(state: StateConfig, begin: int, total: int) -> int:
    """Where the prefill chunk that starts at ``begin`` of a prompt of ``total`` tokens ends.

    On a block edge, or ``prefill_chunk`` tokens after its start if that is sooner.
    """
    end = min(begin - begin % state.block_size + state.block_size, total)
    return min(end, begin + state.prefill_chunk) if state.prefill_chunk else end


class Decoder:
    """Decodes up to ``max_num_seqs`` sequences along one route. Holds their caches and states.

    ``capacity`` is the KV cache's for one sequence, in positions: prompt, output and one round beyond.
    """

    def __init__(
        self,
        model: HybridModel,
        route: Route,
        capacity: int,
        max_num_seqs: int = 1,
        hazard: Hazard = NONE,
        frequent: list[int] | None = None,
    ) -> None:
        arch, device = model.arch, model.device
        self.model, self.route, self.hazard = model, route, hazard
        self.k = route.draft_tokens
        self.boundary = resolve(route, model.native, captures(device))
        kept, how = state_dtype(route, model.dtype), self.boundary.arithmetic
        rows, slots = self.k + 1, max_num_seqs
        self.store = StateStore(arch, route.state.scheme, kept, model.dtype, device, rows, slots, how, hazard)
        pool = slots + (self.store.scratch is not None)
        attention_layers = arch.layer_types.count("full_attention")
        self.kv = KVCache(arch, attention_layers, capacity, model.dtype, device, pool)
        self.mtp_kv = KVCache(arch, 1 if self.k else 0, capacity, model.dtype, device, pool)
        self.prefixes = PrefixCache(route.state.prefix_blocks, route.state.block_size)
        self.head = draft_head.build(route.draft_head.value, model.head, route.shortlist_size, frequent, how)
        self.width = max_num_seqs
        self.recorded: PlayedSteps | None = None
        self.captured: WholeRound | None = None
        parts = (model, self.store, self.kv, self.mtp_kv, self.head)
        if captures(device) and graph_is_whole(route):
            from sm70lab.engine.captured import WholeRound  # imports Triton

            self.captured = WholeRound(model, route, self.store, self.kv, self.mtp_kv, self.head)
        elif self.boundary.recorded:
            self.recorded = (
                CapturedSteps(*parts, max_num_seqs, self.boundary)
                if captures(device)
                else Recorded(*parts, max_num_seqs)
            )
        self._told: Iterator[Told] = iter(())  # of the sequence in a captured round
        self.free = list(range(slots))

    def admit(self, request: Request) -> Sequence:
        """Give a request a free slot and whatever of its prompt the prefix cache has."""
        if self.captured is not None:
            if reason := no_captured_request(request, self.k):
                raise UsageError(f"route.graph=full captured the round: {reason}")
            with torch.inference_mode():
                self.captured.prepare(request.sampling)
        slot = self.free.pop(0)
        noise = self.hazard.noise(request.noise)
        sequence = Sequence(request, slot, noise, list(request.prompt_ids))
        with torch.inference_mode():
            self.store.reset(slot)
            place = (slot, self.store, self.kv, self.mtp_kv)
            for block in self.prefixes.restore(sequence.prompt_ids, *place):
                sequence.prefilled = sequence.reused = block.position
                self._pair(sequence, block.position - 1, block.hidden[None])
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's slot back."""
        self.free.append(sequence.slot)

    # ------------------------------------------------------------------ prefill

    def prefill(self, sequence: Sequence) -> Step | None:
        """Run one chunk of the prompt (see ``chunk_end``); the last one gives the first output token."""
        with torch.inference_mode():
            return self._prefill(sequence)

    def _prefill(self, sequence: Sequence) -> Step | None:
        block, begin = self.route.state.block_size, sequence.prefilled
        end = chunk_end(self.route.state, begin, len(sequence.prompt_ids))
        ids = torch.tensor([sequence.prompt_ids[begin:end]], device=self.model.device)
        hidden = self.model.run(
            ids, [sequence.slot], self.store, self.kv, prefill=True, boundary=self.boundary
        )[0]
        self.store.commit([end - begin])
        # The draft head pairs position i with token i + 1: the prompt's last row has to wait.
        self._pair(sequence, begin, hidden[: len(sequence.prompt_ids) - 1 - begin])
        sequence.prefilled = end
        cached_as = self.hazard.block_end(end, block)
        if self.route.state.prefix_blocks and cached_as and cached_as <= len(sequence.prompt_ids):
            states = self.store.snapshot([sequence.slot])
            self._cache(sequence, cached_as, states, hidden[-1])
        if sequence.in_prefill:
            return None
        sequence.hidden = hidden[-1:]
        logits = self._finite(self.model.logits(sequence.hidden, self.boundary.arithmetic), sequence)
        candidates = truncate(
            sequence.rules.apply(logits, 0, []), sequence.sampling, arithmetic=self.boundary.arithmetic
        )
        token = int(sample(candidates, sequence.noise, Stream.target, range(1)))
        sequence.deliver([token])
        return Step([token], drafted=0, logits=logits if sequence.request.keep_logits else None)

    def _pair(self, sequence: Sequence, position: int, hidden: torch.Tensor) -> None:
        """Give the draft head prompt rows [n, H] from ``position`` on, each with the prompt's next token."""
        if not self.k or not len(hidden):
            return
        device = hidden.device
        tokens = sequence.prompt_ids[position + 1 : position + 1 + len(hidden)]
        self.model.draft(
            torch.tensor([tokens], device=device),
            self.hazard.draft_hidden(hidden, self.model.norm)[None],
            torch.tensor([sequence.slot], device=device),
            torch.tensor([position], device=device),
            self.mtp_kv,
        )

    def _cache(self, sequence: Sequence, end: int, states: list[LayerSnapshot], hidden: torch.Tensor) -> None:
        tokens = sequence.tokens[:end]
        self.prefixes.put(tokens, sequence.slot, states, hidden, self.kv, self.mtp_kv)

    # ------------------------------------------------------------------ rounds

    def round(self, sequences: list[Sequence], draft: bool = True) -> list[Step]:
        """One round of every sequence, or one step of one token each without drafts."""
        with torch.inference_mode():
            if self.captured is not None:
                return [self._captured_round(self.captured, *sequences)]
            return self._round(sequences, self.k if draft else 0)

    def _captured_round(self, captured: WholeRound, sequence: Sequence) -> Step:
        told = next(self._told_of(captured, sequence))
        if not told.finite:
            self._raise_non_finite(sequence)
        sequence.deliver(told.tokens)
        sequence.rounds += 1
        return Step(told.tokens, drafted=self.k)

    def _told_of(self, captured: WholeRound, sequence: Sequence) -> Iterator[Told]:
        if not sequence.rounds:
            self._told = captured.rounds(sequence)
        return self._told

    def _round(self, sequences: list[Sequence], k: int) -> list[Step]:
        drafts = self._draft(sequences, k)
        rows = [[s.output[-1], *d.tokens.tolist()] for s, d in zip(sequences, drafts, strict=True)]
        rows += [[0] * (k + 1)] * (self.width - len(rows))
        slots = self.store.padded([s.slot for s in sequences], self.width)
        tokens = torch.tensor(rows, device=self.model.device)
        hidden, logits = self._verify(tokens, slots, len(sequences))
        steps: list[Step] = []
        for b, sequence in enumerate(sequences):
            position = len(sequence.output)
            checked = self._finite(logits[b], sequence)
            ruled = sequence.rules.apply(checked, position, rows[b][1:])
            target = truncate(ruled, sequence.sampling, arithmetic=self.boundary.arithmetic)
            positions = range(position, position + k + 1)
            accepted = accept(self.route.draft_sampling, target, drafts[b], sequence.noise, positions)
            kept = checked[: len(accepted)] if sequence.request.keep_logits else None
            steps.append(Step(accepted, drafted=k, logits=kept))
            self._cross_edge(b, sequence, hidden[b], len(accepted))
            sequence.hidden = hidden[b, : len(accepted)]
            sequence.deliver(accepted)
            sequence.rounds += 1
        self.store.commit([len(step.tokens) for step in steps])
        return steps

    def _verify(self, tokens: torch.Tensor, slots: list[int], live: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [B, T, H] of the rows, and the logits of the ``live`` first sequences."""
        if self.recorded is not None:
            metadata = self.store.begin(slots, tokens.shape[1], prefill=False)
            hidden, logits = self.recorded.verify(tokens, metadata)
            return hidden, logits[:live]
        hidden = self.model.run(tokens, slots, self.store, self.kv, prefill=False, boundary=self.boundary)
        return hidden, self.model.logits(hidden[:live], self.boundary.arithmetic)

    def _cross_edge(self, row: int, sequence: Sequence, hidden: torch.Tensor, count: int) -> None:
        """Keep the state at a block edge that this round's ``count`` tokens reach or cross.

        The cache takes it in the next round: the draft head has yet to run these rows.
        """
        before, block = self.store.position[sequence.slot], self.route.state.block_size
        edge = before - before % block + block
        if not self.route.state.prefix_blocks or edge > before + count:
            return
        covered = self.hazard.rollover(row, edge - before, count)
        states = self.store.snapshot([sequence.slot], [covered])
        sequence.edge = (edge, states, hidden[edge - before - 1])

    # ------------------------------------------------------------------ drafts

    def _draft(self, sequences: list[Sequence], k: int) -> list[Drafts]:
        """k tokens a sequence from the draft head, each drawn from (or the argmax of) its own q."""
        device = self.model.device
        none = torch.empty(0, dtype=torch.int64, device=device)
        if self.k:
            hidden, slots, start = self._catch_up(sequences)
        for sequence in sequences:
            if sequence.edge is not None:
                self._cache(sequence, *sequence.edge)
                sequence.edge = None
        if not k:
            return [Drafts(none, one_hot(none, torch.float32)) for _ in sequences]
        chosen: list[torch.Tensor] = []  # k times [B]
        distributions: list[list[Candidates]] = [[] for _ in sequences]
        for i in range(k):
            if self.recorded is not None:
                logits = (
                    self.recorded.next_logits(chosen[-1], slots, start + i)
                    if i
                    else self.recorded.first_logits(hidden)
                )
            else:
                if i:
                    hidden = self.model.draft(
                        chosen[-1][:, None], hidden, slots, start + i, self.mtp_kv, self.boundary
                    )
                logits = self.head.logits(hidden[:, 0])
            picked = []
            for b, sequence in enumerate(sequences):
                q = self._distribution(logits[b : b + 1], sequence)
                stream = self._draft_stream(sequence)
                at = len(sequence.output) + i
                picked.append(
                    q.ids[:, 0] if stream is None else sample(q, sequence.noise, stream, range(at, at + 1))
                )
                distributions[b].append(self.hazard.reported(q) if stream is not None else q)
            chosen.append(torch.cat(picked))
        return [
            Drafts(torch.stack([c[b] for c in chosen]), concatenate(qs)) for b, qs in enumerate(distributions)
        ]

    def _draft_stream(self, sequence: Sequence) -> Stream | None:
        return DRAFT_STREAM.get(self.route.draft_sampling) if sequence.sampling.temperature > 0 else None

    def _distribution(self, logits: torch.Tensor, sequence: Sequence) -> Candidates:
        """q of one draft [1, V′], over vocabulary ids; certain where drafts are the argmax."""
        if self._draft_stream(sequence) is None:
            return one_hot(self.head.ids(logits.argmax(-1)), logits.dtype)
        top_p = self.route.proposal == Proposal.top_k_top_p
        q = truncate(logits, sequence.sampling, top_p, self.boundary.arithmetic)
        if not bool(torch.isfinite(q.probs.sum())):
            raise NonFiniteError(
                f"draft logits are not finite in round {sequence.rounds} after {len(sequence.output)} "
                "tokens: no distribution to draw a draft from",
                from_scratch=False,
                slot=sequence.slot,
            )
        return Candidates(self.head.ids(q.ids), q.probs)

    def _catch_up(self, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the draft head on the rows that it has not seen, all sequences padded to k + 1 rows.

        A padded row writes keys beyond the sequence's newest token, where the drafts write next.
        Returns the last true row's output [B, 1, H], the slots and that row's positions [B].
        """
        device, rows = self.model.device, self.k + 1
        counts = [len(s.hidden) for s in sequences]
        tokens = [s.output[-n:] + [0] * (rows - n) for s, n in zip(sequences, counts, strict=True)]
        hidden = self.model.embedding.new_zeros(len(sequences), rows, self.model.arch.hidden_size)
        for b, (sequence, n) in enumerate(zip(sequences, counts, strict=True)):
            hidden[b, :n] = self.hazard.draft_hidden(sequence.hidden, self.model.norm)
        slots = torch.tensor([s.slot for s in sequences], device=device)
        last = torch.tensor([self.store.position[s.slot] - 1 for s in sequences], device=device)
        counts_tensor = torch.tensor(counts, device=device)
        rows_in = (torch.tensor(tokens, device=device), hidden, slots, last + 1 - counts_tensor)
        out = (
            self.model.draft(*rows_in, self.mtp_kv, self.boundary)
            if self.recorded is None
            else self.recorded.catch_up(*rows_in)
        )
        return out[torch.arange(len(sequences), device=device), counts_tensor - 1][:, None], slots, last

    # ------------------------------------------------------------------ checks

    def _finite(self, logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
        """The same logits [T, V]; raises ``NonFiniteError`` with the layer and the round."""
        if not bool(torch.isfinite(logits.sum())):
            self._raise_non_finite(sequence)
        return logits

    def _raise_non_finite(self, sequence: Sequence) -> NoReturn:
        layer = self._first_non_finite_layer(sequence)
        where = (
            "a from-scratch replay is finite, so the kept state is damaged"
            if layer is None
            else f"first in layer {layer} ({self.model.arch.layer_types[layer]}), also from scratch"
        )
        raise NonFiniteError(
            f"logits are not finite in round {sequence.rounds} after {len(sequence.output)} tokens: {where}",
            from_scratch=layer is not None,
            slot=sequence.slot,
        )

    def _first_non_finite_layer(self, sequence: Sequence) -> int | None:
        """The first layer that is not finite when the tokens so far run from scratch."""
        ids = torch.tensor([sequence.tokens], device=self.model.device)
        arch, dtype = self.model.arch, self.model.dtype
        fresh = StateStore(arch, self.store.scheme, self.store.compute_dtype, dtype, ids.device)
        kv = KVCache(arch, len(self.kv.layers), ids.shape[1], dtype, ids.device)
        return self.model.first_non_finite_layer(ids, fresh, kv)


def decode(decoder: Decoder, request: Request) -> Iterator[tuple[Sequence, Step]]:
    """One sequence alone: prefill, then one step a round, for ever; the caller stops asking."""
    sequence = decoder.admit(request)
    try:
        while True:
            if sequence.in_prefill:
                step = decoder.prefill(sequence)
                if step is None:
                    continue
            else:
                (step,) = decoder.round([sequence])
            yield sequence, step
    finally:
        decoder.release(sequence)
