"""``graph=full`` on a CPU: a round's steps as lists of native calls, recorded once and played as one call.

Nothing of Python is left between the layers: what a captured CUDA graph is to a GPU. The functions are
those of the eager round with native arithmetic, in the same order: the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sm70lab.engine.attention import GatedAttention
from sm70lab.engine.draft_head import DraftHead
from sm70lab.engine.gdn_layer import GatedDeltaNet
from sm70lab.engine.kv_cache import KVCache, LayerKV
from sm70lab.engine.mlp import DenseMLP
from sm70lab.engine.model import DecoderLayer, HybridModel
from sm70lab.engine.played import Outputs, PlayedSteps
from sm70lab.engine.schemes import Rows
from sm70lab.engine.state import LayerState, Metadata, StateStore
from sm70lab.kernels import native
from sm70lab.kernels.native import Tape


class Recorded(PlayedSteps):
    """Steps as tapes of native calls."""

    def __init__(
        self, model: HybridModel, store: StateStore, kv: KVCache, mtp_kv: KVCache, head: DraftHead, width: int
    ) -> None:
        super().__init__(model, store, kv, mtp_kv, head, width)
        self._steps: dict[tuple[str, int], tuple[Tape, Outputs]] = {}

    def verify(self, tokens: torch.Tensor, metadata: Metadata) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``PlayedSteps.verify``; a hazard acts on the pools behind the tape."""
        played = super().verify(tokens, metadata)
        self.store.advance_in_place()
        return played

    def _play(self, name: str, rows: int, run: Callable[[], Outputs]) -> Outputs:
        step = self._steps.get((name, rows))
        if step is None:
            with native.recording() as tape:
                outputs = run()
            self._steps[name, rows] = (tape, outputs)
            return outputs
        step[0].play()
        return step[1]

    def _verify(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model, m = self.model, self.metadata
        x = native.embed(ids, model.embedding)
        rotary = native.rotary(m.start, model.frequencies, ids.shape[1], x)
        states, caches = iter(self.store.layers), iter(self.kv.layers)
        for layer in model.decoder_layers():
            normed = native.rms_norm(x, layer.input_norm, layer.eps)
            if layer.gdn is not None:
                x = self._gdn(layer.gdn, normed, x, next(states))
            elif layer.attention is not None:
                x = _attend(layer.attention, normed, x, rotary, next(caches), m.slots, m.start)
            x = _feed_forward(layer, x)
        hidden = native.rms_norm(x, model.norm, model.arch.rms_norm_eps)
        return hidden, native.linear(hidden, model.head)

    def _gdn(
        self, gdn: GatedDeltaNet, normed: torch.Tensor, x: torch.Tensor, state: LayerState
    ) -> torch.Tensor:
        m, shape = self.metadata, gdn.shape
        values = shape.value_heads * shape.value_dim
        sizes = [shape.conv_dim, values, shape.value_heads, shape.value_heads]
        mixed_qkv, z, b, a = native.linear(normed, gdn.in_proj).split(sizes, dim=-1)
        conv_pool, *held = state
        conv = native.conv_rows(conv_pool, m.slots, m.conv_accepted, mixed_qkv, len(gdn.conv_weight))
        heads = (shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim)
        weights = (gdn.conv_weight, a, b, gdn.neg_decay_rate, gdn.dt_bias)
        rows = Rows(*native.gdn_rows(conv, *weights, *heads))
        o = self.store.kind.in_place(held, m.slots, m.ssm_accepted, rows)
        native.write_rows(conv_pool, m.slots, conv)
        o = native.gated_rms_norm(o, z, gdn.norm_weight, shape.eps)
        return native.linear(o.flatten(-2), gdn.out_proj, None, x)

    def _draft(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        model, mtp = self.model, self.model.mtp
        assert mtp is not None and mtp.layer.attention is not None
        rotary = native.rotary(self.draft_start, model.frequencies, ids.shape[1], hidden)
        pair = (
            native.rms_norm(native.embed(ids, model.embedding), mtp.norm_embedding, mtp.eps),
            native.rms_norm(hidden, mtp.norm_hidden, mtp.eps),
        )
        x = native.linear(native.beside(*pair), mtp.fc)
        normed = native.rms_norm(x, mtp.layer.input_norm, mtp.layer.eps)
        place = (self.mtp_kv.layers[0], self.draft_slots, self.draft_start)
        x = _feed_forward(mtp.layer, _attend(mtp.layer.attention, normed, x, rotary, *place))
        return native.rms_norm(x, mtp.norm, mtp.eps)

    def _draft_one(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        out = self._draft(ids, self._row_in)
        native.copy(out, self._row_in)
        return (self.head.logits(out[:, 0]),)


def _attend(
    attention: GatedAttention,
    normed: torch.Tensor,
    x: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    kv: LayerKV,
    slots: torch.Tensor,
    start: torch.Tensor,
) -> torch.Tensor:
    a = attention
    q_gate, k, v = native.linear(normed, a.in_proj, a.in_bias).split(a.sizes, dim=-1)
    norms = (a.q_norm, a.k_norm, a.eps)
    o = native.gated_attention(q_gate, k, v, *norms, *rotary, *kv, slots, start)
    return native.linear(o, a.out_proj, a.out_bias, x)


def _feed_forward(layer: DecoderLayer, x: torch.Tensor) -> torch.Tensor:
    mlp = layer.mlp
    assert isinstance(mlp, DenseMLP)
    normed = native.rms_norm(x, layer.post_norm, layer.eps)
    return native.swiglu(normed, mlp.gate_up, mlp.down, x)
