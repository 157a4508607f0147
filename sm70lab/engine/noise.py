"""Randomness keyed by (seed, prompt, repeat, stream, position, token id), not drawn from a stream.

A route, a batch shape or a draft count therefore never shifts another draw. The generator is
SplitMix64's finaliser (Steele, Lea and Flood 2014), applied once a key word.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
# Made once: a round mixes a few dozen numbers, so what NumPy does around them is what costs.
ONE, GOLDEN_WORD = np.uint64(1), np.uint64(GOLDEN)
SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
UNIT_SHIFT = np.uint64(12)


class Stream(IntEnum):
    """What a draw is for. Draws of different streams are independent."""

    target = 1  # tokens drawn from the target distribution
    draft = 2  # tokens drawn from the draft distribution
    accept = 3  # the acceptance test of rejection sampling
    residual = 4  # the token that replaces a rejected draft


def _mix_int(z: int) -> int:
    """SplitMix64's finaliser of one number."""
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same of an array, which it overwrites; uint64 arithmetic wraps."""
    z ^= z >> SHIFTS[0]
    z *= FACTORS[0]
    z ^= z >> SHIFTS[1]
    z *= FACTORS[1]
    z ^= z >> SHIFTS[2]
    return z


class KeyedNoise:
    """Uniform and Gumbel noise of one generation."""

    def __init__(self, seed: int, prompt: int, repeat: int) -> None:
        key = 0
        for word in (seed, prompt, repeat):
            key = _mix_int(key + (word + 1) * GOLDEN)
        self._keys = {stream: _mix_int(key + stream * GOLDEN) for stream in Stream}

    def words(self) -> NDArray[np.int64]:
        """Each stream's key at the place of its number, the bits of uint64: what kernels hash on a device."""
        keys = [self._keys.get(stream, 0) for stream in range(max(Stream) + 1)]  # type: ignore[call-overload]
        return np.array(keys, dtype=np.uint64).view(np.int64)

    def _hashes(self, stream: Stream, positions: Sequence[int]) -> NDArray[np.uint64]:
        key = self._keys[stream]
        return np.array([_mix_int(key + position * GOLDEN) for position in positions], dtype=np.uint64)

    def uniform(self, stream: Stream, positions: Sequence[int]) -> NDArray[np.float64]:
        """One number in (0, 1) a position."""
        return _to_unit(_mix(self._hashes(stream, positions)))

    def gumbel(self, stream: Stream, positions: Sequence[int], ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """−log(−log U) for R positions and their token ids [R, n]: [R, n]."""
        words = (ids.view(np.uint64) + ONE) * GOLDEN_WORD + self._hashes(stream, positions)[:, None]
        noise: NDArray[np.float64] = -np.log(-np.log(_to_unit(_mix(words))))
        return noise


def _to_unit(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The upper 52 bits as the middle of one of 2^52 equal cells of (0, 1)."""
    unit: NDArray[np.float64] = ((bits >> UNIT_SHIFT).astype(np.float64) + 0.5) * 2.0**-52
    return unit
