"""Lossless acceptance of drafts (Leviathan et al. 2023; Chen et al. 2023).

A draft x drawn from q at a position where the target's truncated distribution is p is accepted
with probability min(1, p(x)/q(x)). The first rejected one is replaced by a draw from the
residual max(p − q, 0), renormalised; if all pass, one more token is drawn from the last row.
Every delivered token is then a draw from p, whatever q is, as long as q is the distribution
that was really sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sm70lab.engine.noise import KeyedNoise, Stream
from sm70lab.engine.sampling import Candidates, sample
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
    p = target.rows(count).prob_of(drafts.tokens[:, None])[:, 0]
    q = drafts.q.prob_of(drafts.tokens[:, None])[:, 0]
    uniform = torch.from_numpy(noise.uniform(Stream.accept, positions[:count])).to(p.device)
    passed = uniform * q < p
    n = int(passed.long().cumprod(0).sum())
    row, at = target.row(n), positions[n : n + 1]
    if n == count:
        last = sample(row, noise, Stream.target, at)
    else:
        residual = (row.probs - drafts.q.row(n).prob_of(row.ids)).clamp_min(0)
        total = residual.sum()
        # p = q up to rounding leaves no residual; a rejection has then probability zero up to
        # rounding too, and p itself is the right distribution.
        residual = torch.where(total > 0, residual / total, row.probs)
        last = sample(Candidates(row.ids, residual), noise, Stream.residual, at)
    return [*drafts.tokens[:n].tolist(), int(last)]


def _match(target: Candidates, drafts: Drafts, noise: KeyedNoise, positions: range) -> list[int]:
    """Draw every row's token from p first; deliver them up to the first that is not its draft.

    The noise of a draw is keyed by its position, so these are the tokens that the no-draft run
    draws, whatever was drafted. A coupled draft is drawn from q with that same noise (drafter-
    invariant speculative decoding; Daliri, Musco and Suresh 2024): the closer q is to p, the more
    often both pick the same token, at least (1 − TV)/(1 + TV) of the time.
    """
    drawn = sample(target, noise, Stream.target, positions)
    n = int((drawn[:-1] == drafts.tokens).long().cumprod(0).sum())
    drawn_list: list[int] = drawn[: n + 1].tolist()
    return drawn_list
