"""The audit under lossless routes (uniform p-values) and under known faults."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sm70lab.judge import audit, tolerance
from sm70lab.schema import Evidence, Gate, Generation, ModelDtype, Round, Status, TokenScores

RUNS = 400


def check(pairs: list[tuple[Generation, Any]], gate: Gate, **kwargs: Any) -> Evidence:
    kwargs = {"greedy": False, "tolerance": tolerance.FLOAT32} | kwargs
    return audit.evidence([g for g, _ in pairs], [s for _, s in pairs], gate, **kwargs)


def change(scores: TokenScores, index: int, **values: Any) -> TokenScores:
    """A copy with one token's entries replaced."""
    changed = {}
    for name, value in values.items():
        array = getattr(scores, name).astype(object if name == "cut_rule" else None)
        array[index] = value
        changed[name] = array
    return replace(scores, **changed)


def outside(scores: TokenScores, index: int, rule: str, gap: float) -> TokenScores:
    return change(
        scores,
        index,
        in_support=False,
        logprob=-np.inf,
        cut_rule=rule,
        cut_gap=gap,
        cut_logit=np.inf if rule == "banned" else 1.0,
        cdf_low=1.0,
        cdf_high=1.0,
    )


def test_lossless_runs_give_uniform_p_values(draw: Any, gate: Gate) -> None:
    found = [check([draw(1000 + i, 200)], gate) for i in range(RUNS)]
    assert all(f.metrics["violations"] == 0 for f in found)
    for name in ("p_ks", "p_score", "p_value"):
        values = [f.metrics[name] for f in found]
        assert stats.kstest(values, "uniform").pvalue > 0.01, name
    assert sum(f.status is Status.bad for f in found) <= 3  # alpha is 0.001
    z = [f.metrics["z"] for f in found]
    assert abs(np.mean(z)) < 3 / np.sqrt(RUNS)
    assert np.std(z) == pytest.approx(1.0, abs=0.1)


def test_the_error_rate_is_alpha_at_most(draw: Any) -> None:
    loose = Gate(audit_alpha=0.1)
    rejected = sum(check([draw(9000 + i, 200)], loose).status is Status.bad for i in range(RUNS))
    assert rejected <= stats.binom.ppf(0.999, RUNS, 0.1)
    assert rejected >= stats.binom.ppf(0.001, RUNS, 0.03)  # and the tests are not asleep


def test_repetitive_text_gives_no_false_alarm(draw: Any, gate: Gate) -> None:
    """Nearly certain tokens: Σ variance is small and its sum far from normal."""
    found = [check([draw(2000 + i, 300, sharpness=12.0)], gate) for i in range(300)]
    assert sum(f.status is Status.bad for f in found) <= 3


@pytest.mark.parametrize("temperature", [0.75, 1.3])
def test_a_shifted_temperature_is_found(temperature: float, draw: Any, gate: Gate) -> None:
    found = check([draw(5, 6000, temperature=temperature)], gate)
    assert found.status is Status.bad
    assert found.metrics["p_ks"] < 1e-6
    assert (found.metrics["z"] > 0) == (temperature < 1.0)
    assert ("likelier than" in found.line) == (temperature < 1.0)


def test_a_narrower_top_p_is_found_without_any_violation(draw: Any, gate: Gate) -> None:
    found = check([draw(6, 6000, top_p=0.8)], gate)
    assert found.metrics["violations"] == 0
    assert found.status is Status.bad
    assert "not draws from the reference" in found.line


def test_a_wider_top_p_leaves_the_support(draw: Any, gate: Gate) -> None:
    found = check([draw(7, 6000, top_p=1.0)], gate)
    assert found.status is Status.bad
    assert found.metrics["violations"] > 20
    assert found.details["first_bad"]["rule"] == "top_p"


def test_each_distribution_test_is_enough_alone(draw: Any, gate: Gate) -> None:
    generation, scores = draw(8, 3000)
    shifted = replace(scores, entropy=scores.entropy + 0.1)  # the score of the temperature only
    found = check([(generation, shifted)], gate)
    assert (found.status, found.metrics["p_ks"] > 0.01) == (Status.bad, True)
    assert "likelier than" in found.line
    scattered = replace(scores, collision=scores.collision + 0.03)  # the score of disturbed logits only
    found = check([(generation, scattered)], gate)
    assert (found.status, found.metrics["p_ks"] > 0.01) == (Status.bad, True)
    middle = replace(scores, cdf_low=np.full(3000, 0.3), cdf_high=np.full(3000, 0.7))  # KS only
    found = check([(generation, middle)], gate)
    assert (found.status, found.metrics["p_score"] > 0.01) == (Status.bad, True)
    rich = replace(scores, log_bets=scores.log_bets + 0.02)  # the bets only
    found = check([(generation, rich)], gate)
    assert (found.status, found.metrics["p_value"] > 0.01) == (Status.bad, True)
    assert "bets" in found.line


@pytest.mark.parametrize(("rule", "gap"), [("top_k", 0.5), ("min_p", 0.5), ("top_p", 0.02), ("banned", 0.0)])
def test_one_token_outside_the_support(rule: str, gap: float, draw: Any, gate: Gate) -> None:
    clean, (generation, scores) = draw(9, 500), draw(10, 500, index=1)
    generation.rounds = [Round(i, 1, 1, 2, 0.1) for i in range(0, 500, 2)]
    found = check([clean, (generation, outside(scores, 321, rule, gap))], gate)
    assert found.status is Status.bad
    assert found.metrics["violations"] == 1
    assert found.details["first_bad"] == {
        "generation": "p1-r0",
        "index": 321,
        "token": generation.token_ids[321],
        "rule": rule,
        "gap": gap,
        "place": "the target's own token of round 160",
    }
    assert "p1-r0 token 321" in found.line
    flags = audit.token_audit(generation, outside(scores, 321, rule, gap), tolerance.FLOAT32, False)
    assert np.flatnonzero(flags.violation).tolist() == [321]
    assert np.flatnonzero(np.isnan(flags.pit)).tolist() == [321]


@pytest.mark.parametrize(("rule", "scale"), [("top_k", "logit"), ("min_p", "logit"), ("top_p", "mass")])
@pytest.mark.parametrize("allowed", [tolerance.FLOAT32, tolerance.FLOAT16])
def test_the_tolerance_goes_by_the_rule(
    rule: str, scale: str, allowed: tolerance.Tolerance, draw: Any, gate: Gate
) -> None:
    generation, scores = draw(11, 500)
    limit = getattr(allowed, scale)
    within = check([(generation, outside(scores, 40, rule, limit))], gate, tolerance=allowed)
    assert (within.status, within.metrics["edge"]) == (Status.ok, 1)
    assert "1 at the edge" in within.line
    beyond = check([(generation, outside(scores, 40, rule, limit * 1.01))], gate, tolerance=allowed)
    assert (beyond.status, beyond.metrics["edge"]) == (Status.bad, 0)


@pytest.mark.parametrize(("behind", "status"), [(9e-4, Status.ok), (2e-3, Status.bad)])
def test_near_equal_candidates_may_change_places_at_a_cut(
    behind: float, status: Status, draw: Any, gate: Gate
) -> None:
    """Two logits a rounding error apart: which of them the nucleus keeps is the arithmetic's doing, though
    the one cut lies beyond it by the other's whole probability."""
    generation, scores = draw(11, 500)
    cut = change(outside(scores, 40, "top_p", 0.3), 40, cut_logit=behind)
    found = check([(generation, cut)], gate)
    assert (found.status, found.metrics["edge"]) == (status, float(status is Status.ok))


def test_tolerances_by_element_type() -> None:
    for dtype in (ModelDtype.float32, ModelDtype.float64):
        assert tolerance.tolerance_for(dtype) == tolerance.FLOAT32
    assert tolerance.tolerance_for(ModelDtype.float16) == tolerance.FLOAT16
    assert tolerance.tolerance_for(ModelDtype.bfloat16).logit > tolerance.FLOAT16.logit


def test_reproducible_and_keyed_by_generation(draw: Any) -> None:
    generation, scores = draw(12, 200)
    pit = audit.token_audit(generation, scores, tolerance.FLOAT32, False).pit
    np.testing.assert_array_equal(pit, audit.token_audit(generation, scores, tolerance.FLOAT32, False).pit)
    for other in (replace(generation, seed=-13), replace(generation, repeat=1)):
        assert not np.array_equal(pit, audit.token_audit(other, scores, tolerance.FLOAT32, False).pit)
    assert ((pit >= scores.cdf_low) & (pit <= scores.cdf_high)).all()


def test_generations_are_pooled(draw: Any, gate: Gate) -> None:
    """A fault too small for one generation is found in twenty."""
    pairs = [draw(40 + i, 300, temperature=0.9, index=i) for i in range(20)]
    assert sum(check([pair], gate).status is Status.bad for pair in pairs) <= 4
    assert check(pairs, gate).status is Status.bad


def test_too_few_tokens(draw: Any, gate: Gate) -> None:
    found = check([draw(14, 63)], gate)
    assert (found.status, found.details["needs_tokens"]) == (Status.unknown, 1)
    assert "1 more needed" in found.line
    assert check([draw(14, 64)], gate).status is Status.ok
    assert check([draw(14, 32), draw(15, 32, index=1)], gate).status is Status.ok
    generation, scores = draw(14, 10)
    assert check([(generation, outside(scores, 3, "top_k", 2.0))], gate).status is Status.bad
    assert check([], gate).status is Status.unknown


def test_part_of_the_tokens_is_not_enough(draw: Any, gate: Gate) -> None:
    first, (second, _) = draw(16, 500), draw(17, 300, index=1)
    found = check([first, (second, None)], gate)
    assert found.status is Status.unknown
    assert found.metrics["audited_share"] == 500 / 800
    assert "500 of 800" in found.line


def forget(scores: TokenScores, index: int) -> TokenScores:
    """As the reference leaves a token that it cannot score."""
    blank = {"log_bets": 0.0, "cut_rule": ""}
    kinds = {f.name: getattr(scores, f.name).dtype.kind for f in fields(TokenScores)}
    names = {n: blank.get(n, np.nan if kind == "f" else 0) for n, kind in kinds.items()}
    return change(scores, index, **names)


@pytest.mark.parametrize("greedy", [False, True])
def test_tokens_that_were_not_scored_count_for_nothing(greedy: bool, draw: Any, gate: Gate) -> None:
    generation, scores = draw(9, 300)
    if greedy:
        scores = replace(scores, argmax=np.array(generation.token_ids))
    assert check([(generation, scores)], gate, greedy=greedy).status is Status.ok
    found = check([(generation, forget(scores, 7))], gate, greedy=greedy)
    assert found.status is Status.unknown
    assert "only 299 of 300 tokens scored" in found.line
    assert found.metrics["violations"] == found.metrics["edge"] == 0
    assert found.metrics["audited_share"] == pytest.approx(299 / 300)
    if not greedy:
        rest = [np.delete(getattr(scores, f.name), 7, axis=0) for f in fields(TokenScores)]
        without = replace(generation, token_ids=[*generation.token_ids[:7], *generation.token_ids[8:]])
        alone = check([(without, TokenScores(*rest))], gate)
        for name in ("z", "z_collision", "log10_e"):
            assert found.metrics[name] == pytest.approx(alone.metrics[name])


def test_a_fault_is_found_beside_tokens_that_were_not_scored(draw: Any, gate: Gate) -> None:
    generation, scores = draw(9, 300)
    found = check([(generation, outside(forget(scores, 7), 40, "top_k", 2.0))], gate)
    assert found.status is Status.bad
    assert found.details["first_bad"]["index"] == 40


@pytest.mark.parametrize("name", [f.name for f in fields(TokenScores)])
def test_scores_must_fit_the_tokens(name: str, draw: Any) -> None:
    generation, scores = draw(18, 100)
    wrong = replace(scores, **{name: getattr(scores, name)[:-1]})
    with pytest.raises(ValueError, match=f"{name} has 99"):
        audit.token_audit(generation, wrong, tolerance.FLOAT32, False)


def test_scores_must_be_numbers(draw: Any) -> None:
    generation, scores = draw(18, 100)
    with pytest.raises(ValueError, match="entropy is not finite at token 7"):
        audit.token_audit(generation, change(scores, 7, entropy=np.nan), tolerance.FLOAT32, False)


def greedy_run(draw: Any) -> tuple[Generation, TokenScores]:
    generation, scores = draw(19, 200)
    generation.token_ids = [int(t) for t in scores.argmax]
    count = len(generation.token_ids)
    return generation, replace(scores, rank=np.zeros(count, dtype=int), top2_margin=np.full(count, 2.0))


def test_greedy_agreement(draw: Any, gate: Gate) -> None:
    found = check([greedy_run(draw)], gate, greedy=True)
    assert found.status is Status.ok
    assert found.metrics["agreement"] == 1.0
    assert "p_ks" not in found.metrics
    assert found.line == "200 of 200 tokens are the reference's argmax, ties: 0"


@pytest.mark.parametrize(
    ("rank", "margin", "status"),
    [(1, 9e-4, Status.ok), (0, 0.0, Status.ok), (1, 2e-3, Status.bad), (7, 9e-4, Status.bad)],
)
def test_greedy_ties_and_faults(rank: int, margin: float, status: Status, draw: Any, gate: Gate) -> None:
    generation, scores = greedy_run(draw)
    generation.token_ids[50] += 1
    scores = change(scores, 50, rank=rank, top2_margin=margin)
    found = check([(generation, scores)], gate, greedy=True)
    assert found.status is status
    assert found.metrics["edge"] == (status is Status.ok)
    assert found.metrics["agreement"] == 199 / 200
    if status is Status.bad:
        assert found.details["first_bad"]["index"] == 50
        assert "token 50" in found.line


@pytest.mark.parametrize(
    ("rule", "gap", "status"),
    [("top_k", 8e-4, Status.ok), ("top_k", 2e-3, Status.bad), ("banned", np.inf, Status.bad)],
)
def test_greedy_tie_of_three(rule: str, gap: float, status: Status, draw: Any, gate: Gate) -> None:
    """The third choice counts by its own gap to the best, not by the margin of the first two."""
    generation, scores = greedy_run(draw)
    generation.token_ids[50] += 1
    scores = change(scores, 50, rank=2, top2_margin=1e-4, cut_rule=rule, cut_gap=gap)
    assert check([(generation, scores)], gate, greedy=True).status is status


@pytest.mark.parametrize(("edges", "status"), [(4, Status.ok), (47, Status.bad)])
def test_many_tokens_at_the_edge_are_not_rounding(edges: int, status: Status, draw: Any, gate: Gate) -> None:
    """A nucleus of 0.99 instead of 0.95 puts 47 of 2,000 tokens within bfloat16's tolerance."""
    generation, scores = draw(3, 2000)
    outside = np.zeros(2000, dtype=bool)
    outside[:: 2000 // edges][:edges] = True
    rule = np.where(outside, "top_p", "")
    gaps = {"cut_gap": np.where(outside, 0.02, 0.0), "cut_logit": np.where(outside, 1.0, 0.0)}
    scores = replace(scores, in_support=~outside, cut_rule=rule, **gaps)
    found = audit.evidence([generation], [scores], gate, greedy=False, tolerance=tolerance.BFLOAT16)
    assert found.status is status
    assert found.metrics["violations"] == 0


def with_noise(scores: TokenScores, **changed: float) -> TokenScores:
    """As a route that draws by the position's noise: every token the reference's, but for token 40."""
    count = len(scores.logprob)
    known = {"noise_gap": 0.0, "noise_winner_logit": np.inf, "noise_winner_mass": np.inf}
    scores = replace(scores, **{name: np.full(count, value) for name, value in known.items()})
    return change(scores, 40, **changed) if changed else scores


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"noise_gap": 2e-3}, Status.bad),
        ({"noise_gap": 9e-4}, Status.ok),  # two draws that rounding may turn round
        ({"noise_gap": 3.0, "noise_winner_logit": 9e-4}, Status.ok),  # rounding may cut the winner
        ({"noise_gap": 3.0, "noise_winner_mass": 9e-5}, Status.ok),
        ({"noise_gap": 3.0, "noise_winner_logit": 2e-3, "noise_winner_mass": 2e-4}, Status.bad),
    ],
)
def test_one_token_that_the_noise_does_not_give(
    changed: dict[str, float], status: Status, draw: Any, gate: Gate
) -> None:
    generation, scores = draw(21, 500)
    found = check([(generation, with_noise(scores, **changed))], gate)
    assert found.status is status
    counted = (found.metrics["violations"], found.metrics["edge"])
    assert counted == ((1, 0) if status is Status.bad else (0, 1))
    if status is Status.bad:
        assert found.details["first_bad"]["rule"] == "noise"
        assert "not what the reference draws with the same noise, first p0-r0 token 40" in found.line


def test_tokens_proven_one_by_one_are_not_condemned_by_chance(draw: Any, gate: Gate) -> None:
    """With the noise known, the distribution tests can only doubt the noise: they need α² for it."""
    generation, scores = draw(6, 3000, temperature=0.89)
    assert check([(generation, scores)], gate).status is Status.bad
    found = check([(generation, with_noise(scores))], gate)
    assert found.metrics["p_value"] < 5e-4
    assert found.status is Status.ok
    assert "3,000 are the token that the reference draws with the same noise" in found.line


def test_the_curve_marks_the_faults(draw: Any, gate: Gate) -> None:
    pairs = [draw(30, 1200, temperature=1.4), draw(31, 300, temperature=1.4, index=1)]
    found = check(pairs, gate)
    first, second = found.details["curve"]
    assert [len(first["token"]), len(second["token"])] == [audit.CURVE_POINTS, 300]
    assert first["token"][-1] == 1199
    assert second["log10_e"][-1] > first["log10_e"][100] + 1  # one wealth, through both outputs
    highest = max(first["log10_e"] + second["log10_e"])
    assert highest == pytest.approx(found.metrics["log10_e"], abs=0.3)  # the curve shows every third token
    bad = np.flatnonzero(~pairs[0][1].in_support)
    assert set(first["faults"]) <= set(bad.tolist()) and first["faults"]
