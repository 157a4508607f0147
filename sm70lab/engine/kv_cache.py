"""Keys and values of the attention layers, written at explicit positions."""

from __future__ import annotations

import torch

from sm70lab.engine.architecture import Architecture


class KVCache:
    """Per layer one key and one value tensor [B, Hkv, capacity, D].

    A rejected row is never removed: the next round writes over it, and reads stop at the
    newest row. Nothing beyond that is ever read, so the memory may hold anything.
    """

    def __init__(
        self, arch: Architecture, layers: int, capacity: int, dtype: torch.dtype, device: torch.device, batch: int = 1
    ) -> None:
        shape = (batch, arch.num_kv_heads, capacity, arch.head_dim)
        self.capacity = capacity
        self.layers = [
            (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(layers)
        ]
