"""Statistics of comparisons: exact where the data are counts, resampled where they are speeds.

scipy does the arithmetic; this file says which test answers which question, and in words where the
data are too few for an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from scipy import stats

RESAMPLES = 9999  # of the bootstrap; also the most sign patterns that are tried one by one (13 pairs)
INTERVAL_PAIRS = 3  # fewer give no interval


@dataclass(frozen=True)
class PassRate:
    """Passes among judged generations (or runs) with the exact interval of Clopper and Pearson (1934)."""

    passed: int
    judged: int
    low: float
    high: float

    @property
    def rate(self) -> float:
        """NaN where nothing was judged."""
        return self.passed / self.judged if self.judged else math.nan


@dataclass(frozen=True)
class SpeedRatio:
    """A route's speed over the baseline's, paired: the geometric mean of the pairs' ratios.

    ``low`` and ``high`` are NaN, and ``p_value`` 1, where ``words`` say why there is no interval.
    """

    ratio: float
    low: float
    high: float
    p_value: float  # two-sided, H0: no difference
    pairs: int
    words: str = ""


def pass_rate(passed: int, judged: int, confidence: float = 0.95) -> PassRate:
    """Pass rate with its Clopper–Pearson interval; (0, 1) where nothing was judged."""
    if judged == 0:
        return PassRate(0, 0, 0.0, 1.0)
    found = stats.binomtest(passed, judged).proportion_ci(confidence, method="exact")
    return PassRate(passed, judged, float(found.low), float(found.high))


def unpaired_p(a: PassRate, b: PassRate) -> float:
    """Two-sided p of equal pass rates of independent samples: Boschloo (1970), exact."""
    if not a.judged or not b.judged:
        return 1.0
    table = [[a.passed, b.passed], [a.judged - a.passed, b.judged - b.passed]]
    return float(stats.boschloo_exact(table).pvalue)


def paired_p(only_a: int, only_b: int) -> float:
    """Two-sided p of equal pass rates from the pairs in which one side alone passed: exact McNemar (1947).

    Pairs that agree say nothing; given their number, the others are Binomial(n, 1/2) if the rates are equal.
    """
    if only_a + only_b == 0:
        return 1.0
    return float(stats.binomtest(only_a, only_a + only_b, 0.5).pvalue)


def speed_ratio(
    baseline: Sequence[float], route: Sequence[float], seed: int = 0, confidence: float = 0.95
) -> SpeedRatio:
    """The ratio route / baseline over pairs of speeds (any one unit, above 0).

    Interval: paired BCa bootstrap (Efron 1987) of the mean log-ratio, seeded. p-value: sign-flip
    permutation of the log-ratios, exact up to 13 pairs; its smallest value is 2^(1 − pairs), so that no
    few lucky pairs decide. Raises ``ValueError`` for speeds that are not above 0 or do not pair.
    """
    a, b = (np.asarray(values, dtype=np.float64) for values in (baseline, route))
    if a.shape != b.shape or not np.all(np.isfinite(a) & np.isfinite(b) & (a > 0) & (b > 0)):
        raise ValueError("speeds must come in pairs and be above 0")
    pairs = int(a.size)
    if not pairs:
        return SpeedRatio(math.nan, math.nan, math.nan, 1.0, 0, "no pair")
    logs = np.log(b) - np.log(a)
    ratio = float(np.exp(logs.mean()))
    if pairs < INTERVAL_PAIRS:
        words = f"{pairs} pair{'s' * (pairs > 1)}: too few for an interval ({INTERVAL_PAIRS} needed)"
        return SpeedRatio(ratio, math.nan, math.nan, 1.0, pairs, words)
    p_value = _sign_flip_p(logs, seed)
    if np.ptp(logs) <= 1e-12 * max(1.0, float(np.abs(logs).max())):
        words = f"the same ratio in all {pairs} pairs: nothing to resample"
        return SpeedRatio(ratio, math.nan, math.nan, p_value, pairs, words)
    found = stats.bootstrap(
        (np.log(a), np.log(b)),
        lambda x, y, axis: np.mean(y - x, axis=axis),
        paired=True,
        method="BCa",
        vectorized=True,
        confidence_level=confidence,
        n_resamples=RESAMPLES,
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return SpeedRatio(ratio, math.exp(found.low), math.exp(found.high), p_value, pairs)


def _sign_flip_p(logs: np.ndarray, seed: int) -> float:
    found = stats.permutation_test(
        (logs, np.zeros_like(logs)),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        random_state=np.random.default_rng(seed),
    )
    return float(found.pvalue)


def pairs_to_decide(alpha: float) -> int:
    """Fewest pairs at which the sign-flip test can reach ``alpha``: 2^(1 − n) ≤ alpha."""
    return 1 + math.ceil(-math.log2(alpha))


def false_discovery(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of many routes (Benjamini and Hochberg 1995).

    Of the routes whose value is below α, at most a share α is expected to be found wrongly.
    """
    return [float(p) for p in stats.false_discovery_control(p_values)] if p_values else []


def runs_needed(a: float, b: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """Runs an arm that tell pass rate ``a`` from ``b``, two-sided, at this power.

    The two-proportion formula (Fleiss, Levin and Paik 2003, 4.14, without continuity correction).
    Raises ``ValueError`` for equal rates, which no number tells apart.
    """
    if a == b:
        raise ValueError(f"pass rates {a} and {b} are equal")
    mean = (a + b) / 2
    z_alpha, z_beta = stats.norm.isf(alpha / 2), stats.norm.isf(1 - power)
    spread = z_alpha * math.sqrt(2 * mean * (1 - mean)) + z_beta * math.sqrt(a * (1 - a) + b * (1 - b))
    return math.ceil(float(spread / (a - b)) ** 2)


class Decision(str, Enum):
    """What a sequential test has found."""

    good = "good"  # the pass rate is p0 rather than p1
    bad = "bad"  # the pass rate is p1 rather than p0
    undecided = "undecided"


@dataclass(frozen=True)
class SequentialTest:
    """Wald's sequential probability ratio test (1945) of a pass rate: p0 (good) against p1 < p0 (bad).

    After each outcome the log-likelihood ratio of bad over good moves; at ``upper`` the rate is called
    bad, at ``lower`` good. P(bad | p0) ≤ α / (1 − β) and P(good | p1) ≤ β / (1 − α), together ≤ α + β.
    """

    p0: float
    p1: float
    alpha: float  # wanted P(called bad | p0)
    beta: float  # wanted P(called good | p1)

    @property
    def upper(self) -> float:
        return math.log((1 - self.beta) / self.alpha)

    @property
    def lower(self) -> float:
        return math.log(self.beta / (1 - self.alpha))

    @property
    def step_passed(self) -> float:
        """What a pass adds (below 0)."""
        return math.log(self.p1 / self.p0)

    @property
    def step_failed(self) -> float:
        """What a failure adds (above 0)."""
        return math.log((1 - self.p1) / (1 - self.p0))

    def log_ratio(self, passed: int, failed: int) -> float:
        """Log-likelihood ratio of p1 over p0 after these outcomes, whatever their order."""
        return passed * self.step_passed + failed * self.step_failed

    def decide(self, passed: int, failed: int) -> Decision:
        """The decision at this point. A caller stops at the first one that is not ``undecided``."""
        ratio = self.log_ratio(passed, failed)
        if ratio >= self.upper:
            return Decision.bad
        return Decision.good if ratio <= self.lower else Decision.undecided

    def passes_to_good(self, failed: int = 0) -> int:
        """Passes in all that end the test as good with so many failures."""
        return math.ceil((self.lower - failed * self.step_failed) / self.step_passed)

    def expected_outcomes(self, p: float) -> float:
        """Wald's approximate expected number of outcomes at pass rate ``p`` (p0 or p1)."""
        reject = self.alpha if p == self.p0 else 1 - self.beta
        drift = p * self.step_passed + (1 - p) * self.step_failed
        return (reject * self.upper + (1 - reject) * self.lower) / drift
