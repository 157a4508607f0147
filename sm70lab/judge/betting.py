"""Evidence that may be looked at after every token: bets against losslessness (an e-process).

Under a lossless route token t is a draw from p'_t given all before it. Then for any distribution r_t
on the same support, fixed before t, the wealth Π r_t(token)/p'_t(token) of who bets on r is a
martingale that starts at 1, and so is any mixture of such wealths. It exceeds 1/α at any time with
probability α at most (Ville 1939; Ramdas, Grünwald, Vovk and Shafer 2023, "Game-theoretic statistics
and safe anytime-valid inference"): looking after every token costs nothing.

The mixture runs over the alternatives of ``schema.BETS`` evenly and over the token from which the
route is broken: a bet is opened every ``SPACING`` tokens, the j-th (from 0) with the share
1/((j + 1)(j + 2)) of the capital, what is not yet opened is kept. A fault that begins at token 3,000
so does not first have to earn back what 3,000 sound tokens cost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SPACING = 250  # tokens between two openings


def log_wealth(log_bets: NDArray[np.float64]) -> NDArray[np.float64]:
    """log of the wealth after each token; ``log_bets`` [tokens, alternatives] → [tokens], nats."""
    tokens, alternatives = log_bets.shape
    if not tokens:
        return np.empty(0)
    total = np.cumsum(log_bets.astype(np.float64), axis=0)
    openings = np.arange(0, tokens, SPACING)
    number = np.arange(len(openings))
    share = np.log(1.0 / ((number + 1.0) * (number + 2.0)) / alternatives)
    start = np.vstack([np.zeros((1, alternatives)), total])[openings]
    opened = np.arange(tokens) // SPACING + 1
    wealth: NDArray[np.float64] = np.log(1.0 / (opened + 1.0))  # Σ of the shares not yet opened
    for begin, weight, before in zip(openings, share, start, strict=True):
        grown = np.logaddexp.reduce(total[begin:] - before, axis=1) + weight
        wealth[begin:] = np.logaddexp(wealth[begin:], grown)
    return wealth


def alarm(log_wealth: NDArray[np.float64], alpha: float) -> int | None:
    """The first token after which the wealth reaches 1/α; None where it never does."""
    reached = np.flatnonzero(log_wealth >= -np.log(alpha))
    return int(reached[0]) if len(reached) else None
