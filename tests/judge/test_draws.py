"""The tests of draws keep their error rates, and the bets theirs at whatever token one looks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from sm70lab.judge import betting, draws
from sm70lab.schema import BETS, TokenScores
from tests.judge.conftest import score


def test_the_combination_is_uniform_for_independent_p_values() -> None:
    rng = np.random.default_rng(1)
    combined = [draws.cauchy_combination(row) for row in rng.random((2000, 3))]
    assert stats.kstest(combined, "uniform").pvalue > 0.01


def test_the_combination_holds_for_dependent_p_values() -> None:
    """Two copies of one test count as one."""
    rng = np.random.default_rng(2)
    same = rng.random(4000)
    combined = np.array([draws.cauchy_combination([p, p]) for p in same])
    np.testing.assert_allclose(combined, same, rtol=1e-6)
    correlated = stats.norm.sf(rng.multivariate_normal([0, 0], [[1, 0.8], [0.8, 1]], 20000))
    rate = np.mean([draws.cauchy_combination(row) < 0.01 for row in correlated])
    assert rate < 0.013


@pytest.mark.parametrize("p", [1e-12, 1e-40, 1e-300])
def test_the_combination_keeps_small_p_values(p: float) -> None:
    assert draws.cauchy_combination([p, 0.5, 0.5]) == pytest.approx(3 * p, rel=1e-6)
    assert draws.cauchy_combination([0.0, 1.0, 1.0]) < 1e-290


@pytest.mark.parametrize(("sharpness", "count"), [(1.5, 400), (1.5, 1500), (8.0, 400)])
def test_scores_keep_their_error_rate(sharpness: float, count: int, draw: Any) -> None:
    """Also where the text is nearly certain and the normal law does not hold: then there is no p-value."""
    found = np.array([score_test(draw(7000 + i, count, sharpness=sharpness)[1]).p_value for i in range(300)])
    known = found[~np.isnan(found)]
    for alpha in (0.05, 0.01):
        assert np.sum(known < alpha) <= stats.binom.ppf(0.999, len(known), alpha)
    if len(known) > 100:
        assert stats.kstest(known, "uniform").pvalue > 0.01


def score_test(scores: TokenScores) -> draws.ScoreTest:
    return draws.score_test([(scores, scores.in_support)])


def test_the_score_test_is_the_written_out_length(draw: Any) -> None:
    first, second = draw(3, 1500)[1], draw(4, 900)[1]
    found = draws.score_test([(first, first.in_support), (second, second.in_support)])
    s = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in vars(first)}
    sums = np.array([np.sum(s["logprob"] + s["entropy"]), np.sum(s["collision"] - np.exp(s["logprob"]))])
    cross = -s["covariance"].sum()
    matrix = np.array([[s["variance"].sum(), cross], [cross, s["collision_variance"].sum()]])
    assert found.p_value == pytest.approx(stats.chi2.sf(sums @ np.linalg.solve(matrix, sums), 2))
    np.testing.assert_allclose([found.z, found.z_collision], sums / np.sqrt(np.diag(matrix)))
    empirical = np.cov(s["logprob"] + s["entropy"], s["collision"] - np.exp(s["logprob"]))
    np.testing.assert_allclose(matrix / 2400, empirical, rtol=0.2)


def test_too_little_variance_gives_no_p_value(draw: Any) -> None:
    scores = draw(5, 100, sharpness=40.0)[1]
    assert np.isnan(score_test(scores).p_value)
    nothing = draws.score_test([(scores, np.zeros(100, dtype=bool))])
    assert (nothing.z, nothing.z_collision) == (0.0, 0.0) and np.isnan(nothing.p_value)


def test_scores_see_disturbed_logits() -> None:
    """Independent noise on the logits makes two draws agree less often."""
    rng = np.random.default_rng(3)
    p = np.full((4000, 4), 0.25) + np.array([0.2, 0.1, -0.1, -0.2])
    disturbed = p * np.exp(1.0 * rng.normal(size=p.shape))
    disturbed /= disturbed.sum(1, keepdims=True)
    tokens = np.argmax(np.cumsum(disturbed, 1) > rng.random((4000, 1)), axis=1)
    found = score_test(score(np.log(p), tokens, 4, 1.0))
    assert found.z_collision > 4 and found.p_value < 1e-4


def test_bets_win_with_probability_alpha_at_most(draw: Any) -> None:
    rng_runs = 400
    for alpha in (0.1, 0.02):
        won = sum(
            betting.alarm(betting.log_wealth(draw(5000 + i, 400)[1].log_bets), alpha) is not None
            for i in range(rng_runs)
        )
        assert won <= stats.binom.ppf(0.999, rng_runs, alpha)


def test_wealth_is_the_mixture_written_out(draw: Any) -> None:
    """Capital 1; the j-th opening takes 1/((j+1)(j+2)) of it, evenly over the alternatives."""
    bets = draw(8, 620)[1].log_bets
    wealth = np.exp(betting.log_wealth(bets))
    for after in (0, 249, 250, 619):
        opened = [j for j in range(3) if j * betting.SPACING <= after]
        expected = 1.0 - sum(1 / ((j + 1) * (j + 2)) for j in opened)
        for j in opened:
            product = np.exp(bets[j * betting.SPACING : after + 1].sum(0))
            expected += product.mean() / ((j + 1) * (j + 2))
        assert wealth[after] == pytest.approx(expected, rel=1e-9)
    assert betting.log_wealth(np.empty((0, len(BETS)))).size == 0


def test_a_late_fault_need_not_earn_back_the_sound_part(draw: Any) -> None:
    """1,500 hotter tokens after 6,000 sound ones are found about as soon as alone."""
    sound, broken = draw(11, 6000)[1].log_bets, draw(12, 1500, temperature=1.5, top_p=0.95)[1].log_bets
    alone = betting.alarm(betting.log_wealth(broken), 0.001)
    late = betting.alarm(betting.log_wealth(np.concatenate([sound, broken])), 0.001)
    assert alone is not None and late is not None
    assert late - 6000 < 2 * alone + 2 * betting.SPACING
