"""The hybrid model: embedding, GDN and attention layers, final norm, head, and the MTP draft head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from sm70lab.engine.architecture import Architecture
from sm70lab.engine.attention import GatedAttention, Rotary
from sm70lab.engine.checkpoint import Weights
from sm70lab.engine.gdn_layer import GatedDeltaNet
from sm70lab.engine.kv_cache import KVCache, LayerKV
from sm70lab.engine.mlp import build_mlp
from sm70lab.engine.routes import REFERENCE, Boundary
from sm70lab.engine.state import LayerState, StateStore
from sm70lab.kernels.attention import inverse_frequencies, rotary_table
from sm70lab.kernels.norm import rms_norm


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

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(rms_norm(x, self.post_norm, self.eps))
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
        start: torch.Tensor,
        boundary: Boundary,
    ) -> torch.Tensor:
        """Row i: the embedding of token i + 1 with the hidden state of position i, both [B, T, hidden].

        ``hidden`` is the target's output after its final norm, or this head's own output when it
        drafts recursively. Returns [B, T, hidden]; the shared head turns it into logits.
        """
        pair = (
            rms_norm(embedded, self.norm_embedding, self.eps),
            rms_norm(hidden, self.norm_hidden, self.eps),
        )
        x = F.linear(torch.cat(pair, dim=-1), self.fc)
        assert self.layer.attention is not None
        x = x + self.layer.attention(
            rms_norm(x, self.layer.input_norm, self.eps), rotary, kv, start, boundary
        )
        return rms_norm(self.layer.feed_forward(x), self.norm, self.eps)


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
        self._round_forward = self.forward

    def compile_rounds(self) -> None:
        """Compile the verify (or one-row) step into one graph around the route's operators.

        Prefills and the draft head stay eager: their row counts vary, and a graph is chosen by
        phase, never by shape.
        """
        self._round_forward = torch.compile(self.forward, dynamic=False, fullgraph=True)

    def decoder_layers(self) -> Iterable[DecoderLayer]:
        """The layers in order."""
        return cast("Iterable[DecoderLayer]", self.layers)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def rotary(self, start: torch.Tensor, tokens: int) -> Rotary:
        """cos and sin [B, T, 1, rotary_dim] for positions start..start + T − 1."""
        positions = start[:, None] + torch.arange(tokens, device=start.device)
        cos, sin = rotary_table(positions, self.frequencies)
        return cos[:, :, None].to(self.dtype), sin[:, :, None].to(self.dtype)

    def forward(
        self,
        tokens: torch.Tensor,
        start: torch.Tensor,
        states: list[LayerState],
        accepted: torch.Tensor,
        kv: list[LayerKV],
        scheme: str,
        prefill_room: int,
        boundary: Boundary,
    ) -> tuple[torch.Tensor, list[LayerState]]:
        """Run T rows of each sequence.

        tokens [B, T] int64 at positions ``start`` [B] and on; states and accepted from
        ``StateStore``, kv from ``KVCache`` (written in place). Returns the hidden states after
        the final norm, [B, T, hidden], and the GDN layers' new states.
        """
        x = F.embedding(tokens, self.embedding)
        rotary = self.rotary(start, tokens.shape[1])
        incoming, caches = iter(states), iter(kv)
        outgoing: list[LayerState] = []
        for layer in self.decoder_layers():
            normed = rms_norm(x, layer.input_norm, layer.eps)
            if layer.gdn is not None:
                mixed, state = layer.gdn(normed, next(incoming), accepted, scheme, prefill_room, boundary)
                outgoing.append(state)
            elif layer.attention is not None:
                mixed = layer.attention(normed, rotary, next(caches), start, boundary)
            x = layer.feed_forward(x + mixed)
        return rms_norm(x, self.norm, self.arch.rms_norm_eps), outgoing

    def run(
        self,
        tokens: torch.Tensor,
        store: StateStore,
        kv: KVCache,
        prefill: bool,
        boundary: Boundary = REFERENCE,
    ) -> torch.Tensor:
        """Open a round on ``store``, run the rows, hand the new states back; the caller commits."""
        store.begin(tokens.shape[1], prefill)
        start = torch.tensor(store.position, device=tokens.device)
        room = store.rows if prefill else 0
        forward = self.forward if prefill else self._round_forward
        hidden, states = forward(
            tokens, start, store.layers, store.accepted, kv.layers, store.scheme, room, boundary
        )
        store.advance(states)
        return hidden

    def first_non_finite_layer(self, tokens: torch.Tensor, store: StateStore, kv: KVCache) -> int | None:
        """The first layer with a non-finite output when ``tokens`` [1, T] run from an empty state."""
        found: list[int] = []

        def watch(layer: int) -> Callable[[nn.Module, object, torch.Tensor], None]:
            return lambda _, __, out: None if bool(torch.isfinite(out).all()) else found.append(layer)

        hooks = [layer.mlp.register_forward_hook(watch(i)) for i, layer in enumerate(self.decoder_layers())]
        try:
            self.run(tokens, store, kv, prefill=True)
        finally:
            for hook in hooks:
                hook.remove()
        return found[0] if found else None

    def draft(
        self, tokens: torch.Tensor, hidden: torch.Tensor, start: torch.Tensor, kv: KVCache, boundary: Boundary
    ) -> torch.Tensor:
        """Run the MTP head on T rows: tokens i + 1 [B, T] with hidden states i [B, T, hidden]."""
        assert self.mtp is not None
        embedded = F.embedding(tokens, self.embedding)
        rotary = self.rotary(start, tokens.shape[1])
        out: torch.Tensor = self.mtp(embedded, hidden, rotary, kv.layers[0], start, boundary)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] → [..., vocabulary] in float32 or better."""
        return F.linear(hidden, self.head).to(torch.promote_types(self.dtype, torch.float32))
