"""Hashes of all windows of a sequence from one prefix sum (Karp and Rabin 1987).

Window [a, b) has the hash Σ m(s_j)·B^(j − a) modulo 2⁶⁴, m a mixing of the symbol's bits. Equal windows
always have equal hashes; unequal ones share theirs by a chance of about 2⁻⁶⁴ unless the text is made
for it. Whoever needs an exact answer compares the symbols too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BASE = 0x9E3779B97F4A7C15  # odd: it has an inverse modulo 2⁶⁴
_INVERSE = pow(_BASE, -1, 1 << 64)


class RollingHash:
    """Prefix sums over a sequence; ``symbols`` has one entry a symbol, 0 to 2³² − 1."""

    def __init__(self, symbols: NDArray[np.int64]) -> None:
        self._powers = _powers(_BASE, symbols.size + 1)
        self._inverses = _powers(_INVERSE, symbols.size + 1)
        self._sums = np.zeros(symbols.size + 1, dtype=np.uint64)
        np.cumsum(_mixed(symbols) * self._powers[:-1], out=self._sums[1:])

    def windows(self, size: int) -> NDArray[np.uint64]:
        """The hash of each window of ``size`` symbols, one entry a start; empty if there is none."""
        count = self._sums.size - size
        if count < 1:
            return np.empty(0, dtype=np.uint64)
        return np.asarray((self._sums[size:] - self._sums[:-size]) * self._inverses[:count])

    def repeats(self, ends: NDArray[np.int64], periods: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether [v − 2p, v) equals [v − 3p, v − p), for each v and p with 3p ≤ v."""
        later = self._sums[ends] - self._sums[ends - 2 * periods]
        earlier = self._sums[ends - periods] - self._sums[ends - 3 * periods]
        return np.asarray(later == earlier * self._powers[periods])


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    powers = np.full(count, base, dtype=np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers)


def _mixed(symbols: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Each symbol as 64 well-mixed bits (the finalizer of splitmix64)."""
    x = (symbols.astype(np.uint64) + np.uint64(1)) * np.uint64(_BASE)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
