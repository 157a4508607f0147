"""``graph=full`` on a GPU: draft, verify, accept and commit as one CUDA graph, with no host in between.

The functions of a round, in the order of ``decoder.Decoder``, as kernels over memory that stays where it
is. What changes between rounds (positions, counts, tokens) is worked out on the device
(``kernels.gpu.round_state``). The host launches a round before it has read the one before: it learns of an
end a round late, and drops what was delivered after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sm70lab.engine.attention import GatedAttention
from sm70lab.engine.draft_head import DraftHead, FullHead, Int8Head, ShortlistHead
from sm70lab.engine.gdn_layer import GatedDeltaNet
from sm70lab.engine.kv_cache import KVCache, LayerKV
from sm70lab.engine.mlp import DenseMLP
from sm70lab.engine.model import DecoderLayer, HybridModel
from sm70lab.engine.noise import Stream
from sm70lab.engine.sequence import Sequence
from sm70lab.engine.state import LayerState, StateStore
from sm70lab.kernels.attention import rotary_table
from sm70lab.kernels.gpu import attention, gdn, norm, round_state, sampling
from sm70lab.kernels.gpu.products import (
    Int8Weight,
    LayerWeight,
    Weight,
    outputs,
    parts_of,
    product,
    product_parts,
    swiglu,
)
from sm70lab.schema import DraftSampling, Numerics, Proposal, Route, Sampling

GREEDY = Sampling(temperature=0.0)
AHEAD = 2  # rounds in flight: the one being read and the one being run


@dataclass(frozen=True)
class Told:
    """What one round tells the host."""

    tokens: list[int]  # delivered, 1..T
    finite: bool  # of all its logits


class _Candidates(NamedTuple):
    rows: sampling.Rows
    space: sampling.Lists


class WholeRound:
    """The rounds of one sequence in slot 0 of a decoder's caches and states."""

    def __init__(
        self,
        model: HybridModel,
        route: Route,
        store: StateStore,
        kv: KVCache,
        mtp_kv: KVCache,
        head: DraftHead,
    ) -> None:
        arch, device = model.arch, model.device
        self.model, self.route, self.store, self.kv, self.mtp_kv = model, route, store, kv, mtp_kv
        self.k, self.device = route.draft_tokens, device
        self.head_weight = _head_weight(head)
        self._columns = outputs(self.head_weight)
        self._names = head.shortlist if isinstance(head, ShortlistHead) else None
        self.exact = route.numerics is Numerics.exact
        rows = self.k + 1
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._spaces: dict[tuple[str, int], _Candidates] = {}
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.place = round_state.places(self.k, device)
        self.tokens = integers(rows)  # to verify: the newest token, then the drafts
        self.delivered, self.count = integers(rows), integers(1)
        self.hidden = torch.zeros(rows, arch.hidden_size, dtype=model.dtype, device=device)  # of those rows
        self.logits = torch.zeros(rows, len(model.head), device=device)  # float32, of those rows
        self.slot = integers(1)
        self.keys = integers(1, sampling.STREAMS.value)
        self.settings, self.draft_settings = torch.zeros(2, 1, 4, device=device).unbind(0)
        self.report = integers(rows + 2)
        self.told = [
            torch.zeros(rows + 2, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(AHEAD)
        ]
        self.events = [torch.cuda.Event() for _ in range(AHEAD)] if device.type == "cuda" else []
        positions = torch.arange(kv.capacity, device=device)
        self.cos_table, self.sin_table = (
            x.to(model.dtype) for x in rotary_table(positions, model.frequencies)
        )
        shape = (2, 3 * rows - 2, arch.rotary_dim)
        self.cos, self.sin = torch.zeros(shape, dtype=model.dtype, device=device).unbind(0)
        self.heads = gdn.Heads(arch.gdn_key_heads, arch.gdn_value_heads, arch.gdn_key_dim, arch.gdn_value_dim)
        self.gdn_room = gdn.scratch(1, rows, self.heads, model.dtype, device)
        caches = [*kv.layers, *mtp_kv.layers]
        self.attention_room = attention.workspace(1, rows, arch.num_heads, caches[0][0]) if caches else None

    # ------------------------------------------------------------------ what the decoder calls

    def prepare(self, asked: Sampling) -> None:
        """Compile and capture the round for requests sampled like this; the pools hold nothing yet."""
        key = self.kind(asked)
        if self.device.type != "cuda" or key in self.graphs:
            return
        self._set(asked, torch.zeros_like(self.keys))
        self._stand(start=1, accepted=0, output=0)
        self._round(*key)  # compiles, and makes every buffer
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._round(*key)
        self.graphs[key] = graph

    def rounds(
        self, sequence: Sequence, ahead: bool = True, between: Callable[[], None] | None = None
    ) -> Iterator[Told]:
        """The rounds of a sequence whose prefill has delivered its first token, one after another.

        ``ahead``: the next one runs while one is read. ``between`` is called between drafting and
        verifying, for which the kernels are launched one by one, without a graph.
        """
        rows, position = self.k + 1, self.store.position[sequence.slot]
        self._set(sequence.sampling, torch.from_numpy(sequence.noise.words())[None])
        self._stand(position, self.store.kind.accepted_when_whole, output=1)
        self.tokens[0] = self.delivered[0] = sequence.output[-1]
        self.hidden.zero_()  # padded rows of the first catch-up: finite, whatever was here
        self.hidden[:1] = sequence.hidden
        key = self.kind(sequence.sampling)
        graph = None if between else self.graphs.get(key)
        run: Callable[[], None] = graph.replay if graph else lambda: self._round(*key, between)
        launched = 0
        for read in itertools.count():
            while launched <= read + ahead:
                self.launch(run, launched % AHEAD)
                launched += 1
            if self.events:
                self.events[read % AHEAD].synchronize()
            told = self.told[read % AHEAD].tolist()
            yield Told(told[: told[rows]], bool(told[rows + 1]))

    def feed(self, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One step without drafts after a token of the caller's: hidden [1, H], logits [1, V]."""
        store = self.store
        if self.k:
            raise ValueError("a token is fed to rounds without drafts")
        self._stand(store.position[0], int(store.accepted[0, 0]), output=1)
        self.tokens[0] = token
        graph = self.graphs.get(key := self.kind(GREEDY))
        graph.replay() if graph else self._round(*key)
        store.position[0] += 1
        store.accepted[:, 0] = 1
        return self.hidden.clone(), self.logits.clone()

    def launch(self, run: Callable[[], None], place: int) -> None:
        """Start a round, and the copy of what it tells to ``told[place]``."""
        run()
        self.told[place].copy_(self.report, non_blocking=True)
        if self.events:
            self.events[place].record()

    def _stand(self, start: int, accepted: int, output: int) -> None:
        """Let the next round begin at cache position ``start``, one row behind which the draft head is."""
        self.place.table.copy_(torch.tensor(round_state.values(start, 1, accepted, output, self.k)))

    def kind(self, asked: Sampling) -> tuple[int, bool]:
        """What a graph is captured for: candidates a row, and whether acceptance is a match."""
        width = sampling.width_for(asked.top_k if asked.temperature > 0 else 1)
        return width, self.route.draft_sampling in (DraftSampling.token_matching, DraftSampling.coupled)

    def _set(self, s: Sampling, keys: torch.Tensor) -> None:
        top_p = self.route.proposal is Proposal.top_k_top_p
        chosen = self.route.draft_sampling in (DraftSampling.greedy, DraftSampling.token_matching)
        target = [s.temperature, float(s.top_k), s.top_p, s.min_p]
        heat = 0.0 if chosen else s.temperature
        draft = [heat, float(s.top_k), *((s.top_p, s.min_p) if top_p else (1.0, 0.0))]
        self.settings.copy_(torch.tensor([target]))
        self.draft_settings.copy_(torch.tensor([draft]))
        self.keys.copy_(keys)

    # ------------------------------------------------------------------ the round

    def _round(self, width: int, match: bool, between: Callable[[], None] | None = None) -> None:
        """Catch up and draft k, verify k + 1 rows, accept, and set the places of the next round."""
        rows, vocabulary = self.k + 1, len(self.model.head)
        round_state.rotary_rows(self.place, self.cos_table, self.sin_table, self.cos, self.sin)
        q = self.drafted(width)
        if self.k:
            self._draft(width)
        if between is not None:
            between()
        self._verify()
        p, space = self._candidates("p", rows, width, vocabulary)
        where = (self.keys, self.place.output)
        sampling.truncate_and_draw(self.logits, self.settings, *where, Stream.target, space, p)
        self._accept(match, p, q)
        round_state.advance(
            self.place, self.delivered, self.count, p.finite, q.finite, self.tokens, self.report
        )

    def _accept(self, match: bool, p: sampling.Rows, q: sampling.Rows) -> None:
        """Which of the drafts tokens[1:] pass, with one more: ``delivered`` and its ``count``."""
        drafts, delivered = self.tokens[1:].view(1, self.k), self.delivered.view(1, self.k + 1)
        sampling.accept(match, p, drafts, q, self.keys, self.place.output, delivered, self.count)

    def _draft(self, width: int) -> None:
        """k tokens from the draft head into tokens[1:], and the distributions they were drawn from."""
        rows = self.k + 1
        stream = Stream.target if self.route.draft_sampling is DraftSampling.coupled else Stream.draft
        q, space = self._candidates("q", self.k, width, self._columns)
        newest = self._buffer("draft hidden", 1, self.model.arch.hidden_size)
        for i in range(self.k):
            if i == 0:
                out = self._mtp(self.delivered, self.hidden, self.place.catch_up, rows, rows)
                round_state.pick_row(out, self.place.rows, newest)
            else:
                first = 2 * rows + i - 1
                newest = self._mtp(self.tokens[i : i + 1], newest, self.place.drafts[i - 1], first, 1)
            logits = self._buffer("draft logits", 1, self._columns, dtype=torch.float32)
            product(newest, self.head_weight, logits, self.exact)
            out_rows = sampling.Rows(
                q.ids[i : i + 1], q.probs[i : i + 1], self.tokens[i + 1 : i + 2], q.finite[i : i + 1]
            )
            sampling.truncate_and_draw(
                logits,
                self.draft_settings,
                self.keys,
                self.place.output,
                stream,
                space,
                out_rows,
                i,
                self._names,
            )

    def _mtp(
        self, tokens: torch.Tensor, hidden: torch.Tensor, start: torch.Tensor, rotary: int, rows: int
    ) -> torch.Tensor:
        """The draft head on T rows; its rotary rows begin at ``rotary``. Returns [T, H]."""
        model, mtp = self.model, self.model.mtp
        assert mtp is not None and mtp.layer.attention is not None
        size = model.arch.hidden_size
        pair = self._buffer("pair", rows, 2 * size)
        norm.draft_input(tokens, model.embedding, hidden, mtp.norm_embedding, mtp.norm_hidden, mtp.eps, pair)
        x, normed = self._buffer("x", rows, size), self._buffer("normed", rows, size)
        product(pair, mtp.fc, x, self.exact)
        norm.rms_norm(x, mtp.layer.input_norm, mtp.layer.eps, normed)
        o = self._attend(mtp.layer.attention, normed, self.mtp_kv.layers[0], start, rotary)
        self._close(o, mtp.layer.attention.out_proj, x, mtp.layer.post_norm, mtp.layer.eps, normed)
        out = self._buffer("draft hidden" if rows == 1 else "caught up", rows, size)
        self._feed_forward(mtp.layer, x, normed, mtp.norm, mtp.eps, out)
        return out

    def _verify(self) -> None:
        """The rows ``tokens`` from the committed state: ``hidden`` and ``logits``."""
        model, rows, size = self.model, self.k + 1, self.model.arch.hidden_size
        layers = list(model.decoder_layers())
        states, caches = iter(self.store.layers), iter(self.kv.layers)
        x, normed = self._buffer("x", rows, size), self._buffer("normed", rows, size)
        norm.embed_rms_norm(self.tokens, model.embedding, layers[0].input_norm, layers[0].eps, x, normed)
        for number, layer in enumerate(layers):
            if layer.gdn is not None:
                o, out_proj = self._gdn(layer.gdn, normed, next(states)), layer.gdn.out_proj
            else:
                assert layer.attention is not None
                out_proj = layer.attention.out_proj
                o = self._attend(layer.attention, normed, next(caches), self.place.start, 0)
            self._close(o, out_proj, x, layer.post_norm, layer.eps, normed)
            last = number == len(layers) - 1
            following = model.norm if last else layers[number + 1].input_norm
            self._feed_forward(layer, x, normed, following, layer.eps, self.hidden if last else normed)
        product(self.hidden, model.head, self.logits, self.exact)

    def _gdn(self, layer: GatedDeltaNet, normed: torch.Tensor, state: LayerState) -> torch.Tensor:
        rows, heads = len(normed), self.heads
        projected = self._buffer("projected", rows, heads.projected)
        product(normed, layer.in_proj, projected, self.exact)
        weights = gdn.GDNWeights(layer.conv_weight, layer.neg_decay_rate, layer.dt_bias, layer.norm_weight)
        where = gdn.Place(self.slot, self.place.accepted, self.place.accepted)
        o = self._buffer("gdn output", rows, heads.value_heads * heads.value_dim)
        # The graph is one round: nothing in it writes the pools before these kernels read them.
        gdn.gdn_round(
            projected[None], weights, gdn.GDNPools(*state), where, heads, layer.shape.eps,
            self.gdn_room, o[None], settled=True,
        )  # fmt: skip
        return o

    def _attend(
        self, layer: GatedAttention, normed: torch.Tensor, kv: LayerKV, start: torch.Tensor, rotary: int
    ) -> torch.Tensor:
        rows = len(normed)
        fused = self._buffer("qkv", rows, outputs(layer.in_proj))
        q_gate, k, v = product(normed, layer.in_proj, fused, self.exact)[None].split(layer.sizes, dim=-1)
        cos, sin = (table[None, rotary : rotary + rows] for table in (self.cos, self.sin))
        o = self._buffer("attention output", rows, layer.heads * layer.head_dim)
        assert self.attention_room is not None
        attention.gated_attention(
            q_gate, k, v, layer.q_norm, layer.k_norm, cos, sin, *kv, self.slot, start, layer.eps,
            self.attention_room, o[None],
        )  # fmt: skip
        return o

    def _feed_forward(
        self,
        layer: DecoderLayer,
        x: torch.Tensor,
        normed: torch.Tensor,
        following: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        mlp = layer.mlp
        assert isinstance(mlp, DenseMLP)
        inner = self._buffer("inner", len(x), outputs(mlp.gate_up) // 2)
        swiglu(normed, mlp.gate_up, inner, self.exact)
        self._close(inner, mlp.down, x, following, eps, out)

    def _close(
        self,
        o: torch.Tensor,
        weight: LayerWeight,
        x: torch.Tensor,
        following: torch.Tensor,
        eps: float,
        normed: torch.Tensor,
    ) -> None:
        """x += o·Wᵀ, and the norm that the next product reads."""
        parts = self._buffer(
            "parts", parts_of(o, weight, self.exact), len(o), outputs(weight), dtype=torch.float32
        )
        product_parts(o, weight, parts, self.exact)
        norm.add_rms_norm(x, parts, following, eps, x, normed)

    # ------------------------------------------------------------------ memory

    def _buffer(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory by name and shape: made in the first round, the same in every later one."""
        key = (name, shape)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(shape, dtype=dtype or self.model.dtype, device=self.device)
        return self._buffers[key]

    def drafted(self, width: int) -> sampling.Rows:
        """The distributions that this round's drafts tokens[1:] were drawn from."""
        return self._candidates("q", max(self.k, 1), width, self._columns).rows

    def _candidates(self, name: str, count: int, width: int, vocabulary: int) -> _Candidates:
        key = (name, width)
        if key not in self._spaces:
            rows = sampling.rows(count, width, self.device)
            space = sampling.lists(1 if name == "q" else count, width, vocabulary, self.device)
            self._spaces[key] = _Candidates(rows, space)
        return self._spaces[key]


def _head_weight(head: DraftHead) -> Weight:
    if isinstance(head, Int8Head):
        return Int8Weight(head.codes, head.scale)
    assert isinstance(head, FullHead)
    return head.weight
