"""Keys and values of the attention layers, written at explicit positions."""

from __future__ import annotations

import torch

from sm70lab.engine.architecture import Architecture
from sm70lab.kernels.attention import causal_attention

LayerKV = tuple[torch.Tensor, torch.Tensor]  # keys, values [B, Hkv, capacity, D]


class KVCache:
    """Per layer one key and one value tensor [B, Hkv, capacity, D].

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
        batch: int = 1,
    ) -> None:
        shape = (batch, arch.num_kv_heads, capacity, arch.head_dim)
        self.capacity = capacity
        self.layers = [
            (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(layers)
        ]


def cached_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, start: torch.Tensor
) -> torch.Tensor:
    """Write T new rows into the cache at ``start`` [B] and attend causally over all rows up to them.

    q [B, T, Hq, D]; k, v [B, T, Hkv, D]. Returns [B, T, Hq·D].
    """
    tokens = q.shape[1]
    outputs = []
    for b, first in enumerate(start.tolist()):
        end = first + tokens
        keys, values = kv[0][b : b + 1], kv[1][b : b + 1]
        keys[:, :, first:end] = k[b : b + 1].transpose(1, 2)
        values[:, :, first:end] = v[b : b + 1].transpose(1, 2)
        outputs.append(causal_attention(q[b : b + 1], keys[:, :, :end], values[:, :, :end]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
