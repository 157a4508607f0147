"""The output is the target's own distribution, whatever drafts: joint distributions, exactly known.

False alarms: one in ten thousand for all chi-square and binomial tests of this file together
(Bonferroni), and with fixed seeds none by chance on one machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats

from sm70lab.engine.noise import KeyedNoise, Stream
from sm70lab.engine.rejection import Drafts, accept, one_hot
from sm70lab.engine.sampling import LogitsRules, sample, truncate
from sm70lab.engine.stopping import Delivery
from sm70lab.engine.text import NumberText
from sm70lab.schema import DraftSampling, Proposal
from tests.engine.rounds import (
    LENGTH,
    PROMPT,
    SAMPLED,
    STOP,
    Case,
    Model,
    Player,
    joint,
    p_value,
    sampling,
    target_row,
)

TESTS = 200  # more than this file makes
LIMIT = 1e-4 / TESTS
MATCHING = (DraftSampling.token_matching, DraftSampling.coupled)
RULES = [*DraftSampling, None]
TEMPERATURES = [1.0, 0.2, 1.7, 0.0, 1.0]
CUTS: list[dict[str, float]] = [
    {},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"top_k": 4, "top_p": 0.9, "min_p": 0.05},
]
PENALTIES: list[dict[str, float]] = [
    {},
    {"repetition_penalty": 1.6},
    {"presence_penalty": 0.9},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"presence_penalty": 1e12},
]
BANS: list[dict[str, object]] = [
    {},
    {"min_tokens": 2},
    {"logit_bias": {0: 1.5, 2: -2.0}},
    {"banned_ids": [4]},
    {"min_tokens": 1, "logit_bias": {1: 2.0, 4: 9.0}, "banned_ids": [4]},
]
DRAFTERS = [
    ("full", Proposal.top_k_top_p),
    ("full", Proposal.top_k),
    ("shortlist", Proposal.top_k_top_p),
    ("shortlist", Proposal.top_k),
    ("int8", Proposal.top_k),
]


def cases() -> Iterator[Case]:
    """125 cases in which any three of the six lists meet in all combinations.

    An orthogonal array of strength three: the values at 0..4 and the leading coefficient of every
    polynomial of degree two over the integers modulo 5 (Bush 1952).
    """
    for a, b, c in itertools.product(range(5), repeat=3):
        rule, temperature, cut, penalty, ban = ((a + b * j + c * j * j) % 5 for j in range(5))
        s = sampling(temperature=TEMPERATURES[temperature], **CUTS[cut], **PENALTIES[penalty], **BANS[ban])
        yield Case(RULES[rule], s, *DRAFTERS[c])


@pytest.mark.parametrize("rule", RULES)
def test_outputs_have_the_target_distribution(rule: DraftSampling | None) -> None:
    """800 outputs of three tokens a case; the matching rules give the no-draft run's own tokens."""
    model = Model(5)
    for seed, case in enumerate(cases()):
        if case.rule == rule:
            noise = KeyedNoise(seed, 0, 0)
            outputs = Player(model, case).play(800 if case.sampling.temperature else 50, noise)
            assert p_value(outputs, joint(model, case.sampling)) > LIMIT, case
            if rule in MATCHING:
                undrafted = Player(model, Case(None, case.sampling)).play(len(outputs), noise)
                assert np.array_equal(outputs, undrafted), case


@pytest.mark.parametrize("rule", RULES)
def test_twenty_thousand_draws_at_temperature_0_2(rule: DraftSampling | None) -> None:
    model, s = Model(4, spread=0.15), sampling(temperature=0.2, top_p=0.999)
    outputs = Player(model, Case(rule, s, "shortlist")).play(10_000, KeyedNoise(1, 0, 0), length=2)
    assert p_value(outputs, joint(model, s, length=2)) > LIMIT


WRONG = {  # what is drawn from, and what is reported
    "another head": (Case(DraftSampling.probabilistic, sampling(), "shortlist"), sampling(), "full"),
    "another cut": (Case(DraftSampling.probabilistic, sampling(top_p=0.7)), sampling(), "full"),
    "another temperature": (Case(DraftSampling.probabilistic, sampling()), sampling(temperature=1.3), "full"),
    "the argmax drawn": (Case(DraftSampling.greedy, sampling()), sampling(), "full"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrongly_reported_draft_distribution_is_noticed(kind: str) -> None:
    """The same chi-square has the power it needs."""
    model, (case, s, head) = Model(5), WRONG[kind]
    reported = Player(model, Case(DraftSampling.probabilistic, s, head))
    outputs = Player(model, case, reported).play(6_000, KeyedNoise(2, 0, 0))
    assert p_value(outputs, joint(model, case.sampling)) < LIMIT


def both(rule: DraftSampling, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Probability [V] that x is the draft and is accepted.

    Rejection: min(p, q). Gumbel-max with shared noise: 1 / Σ_y max(p_y/p_x, q_y/q_x), since x wins
    both races of exponential clocks (Daliri, Musco and Suresh 2024).
    """
    if rule == DraftSampling.probabilistic:
        return np.minimum(p, q)
    with np.errstate(divide="ignore", invalid="ignore"):
        shared = 1 / np.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(-1)
    return np.where((p > 0) & (q > 0), shared, 0)


@pytest.mark.parametrize("head", ["full", "shortlist", "int8"])
@pytest.mark.parametrize("rule", SAMPLED)
def test_acceptance_of_each_position_is_the_known_one(rule: DraftSampling, head: str) -> None:
    """Probabilistic: 1 − TV(p, q). Coupled: its formula, never below (1 − TV)/(1 + TV)."""
    model, s, trials = Model(5), sampling(temperature=1.2, top_p=0.95), 6_000
    player = Player(model, Case(rule, s, head))

    def passing(output: tuple[int, ...]) -> np.ndarray:
        p, row = target_row(model, s, output), player.q(output)
        q = np.zeros_like(p)
        q[row.ids[0].numpy()] = row.probs[0].double().numpy()
        found, distance = both(rule, p, q), np.abs(p - q).sum() / 2
        least = 1 - distance if rule == DraftSampling.probabilistic else (1 - distance) / (1 + distance)
        assert found.sum() >= least - 1e-6
        return found

    first = passing(())
    second = sum(first[x] * passing((x,)).sum() for x in range(5))
    outputs: list[tuple[int, ...]] = [()] * trials
    player.round(outputs, KeyedNoise(3, 0, 0), LENGTH)
    for position, rate in ((1, first.sum()), (2, second)):
        passed = sum(len(output) > position for output in outputs)
        assert stats.binomtest(passed, trials, rate).pvalue > LIMIT, f"draft position {position}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_bonus_token_obeys_a_ban_when_all_drafts_pass(temperature: float) -> None:
    """The raw argmax of every row is banned, and the drafts are the only other likely token."""
    s = sampling(temperature=temperature, banned_ids=[0])
    logits = torch.tensor([[9.0, 40.0, 0.0, 0.0], [60.0, 40.0, 0.0, 0.0], [60.0, 1.0, 1.0, 1.0]])
    target = truncate(LogitsRules(s, PROMPT, STOP).apply(logits, 0, [1, 1]), s)
    tokens = torch.tensor([1, 1])
    for rule in (DraftSampling.greedy, DraftSampling.token_matching):
        for repeat in range(300):
            noise = KeyedNoise(4, 0, repeat)
            found = accept(rule, target, Drafts(tokens, one_hot(tokens, torch.float32)), noise, range(3))
            assert found[:2] == [1, 1] and len(found) == 3 and found[2] != 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("settings", [{"presence_penalty": 1e12}, {"frequency_penalty": 1e12}])
def test_an_infinite_penalty_never_repeats_a_token(
    rule: DraftSampling | None, settings: dict[str, float]
) -> None:
    outputs = Player(Model(5), Case(rule, sampling(**settings))).play(200, KeyedNoise(5, 0, 0), length=5)
    assert (np.sort(outputs, axis=1) == np.arange(5)).all()


def test_a_round_without_drafts_delivers_the_target_token() -> None:
    player, noise = Player(Model(5), Case(None, sampling())), KeyedNoise(8, 0, 0)
    target, none = player.verified((), ())
    for rule in DraftSampling:
        for at in range(100):
            place = range(at, at + 1)
            assert (
                accept(rule, target, none, noise, place)
                == sample(target, noise, Stream.target, place).tolist()
            )


@pytest.mark.parametrize("rule", RULES)
def test_an_infinite_bias_against_a_token_leaves_none(rule: DraftSampling | None) -> None:
    s = sampling(logit_bias={2: -1e12})
    assert (Player(Model(5), Case(rule, s)).play(500, KeyedNoise(6, 0, 0)) != 2).all()


@pytest.mark.parametrize("rule", RULES)
def test_eight_repeats_are_eight_outputs(rule: DraftSampling | None) -> None:
    player = Player(Model(5), Case(rule, sampling()))
    found = {tuple(player.play(1, KeyedNoise(7, 0, repeat), length=20)[0]) for repeat in range(8)}
    assert len(found) == 8


@pytest.mark.parametrize("size", range(1, 6))
def test_rounds_deliver_what_token_by_token_delivery_does(size: int) -> None:
    """Every place of the end token, every budget, rounds of 1 to 5 tokens: no token after either."""
    for end, budget in itertools.product(range(13), range(1, 13)):
        tokens = [9 if i == end else i % 8 for i in range(13)]
        d = Delivery(NumberText(64).stream(), frozenset({9}), [], budget)
        delivered = 0
        for begin in range(0, 13, size):
            delivered += d.push(tokens[begin : begin + size])
            if d.finish_reason:
                break
        last = min(end, budget - 1)
        assert d.token_ids == tokens[: last + 1] and delivered == last + 1
        assert d.finish_reason == ("stop" if last == end else "length")
        assert d.text == "".join(f"{t} " for t in d.token_ids if t != 9)
