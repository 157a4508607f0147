"""Lossless acceptance of drafts (Leviathan et al. 2023; Chen et al. 2023).

A draft x drawn from q at a position where the target's truncated distribution is p is accepted
with probability min(1, p(x)/q(x)). The first rejected one is replaced by a draw from the
residual max(p − q, 0), renormalised; if all pass, one more token is drawn from the last row.
Every delivered token is then a draw from p, whatever q is, as long as q is the distribution
that was really sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sm70lab.engine.noise import KeyedNoise, Stream
from sm70lab.engine.sampling import Candidates, draw, sample
from sm70lab.schema import DraftSampling


@dataclass
class Drafts:
    """k drafts of one round: tokens [k] int64 and the distributions they were drawn from."""

    tokens: torch.Tensor
    q: Candidates


def one_hot(tokens: torch.Tensor, dtype: torch.dtype) -> Candidates:
    """The distribution of a draft that was not sampled but chosen."""
    return Candidates(tokens[:, None], torch.ones(len(tokens), 1, dtype=dtype, device=tokens.device))


def accept(
    rule: DraftSampling, target: Candidates, drafts: Drafts, noise: KeyedNoise, positions: range
) -> list[int]:
    """The tokens this round delivers: the accepted drafts and one more, 1..k + 1 in all.

    target: k + 1 rows; row i is p at output position ``positions[i]``.
    """
    if rule in (DraftSampling.token_matching, DraftSampling.coupled):
        return _match(target, drafts, noise, positions)
    count = len(drafts.tokens)
    if not count:
        return sample(target, noise, Stream.target, positions).tolist()
    tokens = drafts.tokens.cpu().numpy()
    (p_ids, p), (q_ids, q) = target.on_host(), drafts.q.on_host()
    uniform = noise.uniform(Stream.accept, positions[:count])
    passed = uniform * prob_of(tokens, q_ids, q) < prob_of(tokens, p_ids[:count], p[:count])
    n = count if passed.all() else int(passed.argmin())
    weights, stream = p[n], Stream.target
    if n < count:
        stream = Stream.residual
        residual = np.maximum(weights - probs_of(p_ids[n], q_ids[n], q[n]), 0)
        # p = q up to rounding leaves no residual; a rejection has then probability zero up to
        # rounding too, and p itself is the right distribution.
        weights = residual if residual.any() else weights
    last = draw(p_ids[n : n + 1], weights[None], noise, stream, positions[n : n + 1])
    return [*tokens[:n].tolist(), int(last[0])]


def prob_of(tokens: NDArray[np.int64], ids: NDArray[np.int64], probs: NDArray[Any]) -> NDArray[Any]:
    """Probability of one token [R] under each row's candidates ids, probs [R, n]; zero outside them."""
    found: NDArray[Any] = np.where(ids == tokens[:, None], probs, 0).sum(-1)
    return found


def probs_of(tokens: NDArray[np.int64], ids: NDArray[np.int64], probs: NDArray[Any]) -> NDArray[Any]:
    """The same of m tokens [m] under one row [n], by table: m × n would not fit for whole vocabularies."""
    table = np.zeros(max(int(ids.max()), int(tokens.max())) + 1, probs.dtype)
    table[ids] = probs
    found: NDArray[Any] = table[tokens]
    return found


def _match(target: Candidates, drafts: Drafts, noise: KeyedNoise, positions: range) -> list[int]:
    """Draw every row's token from p first; deliver them up to the first that is not its draft.

    The noise of a draw is keyed by its position, so these are the tokens that the no-draft run
    draws, whatever was drafted. A coupled draft is drawn from q with that same noise (drafter-
    invariant speculative decoding; Daliri, Musco and Suresh 2024): the closer q is to p, the more
    often both pick the same token, at least (1 − TV)/(1 + TV) of the time.
    """
    drawn: list[int] = sample(target, noise, Stream.target, positions).tolist()
    for n, draft in enumerate(drafts.tokens.tolist()):
        if drawn[n] != draft:
            return drawn[: n + 1]
    return drawn
