"""The round loop: draft k tokens, verify k + 1 rows, accept, commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sm70lab.engine.kv_cache import KVCache
from sm70lab.engine.model import HybridModel
from sm70lab.engine.noise import KeyedNoise, Stream
from sm70lab.engine.rejection import Drafts, accept, one_hot
from sm70lab.engine.routes import resolve
from sm70lab.engine.sampling import Candidates, LogitsRules, concatenate, sample, truncate
from sm70lab.engine.state import StateStore
from sm70lab.errors import NonFiniteError
from sm70lab.schema import DraftSampling, Proposal, Route, Sampling, StateDtype

# Which noise draws the drafts; modes that are not here draft the draft head's argmax.
DRAFT_STREAM = {DraftSampling.probabilistic: Stream.draft, DraftSampling.coupled: Stream.target}


@dataclass
class Step:
    """What one round produced, before end tokens and budget cut it."""

    tokens: list[int]
    drafted: int


def state_dtype(route: Route, dtype: torch.dtype) -> torch.dtype:
    """``auto`` is float32, and float64 for a float64 model."""
    if route.state.dtype == StateDtype.auto:
        return torch.promote_types(dtype, torch.float32)
    resolved: torch.dtype = getattr(torch, route.state.dtype.value)
    return resolved


class Decoder:
    """Decodes one sequence along one route. Holds its caches, its state and its noise.

    ``capacity`` is the KV cache's, in positions: prompt, output and one round beyond.
    """

    def __init__(
        self,
        model: HybridModel,
        route: Route,
        sampling: Sampling,
        prompt_ids: list[int],
        capacity: int,
        noise: KeyedNoise,
        stop_ids: frozenset[int],
    ) -> None:
        arch, device = model.arch, model.device
        self.model, self.route, self.sampling, self.noise = model, route, sampling, noise
        self.prompt_ids = prompt_ids
        self.k = route.draft_tokens
        self.rules = LogitsRules(sampling, prompt_ids, stop_ids)
        self.boundary = resolve(route)
        kept = state_dtype(route, model.dtype)
        self.store = StateStore(arch, route.state.scheme.value, kept, model.dtype, device, rows=self.k + 1)
        attention_layers = arch.layer_types.count("full_attention")
        self.kv = KVCache(arch, attention_layers, capacity, model.dtype, device)
        self.mtp_kv = KVCache(arch, 1 if self.k else 0, capacity, model.dtype, device)
        self.output: list[int] = []
        self.rounds = 0
        # Rows that the target has run and the draft head has not: their hidden states [1, n, H].
        # Their successors are the last n output tokens.
        self._hidden = torch.empty(0)

    def steps(self) -> Iterator[Step]:
        """Prefill, then one ``Step`` a round, for ever: the caller stops asking."""
        with torch.inference_mode():
            first = self._prefill()
        yield Step([first], drafted=0)
        while True:
            with torch.inference_mode():
                step = self._round()
            yield step

    def _deliver(self, tokens: list[int]) -> None:
        self.output += tokens
        self.rules.observe(tokens)

    def _prefill(self) -> int:
        """Run the prompt in chunks that end on state-block edges; return the first output token."""
        ids = torch.tensor([self.prompt_ids], device=self.model.device)
        total = ids.shape[1]
        for begin in range(0, total, self.route.state.block_size):
            chunk = ids[:, begin : begin + self.route.state.block_size]
            hidden = self.model.run(chunk, self.store, self.kv, prefill=True, boundary=self.boundary)
            self.store.commit([chunk.shape[1]])
            # The draft head pairs position i with token i + 1: the prompt's last row has to wait.
            paired = min(chunk.shape[1], total - 1 - begin)
            if self.k and paired:
                start = torch.tensor([begin], device=ids.device)
                self.model.draft(
                    ids[:, begin + 1 : begin + 1 + paired],
                    hidden[:, :paired],
                    start,
                    self.mtp_kv,
                    self.boundary,
                )
        self._hidden = hidden[:, -1:]
        logits = self._logits(self._hidden)
        candidates = truncate(self.rules.apply(logits, 0, []), self.sampling)
        token = int(sample(candidates, self.noise, Stream.target, range(1)))
        self._deliver([token])
        return token

    def _round(self) -> Step:
        drafts = self._draft()
        position = len(self.output)
        rows = torch.tensor([self.output[-1:] + drafts.tokens.tolist()], device=self.model.device)
        hidden = self.model.run(rows, self.store, self.kv, prefill=False, boundary=self.boundary)
        logits = self.rules.apply(self._logits(hidden), position, drafts.tokens.tolist())
        target = truncate(logits, self.sampling)
        tokens = accept(
            self.route.draft_sampling, target, drafts, self.noise, range(position, position + self.k + 1)
        )
        self.store.commit([len(tokens)])
        self._hidden = hidden[:, : len(tokens)]
        self._deliver(tokens)
        self.rounds += 1
        return Step(tokens, drafted=self.k)

    def _draft(self) -> Drafts:
        """k tokens from the draft head, each drawn from (or the argmax of) its own distribution q."""
        if not self.k:
            none = torch.empty(0, dtype=torch.int64, device=self.model.device)
            return Drafts(none, one_hot(none, torch.float32))
        stream = DRAFT_STREAM.get(self.route.draft_sampling) if self.sampling.temperature > 0 else None
        count = self._hidden.shape[1]
        tokens = torch.tensor([self.output[-count:]], device=self.model.device)
        start = torch.tensor([self.store.position[0] - count], device=self.model.device)
        hidden = self.model.draft(tokens, self._hidden, start, self.mtp_kv, self.boundary)[:, -1:]
        start = start + count - 1
        chosen: list[torch.Tensor] = []
        distributions: list[Candidates] = []
        for i in range(self.k):
            if i:
                start = start + 1
                hidden = self.model.draft(chosen[-1][None], hidden, start, self.mtp_kv, self.boundary)
            logits = self.model.logits(hidden[:, 0])
            if stream is not None:
                q = truncate(logits, self.sampling, top_p=self.route.proposal == Proposal.top_k_top_p)
                chosen.append(
                    sample(q, self.noise, stream, range(len(self.output) + i, len(self.output) + i + 1))
                )
            else:
                chosen.append(logits.argmax(-1))
                q = one_hot(chosen[-1], logits.dtype)
            distributions.append(q)
        return Drafts(torch.cat(chosen), concatenate(distributions))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Target logits [T, V] of hidden [1, T, H]; raises ``NonFiniteError``."""
        logits = self.model.logits(hidden[0])
        if not bool(torch.isfinite(logits.sum())):
            layer = self._first_non_finite_layer()
            where = (
                "a from-scratch replay is finite, so the kept state is damaged"
                if layer is None
                else f"first in layer {layer} ({self.model.arch.layer_types[layer]}), also from scratch"
            )
            message = f"logits are not finite in round {self.rounds} after {len(self.output)} tokens: {where}"
            raise NonFiniteError(message, from_scratch=layer is not None)
        return logits

    def _first_non_finite_layer(self) -> int | None:
        """The first layer that is not finite when the tokens so far run from scratch."""
        ids = torch.tensor([self.prompt_ids + self.output], device=self.model.device)
        kept = self.store.compute_dtype
        fresh = StateStore(self.model.arch, self.store.scheme, kept, self.model.dtype, ids.device)
        kv = KVCache(self.model.arch, len(self.kv.layers), ids.shape[1], self.model.dtype, ids.device)
        return self.model.first_non_finite_layer(ids, fresh, kv)
