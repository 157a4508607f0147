"""Randomness keyed by (seed, prompt, repeat, stream, position, token id), not drawn from a stream.

A route, a batch shape or a draft count therefore never shifts another draw. The generator is
SplitMix64's finaliser (Steele, Lea and Flood 2014) applied once a key word, in int64 arithmetic
that any device has.
"""

from __future__ import annotations

from enum import IntEnum

import torch

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


class Stream(IntEnum):
    """What a draw is for. Draws of different streams are independent."""

    target = 1  # tokens drawn from the target distribution
    draft = 2  # tokens drawn from the draft distribution
    accept = 3  # the acceptance test of rejection sampling
    residual = 4  # the token that replaces a rejected draft


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_int(z: int) -> int:
    """SplitMix64 finaliser on a Python integer; the twin of ``_mix``."""
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


class KeyedNoise:
    """Uniform and Gumbel noise of one generation."""

    def __init__(self, seed: int, prompt: int, repeat: int) -> None:
        key = 0
        for word in (seed, prompt, repeat):
            key = _mix_int(key + (word + 1) * GOLDEN)
        self._keys = {stream: _mix_int(key + stream * GOLDEN) for stream in Stream}

    def _hash(self, stream: Stream, positions: torch.Tensor) -> torch.Tensor:
        return _mix(positions * _signed(GOLDEN) + _signed(self._keys[stream]))

    def uniform(self, stream: Stream, positions: torch.Tensor) -> torch.Tensor:
        """One number in (0, 1) a position: float64, the shape of ``positions`` (int64)."""
        return _to_unit(_mix(self._hash(stream, positions)))

    def gumbel(self, stream: Stream, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """−log(−log U) for each token id: positions [R], ids [R, n] int64 → float64 [R, n]."""
        keyed = self._hash(stream, positions)[:, None] + (ids + 1) * _signed(GOLDEN)
        return -torch.log(-torch.log(_to_unit(_mix(keyed))))


def _to_unit(bits: torch.Tensor) -> torch.Tensor:
    """The upper 52 bits as the middle of one of 2^52 equal cells of (0, 1), float64."""
    return (_shift(bits, 12).double() + 0.5) * 2.0**-52
