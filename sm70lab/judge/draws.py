"""Are these tokens draws from their distributions? Tests over a whole run, and their one p-value.

Under a lossless route token t is a draw from p'_t given all before it. Two tests, each blind where
the other sees:

- Uniformity: low + U·(high − low), with the token's interval in the cumulative p' and U uniform, is
  uniform and independent over t (randomised probability-integral transform: Brockwell 2007); tested by
  Kolmogorov–Smirnov. Exact for any number of tokens.
- Scores: X = log p'(token) + H(p') and S = Σ p'² − p'(token) have mean 0 and a known covariance, whatever
  came before, so their sums are about normal (martingale central limit theorem) and their squared
  Mahalanobis length is about χ² with two degrees of freedom. X is the score of the temperature; S that
  of a random disturbance of the logits: with independent noise of variance v on them the mean
  probability of a token becomes p'·(1 + v·(Σ p'² − p')) to first order, which is what a damaged state
  does. Rao's score test: for small changes of these kinds no test needs fewer tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from sm70lab.schema import TokenScores

Array = NDArray[np.float64]

# Σ variance from which a sum counts as normal: log p' is skewed, so below it one rare token can outweigh
# the sum. In nats², simulated rate of p < 1/3000, over nominal: 2.2 at 27, 1.3 at 40, 0.8 at 108.
NORMAL_VARIANCE = 40.0
NORMAL_COLLISIONS = 10.0  # of p', whose steps are below 1
NEARLY_ALIKE = 0.999  # squared correlation from which X and S say the same


@dataclass(frozen=True)
class ScoreTest:
    """The standardised sums, and the p-value of both; NaN where there is too little variance."""

    z: float  # of X: positive where tokens are too likely
    z_collision: float  # of S: positive where draws agree less often than they should
    p_value: float


def uniformity_test(pit: Array) -> tuple[float, float]:
    """Kolmogorov–Smirnov statistic of the transforms, and its p-value."""
    result = stats.kstest(pit, "uniform")
    return float(result.statistic), float(result.pvalue)


def score_test(parts: Sequence[tuple[TokenScores, NDArray[np.bool_]]]) -> ScoreTest:
    """The score test over the chosen tokens of several outputs."""
    x = _total(parts, lambda s: s.logprob + s.entropy)
    y = _total(parts, lambda s: s.collision - np.exp(s.logprob))
    xx, yy = _total(parts, lambda s: s.variance), _total(parts, lambda s: s.collision_variance)
    xy = -_total(parts, lambda s: s.covariance)
    z, z_collision = _ratio(x, xx), _ratio(y, yy)
    if xx < NORMAL_VARIANCE:
        return ScoreTest(z, z_collision, float("nan"))
    if yy < NORMAL_COLLISIONS or xy**2 > NEARLY_ALIKE * xx * yy:
        return ScoreTest(z, z_collision, float(2 * stats.norm.sf(abs(z))))
    length = (yy * x**2 - 2 * xy * x * y + xx * y**2) / (xx * yy - xy**2)
    return ScoreTest(z, z_collision, float(stats.chi2.sf(length, 2)))


def cauchy_combination(p_values: Sequence[float]) -> float:
    """One p-value from several, whatever their dependence (Liu and Xie 2020).

    The mean of tan((½ − p)π) is about standard Cauchy in its upper tail even for dependent tests. Each
    must be uniform, not merely at most so: a bound that says 1 would outvote every other.
    """
    p = np.clip(np.asarray(p_values, dtype=np.float64), 1e-300, 1 - 1e-12)
    small = p < 1e-15  # tan loses its digits there
    terms = np.where(small, 1.0 / (p * np.pi), np.tan((0.5 - p) * np.pi))
    mean = float(terms.mean())
    return float(stats.cauchy.sf(mean))


def _total(
    parts: Sequence[tuple[TokenScores, NDArray[np.bool_]]], value: Callable[[TokenScores], Array]
) -> float:
    with np.errstate(invalid="ignore"):  # −inf outside the support, which is not chosen
        return float(sum(np.sum(value(s).astype(np.float64)[chosen]) for s, chosen in parts))


def _ratio(total: float, variance: float) -> float:
    return float(total / np.sqrt(variance)) if variance > 0 else 0.0
