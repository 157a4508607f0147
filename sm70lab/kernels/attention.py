"""Causal grouped-query attention of the newest rows over a KV cache, and rotary positions."""

from __future__ import annotations

import torch


def inverse_frequencies(rotary_dim: int, theta: float) -> torch.Tensor:
    """θ^(−2i/d) for i < d/2, twice over: float32 [rotary_dim] (Su et al. 2021)."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return (1.0 / theta**exponents).repeat(2)


def rotary_table(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [..., rotary_dim] of position·frequency, float32."""
    angles = positions[..., None].float() * frequencies
    return angles.cos(), angles.sin()


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first rotary_dim channels of x [B, T, heads, D]; cos, sin [B, T, 1, rotary_dim]."""
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q·kᵀ/√D)·v, causal among the newest T rows, with the softmax in float32 or better.

    q [B, T, Hq, D]: the newest rows; k, v [B, Hkv, L, D]: all rows up to the newest.
    Query head h reads key head h // (Hq / Hkv). Returns [B, T, Hq·D].
    """
    batch, tokens, heads, dim = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    group = heads // kv_heads
    grouped = (q * dim**-0.5).transpose(1, 2).reshape(batch, kv_heads, group * tokens, dim)
    scores = grouped @ k.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if tokens > 1:
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        newest = scores.view(batch, kv_heads, group, tokens, length)[..., length - tokens :]
        newest.masked_fill_(future, -torch.inf)
    out: torch.Tensor = scores.softmax(-1).to(v.dtype) @ v
    return out.view(batch, heads, tokens, dim).transpose(1, 2).reshape(batch, tokens, heads * dim)
