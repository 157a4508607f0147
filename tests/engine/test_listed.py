"""Scores from the likeliest tokens alone are those from the whole row, or there are none."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from sm70lab.engine import listed, scoring
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.sampling import LogitsRules
from sm70lab.schema import Sampling, TokenScores

V, ROWS = 300, 200
STOP = frozenset({4, 8})
PROMPT = [1, 2, 3]


def logits(seed: int, ties: bool = False) -> torch.Tensor:
    """Float32 rows, flat and peaked ones; with ties many are equal."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, V, generator=g) * torch.rand(ROWS, 1, generator=g) * 6
    return (rows * 2).round() / 2 if ties else rows


def drawn(rows: torch.Tensor, seed: int) -> list[int]:
    """Mostly likely tokens, some that nobody would draw."""
    g = torch.Generator().manual_seed(seed)
    likely = torch.multinomial((rows * 1.2).softmax(-1), 1, generator=g)[:, 0]
    wild = torch.randint(V, (len(rows),), generator=g)
    return torch.where(torch.rand(len(rows), generator=g) < 0.8, likely, wild).tolist()


def told(rows: torch.Tensor, tokens: list[int], count: int) -> list[listed.ListedRow]:
    """What a server tells of these logits: float32 log-probabilities of the likeliest, and the token's."""
    found = rows.log_softmax(-1)
    ids = in_order(rows)[:, :count]
    answer = []
    for r, token in enumerate(tokens):
        rank = int((rows[r] > rows[r, token]).sum())
        near = found[r, ids[r]].tolist()
        answer.append(listed.ListedRow(ids[r].tolist(), near, float(found[r, token]), rank))
    return answer


def in_order(rows: torch.Tensor) -> torch.Tensor:
    """Ids by falling logit; of equal ones the smaller first."""
    return rows.argsort(stable=True, dim=-1, descending=True)


def whole(rows: torch.Tensor, tokens: list[int], s: Sampling, noise: KeyedNoise | None) -> TokenScores:
    """The same from whole rows, with the rules applied one token after the other."""
    ruled = LogitsRules(s, PROMPT, STOP).apply(rows.double(), 0, tokens)
    width, order = scoring.candidates(s, V), in_order(ruled)
    falling = ruled.gather(-1, order)
    beyond = falling[:, width] if width < V else torch.full((len(rows),), -torch.inf)
    likeliest = scoring.Likeliest(order[:, :width], falling[:, :width], beyond)
    own = ruled.gather(-1, torch.tensor(tokens)[:, None])
    norm, rank = (ruled / (s.temperature or 1.0)).logsumexp(-1), (ruled > own).sum(-1)
    columns = scoring.score_likeliest(likeliest, torch.tensor(tokens), own[:, 0], norm, rank, s, noise, 0)
    found = {name: values.numpy() for name, values in columns.items()}
    found["cut_rule"] = np.array(scoring.RULES)[found["cut_rule"]]
    return TokenScores(**found)


def agree(a: TokenScores, b: TokenScores, ruled: bool) -> None:
    """The scored tokens of ``a`` have ``b``'s scores."""
    known = a.known
    for f in fields(TokenScores):
        x, y = getattr(a, f.name)[known], getattr(b, f.name)[known]
        if f.name == "rank" and ruled:  # of a token that is not listed it is the one before the rules
            assert (x == y)[y < 3].all() and (x >= 3)[y >= 3].all()
        elif f.name == "noise_winner_logit" and ruled:  # what is cut may be known as a bound alone
            assert not (x > y + 2e-5).any()
        elif y.dtype.kind in "Uib":
            assert (x == y).all(), f.name
        else:
            where = ~np.isnan(x) if f.name == "raw_logprob" else slice(None)  # the whole row's sum
            np.testing.assert_allclose(x[where], y[where], atol=2e-5, rtol=1e-5, err_msg=f.name)


CASES = {
    "official": Sampling(temperature=1.0, top_p=0.95, top_k=20),
    "top-k alone": Sampling(temperature=0.7, top_p=1.0, top_k=12),
    "hot": Sampling(temperature=1.6, top_p=0.9, top_k=20),
    "min-p": Sampling(temperature=0.9, top_p=1.0, top_k=18, min_p=0.05),
    "all three": Sampling(temperature=1.2, top_p=0.8, top_k=15, min_p=0.02),
    "greedy": Sampling(temperature=0.0),
    "bias": Sampling(temperature=1.0, top_k=8, logit_bias={5: -3.0, 17: 0.5}),
    "bans": Sampling(temperature=1.0, top_k=8, banned_ids=[5, 6, 7], min_tokens=150),
    "penalties": Sampling(temperature=0.8, top_k=6, presence_penalty=0.7, frequency_penalty=0.2),
}


RULED = ("bias", "bans", "penalties")


@pytest.mark.parametrize("name", CASES)
def test_listed_tokens_score_as_the_whole_row_does(name: str) -> None:
    s, rows = CASES[name], logits(len(name))
    tokens, noise = drawn(rows, 7), None if s.temperature == 0 else KeyedNoise(3, 0, 0)
    scores = listed.score(told(rows, tokens, 30), PROMPT, tokens, s, STOP, noise=noise)
    agree(scores, whole(rows, tokens, s, noise), name in RULED)
    assert scores.known.all() or name in ("bias", "penalties")
    assert scores.known.mean() > 0.3


@pytest.mark.parametrize("name", [name for name in CASES if name not in RULED])
def test_equal_tokens_keep_the_order_in_which_they_are_listed(name: str) -> None:
    s, rows = CASES[name], logits(len(name), ties=True)
    tokens, noise = drawn(rows, 7), None if s.temperature == 0 else KeyedNoise(3, 0, 0)
    scores = listed.score(told(rows, tokens, 30), PROMPT, tokens, s, STOP, noise=noise)
    agree(scores, whole(rows, tokens, s, noise), ruled=False)
    assert scores.known.all()


@pytest.mark.parametrize("count", [20, 21], ids=["as many as top-k", "one more"])
def test_as_many_as_top_k_leaves_are_enough(count: int) -> None:
    """The first one cut is then known as a bound, so is the margin of the noise's winner."""
    s, rows, noise = CASES["official"], logits(1), KeyedNoise(3, 0, 0)
    tokens = drawn(rows, 7)
    scores = listed.score(told(rows, tokens, count), PROMPT, tokens, s, STOP, noise=noise)
    assert scores.known.all()
    agree(scores, whole(rows, tokens, s, noise), ruled=count == 20)


@pytest.mark.parametrize(
    "s",
    [
        Sampling(temperature=1.0, top_p=0.9, top_k=0),
        Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.1),
        Sampling(temperature=1.0, top_p=0.9, top_k=100),
        Sampling(temperature=0.5, top_p=0.6, top_k=0),
        Sampling(temperature=1.0, top_p=0.7, top_k=100, logit_bias={5: -1.0}),
    ],
)
def test_without_enough_tokens_a_row_is_scored_where_the_others_are_cut_for_certain(s: Sampling) -> None:
    rows = logits(11) * (1 if s.top_k == 0 else 4)  # peaked, else none is enough
    tokens = drawn(rows / 3, 7)
    scores = listed.score(told(rows, tokens, 30), PROMPT, tokens, s, STOP, V, KeyedNoise(3, 0, 0))
    truth = whole(rows, tokens, s, KeyedNoise(3, 0, 0))
    known = scores.known
    assert 0.02 < known.mean() < 0.98
    np.testing.assert_array_equal(scores.in_support[known], truth.in_support[known])
    for name in ("logprob", "entropy", "variance", "cdf_high", "collision", "log_bets"):
        inside = known & truth.in_support if name == "cdf_high" else known
        np.testing.assert_allclose(getattr(scores, name)[inside], getattr(truth, name)[inside], atol=5e-5)
    # Outside it is beyond the cut by at least what is said.
    outside = known & ~truth.in_support
    assert outside.any()
    assert (scores.cut_gap[outside] <= truth.cut_gap[outside] + 1e-5).all()
    assert (scores.cut_rule[outside] != "").all()
    if s.temperature == 1 and s.top_k == 0 and s.min_p == 0:  # exactly the rows whose nucleus is listed
        p = rows.double().softmax(-1).sort(dim=-1, descending=True).values
        assert (known == (p[:, :30].sum(-1) >= s.top_p).numpy()).all()
    blank = scores.logprob[~known]
    assert np.isnan(blank).all() and not scores.in_support[~known].any()
    assert (scores.log_bets[~known] == 0).all() and np.isnan(scores.noise_gap[~known]).all()


def test_a_whole_vocabulary_listed_needs_no_cut() -> None:
    s, rows = Sampling(temperature=0.8, top_p=1.0, top_k=0), logits(2)
    tokens = drawn(rows, 7)
    scores = listed.score(told(rows, tokens, V), PROMPT, tokens, s, STOP, vocabulary=V)
    assert scores.known.all()
    agree(scores, whole(rows, tokens, s, None), ruled=False)
    assert not listed.score(told(rows, tokens, 30), PROMPT, tokens, s, STOP, vocabulary=V).known.any()


def test_rows_that_were_not_told_are_not_scored() -> None:
    s, rows = CASES["official"], logits(2)
    tokens = drawn(rows, 7)
    answer: list[listed.ListedRow | None] = list(told(rows, tokens, 30))
    answer[3] = None
    scores = listed.score(answer[:150], PROMPT, tokens, s, STOP)
    assert np.flatnonzero(~scores.known).tolist() == [3, *range(150, ROWS)]


def test_what_log_probabilities_cannot_tell_is_refused() -> None:
    assert listed.why_not(CASES["official"], None) is None
    assert "repetition_penalty=1.1" in str(listed.why_not(Sampling(repetition_penalty=1.1), STOP))
    assert "min_tokens=5" in str(listed.why_not(Sampling(min_tokens=5), None))
    assert listed.why_not(Sampling(min_tokens=5), STOP) is None
