"""The reference's scores say what the truncated distribution says, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from sm70lab.engine import reference
from sm70lab.engine.kv_cache import KVCache
from sm70lab.engine.loading import find
from sm70lab.engine.sampling import LogitsRules
from sm70lab.engine.state import StateStore
from sm70lab.errors import UsageError
from sm70lab.judge import audit
from sm70lab.schema import Gate, Generation, ModelDtype, ModelSpec, Prompt, Sampling, Status
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
    by_k = reference._score_rows(logits, tokens, Sampling(temperature=1.0, top_p=1.0, top_k=2))
    assert by_k["cut_rule"].tolist() == [1, 1]
    np.testing.assert_allclose(by_k["cut_gap"].numpy(), [1.0, 2.0])
    by_p = reference._score_rows(logits, tokens, Sampling(temperature=1.0, top_p=0.8, top_k=0))
    p = logits[0].softmax(-1)
    assert by_p["cut_rule"].tolist() == [2, 2]
    np.testing.assert_allclose(by_p["cut_gap"].numpy(), [float(p[0] + p[1]) - 0.8, float(p[:3].sum()) - 0.8])
    greedy = reference._score_rows(logits, tokens, Sampling(temperature=0.0))
    np.testing.assert_allclose(greedy["cut_gap"].numpy(), [2.0, 3.0])
    banned = reference._score_rows(torch.tensor([[1.0, -torch.inf]]), torch.tensor([1]), OFFICIAL)
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
    found = audit.evidence([generation], [scores], Gate(), greedy=False, tolerance=audit.FLOAT32)
    assert found.status is Status.bad
    assert found.metrics["z"] < -5


def test_a_reference_that_is_not_finite_judges_nothing() -> None:
    m = find(ModelSpec(name="random", shape=tiny.SHAPE)).build(ModelDtype.float32, tiny.CPU)
    with torch.inference_mode():
        m.norm[0] = torch.nan
    with pytest.raises(UsageError, match="the reference's logits are not finite"):
        reference.score(m, tiny.prompt(9), [1, 2, 3], OFFICIAL, frozenset())
