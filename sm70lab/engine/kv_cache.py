"""Keys and values of the attention layers, written at explicit positions."""

from __future__ import annotations

import torch

from sm70lab.engine.architecture import Architecture
from sm70lab.kernels import native
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.kernels.attention import apply_rotary, causal_attention
from sm70lab.kernels.norm import rms_norm
from sm70lab.kernels.rows import by_row

PREFILL_ROWS = 64  # at a time: their scores then stay in the processor's cache
LayerKV = tuple[torch.Tensor, torch.Tensor]  # keys, values [N, Hkv, capacity, D]


class KVCache:
    """Per layer one key and one value tensor [N, Hkv, capacity, D], a row a slot.

    A rejected row is never removed: the next round writes over it, and reads stop at the
    newest row. Nothing beyond that is ever read, so the memory may hold anything.
    """

    def __init__(
        self,
        arch: Architecture,
        layers: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        slots: int = 1,
    ) -> None:
        shape = (slots, arch.num_kv_heads, capacity, arch.head_dim)
        self.capacity = capacity
        self.layers = [
            (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(layers)
        ]


def gated_attention(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    start: torch.Tensor,
    eps: float,
    arithmetic: Arithmetic,
) -> torch.Tensor:
    """Norm and rotate q and k, write T new rows into the cache, attend causally over all rows up to them.

    q_gate [B, T, Hq·2D] (q | gate for each head); k, v [B, T, Hkv·D]; norm weights [D]; cos, sin
    [B, T, rotary_dim]; keys, values [N, Hkv, capacity, D], written in rows ``slots`` [B] at
    positions ``start`` [B] and on. Returns the gated outputs [B, T, Hq·D].
    """
    if arithmetic is Arithmetic.native:
        norms = (q_norm, k_norm, eps)
        return native.gated_attention(q_gate, k, v, *norms, cos, sin, keys, values, slots, start)
    if arithmetic is Arithmetic.captured:
        return _captured_attention(
            q_gate, k, v, (q_norm, k_norm), (cos, sin), (keys, values), slots, start, eps
        )
    batch, tokens, _ = k.shape
    dim = keys.shape[-1]
    q, gate = q_gate.view(batch, tokens, -1, 2 * dim).chunk(2, dim=-1)
    q, k = (
        apply_rotary(rms_norm(x, norm, eps), cos[:, :, None], sin[:, :, None])
        for x, norm in ((q, q_norm), (k.reshape(batch, tokens, -1, dim), k_norm))
    )
    v = v.reshape(k.shape)
    outputs = []
    for b, (slot, first) in enumerate(zip(slots.tolist(), start.tolist(), strict=True)):
        end = first + tokens
        keys[slot, :, first:end] = k[b].transpose(0, 1)
        values[slot, :, first:end] = v[b].transpose(0, 1)
        width = PREFILL_ROWS if arithmetic is Arithmetic.plain else 1
        for t in range(0, tokens, width):
            newest = min(t + width, tokens)
            read = (slice(slot, slot + 1), slice(None), slice(first + newest))
            outputs.append(causal_attention(q[b : b + 1, t:newest], keys[read], values[read]))
    o = torch.cat(outputs, dim=1).view(batch, tokens, -1)
    gate = gate.reshape(o.shape)
    if arithmetic is Arithmetic.by_row:
        return by_row(lambda *row: row[0] * torch.sigmoid(row[1]), [o, gate])
    return o * torch.sigmoid(gate)


def _captured_attention(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    rotary: tuple[torch.Tensor, torch.Tensor],
    kv: LayerKV,
    slots: torch.Tensor,
    start: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The GPU's kernel, which reads slots and positions on the device."""
    from sm70lab.kernels.gpu import attention  # imports Triton

    batch, tokens, _ = k.shape
    room = attention.workspace(batch, tokens, q_gate.shape[-1] // (2 * kv[0].shape[-1]), kv[0])
    return attention.gated_attention(q_gate, k, v, *norms, *rotary, *kv, slots, start, eps, room)
