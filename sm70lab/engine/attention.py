"""Full attention with an output gate and partial rotary positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sm70lab.engine import operators
from sm70lab.engine.architecture import Architecture
from sm70lab.engine.checkpoint import Weights
from sm70lab.engine.kv_cache import LayerKV, cached_attention
from sm70lab.engine.routes import Boundary, Opaque
from sm70lab.kernels.attention import apply_rotary
from sm70lab.kernels.norm import rms_norm

Rotary = tuple[torch.Tensor, torch.Tensor]  # cos, sin [B, T, 1, rotary_dim]


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
        self, x: torch.Tensor, rotary: Rotary, kv: LayerKV, start: torch.Tensor, boundary: Boundary
    ) -> torch.Tensor:
        """x [B, T, hidden] at positions start..start + T − 1 → [B, T, hidden]."""
        batch, tokens, _ = x.shape
        q_gate, k, v = F.linear(x, self.in_proj, self.in_bias).split(self.sizes, dim=-1)
        q, gate = q_gate.view(batch, tokens, self.heads, 2 * self.head_dim).chunk(2, dim=-1)
        q = apply_rotary(rms_norm(q, self.q_norm, self.eps), *rotary)
        k = apply_rotary(rms_norm(k.view(batch, tokens, self.kv_heads, -1), self.k_norm, self.eps), *rotary)
        attend = cached_attention if boundary.opaque is Opaque.nothing else operators.cached_attention
        o = attend(q, k, v.view(batch, tokens, self.kv_heads, -1), kv, start)
        return F.linear(o * torch.sigmoid(gate.reshape(o.shape)), self.out_proj, self.out_bias)
