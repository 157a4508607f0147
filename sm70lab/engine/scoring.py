"""One token under one distribution: everything the judge wants to know, R rows at a time.

The truncation is written out here once more, in float64 and in log-probabilities: the judge shares
no code with the sampler it judges, and nothing underflows to a false zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sm70lab.engine.noise import KeyedNoise, Stream
from sm70lab.schema import BETS, Sampling

RULES = ("", "top_k", "top_p", "min_p", "banned")
GREEDY_RIVALS = 20  # candidates of a greedy run whose logits are compared between precisions
CLEAR_LOGIT_GAP = 0.05  # beyond rounding in any dtype: then the top-k cut itself is the violation


@dataclass
class Likeliest:
    """R rows' likeliest tokens, n each, falling: all that truncation asks of a row of logits.

    A row with fewer than n is filled up with −∞.
    """

    ids: torch.Tensor  # [R, n]
    values: torch.Tensor  # [R, n] logits, float64
    beyond: torch.Tensor  # [R] the likeliest logit that is not among them; −inf where there is none
    log_rest: torch.Tensor | None = None  # [R] log Σ exp(logit / temperature) of those that top-p still sees


@dataclass
class Truncated:
    """R truncated distributions p', n candidates each, falling; see ``cut``."""

    ids: torch.Tensor  # [R, n]
    values: torch.Tensor  # [R, n] logits
    log_p: torch.Tensor  # [R, n] log-probabilities before top-p and min-p
    before: torch.Tensor  # [R, n] mass of the likelier candidates, before top-p and min-p
    least: torch.Tensor  # [R, 1] what min-p asks of log_p
    keep: torch.Tensor  # [R, n] bool
    log_kept: torch.Tensor  # [R, n] log p', −inf where cut
    beyond: torch.Tensor  # [R] the likeliest logit that top-k cuts; −inf where it cuts none
    nucleus: float


def candidates(sampling: Sampling, vocabulary: int) -> int:
    """How many of a row's tokens pass top-k."""
    if sampling.temperature == 0:
        return 1
    return min(sampling.top_k, vocabulary) if sampling.top_k > 0 else vocabulary


def likeliest(logits: torch.Tensor, sampling: Sampling) -> Likeliest:
    """What top-k leaves of R rows of logits [R, V]."""
    vocabulary = logits.shape[-1]
    width = candidates(sampling, vocabulary)
    values, ids = logits.topk(min(width + 1, vocabulary), dim=-1)
    values = values.double()
    beyond = values[:, width] if width < vocabulary else values.new_full((len(values),), -torch.inf)
    return Likeliest(ids[:, :width], values[:, :width], beyond)


def cut(rows: Likeliest, sampling: Sampling) -> Truncated:
    """p' of R rows, in float64."""
    values = rows.values
    scaled = values / (sampling.temperature or 1.0)
    if rows.log_rest is None:
        log_p = scaled.log_softmax(-1)
    else:
        log_p = scaled - torch.logaddexp(scaled.logsumexp(-1), rows.log_rest)[:, None]
    before = log_p.exp().cumsum(-1) - log_p.exp()
    least = log_p[:, :1] + (float(np.log(sampling.min_p)) if sampling.min_p > 0 else -torch.inf)
    nucleus = sampling.top_p if sampling.top_p < 1 else torch.inf  # 1 is off: rounding must not cut
    keep = (before < nucleus) & (log_p >= least) & ~torch.isinf(values)
    keep[:, 0] = True
    log_kept = log_p.masked_fill(~keep, -torch.inf)
    log_kept = log_kept - log_kept.logsumexp(-1, keepdim=True)
    return Truncated(rows.ids, values, log_p, before, least, keep, log_kept, rows.beyond, nucleus)


def truncate(logits: torch.Tensor, sampling: Sampling) -> Truncated:
    """p' of R rows of logits [R, V], in float64 from the candidates on."""
    return cut(likeliest(logits, sampling), sampling)


def score_rows(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    sampling: Sampling,
    noise: KeyedNoise | None = None,
    position: int = 0,
) -> dict[str, torch.Tensor]:
    """Score R tokens [R] under logits [R, V]: one entry of ``TokenScores`` each, [R] or [R, bets].

    ``noise`` is the run's own where the route draws each token by Gumbel-max with it; row r is then
    output position ``position + r``.
    """
    own = logits.gather(-1, tokens[:, None])
    scaled = logits if sampling.temperature in (0, 1) else logits / sampling.temperature
    norm = scaled.logsumexp(-1).double()
    rows = likeliest(logits, sampling)
    chosen = own[:, 0].double()
    rank = (rows.values > chosen[:, None]).sum(-1)
    beyond = chosen < rows.values[:, -1]  # there may be others between, which are not among the likeliest
    rank[beyond] = (logits[beyond] > own[beyond]).sum(-1)
    return score_likeliest(rows, tokens, chosen, norm, rank, sampling, noise, position)


def score_likeliest(
    rows: Likeliest,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    norm: torch.Tensor,
    rank: torch.Tensor,
    sampling: Sampling,
    noise: KeyedNoise | None,
    position: int,
) -> dict[str, torch.Tensor]:
    """The same of what is known of each row: its likeliest tokens, and of the token that was drawn its
    logit ``chosen``, the log of the row's sum at the temperature ``norm`` and its ``rank``, [R] each."""
    greedy, temperature = sampling.temperature == 0, sampling.temperature or 1.0
    t = cut(rows, sampling)
    p = t.log_kept.exp()
    finite = t.log_kept.masked_fill(~t.keep, 0.0)
    entropy = -(p * finite).sum(-1)
    at = t.ids == tokens[:, None]
    candidate, inside = at.any(-1), (at & t.keep).any(-1)
    log_prob = t.log_kept.masked_fill(~at, -torch.inf).amax(-1)
    low = ((p.cumsum(-1) - p) * at).sum(-1)
    last = (~torch.isinf(t.values)).sum(-1).clamp_min(1) - 1
    place = torch.where(candidate, at.long().argmax(-1), last)
    cuts = {  # how far beyond each cut; negative is inside
        "top_k": t.values.gather(-1, last[:, None])[:, 0] - chosen,
        "top_p": t.before.gather(-1, place[:, None])[:, 0] - t.nucleus,
        "min_p": t.least[:, 0] - (chosen - t.values[:, 0]) / temperature - t.log_p[:, 0],
    }
    gap, rule = _violation(cuts, candidate, torch.isinf(chosen), greedy)
    second = torch.maximum(t.values[:, 1], t.beyond) if t.values.shape[-1] > 1 else t.beyond
    collision = (p**2).sum(-1)
    return {
        "logprob": log_prob,
        "raw_logprob": chosen / temperature - norm,
        "entropy": entropy,
        "variance": ((p * finite**2).sum(-1) - entropy**2).clamp_min(0),
        "rank": rank,
        "in_support": inside,
        "cut_gap": torch.where(inside, 0.0, gap),
        "cut_logit": torch.where(inside, 0.0, _last_kept(t) - chosen),
        "cut_rule": torch.where(inside, 0, rule),
        "argmax": t.ids[:, 0],
        "top2_margin": t.values[:, 0] - second,
        "cdf_low": low,
        "cdf_high": low + log_prob.exp(),
        "collision": collision,
        "collision_variance": ((p**3).sum(-1) - collision**2).clamp_min(0),
        "covariance": (p**2 * finite).sum(-1) + entropy * collision,
        "log_bets": torch.where(inside[:, None], _log_bets(finite, p, t.keep, log_prob, collision), 0.0),
        **_against_noise(t, chosen, temperature, tokens, None if greedy else noise, position),
    }


def _last_kept(t: Truncated) -> torch.Tensor:
    """The least logit inside the cuts, [R]."""
    return t.values.masked_fill(~t.keep, torch.inf).amin(-1)


def _first_cut(t: Truncated) -> torch.Tensor:
    """The likeliest logit that a cut takes away, [R]; −inf where none is."""
    return torch.maximum(t.values.masked_fill(t.keep, -torch.inf).amax(-1), t.beyond)


def _violation(
    cuts: dict[str, torch.Tensor], candidate: torch.Tensor, banned: torch.Tensor, greedy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far each token is beyond the cut it violates, and the index of that cut in ``RULES``.

    The gap is in logits for top-k and min-p, in probability mass for top-p. A token outside the
    top k counts against the nucleus as if it stood in the place of the last candidate: with a
    hair's breadth in logits it may be in the top k, but still be far outside the nucleus.
    """
    gap = torch.full_like(cuts["top_k"], torch.inf)  # what no cut explains has no excuse
    rule = torch.zeros_like(candidate, dtype=torch.int64)
    if not greedy:
        for name, reached in (("min_p", cuts["min_p"] > 0), ("top_p", cuts["top_p"] >= 0)):
            gap = torch.where(reached, cuts[name], gap)
            rule = torch.where(reached, RULES.index(name), rule)
    by_k = ~candidate & ((rule == 0) | (cuts["top_k"] > CLEAR_LOGIT_GAP))
    gap, rule = torch.where(by_k, cuts["top_k"], gap), torch.where(by_k, RULES.index("top_k"), rule)
    return torch.where(banned, torch.inf, gap), torch.where(banned, RULES.index("banned"), rule)


def _log_bets(
    log_p: torch.Tensor, p: torch.Tensor, keep: torch.Tensor, chosen: torch.Tensor, collision: torch.Tensor
) -> torch.Tensor:
    """log r(token)/p'(token) for each alternative r of ``BETS``: [R, len(BETS)].

    Every r is a distribution on the support of p', so that E[r/p'] = 1 exactly:

    - temperature T: r ∝ p'^(1/T).
    - noise v: r = p'·(1 + v·(Σ p'² − p')). To second order the mean of softmax(log p' + √v·ε) over
      independent ε ~ N(0, 1): what disturbed logits do on average. Positive for v < 4.
    - flat ε: r = (1 − ε)·p' + ε/m, m tokens in the support.
    """
    bets = []
    size = keep.sum(-1)
    for name, value in BETS.items():
        if name.startswith("temperature"):
            norm = (log_p / value).masked_fill(~keep, -torch.inf).logsumexp(-1)
            bets.append(chosen / value - norm - chosen)
        elif name.startswith("noise"):
            bets.append(torch.log1p(value * (collision - chosen.exp())))
        else:
            bets.append(torch.log(1 - value + value / size * torch.exp(-chosen)))
    return torch.stack(bets, dim=-1)


def _against_noise(
    t: Truncated,
    chosen: torch.Tensor,
    temperature: float,
    tokens: torch.Tensor,
    noise: KeyedNoise | None,
    position: int,
) -> dict[str, torch.Tensor]:
    """The token that p' gives with the run's noise, argmax(log p' + g), against the one delivered."""
    if noise is None:
        unknown = torch.full_like(chosen, torch.nan)
        return {"noise_gap": unknown, "noise_winner_logit": unknown, "noise_winner_mass": unknown}
    best, winner = (t.log_kept + _gumbel(noise, position, t.ids)).max(-1)
    norm = (t.log_kept - t.values / temperature)[:, 0]  # log p' = value / temperature + norm
    own = chosen / temperature + norm + _gumbel(noise, position, tokens[:, None])[:, 0]
    at = winner[:, None]
    value, mass = t.values.gather(-1, at)[:, 0], t.before.gather(-1, at)[:, 0]
    by_min_p = (t.log_p.gather(-1, at)[:, 0] - t.least[:, 0]) * temperature
    first = winner == 0  # the likeliest token is never cut
    same = t.ids.gather(-1, at)[:, 0] == tokens
    return {
        "noise_gap": torch.where(same, 0.0, (best - own) * temperature),
        "noise_winner_logit": torch.where(first, torch.inf, torch.minimum(value - _first_cut(t), by_min_p)),
        "noise_winner_mass": torch.where(first, torch.inf, t.nucleus - mass),
    }


def _gumbel(noise: KeyedNoise, position: int, ids: torch.Tensor) -> torch.Tensor:
    """The target's noise of tokens ids [R, n] at output positions ``position`` and on, float64."""
    positions = range(position, position + len(ids))
    table: NDArray[np.float64] = noise.gumbel(Stream.target, positions, ids.cpu().numpy())
    return torch.from_numpy(table).to(ids.device)


def choices(logits: torch.Tensor, sampling: Sampling, count: int) -> list[tuple[int, float]]:
    """The ``count`` likeliest tokens of one row of logits [1, V], with their p' (0 where cut)."""
    t = truncate(logits, sampling)
    kept = dict(zip(t.ids[0].tolist(), t.log_kept[0].exp().tolist(), strict=True))
    return [(token, kept.get(token, 0.0)) for token in logits[0].topk(count).indices.tolist()]


def drawn(logits: torch.Tensor, sampling: Sampling, noise: KeyedNoise, position: int) -> tuple[int, float]:
    """The token that p' of one row of logits [1, V] gives with this noise, with its p'."""
    return drawn_from(truncate(logits, sampling), noise, position)


def drawn_from(t: Truncated, noise: KeyedNoise, position: int) -> tuple[int, float]:
    """The same of one row's p'."""
    place = int((t.log_kept + _gumbel(noise, position, t.ids)).argmax())
    return int(t.ids[0, place]), float(t.log_kept[0, place].exp())


def rounding_rows(coarse: torch.Tensor, fine: torch.Tensor, sampling: Sampling) -> dict[str, torch.Tensor]:
    """How two precisions of the same R rows of logits [R, V] differ, [R] each: see ``schema.Rounding``.

    ``logit``: largest change of a candidate's logit against the best one's; ``mass``: of the
    probability before a candidate; ``outside``: the probability of what only ``coarse`` keeps.
    """
    coarse, fine = coarse.double(), fine.double()
    if sampling.temperature == 0:  # of the argmax alone nothing could change: its rivals count
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=GREEDY_RIVALS)
    a, b = truncate(coarse, sampling), truncate(fine, sampling)
    likely = b.log_p > -12.0  # what could be drawn at all
    at_a, at_b = coarse.gather(-1, b.ids), b.values
    shift = ((at_a - at_a[:, :1]) - (at_b - at_b[:, :1])).abs()
    kept_b = torch.zeros_like(fine, dtype=torch.bool).scatter(-1, b.ids, b.keep)
    only = ~kept_b.gather(-1, a.ids) & a.keep
    # In the fine order: two near-equal candidates that change places move no cut by themselves.
    p_a = torch.zeros_like(coarse).scatter(-1, a.ids, a.log_p.exp()).gather(-1, b.ids)
    mass = (p_a.cumsum(-1) - p_a - b.before).abs().masked_fill(~likely, 0.0)
    return {
        "logit": shift.masked_fill(~likely, 0.0).amax(-1),
        "mass": mass.amax(-1),
        "outside": (a.log_kept.exp() * only).sum(-1),
    }
