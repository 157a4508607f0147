"""Weights of a Gated DeltaNet layer, run along a route's boundary."""

from __future__ import annotations

import torch
from torch import nn

from sm70lab.engine import forward_context, operators
from sm70lab.engine.architecture import Architecture
from sm70lab.engine.checkpoint import Weights
from sm70lab.engine.gdn import (
    CoreWeights,
    GDNShape,
    How,
    Place,
    core,
    input_projection,
    output_projection,
)
from sm70lab.engine.routes import Boundary, Opaque
from sm70lab.engine.state import LayerState


class GatedDeltaNet(nn.Module):
    """Weights of one GDN layer, the four input projections fused into one matrix (q | k | v | z | b | a)."""

    def __init__(self, arch: Architecture, weights: Weights, prefix: str, dtype: torch.dtype) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.shape = GDNShape(
            arch.gdn_key_heads, arch.gdn_value_heads, arch.gdn_key_dim, arch.gdn_value_dim, arch.rms_norm_eps
        )
        if arch.layout == "qwen3_next":
            qkvz, ba = (weights.read(f"{prefix}in_proj_{n}.weight") for n in ("qkvz", "ba"))
            fused = _from_interleaved(self.shape, qkvz, ba)
        else:
            fused = torch.cat([weights.read(f"{prefix}in_proj_{n}.weight") for n in ("qkv", "z", "b", "a")])
        self.in_proj = nn.Buffer(fused.to(dtype))
        self.conv_weight = nn.Buffer(
            weights.read(prefix + "conv1d.weight").squeeze(1).t().contiguous().to(dtype)
        )
        self.neg_decay_rate = nn.Buffer(-weights.read(prefix + "A_log").to(wide).exp())
        self.dt_bias = nn.Buffer(weights.read(prefix + "dt_bias").to(wide))
        self.norm_weight = nn.Buffer(weights.read(prefix + "norm.weight").to(wide))
        self.out_proj = nn.Buffer(weights.read(prefix + "out_proj.weight").to(dtype))

    def forward(
        self, x: torch.Tensor, layer: int, place: Place | None, boundary: Boundary
    ) -> tuple[torch.Tensor, LayerState]:
        """The layer cut at ``boundary``: its output [B, T, hidden] and its new pool rows.

        ``place`` None: the core looks the state of GDN layer ``layer`` up in the forward context, and
        leaves the new pool rows there.
        """
        cut = boundary.opaque
        how = How(self.shape, boundary.arithmetic, boundary.packed)
        weights = CoreWeights(self.conv_weight, self.neg_decay_rate, self.dt_bias)
        state: LayerState = []
        if cut is Opaque.layer:
            assert place is not None
            y, *state = operators.gdn_layer(
                x, self.in_proj, weights, self.norm_weight, self.out_proj, place, how
            )
            return y, state
        if cut is Opaque.input_core:
            assert place is not None
            o, z, *state = operators.gdn_input_core(x, self.in_proj, weights, place, how)
        else:
            project = operators.gdn_input_projection if cut is Opaque.input_and_core else input_projection
            mixed_qkv, z, b, a = project(x, self.in_proj, how)
            if boundary.contiguous_qkv:
                mixed_qkv = mixed_qkv.contiguous()
            if place is None:
                look_up = forward_context.core if cut is Opaque.nothing else operators.gdn_core_in_context
                o = look_up(mixed_qkv, b, a, weights, layer, how)
            else:
                run = core if cut is Opaque.nothing else operators.gdn_core
                o, *state = run(mixed_qkv, b, a, weights, place, how)
        finish = operators.gdn_output_projection if cut is Opaque.core_and_output else output_projection
        return finish(o, z, self.norm_weight, self.out_proj, how), state


def _from_interleaved(shape: GDNShape, qkvz: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
    """Qwen3-Next stores rows per key head, [q, k, v·r, z·r] and [b·r, a·r]; return q | k | v | z | b | a."""
    heads, ratio = shape.key_heads, shape.value_heads // shape.key_heads
    sizes = [shape.key_dim, shape.key_dim, ratio * shape.value_dim, ratio * shape.value_dim]
    parts = qkvz.view(heads, sum(sizes), -1).split(sizes, dim=1)
    parts += ba.view(heads, 2 * ratio, -1).split([ratio, ratio], dim=1)
    return torch.cat([part.reshape(-1, qkvz.shape[-1]) for part in parts])
