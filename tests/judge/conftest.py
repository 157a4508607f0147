"""Factories of records: generations from text, rounds, and simulated scored draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from sm70lab.schema import BETS, Gate, Generation, Prompt, Round, TokenScores

MARKERS = ["rgba(rgba", "UTF-UTF", "propertycorrectly", "255555555", "0" * 20, "5" * 20, "\ufffd"]

MakeGeneration = Callable[..., Generation]
Draw = Callable[..., tuple[Generation, TokenScores]]


@pytest.fixture
def gate() -> Gate:
    return Gate(bad_markers=list(MARKERS))


@pytest.fixture
def make() -> MakeGeneration:
    return make_generation


@pytest.fixture
def draw() -> Draw:
    return draw_run


def make_generation(
    text: str = "",
    *,
    token_ids: Sequence[int] | None = None,
    finish_reason: str = "stop",
    rounds: Sequence[Round] = (),
    contract: str | None = None,
    prompt_text: str = "",
    name: str = "page",
    index: int = 0,
    seed: int = 7,
) -> Generation:
    """A generation; by default its token ids are all distinct and as many as a third of the text."""
    ids = list(range(max(64, len(text) // 3))) if token_ids is None else list(token_ids)
    prompt = Prompt(index, name, prompt_text, [1], 6000, contract)
    return Generation(
        prompt, 0, seed, ids, text, finish_reason, list(rounds), 0.1, sum(r.seconds for r in rounds) or 1.0
    )


def truncate(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """p' by top-k, then top-p; rows of probabilities (n, vocabulary)."""
    order = np.argsort(-logits, axis=1)
    ranked = np.take_along_axis(logits, order, 1)
    ranked[:, top_k:] = -np.inf
    p = np.exp(ranked - ranked[:, :1])
    p /= p.sum(1, keepdims=True)
    p[np.cumsum(p, 1) - p >= top_p] = 0.0
    p /= p.sum(1, keepdims=True)
    result = np.zeros_like(p)
    np.put_along_axis(result, order, p, 1)
    return result


def score(logits: np.ndarray, tokens: np.ndarray, top_k: int, top_p: float) -> TokenScores:
    """What a scorer gives for these tokens under the truncated distribution of ``logits``."""
    p = truncate(logits, top_k, top_p)
    rows = np.arange(len(tokens))
    order = np.argsort(-logits, axis=1)
    rank = np.argmax(order == tokens[:, None], axis=1)
    ranked = np.take_along_axis(p, order, 1)
    cumulative = np.cumsum(ranked, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_p = np.where(p > 0, np.log(p), 0.0)
        logprob = np.log(p[rows, tokens])
    entropy = -(p * log_p).sum(1)
    sorted_logits = np.take_along_axis(logits, order, 1)
    beyond_k = rank >= top_k
    inside = p[rows, tokens] > 0
    kept = np.exp(sorted_logits[:, :top_k] - sorted_logits[:, :1])
    kept_mass = np.cumsum(kept, 1) / kept.sum(1, keepdims=True)
    before = kept_mass[rows, np.clip(rank - 1, 0, top_k - 1)]
    gap = np.where(beyond_k, sorted_logits[:, top_k - 1] - logits[rows, tokens], before - top_p)
    rule = np.where(inside, "", np.where(beyond_k, "top_k", "top_p"))
    full = logits - sorted_logits[:, :1]
    full -= np.log(np.exp(full).sum(1, keepdims=True))
    collision = (p**2).sum(1)
    own = np.where(inside, p[rows, tokens], collision)  # those outside count for nothing
    unknown = np.full(len(tokens), np.nan)
    last = np.where(p > 0, logits, np.inf).min(1)
    return TokenScores(
        logprob=logprob,
        raw_logprob=full[rows, tokens],
        entropy=entropy,
        variance=np.maximum((p * log_p**2).sum(1) - entropy**2, 0.0),
        rank=rank,
        in_support=inside,
        cut_gap=np.where(inside, 0.0, gap),
        cut_logit=np.where(inside, 0.0, last - logits[rows, tokens]),
        cut_rule=rule,
        argmax=order[:, 0],
        top2_margin=sorted_logits[:, 0] - sorted_logits[:, 1],
        cdf_low=cumulative[rows, rank] - ranked[rows, rank],
        cdf_high=cumulative[rows, rank],
        collision=collision,
        collision_variance=np.maximum((p**3).sum(1) - collision**2, 0.0),
        covariance=(p**2 * log_p).sum(1) + entropy * collision,
        log_bets=np.where(inside[:, None], log_bets(p, own), 0.0),
        noise_gap=unknown,
        noise_winner_logit=unknown,
        noise_winner_mass=unknown,
    )


def log_bets(p: np.ndarray, own: np.ndarray) -> np.ndarray:
    """log r/p' of each bet for tokens of probability ``own`` (n) under p' (n, vocabulary)."""
    bets = []
    for name, value in BETS.items():
        if name.startswith("temperature"):
            bets.append(np.log(own ** (1 / value) / (p ** (1 / value)).sum(1) / own))
        elif name.startswith("noise"):
            bets.append(np.log(1 + value * ((p**2).sum(1) - own)))
        else:
            bets.append(np.log((1 - value) + value / (p > 0).sum(1) / own))
    return np.stack(bets, axis=1)


def draw_run(
    seed: int,
    count: int,
    *,
    temperature: float = 1.0,
    top_p: float = 0.95,
    sharpness: float = 1.5,
    index: int = 0,
) -> tuple[Generation, TokenScores]:
    """Tokens drawn at ``temperature`` and ``top_p`` and scored at 1.0 and 0.95 (top-k 8 of 32)."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(count, 32)) * sharpness * rng.gamma(2.0, 1.0, size=(count, 1))
    p = truncate(logits / temperature, 8, top_p)
    tokens = np.argmax(np.cumsum(p, 1) > rng.random((count, 1)) * p.sum(1, keepdims=True), axis=1)
    generation = make_generation(token_ids=tokens.tolist(), seed=seed, index=index, name=f"p{index}")
    return generation, score(logits, tokens, 8, 0.95)
