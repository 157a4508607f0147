"""The repetition stop: an output that has gone round in a loop for long enough ends there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_PERIOD = 256  # tokens of the longest loop that is looked for
LOOP_TOKENS = 180  # how long a loop must have lasted; at least its first pass and two more


class LoopDetector:
    """Takes an output's tokens one by one and says when it is in a loop.

    A loop of period p has lasted n tokens when each of the last n equals the one p places before it.
    """

    def __init__(self) -> None:
        self._recent: NDArray[np.int64] = np.full(MAX_PERIOD, -1, dtype=np.int64)  # newest first
        self._same: NDArray[np.int64] = np.zeros(MAX_PERIOD, dtype=np.int64)  # by period − 1
        periods = np.arange(1, MAX_PERIOD + 1)
        self._least = np.maximum(2 * periods, LOOP_TOKENS - periods)

    def push(self, token: int) -> bool:
        """Whether the output, with this token, has been in one loop for long enough."""
        self._same = np.where(self._recent == token, self._same + 1, 0)
        self._recent = np.roll(self._recent, 1)
        self._recent[0] = token
        return bool((self._same >= self._least).any())
