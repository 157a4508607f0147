"""Full attention with an output gate and partial rotary positions."""

from __future__ import annotations

import torch
from torch import nn

from sm70lab.engine import operators
from sm70lab.engine.architecture import Architecture
from sm70lab.engine.checkpoint import Weights
from sm70lab.engine.kv_cache import LayerKV, gated_attention
from sm70lab.engine.routes import Boundary, Opaque
from sm70lab.kernels.linear import linear

Rotary = tuple[torch.Tensor, torch.Tensor]  # cos, sin [B, T, rotary_dim]


class GatedAttention(nn.Module):
    """Weights of one attention layer; q (with its gate per head), k and v fused into one matrix."""

    in_bias: torch.Tensor | None
    out_bias: torch.Tensor | None

    def __init__(self, arch: Architecture, weights: Weights, prefix: str, dtype: torch.dtype) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.heads, self.kv_heads, self.head_dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
        self.eps = arch.rms_norm_eps
        self.sizes = [
            2 * self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.kv_heads * self.head_dim,
        ]
        names = ("q_proj", "k_proj", "v_proj")
        self.in_proj = nn.Buffer(torch.cat([weights.read(f"{prefix}{n}.weight") for n in names]).to(dtype))
        self.out_proj = nn.Buffer(weights.read(prefix + "o_proj.weight").to(dtype))
        in_bias = out_bias = None
        if arch.attention_bias:
            in_bias = torch.cat([weights.read(f"{prefix}{n}.bias") for n in names]).to(dtype)
            out_bias = weights.read(prefix + "o_proj.bias").to(dtype)
        self.register_buffer("in_bias", in_bias)
        self.register_buffer("out_bias", out_bias)
        self.q_norm = nn.Buffer(1 + weights.read(prefix + "q_norm.weight").to(wide))
        self.k_norm = nn.Buffer(1 + weights.read(prefix + "k_norm.weight").to(wide))

    def forward(
        self,
        x: torch.Tensor,
        rotary: Rotary,
        kv: LayerKV,
        slots: torch.Tensor,
        start: torch.Tensor,
        boundary: Boundary,
    ) -> torch.Tensor:
        """x [B, T, hidden] of cache rows ``slots`` at positions start..start + T − 1 → [B, T, hidden]."""
        how = boundary.arithmetic
        q_gate, k, v = linear(x, self.in_proj, self.in_bias, how).split(self.sizes, dim=-1)
        attend = gated_attention if boundary.opaque is Opaque.nothing else operators.gated_attention
        norms = (self.q_norm, self.k_norm)
        o = attend(q_gate, k, v, *norms, *rotary, *kv, slots, start, self.eps, how)
        return linear(o, self.out_proj, self.out_bias, how)
