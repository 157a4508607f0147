"""Block-aligned prefix cache: keys, values and recurrent states at block edges, by the tokens before them.

A hybrid model can start in the middle of a prompt only where its whole recurrent state was kept.
So a prefix is cached at block edges alone: each block has the keys and values of its own rows, and
the states of all GDN layers as they were after its last row. Whether a prompt's chunk or a decode
round reached the edge makes no difference.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sm70lab.engine.kv_cache import KVCache
from sm70lab.engine.state import LayerSnapshot, StateStore


@dataclass
class Block:
    """What one block edge needs to go on from there; keys and values [Hkv, block, D] a layer."""

    position: int  # tokens before the edge
    states: list[LayerSnapshot]
    hidden: torch.Tensor  # [H]: the last row's final state, which the draft head pairs with the next token
    kv: list[tuple[torch.Tensor, torch.Tensor]]
    mtp_kv: list[tuple[torch.Tensor, torch.Tensor]]


class PrefixCache:
    """At most ``capacity`` blocks; the one unused for longest is evicted first, a chain from its end.

    A block's last draft key belongs to the token after it, which is not in the block: whoever
    restores it runs that row again, with ``Block.hidden``.
    """

    def __init__(self, capacity: int, block_size: int) -> None:
        self.capacity, self.block_size = capacity, block_size
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def _keys(self, tokens: Sequence[int]) -> list[bytes]:
        """One key a whole block of ``tokens``; each covers everything before it."""
        keys, key = [], b""
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            block = np.array(tokens[end - self.block_size : end], dtype=np.int64).tobytes()
            key = hashlib.blake2b(key + block, digest_size=16).digest()
            keys.append(key)
        return keys

    def _used(self, chain: list[bytes]) -> None:
        """A chain's first block is the last to go."""
        for key in reversed(chain):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def put(
        self,
        tokens: Sequence[int],
        slot: int,
        states: list[LayerSnapshot],
        hidden: torch.Tensor,
        kv: KVCache,
        mtp_kv: KVCache,
    ) -> None:
        """Cache the block that ends after ``tokens`` (a whole number of blocks), read from ``slot``."""
        *before, key = self._keys(tokens)
        if not self.capacity or key in self._blocks:
            return
        if len(self._blocks) == self.capacity:
            # Never a block that this one needs: a chain without its start is of no use.
            oldest = next((k for k in self._blocks if k not in before), None)
            if oldest is None:
                return
            del self._blocks[oldest]
        end = len(tokens)
        span = slice(end - self.block_size, end)
        copies = [
            [(keys[slot, :, span].clone(), values[slot, :, span].clone()) for keys, values in cache.layers]
            for cache in (kv, mtp_kv)
        ]
        states = [(window.clone(), state.clone()) for window, state in states]
        self._blocks[key] = Block(end, states, hidden.clone(), *copies)
        self._used([*before, key])

    def restore(
        self, tokens: Sequence[int], slot: int, store: StateStore, kv: KVCache, mtp_kv: KVCache
    ) -> list[Block]:
        """Put the longest cached prefix of ``tokens`` into ``slot``; returns its blocks.

        The last token is never taken from the cache: its logits are wanted.
        """
        found: list[Block] = []
        keys_before = self._keys(tokens[:-1])
        for key in keys_before:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        self._used(keys_before[: len(found)])
        for block in found:
            span = slice(block.position - self.block_size, block.position)
            for cache, kept in ((kv, block.kv), (mtp_kv, block.mtp_kv)):
                for (keys, values), (old_keys, old_values) in zip(cache.layers, kept, strict=True):
                    keys[slot, :, span], values[slot, :, span] = old_keys, old_values
        if found:
            store.restore(slot, found[-1].states, found[-1].position)
        return found
