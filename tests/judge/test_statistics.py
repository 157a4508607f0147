"""Exact tests keep their error rates, intervals their coverage, and too few data are said in words."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from sm70lab.judge import statistics
from sm70lab.judge.statistics import Decision, SequentialTest


def test_what_clean_runs_alone_can_show() -> None:
    assert statistics.pass_rate(20, 20).low == pytest.approx(0.8316, abs=1e-4)
    assert statistics.pass_rate(59, 59).low == pytest.approx(0.9394, abs=1e-4)
    none = statistics.pass_rate(0, 0)
    assert (none.low, none.high, none.judged) == (0.0, 1.0, 0)
    assert math.isnan(none.rate)


@pytest.mark.parametrize("p", [0.02, 0.5, 0.8, 0.95, 0.99])
def test_the_pass_rate_interval_covers_at_least_95_percent(p: float) -> None:
    rates = [statistics.pass_rate(k, 20) for k in range(21)]
    covered = sum(stats.binom.pmf(k, 20, p) for k, r in enumerate(rates) if r.low <= p <= r.high)
    assert covered >= 0.95


def test_boschloo_keeps_alpha_and_reaches_the_power_that_runs_needed_promises() -> None:
    n = statistics.runs_needed(0.95, 0.5)
    arms = [statistics.pass_rate(k, n) for k in range(n + 1)]
    table = {
        (i, j): statistics.unpaired_p(arms[i], arms[j])
        for i, j in itertools.combinations_with_replacement(range(n + 1), 2)
    }

    def rejects(p: float, q: float) -> float:
        a, b = stats.binom.pmf(range(n + 1), n, p), stats.binom.pmf(range(n + 1), n, q)
        pairs = itertools.product(range(n + 1), repeat=2)
        return float(sum(a[i] * b[j] for i, j in pairs if table[min(i, j), max(i, j)] < 0.05))

    for p in (0.1, 0.5, 0.8, 0.95):
        assert rejects(p, p) <= 0.05
    assert 0.7 <= rejects(0.95, 0.5) <= 0.9  # the formula is the normal approximation's 0.8


def test_an_arm_without_outcomes_decides_nothing() -> None:
    empty, full = statistics.pass_rate(0, 0), statistics.pass_rate(5, 5)
    assert statistics.unpaired_p(empty, full) == statistics.unpaired_p(full, empty) == 1.0
    assert statistics.unpaired_p(full, full) == 1.0


@pytest.mark.parametrize(("a", "b", "p"), [(0, 0, 1.0), (0, 5, 0.0625), (6, 0, 0.03125), (3, 3, 1.0)])
def test_mcnemar_counts_the_pairs_that_disagree(a: int, b: int, p: float) -> None:
    assert statistics.paired_p(a, b) == pytest.approx(p)


def test_runs_needed_to_tell_95_percent_from_80() -> None:
    assert statistics.runs_needed(0.95, 0.8) == statistics.runs_needed(0.8, 0.95) == 76
    with pytest.raises(ValueError, match="equal"):
        statistics.runs_needed(0.9, 0.9)


def test_many_routes_are_corrected_together() -> None:
    assert statistics.false_discovery([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.04, 0.04])
    assert statistics.false_discovery([]) == []


# ----------------------------------------------------------------------------------------- speed


def speeds(seed: int, pairs: int, ratio: float, noise: float = 0.03) -> tuple[np.ndarray, np.ndarray]:
    """Pairs whose common part (prompt, machine) varies far more than their ratio."""
    rng = np.random.default_rng(seed)
    common = 100 * rng.lognormal(0, 0.5, pairs)
    return common, common * ratio * np.exp(noise * rng.normal(size=pairs))


def test_a_ratio_is_found_through_what_the_pairs_share() -> None:
    found = statistics.speed_ratio(*speeds(1, 12, 1.25))
    assert found.low < 1.25 < found.high
    assert found.high - found.low < 0.06
    assert found.p_value == pytest.approx(2 / 2**12)
    assert found == statistics.speed_ratio(*speeds(1, 12, 1.25))
    back = statistics.speed_ratio(*reversed(speeds(1, 12, 1.25)))
    assert back.ratio == pytest.approx(1 / found.ratio)


def test_the_speed_interval_covers() -> None:
    found = [statistics.speed_ratio(*speeds(seed, 12, 1.1), seed=seed) for seed in range(120)]
    covered = sum(f.low <= 1.1 <= f.high for f in found)
    assert 0.85 * 120 <= covered < 120  # 95 % nominal; BCa of twelve pairs gives about 92 %
    false_alarms = sum(
        statistics.speed_ratio(*speeds(seed, 8, 1.0), seed=seed).p_value < 0.05 for seed in range(120)
    )
    assert false_alarms <= stats.binom.isf(0.001, 120, 0.05)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ([], [], "no pair"),
        ([100.0], [150.0], "1 pair: too few"),
        ([100.0, 90.0], [150.0, 140.0], "2 pairs: too few"),
        ([100.0, 90.0, 80.0], [200.0, 180.0, 160.0], "the same ratio in all 3 pairs"),
    ],
)
def test_too_few_or_equal_pairs_get_words_and_no_interval(a: list[float], b: list[float], words: str) -> None:
    found = statistics.speed_ratio(a, b)
    assert words in found.words
    assert math.isnan(found.low) and math.isnan(found.high)
    assert found.p_value >= 2.0 ** (1 - len(a)) if a else found.p_value == 1.0


def test_few_lucky_pairs_never_decide() -> None:
    assert statistics.pairs_to_decide(0.05) == 6
    for pairs in (5, 6):
        p = statistics.speed_ratio(*speeds(3, pairs, 3.0)).p_value
        assert (p < 0.05) == (pairs >= 6)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_speeds_must_be_speeds(bad: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        statistics.speed_ratio([100.0, 100.0], [100.0, bad])
    with pytest.raises(ValueError, match="pairs"):
        statistics.speed_ratio([100.0], [])


# ------------------------------------------------------------------------------------ sequential


def simulate(test: SequentialTest, p: float, seed: int, runs: int = 20_000) -> tuple[float, float]:
    """(share called bad, mean number of outcomes), every sequence run to its decision."""
    rng = np.random.default_rng(seed)
    steps = np.where(rng.random((runs, 400)) < p, test.step_passed, test.step_failed)
    ratio = np.cumsum(steps, axis=1)
    out = (ratio >= test.upper) | (ratio <= test.lower)
    assert out.any(axis=1).all()
    end = out.argmax(axis=1)
    return float((ratio[np.arange(runs), end] >= test.upper).mean()), float(end.mean() + 1)


@pytest.mark.parametrize(("alpha", "beta"), [(0.05, 0.05), (0.01, 0.1), (0.2, 0.05)])
def test_the_sequential_test_keeps_its_error_rates(alpha: float, beta: float) -> None:
    test = SequentialTest(0.95, 0.8, alpha, beta)
    bad_when_good, outcomes_good = simulate(test, 0.95, seed=1)
    bad_when_bad, outcomes_bad = simulate(test, 0.8, seed=2)
    noise = 4 * math.sqrt(0.25 / 20_000)
    assert bad_when_good <= alpha / (1 - beta) + noise
    assert 1 - bad_when_bad <= beta / (1 - alpha) + noise
    assert bad_when_good + (1 - bad_when_bad) <= alpha + beta + noise
    # Wald's numbers leave out the overshoot of the last step, so the real ones are a little above
    for found, p in ((outcomes_good, 0.95), (outcomes_bad, 0.8)):
        assert test.expected_outcomes(p) <= found * 1.02
        assert found <= test.expected_outcomes(p) + 12


def test_about_25_outcomes_tell_95_percent_from_80() -> None:
    test = SequentialTest(0.95, 0.8, 0.05, 0.05)
    assert [round(test.expected_outcomes(p)) for p in (0.95, 0.8)] == [28, 19]
    assert test.upper == pytest.approx(math.log(19)) == -test.lower


def test_decisions_at_the_boundaries() -> None:
    test = SequentialTest(0.95, 0.8, 0.05, 0.05)
    assert test.passes_to_good() == 18
    assert [test.decide(n, 0) for n in (0, 17, 18)] == [Decision.undecided, Decision.undecided, Decision.good]
    assert [test.decide(0, n) for n in (2, 3)] == [Decision.undecided, Decision.bad]
    more = test.passes_to_good(failed=1)
    assert test.decide(more, 1) is Decision.good and test.decide(more - 1, 1) is Decision.undecided
