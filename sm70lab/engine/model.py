"""The hybrid model: embedding, GDN and attention layers, final norm, head, and the MTP draft head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from sm70lab.engine import forward_context
from sm70lab.engine.architecture import Architecture
from sm70lab.engine.attention import GatedAttention, Rotary
from sm70lab.engine.checkpoint import Weights
from sm70lab.engine.forward_context import ForwardContext
from sm70lab.engine.gdn import Place
from sm70lab.engine.gdn_layer import GatedDeltaNet
from sm70lab.engine.kv_cache import KVCache, LayerKV
from sm70lab.engine.mlp import build_mlp
from sm70lab.engine.routes import REFERENCE, Boundary, Opaque
from sm70lab.engine.state import LayerState, Metadata, StateStore
from sm70lab.kernels import native
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.kernels.attention import inverse_frequencies, rotary_table
from sm70lab.kernels.linear import linear
from sm70lab.kernels.norm import rms_norm

Backend = str | Callable[..., Any]  # of torch.compile


class DecoderLayer(nn.Module):
    """Pre-norm residual layer: token mixer (GDN or attention), then the feed-forward."""

    def __init__(
        self, arch: Architecture, weights: Weights, prefix: str, dtype: torch.dtype, kind: str, moe: bool
    ) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.eps = arch.rms_norm_eps
        self.input_norm = nn.Buffer(1 + weights.read(prefix + "input_layernorm.weight").to(wide))
        self.post_norm = nn.Buffer(1 + weights.read(prefix + "post_attention_layernorm.weight").to(wide))
        self.gdn = (
            GatedDeltaNet(arch, weights, prefix + "linear_attn.", dtype)
            if kind == "linear_attention"
            else None
        )
        self.attention = (
            GatedAttention(arch, weights, prefix + "self_attn.", dtype) if kind == "full_attention" else None
        )
        self.mlp = build_mlp(arch, weights, prefix + "mlp.", dtype, moe)

    def feed_forward(self, x: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
        normed = rms_norm(x, self.post_norm, self.eps, arithmetic)
        out: torch.Tensor = x + self.mlp(normed, arithmetic)
        return out


class MTPHead(nn.Module):
    """Native multi-token prediction: one attention layer over fc(cat(embedding, hidden))."""

    def __init__(self, arch: Architecture, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.eps = arch.rms_norm_eps
        self.fc = nn.Buffer(weights.read("mtp.fc.weight").to(dtype))
        self.norm_embedding = nn.Buffer(1 + weights.read("mtp.pre_fc_norm_embedding.weight").to(wide))
        self.norm_hidden = nn.Buffer(1 + weights.read("mtp.pre_fc_norm_hidden.weight").to(wide))
        self.norm = nn.Buffer(1 + weights.read("mtp.norm.weight").to(wide))
        self.layer = DecoderLayer(
            arch, weights, "mtp.layers.0.", dtype, "full_attention", arch.num_experts > 0
        )

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        rotary: Rotary,
        kv: LayerKV,
        slots: torch.Tensor,
        start: torch.Tensor,
        boundary: Boundary,
    ) -> torch.Tensor:
        """Row i: the embedding of token i + 1 with the hidden state of position i, both [B, T, hidden].

        ``hidden`` is the target's output after its final norm, or this head's own output when it
        drafts recursively. Returns [B, T, hidden]; the shared head turns it into logits.
        """
        how = boundary.arithmetic
        pair = (
            rms_norm(embedded, self.norm_embedding, self.eps, how),
            rms_norm(hidden, self.norm_hidden, self.eps, how),
        )
        x = linear(torch.cat(pair, dim=-1), self.fc, None, how)
        assert self.layer.attention is not None
        normed = rms_norm(x, self.layer.input_norm, self.eps, how)
        x = x + self.layer.attention(normed, rotary, kv, slots, start, boundary)
        return rms_norm(self.layer.feed_forward(x, how), self.norm, self.eps, how)


class HybridModel(nn.Module):
    """The target model with its draft head. Stateless: caches and states come in and go out."""

    def __init__(self, arch: Architecture, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        self.arch, self.dtype = arch, dtype
        wide = torch.promote_types(dtype, torch.float32)
        self.embedding = nn.Buffer(weights.read("model.embed_tokens.weight").to(dtype))
        self.layers = nn.ModuleList(
            DecoderLayer(arch, weights, f"model.layers.{i}.", dtype, kind, arch.is_moe_layer(i))
            for i, kind in enumerate(arch.layer_types)
        )
        self.norm = nn.Buffer(1 + weights.read("model.norm.weight").to(wide))
        self.frequencies = nn.Buffer(inverse_frequencies(arch.rotary_dim, arch.rope_theta))
        self.head: torch.Tensor = self.embedding
        if not arch.tie_word_embeddings:
            self.head = nn.Buffer(weights.read("lm_head.weight").to(dtype))
        self.mtp = MTPHead(arch, weights, dtype) if arch.mtp_layers else None
        self.native = False  # whether rounds may run the C++ kernels
        self.pieces = False  # whether a compiled round's outputs lie in memory that its next run overwrites
        self._round_forward = self.forward
        self._round_draft = self._draft

    def compile_rounds(self, backend: Backend = "inductor", pieces: bool = False) -> None:
        """Compile the verify (or one-row) step and the draft step, each into one graph a shape.

        A graph is chosen by phase, never by shape: prefills stay eager, their row counts vary.
        ``pieces``: what lies between opaque operators is replayed as CUDA graphs.
        """
        self.pieces = pieces
        options: dict[str, Any] = {"triton.cudagraphs": True, "graph_partition": True}
        more = {"options": options} if pieces else {}
        compiled = partial(torch.compile, backend=backend, dynamic=False, fullgraph=True, **more)
        self._round_forward = compiled(self.forward)
        if not self.native:  # nothing is left to fuse there, and the dispatcher would cost a tenth of a round
            self._round_draft = compiled(self._draft)

    def decoder_layers(self) -> Iterable[DecoderLayer]:
        """The layers in order."""
        return cast("Iterable[DecoderLayer]", self.layers)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def rotary(self, start: torch.Tensor, tokens: int, arithmetic: Arithmetic) -> Rotary:
        """cos and sin [B, T, rotary_dim] for positions start..start + T − 1."""
        if arithmetic is Arithmetic.native:
            return native.rotary(start, self.frequencies, tokens, self.norm)
        positions = start[:, None] + torch.arange(tokens, device=start.device)
        cos, sin = rotary_table(positions, self.frequencies)
        return cos.to(self.dtype), sin.to(self.dtype)

    def forward(
        self,
        tokens: torch.Tensor,
        states: list[LayerState],
        metadata: Metadata,
        rotary: Rotary,
        kv: list[LayerKV],
        scheme: str,
        prefill_room: int,
        boundary: Boundary,
    ) -> tuple[torch.Tensor, list[LayerState]]:
        """Run T rows of each sequence.

        tokens [B, T] int64; states and metadata from ``StateStore``, kv from ``KVCache`` (written in
        place), rotary for the rows' positions. Returns the hidden states after the final norm,
        [B, T, hidden], and the GDN layers' new pool rows. Without ``states`` the layers look theirs up
        in the forward context, and leave the new ones there.
        """
        how = boundary.arithmetic
        x = F.embedding(tokens, self.embedding)
        caches = iter(kv)
        where = (metadata.slots, metadata.conv_accepted, metadata.ssm_accepted)
        outgoing: list[LayerState] = []
        for layer in self.decoder_layers():
            normed = rms_norm(x, layer.input_norm, layer.eps, how)
            if layer.gdn is not None:
                number = len(outgoing)
                place = Place(states[number], *where, scheme, prefill_room) if states else None
                mixed, state = layer.gdn(normed, number, place, boundary)
                outgoing.append(state)
            elif layer.attention is not None:
                slots, start = metadata.slots, metadata.start
                mixed = layer.attention(normed, rotary, next(caches), slots, start, boundary)
            x = layer.feed_forward(x + mixed, how)
        return rms_norm(x, self.norm, self.arch.rms_norm_eps, how), outgoing

    def run(
        self,
        tokens: torch.Tensor,
        slots: Sequence[int],
        store: StateStore,
        kv: KVCache,
        prefill: bool,
        boundary: Boundary = REFERENCE,
    ) -> torch.Tensor:
        """Open a round on ``store``, run the rows, hand the new states back; the caller commits."""
        metadata = store.begin(slots, tokens.shape[1], prefill)
        if prefill:
            boundary = replace(boundary, opaque=Opaque.nothing, arithmetic=Arithmetic.plain, packed=False)
        return self.run_rows(tokens, store, kv, metadata, store.rows if prefill else 0, boundary)

    def run_rows(
        self,
        tokens: torch.Tensor,
        store: StateStore,
        kv: KVCache,
        metadata: Metadata,
        room: int,
        boundary: Boundary,
    ) -> torch.Tensor:
        """``run`` in a round that is open: nothing here waits for the device."""
        forward = self.forward if boundary.opaque is Opaque.nothing else self._round_forward
        # Outside the graph: a compiler's own cosine may depend on how many rows it takes at once.
        rotary = self.rotary(metadata.start, tokens.shape[1], boundary.arithmetic)
        settings = (rotary, kv.layers, store.scheme, room, boundary)
        if boundary.in_context:
            context = ForwardContext(store.layers, metadata, store.scheme, room)
            with forward_context.entered(context):
                hidden, _ = forward(tokens, [], metadata, *settings)
            states = context.taken()
        else:
            hidden, states = forward(tokens, store.layers, metadata, *settings)
        store.advance(states, metadata)
        return hidden.clone() if self.pieces else hidden

    def first_non_finite_layer(self, tokens: torch.Tensor, store: StateStore, kv: KVCache) -> int | None:
        """The first layer with a non-finite output when ``tokens`` [1, T] run from an empty state."""
        found: list[int] = []

        def watch(layer: int) -> Callable[[nn.Module, object, torch.Tensor], None]:
            return lambda _, __, out: None if bool(torch.isfinite(out).all()) else found.append(layer)

        hooks = [layer.mlp.register_forward_hook(watch(i)) for i, layer in enumerate(self.decoder_layers())]
        try:
            self.run(tokens, [0], store, kv, prefill=True)
        finally:
            for hook in hooks:
                hook.remove()
        return found[0] if found else None

    def draft(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        slots: torch.Tensor,
        start: torch.Tensor,
        kv: KVCache,
        boundary: Boundary = REFERENCE,
    ) -> torch.Tensor:
        """Run the MTP head on T rows: tokens i + 1 [B, T] with hidden states i [B, T, hidden]."""
        if boundary.opaque is Opaque.nothing:
            rotary = self.rotary(start, tokens.shape[1], boundary.arithmetic)
            return self._draft(tokens, hidden, rotary, kv.layers[0], slots, start, boundary)
        count, pool = len(tokens), len(kv.layers[0][0])
        missing = max(pool - 1 - count, 0)
        if missing:  # one graph for any number of running sequences: the last pool row is scratch
            tokens, hidden, start = (
                torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) for x in (tokens, hidden, start)
            )
            slots = torch.cat((slots, slots.new_full((missing,), pool - 1)))
        rotary = self.rotary(start, tokens.shape[1], boundary.arithmetic)
        out = self._round_draft(tokens, hidden, rotary, kv.layers[0], slots, start, boundary)[:count]
        return out.clone() if self.pieces else out

    def _draft(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        rotary: Rotary,
        kv: LayerKV,
        slots: torch.Tensor,
        start: torch.Tensor,
        boundary: Boundary,
    ) -> torch.Tensor:
        assert self.mtp is not None
        embedded = F.embedding(tokens, self.embedding)
        out: torch.Tensor = self.mtp(embedded, hidden, rotary, kv, slots, start, boundary)
        return out

    def logits(self, hidden: torch.Tensor, arithmetic: Arithmetic = Arithmetic.plain) -> torch.Tensor:
        """[..., hidden] → [..., vocabulary] in float32 or better."""
        return linear(hidden, self.head, None, arithmetic).to(torch.promote_types(self.dtype, torch.float32))
