"""The no-draft run beside a route: fed the route's own tokens, one row at a time, it says what each
next token must be and what every layer's state must be.

As long as every token was the one it expected, it *is* the no-draft run of the request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sm70lab.engine.decoder import Decoder, chunk_end
from sm70lab.engine.kv_cache import KVCache
from sm70lab.engine.noise import KeyedNoise, Stream
from sm70lab.engine.routes import Opaque
from sm70lab.engine.sampling import Candidates, LogitsRules, truncate
from sm70lab.engine.sequence import Request
from sm70lab.engine.state import LayerSnapshot, StateStore

if TYPE_CHECKING:
    from sm70lab.engine.captured import WholeRound


class Shadow:
    """Follows one request along a decoder's model and arithmetic: eager, no drafts, slots of one row."""

    def __init__(self, decoder: Decoder, request: Request, capacity: int) -> None:
        model = decoder.model
        self.decoder, self.model, self.request = decoder, model, request
        self.boundary = replace(decoder.boundary, opaque=Opaque.nothing)
        how = self.boundary.arithmetic
        wide = torch.promote_types(model.dtype, torch.float32)
        scheme = "slots" if decoder.captured is None else "replay"
        self.store = StateStore(model.arch, scheme, wide, model.dtype, model.device, arithmetic=how)
        layers = model.arch.layer_types.count("full_attention")
        self.kv = KVCache(model.arch, layers, capacity, model.dtype, model.device)
        self.mtp_kv = KVCache(model.arch, model.arch.mtp_layers, capacity, model.dtype, model.device)
        self.rules = LogitsRules(request.sampling, list(request.prompt_ids), request.stop_ids)
        self.output: list[int] = []
        self.hidden = self.logits = torch.empty(0)  # [1, H] and [1, V] of the last row
        self.captured = self._captured(decoder)
        self._prefill()

    @torch.inference_mode()
    def _captured(self, decoder: Decoder) -> WholeRound | None:
        """The same kernels, one row at a time, where the decoder's rounds are captured."""
        if decoder.captured is None:
            return None
        from sm70lab.engine.captured import GREEDY, WholeRound  # imports Triton

        route = replace(decoder.route, draft_tokens=0)
        whole = WholeRound(self.model, route, self.store, self.kv, self.mtp_kv, decoder.head)
        whole.prepare(GREEDY)
        self.store.reset(0)
        return whole

    @torch.inference_mode()
    def _prefill(self) -> None:
        """The prompt in the decoder's own chunks, so that even the last bits must agree."""
        state, ids = self.decoder.route.state, list(self.request.prompt_ids)
        begin = 0
        while begin < len(ids):
            end = chunk_end(state, begin, len(ids))
            self._run(ids[begin:end], prefill=True)
            if pairs := ids[begin + 1 : end + 1]:
                self._pair(pairs, begin, self.hidden[: len(pairs)])
            begin = end
        self.hidden = self.hidden[-1:]

    def _run(self, tokens: list[int], prefill: bool) -> None:
        if self.captured is not None and not prefill:
            self.hidden, self.logits = self.captured.feed(tokens[0])
            return
        ids = torch.tensor([tokens], device=self.model.device)
        self.hidden = self.model.run(ids, [0], self.store, self.kv, prefill, self.boundary)[0]
        self.store.commit([len(tokens)])
        self.logits = self.model.logits(self.hidden[-1:], self.boundary.arithmetic)

    def _pair(self, tokens: list[int], position: int, hidden: torch.Tensor) -> torch.Tensor | None:
        if not self.decoder.k:
            return None
        slot, start = torch.tensor([[0], [position]], device=hidden.device)
        ids = torch.tensor([tokens], device=hidden.device)
        return self.model.draft(ids, hidden[None], slot, start, self.mtp_kv, self.boundary)[0]

    @torch.inference_mode()
    def feed(self, token: int) -> None:
        """Take the route's next token into caches and states."""
        self._run([token], prefill=False)

    @torch.inference_mode()
    def first_draft(self, token: int) -> torch.Tensor | None:
        """Draft logits after ``token``, which has been expected but not fed: [V′]."""
        out = self._pair([token], self.store.position[0] - 1, self.hidden)
        return None if out is None else self.decoder.head.logits(out)[0]

    def deliver(self, token: int) -> None:
        """Count a token for the penalties."""
        self.output.append(token)
        self.rules.observe([token])

    def expect(self) -> tuple[int, float]:
        """The no-draft run's next token, and its lead over the runner-up.

        The lead is in logits when greedy, else in log-probability plus Gumbel noise.
        """
        position = len(self.output)
        logits = self.rules.apply(self.logits, position, [])
        candidates = truncate(logits, self.request.sampling)
        if candidates.ids.shape[-1] == 1:
            top = logits[0].double().topk(2).values
            return int(candidates.ids), float(top[0] - top[1])
        scores = _perturbed(candidates, self.request.noise, position)
        top = scores.topk(2).values
        return int(candidates.ids[0, scores.argmax()]), float(top[0] - top[1])

    def states(self) -> list[LayerSnapshot]:
        """Of every layer after the tokens fed so far."""
        return self.store.snapshot([0])


def _perturbed(candidates: Candidates, noise: KeyedNoise, position: int) -> torch.Tensor:
    gumbel = noise.gumbel(Stream.target, [position], candidates.ids.cpu().numpy())[0]
    return candidates.probs[0].double().cpu().log() + torch.from_numpy(gumbel)
