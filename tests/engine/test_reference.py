"""The reference's scores say what the truncated distribution says, token by token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from sm70lab.engine import reference, scoring
from sm70lab.engine.kv_cache import KVCache
from sm70lab.engine.loading import find
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.sampling import LogitsRules
from sm70lab.engine.state import StateStore
from sm70lab.errors import UsageError
from sm70lab.judge import audit, tolerance
from sm70lab.schema import (
    BETS,
    DraftSampling,
    Gate,
    Generation,
    ModelDtype,
    ModelSpec,
    Prompt,
    Sampling,
    Status,
)
from tests.engine import tiny
from tests.engine.test_sampling import truncated

OFFICIAL = Sampling(temperature=1.0, top_p=0.95, top_k=20)


def step_logits(ids: list[int], prompt_length: int) -> torch.Tensor:
    """Logits that predict each output token, one step at a time from nothing."""
    m = tiny.model()
    store = StateStore(m.arch, "slots", torch.float64, m.dtype, tiny.CPU)
    kv = KVCache(m.arch, 1, len(ids), m.dtype, tiny.CPU)
    rows = []
    with torch.inference_mode():
        for token in ids[:-1]:
            rows.append(m.logits(m.run(torch.tensor([[token]]), [0], store, kv, prefill=False)[0]))
            store.commit([1])
    return torch.cat(rows)[prompt_length - 1 :]


@pytest.mark.parametrize(
    "s",
    [
        OFFICIAL,
        Sampling(temperature=0.7, top_p=0.9, top_k=0, min_p=0.02),
        Sampling(temperature=1.0, top_k=10, presence_penalty=0.8, banned_ids=[5], min_tokens=12),
    ],
)
def test_scores_are_the_written_out_distribution(s: Sampling) -> None:
    prompt, stop = tiny.prompt(300), frozenset({4, 8})  # longer than one scoring chunk
    output = list(tiny.decode(tiny.decoder(tiny.model(), tiny.route(0), prompt, s, stop_ids=stop), 30))
    output[17] = 5  # a token that nobody drew
    scores = reference.score(tiny.model(), prompt, output, s, stop)
    logits = step_logits(prompt + output, len(prompt))
    rules = LogitsRules(s, prompt, stop)
    for i, token in enumerate(output):
        row = rules.apply(logits[i : i + 1], i, [])[0]
        rules.observe([token])
        p = truncated(row, s)
        assert scores.in_support[i] == (p[token] > 0)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(scores.logprob[i], np.log(p[token]), atol=1e-9)
        support = p[p > 0]
        np.testing.assert_allclose(scores.entropy[i], -(support * np.log(support)).sum(), atol=1e-9)
        second = (support * np.log(support) ** 2).sum() - scores.entropy[i] ** 2
        np.testing.assert_allclose(scores.variance[i], second, atol=1e-9)
        order = np.argsort(-row.numpy(), kind="stable")
        assert scores.rank[i] == list(order).index(token)
        assert scores.argmax[i] == order[0]
        np.testing.assert_allclose(scores.cdf_high[i] - scores.cdf_low[i], p[token], atol=1e-9)
        if p[token] > 0:
            np.testing.assert_allclose(scores.cdf_low[i], p[p > p[token]].sum(), atol=1e-9)
            assert scores.cut_gap[i] == 0 and scores.cut_rule[i] == ""
        else:
            assert scores.cut_gap[i] >= 0 and scores.cut_rule[i] in ("top_k", "top_p", "min_p", "banned")


def test_drafted_runs_are_clean_and_their_transforms_uniform() -> None:
    prompt = tiny.prompt(13)
    transforms = []
    for repeat in range(4):
        d = tiny.decoder(tiny.model(), tiny.route(3), prompt, OFFICIAL, repeat=repeat)
        output = tiny.decode(d, 250)
        scores = reference.score(tiny.model(), prompt, output, OFFICIAL, frozenset())
        assert scores.in_support.all()
        u = np.random.default_rng(repeat).random(len(output))
        transforms.append(scores.cdf_low + u * (scores.cdf_high - scores.cdf_low))
    assert stats.kstest(np.concatenate(transforms), "uniform").pvalue > 1e-3


def test_which_cut_a_token_violates() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]] * 2, dtype=torch.float64)
    tokens = torch.tensor([2, 3])
    by_k = scoring.score_rows(logits, tokens, Sampling(temperature=1.0, top_p=1.0, top_k=2))
    assert by_k["cut_rule"].tolist() == [1, 1]
    np.testing.assert_allclose(by_k["cut_gap"].numpy(), [1.0, 2.0])
    by_p = scoring.score_rows(logits, tokens, Sampling(temperature=1.0, top_p=0.8, top_k=0))
    p = logits[0].softmax(-1)
    assert by_p["cut_rule"].tolist() == [2, 2]
    np.testing.assert_allclose(by_p["cut_gap"].numpy(), [float(p[0] + p[1]) - 0.8, float(p[:3].sum()) - 0.8])
    greedy = scoring.score_rows(logits, tokens, Sampling(temperature=0.0))
    np.testing.assert_allclose(greedy["cut_gap"].numpy(), [2.0, 3.0])
    banned = scoring.score_rows(torch.tensor([[1.0, -torch.inf]]), torch.tensor([1]), OFFICIAL)
    assert banned["cut_rule"].tolist() == [4] and banned["cut_gap"].tolist() == [torch.inf]


@pytest.mark.parametrize("temperature", [0.01, 0.1])
def test_tokens_that_nobody_would_draw_are_unlikely_not_excused(temperature: float) -> None:
    """Without cuts every token is in the support; one in e^-700 must not look like a false zero."""
    s = Sampling(temperature=temperature, top_p=1.0, top_k=0)
    ids = np.random.default_rng(1).integers(0, 64, 200).tolist()
    scores = reference.score(tiny.model(), tiny.prompt(9), ids, s, frozenset())
    assert scores.in_support.all()
    assert np.isfinite(scores.logprob).all()
    prompt = Prompt(0, "random", "", tiny.prompt(9), 200)
    generation = Generation(prompt, 0, 1, ids, "", "length", [], 0.0, 1.0)
    found = audit.evidence([generation], [scores], Gate(), greedy=False, tolerance=tolerance.FLOAT32)
    assert found.status is Status.bad
    assert found.metrics["z"] < -5


def test_a_reference_that_is_not_finite_judges_nothing() -> None:
    m = find(ModelSpec(name="random", shape=tiny.SHAPE)).build(ModelDtype.float32, tiny.CPU)
    with torch.inference_mode():
        m.norm[0] = torch.nan
    with pytest.raises(UsageError, match="the reference's logits are not finite"):
        reference.score(m, tiny.prompt(9), [1, 2, 3], OFFICIAL, frozenset())


def test_bets_are_fair() -> None:
    """Σ over tokens of p'(token)·r(token)/p'(token) = 1."""
    logits = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 2
    s = Sampling(temperature=0.8, top_p=0.9, top_k=7)
    total = np.zeros((5, len(BETS)))
    collision = np.zeros(5)
    for token in range(12):
        row = scoring.score_rows(logits, torch.full((5,), token), s)
        p = row["logprob"].exp().numpy()
        total += p[:, None] * row["log_bets"].exp().numpy()
        collision += p**2
        assert (row["log_bets"][~row["in_support"]] == 0).all()
    np.testing.assert_allclose(total, 1.0, atol=1e-12)
    np.testing.assert_allclose(row["collision"].numpy(), collision, atol=1e-12)


@pytest.mark.parametrize("rule", [DraftSampling.coupled, DraftSampling.token_matching])
def test_the_reference_draws_the_same_tokens_with_the_same_noise(rule: DraftSampling) -> None:
    prompt = tiny.prompt(13)
    route = dataclasses.replace(tiny.route(3), draft_sampling=rule)
    s = dataclasses.replace(OFFICIAL, temperature=0.9)
    output = tiny.decode(tiny.decoder(tiny.model(), route, prompt, s), 300)
    noise = KeyedNoise(0, 0, 0)
    scores = reference.score(tiny.model(), prompt, output, s, frozenset(), noise)
    assert (scores.noise_gap == 0).all()
    assert (scores.noise_winner_logit > 0).all() and (scores.noise_winner_mass > 0).all()
    other = reference.score(tiny.model(), prompt, output, s, frozenset(), KeyedNoise(1, 0, 0))
    assert (other.noise_gap > 0).mean() > 0.2
    assert np.isnan(reference.score(tiny.model(), prompt, output, s, frozenset()).noise_gap).all()


def test_rounding_is_that_of_the_element_type() -> None:
    prompt, output = tiny.prompt(13), tiny.prompt(60)
    source = find(ModelSpec(name="random", shape=tiny.SHAPE))
    models = {dtype: source.build(dtype, tiny.CPU) for dtype in (ModelDtype.float32, ModelDtype.float64)}
    fine = models[ModelDtype.float64]
    found = reference.rounding(models[ModelDtype.float32], fine, prompt, output, OFFICIAL, frozenset())
    assert found.rows == 60
    assert 1e-9 < found.logit_rms <= found.logit < 1e-4
    assert 0 < found.mass < 1e-4
    assert found.outside == 0
    same = reference.rounding(fine, fine, prompt, output, OFFICIAL, frozenset())
    assert (same.logit, same.mass, same.outside) == (0, 0, 0)


def test_a_rounding_that_moves_a_cut_is_seen() -> None:
    fine = torch.tensor([[3.0, 2.0, 1.0, 0.999]], dtype=torch.float64)
    coarse = torch.tensor([[3.0, 2.0, 0.99, 1.0]], dtype=torch.float64)
    found = scoring.rounding_rows(coarse, fine, Sampling(temperature=1.0, top_p=1.0, top_k=3))
    p = torch.tensor([3.0, 2.0, 1.0]).double().softmax(-1)
    np.testing.assert_allclose(found["outside"].numpy(), [float(p[2])], atol=1e-3)
    np.testing.assert_allclose(found["logit"].numpy(), [0.01], atol=1e-12)


def test_the_rounding_of_a_greedy_run_is_that_of_its_best_tokens_rivals() -> None:
    fine = torch.tensor([[3.0, 2.99, 0.0]], dtype=torch.float64)
    coarse = torch.tensor([[3.0, 3.01, 0.0]], dtype=torch.float64)
    found = scoring.rounding_rows(coarse, fine, Sampling(temperature=0.0, top_p=1.0, top_k=0))
    np.testing.assert_allclose(found["logit"].numpy(), [0.02], atol=1e-12)


def test_the_likeliest_tokens_are_the_references() -> None:
    prompt, output = tiny.prompt(13), tiny.prompt(20)
    next_row = reference.next_row(tiny.model(), prompt, output, OFFICIAL, frozenset())
    found = scoring.choices(next_row, OFFICIAL, 3)
    row = step_logits([*prompt, *output, 0], len(prompt))[len(output)]
    p = truncated(row, OFFICIAL)
    best = np.argsort(-row.numpy())[:3]
    assert [token for token, _ in found] == best.tolist()
    np.testing.assert_allclose([probability for _, probability in found], p[best], atol=1e-9)


@pytest.mark.parametrize("s", [OFFICIAL, Sampling(top_k=3), Sampling(top_k=0), Sampling(temperature=0.0)])
def test_every_token_has_its_rank(s: Sampling) -> None:
    """Inside the cuts, beyond them, equal to others, and banned."""
    row = torch.randn(64, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    row[10], row[11], row[12] = row[13], -torch.inf, -torch.inf
    scored = scoring.score_rows(row.expand(64, -1), torch.arange(64), s)
    assert scored["rank"].tolist() == [int((row > own).sum()) for own in row]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_logit_of_the_reference_that_is_no_number(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    m = tiny.model()
    logits = m.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        found[-1, slice(None) if value == -torch.inf else 7] = value
        return found

    monkeypatch.setattr(m, "logits", broken)
    with pytest.raises(UsageError, match="the reference's logits are not finite"):
        reference.score(m, tiny.prompt(13), tiny.prompt(20), OFFICIAL, frozenset())


def test_which_of_two_near_equal_tokens_is_cut_is_told_by_their_logits() -> None:
    """The nucleus keeps one of two candidates a rounding error apart; mass alone sees a gap of 0.2."""
    logits = torch.tensor([[2.0, 1.0, 1.0 - 1e-7, 0.0]], dtype=torch.float64)
    p = logits.softmax(-1)[0]
    s = Sampling(temperature=1.0, top_k=0, top_p=float(p[0] + p[1]) - 0.01)
    row = scoring.score_rows(logits, torch.tensor([2]), s)
    assert not row["in_support"][0]
    assert float(row["cut_gap"][0]) == pytest.approx(0.01, abs=1e-6)
    assert float(row["cut_logit"][0]) == pytest.approx(1e-7, rel=1e-3)
    swapped = logits[:, [0, 2, 1, 3]] + torch.tensor([0.0, 2e-7, 0.0, 0.0], dtype=torch.float64)
    assert scoring.rounding_rows(swapped, logits, s)["mass"][0] < 1e-6


def test_the_likeliest_tokens_are_weighed_as_the_next_token_would_be() -> None:
    """Penalties count the output alone, and min_tokens its length: as when the token is scored in place."""
    s = Sampling(temperature=1.0, top_k=10, presence_penalty=0.8, repetition_penalty=1.3, min_tokens=21)
    prompt, output, stop = tiny.prompt(13), tiny.prompt(20), frozenset({4, 8})
    row = reference.next_row(tiny.model(), prompt, output, s, stop)
    for token, probability in scoring.choices(row, s, 12):
        scored = reference.score(tiny.model(), prompt, [*output, token], s, stop)
        np.testing.assert_allclose(probability, np.exp(scored.logprob[-1]), atol=1e-9)


def test_the_noises_token_is_the_one_that_agrees_with_it() -> None:
    prompt, output = tiny.prompt(13), tiny.prompt(20)
    row = reference.next_row(tiny.model(), prompt, output, OFFICIAL, frozenset())
    tokens = set()
    for seed in range(4):
        noise = KeyedNoise(seed, 0, 0)
        token, probability = scoring.drawn(row, OFFICIAL, noise, len(output))
        scored = reference.score(tiny.model(), prompt, [*output, token], OFFICIAL, frozenset(), noise)
        assert scored.noise_gap[-1] == 0
        np.testing.assert_allclose(probability, np.exp(scored.logprob[-1]), atol=1e-9)
        tokens.add(token)
    assert len(tokens) > 1
