"""Every sampled token is a draw from the target's truncated distribution, drafts or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from sm70lab.config import compose
from sm70lab.engine.noise import KeyedNoise, Stream
from sm70lab.engine.rejection import Drafts, accept, one_hot, prob_of, probs_of
from sm70lab.engine.sampling import Candidates, LogitsRules, sample, truncate
from sm70lab.errors import UsageError
from sm70lab.kernels import native
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.schema import DraftSampling, Sampling
from tests.engine import tiny
from tests.engine.assertions import assert_close

P_LIMIT = 1e-4  # a correct sampler fails one test in ten thousand; seeds are fixed, so never by chance


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value of counts against probabilities, bins with fewer than 5 expected merged."""
    assert counts[probs == 0].sum() == 0, "a token outside the support was drawn"
    expected = probs * counts.sum()
    order = np.argsort(expected)[::-1]
    small = expected[order] < 5
    kept = order[~small]
    observed = np.append(counts[kept], counts[order[small]].sum())
    wanted = np.append(expected[kept], expected[order[small]].sum())
    if wanted[-1] < 5 and len(wanted) > 1:
        observed = np.append(observed[:-2], observed[-2] + observed[-1])
        wanted = np.append(wanted[:-2], wanted[-2] + wanted[-1])
    if len(wanted) == 1:
        return 1.0  # too few draws at this position to say anything
    return float(stats.chisquare(observed, wanted).pvalue)


@pytest.mark.parametrize("stream", list(Stream))
def test_noise_is_uniform_and_its_neighbours_are_independent(stream: Stream) -> None:
    noise = KeyedNoise(20260620, 0, 0)
    positions = range(40_000)
    u = noise.uniform(stream, positions)
    assert stats.kstest(u, "uniform").pvalue > P_LIMIT
    others = [noise.uniform(s, positions) for s in Stream if s != stream]
    others += [np.roll(u, 1), KeyedNoise(20260621, 0, 0).uniform(stream, positions)]
    others += [KeyedNoise(20260620, 1, 0).uniform(stream, positions)]
    others += [KeyedNoise(20260620, 0, 1).uniform(stream, positions)]
    for other in others:
        grid = np.histogram2d(u, other, bins=10)[0].ravel()
        assert stats.chisquare(grid).pvalue > P_LIMIT


def test_gumbel_noise_has_its_distribution_over_ids_and_positions() -> None:
    noise = KeyedNoise(7, 0, 0)
    g = noise.gumbel(Stream.target, range(200), np.tile(np.arange(200), (200, 1)))
    assert stats.kstest(g.ravel(), "gumbel_r").pvalue > P_LIMIT
    assert abs(np.corrcoef(g[:, :-1].ravel(), g[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(g[:-1].ravel(), g[1:].ravel())[0, 1]) < 0.02


SAMPLINGS = [
    Sampling(temperature=1.0, top_p=1.0, top_k=0),
    Sampling(temperature=0.2, top_p=1.0, top_k=0),
    Sampling(temperature=1.0, top_p=0.8, top_k=0),
    Sampling(temperature=1.3, top_p=0.95, top_k=3),
    Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.2),
]


def truncated(logits: torch.Tensor, s: Sampling) -> np.ndarray:
    """The truncated distribution, written out token by token."""
    probs = (logits.double() / s.temperature).softmax(-1).numpy()
    order = np.argsort(-probs, kind="stable")
    if s.top_k:
        probs[order[s.top_k :]] = 0
    probs /= probs.sum()
    mass, kept = 0.0, np.zeros_like(probs)
    for token in order:
        if mass < s.top_p and probs[token] >= s.min_p * probs.max():
            kept[token] = probs[token]
        mass += probs[token]
    return kept / kept.sum()


@pytest.mark.parametrize("s", SAMPLINGS)
def test_truncation_is_the_written_out_rule(s: Sampling) -> None:
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    candidates = truncate(logits, s)
    dense = torch.zeros_like(logits).scatter(1, candidates.ids, candidates.probs)
    for row, wanted in zip(dense, logits, strict=True):
        assert_close(row, torch.tensor(truncated(wanted, s)), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("s", [*SAMPLINGS, Sampling(), Sampling(top_k=65)])
def test_native_top_k_truncates_to_the_same_bits(s: Sampling, dtype: torch.dtype) -> None:
    if (reason := native.available()) is not None:
        pytest.skip(reason)
    logits = torch.randn(5, 4096, generator=torch.Generator().manual_seed(2), dtype=dtype) * 3
    logits[:, 7] = -torch.inf  # a ban
    plain, fast = truncate(logits, s), truncate(logits, s, arithmetic=Arithmetic.native)
    assert torch.equal(plain.ids, fast.ids) and torch.equal(plain.probs, fast.probs)


@pytest.mark.parametrize("s", SAMPLINGS)
@pytest.mark.parametrize(
    "rule", [DraftSampling.probabilistic, DraftSampling.greedy, DraftSampling.token_matching]
)
def test_every_position_of_a_round_is_a_draw_from_the_target(s: Sampling, rule: DraftSampling) -> None:
    """5,000 rounds of three drafts over a vocabulary of 6: chi-square at each position they reach."""
    g = torch.Generator().manual_seed(3)
    target_logits = torch.randn(4, 6, generator=g, dtype=torch.float64) * 1.5
    draft_logits = target_logits[:3] + 0.6 * torch.randn(3, 6, generator=g, dtype=torch.float64)
    target = truncate(target_logits, s)
    q = (
        truncate(draft_logits, s, top_p=False)
        if rule == DraftSampling.probabilistic
        else one_hot(draft_logits.argmax(-1), torch.float64)
    )
    counts = np.zeros((4, 6))
    for repeat in range(5_000):
        noise = KeyedNoise(5, 0, repeat)
        positions = range(4)
        drafts = Drafts(sample(q, noise, Stream.draft, positions[:3]), q)
        for i, token in enumerate(accept(rule, target, drafts, noise, positions)):
            counts[i, token] += 1
    assert counts[0].sum() == 5_000 and counts[1].sum() > 300
    for i in range(4):
        assert chi_square(counts[i], truncated(target_logits[i], s)) > P_LIMIT, f"position {i}"


def test_a_wrongly_reported_draft_distribution_is_noticed() -> None:
    """The same test must fail when q is not what was sampled: it has the power it claims."""
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    ids = torch.arange(3)[None]
    drawn = Candidates(ids, torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64))
    reported = Candidates(ids, torch.tensor([[0.4, 0.3, 0.3]], dtype=torch.float64))
    counts = np.zeros(3)
    for repeat in range(4000):
        noise = KeyedNoise(5, 0, repeat)
        draft = sample(drawn, noise, Stream.draft, range(1))
        target = Candidates(ids.expand(2, 3), p.expand(2, 3))
        counts[accept(DraftSampling.probabilistic, target, Drafts(draft, reported), noise, range(2))[0]] += 1
    assert chi_square(counts, p[0].numpy()) < P_LIMIT


def test_probability_of_a_token_outside_the_candidates_is_zero() -> None:
    ids, probs = Candidates(torch.tensor([[3, 1]]), torch.tensor([[0.75, 0.25]])).on_host()
    assert probs_of(np.array([1, 3, 0, 9]), ids[0], probs[0]).tolist() == [0.25, 0.75, 0.0, 0.0]
    assert [prob_of(np.array([token]), ids, probs).item() for token in (1, 3, 0)] == [0.25, 0.75, 0.0]


def test_rejection_over_a_whole_large_vocabulary_needs_no_square_of_it() -> None:
    """Without top-k the candidates are the vocabulary: 200,000 squared would not fit any memory."""
    size = 200_000
    g = torch.Generator().manual_seed(1)
    s = Sampling(temperature=1.0, top_p=1.0, top_k=0)
    target, q = (truncate(torch.randn(n, size, generator=g), s) for n in (2, 1))
    for repeat in range(5):
        noise = KeyedNoise(1, 0, repeat)
        drafts = Drafts(sample(q, noise, Stream.draft, range(1)), q)
        assert 1 <= len(accept(DraftSampling.probabilistic, target, drafts, noise, range(2))) <= 2


def run_text(
    sampling: Sampling, tokens: int = 60, k: int = 3, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    d = tiny.decoder(tiny.model(), tiny.route(k), tiny.prompt(9), sampling, stop_ids=stop_ids)
    return tiny.decode(d, tokens)


def test_banned_argmax_never_appears_though_all_drafts_are_accepted() -> None:
    favourite = max(set(run_text(tiny.GREEDY)), key=run_text(tiny.GREEDY).count)
    banned = Sampling(temperature=0.0, banned_ids=[favourite])
    assert favourite not in run_text(banned)
    assert run_text(banned) == run_text(banned, k=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.3}]
)
def test_penalties_apply_to_every_verify_row(temperature: float, penalty: dict[str, float]) -> None:
    """Under token matching the whole output must be the no-draft run's."""
    s = Sampling(temperature=temperature, **penalty)  # type: ignore[arg-type]
    wanted = run_text(s, k=0)
    d = tiny.decoder(tiny.model(), tiny.route(3, sampling=DraftSampling.token_matching), tiny.prompt(9), s)
    assert tiny.decode(d, 60) == wanted
    assert wanted != run_text(Sampling(temperature=temperature), k=0)


def test_an_endless_presence_penalty_never_repeats_a_token() -> None:
    out = run_text(Sampling(temperature=1.0, presence_penalty=1e9), tokens=40)
    assert len(set(out)) == 40


def test_penalty_formulas() -> None:
    s = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    rules = LogitsRules(s, [1], frozenset())
    rules.observe([2, 2])
    logits = rules.apply(torch.tensor([[1.0, 1.0, 1.0, -1.0]] * 2, dtype=torch.float64), 2, [3])
    assert logits[0].tolist() == [1.0, 0.5, 0.5 - 0.5 - 0.5, -1.0]
    assert logits[1].tolist() == [1.0, 0.5, 0.5 - 0.5 - 0.5, -2.0 - 0.5 - 0.25]


def test_bias_comes_after_penalties_and_before_bans() -> None:
    s = Sampling(repetition_penalty=2.0, logit_bias={1: 3.0, 2: -1.5, 0: 9.0}, banned_ids=[0])
    rules = LogitsRules(s, [1], frozenset())
    logits = rules.apply(torch.tensor([[1.0, 1.0, 1.0, -1.0]] * 2, dtype=torch.float64), 0, [3])
    assert logits.tolist() == [[-torch.inf, 3.5, -0.5, -1.0], [-torch.inf, 3.5, -0.5, -2.0]]


def test_bias_is_a_setting() -> None:
    assert compose(["sampling.logit_bias={5:-2.5,7:1}"]).sampling.logit_bias == {5: -2.5, 7: 1.0}
    assert compose().sampling.logit_bias == {}


@pytest.mark.parametrize(
    ("value", "must"),
    [
        ("{5:nan}", "-1e12 to 1e12"),
        ("{5:-inf}", "use sampling.banned_ids"),
        ("{5:1e13}", "-1e12 to 1e12"),
        ("{-1:2}", "token ids must be whole numbers"),
        ("{true:2}", "token ids must be whole numbers"),
        ("{a:2}", "Key a"),
        ("{5:a}", "could not be converted to Float"),
    ],
)
def test_a_bias_that_cannot_work_is_refused(value: str, must: str) -> None:
    with pytest.raises(UsageError, match=rf"sampling\.logit_bias.*{must}"):
        compose([f"sampling.logit_bias={value}"])


def test_min_tokens_bans_end_tokens_row_by_row() -> None:
    stop = frozenset(range(0, 64, 2))
    out = run_text(Sampling(temperature=1.0, min_tokens=30), tokens=60, stop_ids=stop)
    assert not stop & set(out[:30])
    assert stop & set(out[30:])


def test_rules_that_leave_nothing_to_draw_are_an_error() -> None:
    with pytest.raises(UsageError, match="leave no token at output position 0"):
        run_text(Sampling(temperature=1.0, banned_ids=list(range(64))))
    with pytest.raises(UsageError, match="leave no token"):
        run_text(Sampling(temperature=0.0, min_tokens=5), stop_ids=frozenset(range(64)))
