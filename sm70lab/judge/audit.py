"""Losslessness audit: were these tokens drawn from the reference's own distribution?

Under a lossless route token t is a draw from p'_t, the no-draft reference's truncated distribution
given the tokens before it (speculative sampling is exact: Leviathan, Kalman and Matias 2023; Chen
et al. 2023). Penalties and bans are already inside p'. Three tests follow, on all tokens of all
generations pooled once, at the end; their p-values share ``gate.audit_alpha`` by Bonferroni:

1. Support: a token with p'(token) = 0 cannot be drawn. One beyond the tolerance decides alone; those
   within it ("at the edge") are the arithmetic's doing only while they are few: their number is
   tested against Binomial(n, ``edge_share``).
2. Uniformity: low + U·(high − low), with the token's interval in the cumulative p' and U uniform,
   is uniform and independent over t (randomised probability-integral transform: Brockwell 2007);
   tested by Kolmogorov–Smirnov.
3. Log-probability: X_t = log p'(token) + entropy has mean 0 and the given variance, whatever came
   before, so Σ X / √(Σ variance) is about standard normal (martingale central limit theorem). Where
   Σ variance is too small for that, Chebyshev's bound 1/z² is the p-value.

At temperature 0 the token must be the reference's argmax: see ``token_audit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from sm70lab.schema import Evidence, Gate, Generation, ModelDtype, Status, TokenScores

_SEED_TAG = 0x6175646974  # "audit": keeps U apart from every draw of the run with the same seed
_TESTS = 4
# Σ variance (nats²) from which z counts as normal: log p' is skewed, so below it one rare token can
# outweigh the sum. Simulated rate of p < 1/3000, over nominal: 2.2 at 27 nats², 1.3 at 40, 0.8 at 108.
_NORMAL_VARIANCE = 40.0
_ROUNDING = 1e-6  # nats a token: what float32 log-probabilities are worth


@dataclass(frozen=True)
class Tolerance:
    """How far outside the support a token may lie and still be the arithmetic's doing.

    ``logit``: gap to the cut of top-k and min-p, and between near-equal greedy choices (nats);
    ``mass``: gap to the cut of top-p (probability). A banned token has no tolerance, and neither has
    one that no cut explains. ``edge_share``: how large a share of the tokens may lie there.
    """

    logit: float
    mass: float
    edge_share: float


# Provisional until measured: differences of a verify block to single steps in each element type,
# with room. bfloat16 has eight times the rounding step of float16.
# Seen on sampled tokens of the embedded model: in float16 three of 24,000 outside, the farthest by 0.013
# of mass; in bfloat16 five of 2,500, the farthest by 0.025.
FLOAT32 = Tolerance(logit=1e-3, mass=1e-4, edge_share=5e-4)
FLOAT16 = Tolerance(logit=0.05, mass=0.03, edge_share=2e-3)
BFLOAT16 = Tolerance(logit=0.4, mass=0.04, edge_share=5e-3)


def tolerance_for(dtype: ModelDtype) -> Tolerance:
    """The default tolerance for a route that computes in ``dtype``."""
    if dtype is ModelDtype.float16:
        return FLOAT16
    return BFLOAT16 if dtype is ModelDtype.bfloat16 else FLOAT32


@dataclass(frozen=True)
class TokenAudit:
    """Arrays with one entry an output token."""

    pit: NDArray[np.float64]  # randomised PIT; NaN outside the support and in greedy runs
    violation: NDArray[np.bool_]  # outside the support, or not the argmax, beyond the tolerance
    edge: NDArray[np.bool_]  # the same within the tolerance ("at the edge"; greedy: a tie)


def token_audit(
    generation: Generation, scores: TokenScores, tolerance: Tolerance, greedy: bool
) -> TokenAudit:
    """Audit one generation's tokens; reproducible, U comes from the generation's seed.

    Greedy: every disagreement with the argmax is a violation, unless the token's logit is within the
    tolerance of it: by ``top2_margin`` for the second choice, by the top-k ``cut_gap`` (greedy is top-1)
    for one further down. Raises ``ValueError`` where an array's
    length is not the number of tokens or a supported token's score is not a number.
    """
    count = len(generation.token_ids)
    for name, values in vars(scores).items():
        if len(values) != count:
            raise ValueError(f"{generation.key}: scores.{name} has {len(values)} entries for {count} tokens")
    if greedy:
        wrong = np.asarray(scores.argmax) != np.asarray(generation.token_ids, dtype=np.int64)
        tie = wrong & (_greedy_gap(scores) <= tolerance.logit)
        return TokenAudit(np.full(count, np.nan), wrong & ~tie, tie)
    inside = np.asarray(scores.in_support, dtype=bool)
    for name in ("logprob", "entropy", "variance", "cdf_low", "cdf_high"):
        broken = np.flatnonzero(inside & ~np.isfinite(getattr(scores, name)))
        if broken.size:
            raise ValueError(f"{generation.key}: scores.{name} is not finite at token {broken[0]}")
    allowed = np.zeros(count)
    allowed[np.isin(scores.cut_rule, ("top_k", "min_p"))] = tolerance.logit
    allowed[scores.cut_rule == "top_p"] = tolerance.mass
    explained = np.isin(scores.cut_rule, ("top_k", "min_p", "top_p"))
    edge = ~inside & explained & (scores.cut_gap <= allowed)
    key = (generation.seed % 2**64, generation.prompt.index, generation.repeat, _SEED_TAG)
    uniform = np.random.default_rng(key).random(count)
    pit = scores.cdf_low + uniform * (scores.cdf_high - scores.cdf_low)
    return TokenAudit(np.where(inside, np.clip(pit, 0.0, 1.0), np.nan), ~inside & ~edge, edge)


def _greedy_gap(scores: TokenScores) -> NDArray[np.float64]:
    """Each token's logit gap to the argmax, where it is not the argmax; infinite where not known."""
    further = np.where(scores.cut_rule == "top_k", scores.cut_gap, np.inf)
    return np.where(scores.rank <= 1, scores.top2_margin, further)


def z_test(logprob: np.ndarray, entropy: np.ndarray, variance: np.ndarray) -> tuple[float, float]:
    """z of Σ(log p' + entropy), in nats, and its two-sided p-value. Positive: too likely tokens."""
    total = float(np.sum(logprob + entropy))
    spread = float(np.sum(variance))
    if spread < _NORMAL_VARIANCE:
        z = total / np.sqrt(spread + (len(logprob) * _ROUNDING) ** 2) if len(logprob) else 0.0
        return float(z), float(min(1.0, 1.0 / z**2)) if z else 1.0
    z = total / np.sqrt(spread)
    return float(z), float(2.0 * stats.norm.sf(abs(z)))


def evidence(
    generations: Sequence[Generation],
    scores: Sequence[TokenScores | None],
    gate: Gate,
    *,
    greedy: bool,
    tolerance: Tolerance,
) -> Evidence:
    """The audit over all generations; ``scores`` lie parallel to them.

    ``bad``: a violation, or a p-value below ``gate.audit_alpha`` / 4. ``unknown``: no fault, but fewer
    than ``gate.min_tokens`` tokens scored in all, or some generation not scored. ``metrics``: tokens,
    audited_share, violations, edge, and ks_statistic, p_ks, z, p_z (sampled) or agreement (greedy).
    ``details['first_bad']``: generation, index, token, rule, gap, place; absent without a violation.
    """
    pairs = [(g, s) for g, s in zip(generations, scores, strict=True) if s is not None]
    audits = [token_audit(g, s, tolerance, greedy) for g, s in pairs]
    total = sum(len(g.token_ids) for g in generations)
    tokens = sum(len(g.token_ids) for g, _ in pairs)
    bad = sum(int(a.violation.sum()) for a in audits)
    edge = sum(int(a.edge.sum()) for a in audits)
    missing = max(0, gate.min_tokens - tokens)
    metrics: dict[str, float] = {"tokens": tokens, "audited_share": tokens / total if total else 0.0}
    p_edge = float(stats.binom.sf(edge - 1, tokens, tolerance.edge_share)) if edge else 1.0
    metrics |= {"violations": bad, "edge": edge, "p_edge": p_edge}
    details: dict[str, Any] = {"tolerance": asdict(tolerance), "needs_tokens": missing}
    faults = []
    if bad:
        details["first_bad"] = first = _first_bad(pairs, audits, greedy)
        what = "not the reference's argmax" if greedy else "outside the reference's support"
        gap = f"{'behind it by' if greedy else first['rule'] + ', beyond the cut by'} {first['gap']:.3g}"
        place = f"{first['generation']} token {first['index']:,}"
        faults.append(f"{bad:,} of {tokens:,} tokens {what}, first {place} ({gap}; {first['place']})")
    if greedy:
        agreeing = tokens - bad - edge
        metrics["agreement"] = agreeing / tokens if tokens else 0.0
        summary = f"{agreeing:,} of {tokens:,} tokens are the reference's argmax, ties: {edge}"
    else:
        metrics |= _distribution(pairs, audits)
        summary = (
            f"{tokens:,} tokens: KS p = {metrics['p_ks']:.3g}, z = {metrics['z']:+.2f} "
            f"(p = {metrics['p_z']:.3g}), {edge} at the edge of the support"
        )
        if not missing:
            faults += _rejections(metrics, gate.audit_alpha / _TESTS)
    if faults:
        return Evidence("audit", Status.bad, f"{'; '.join(faults)} [{summary}]", metrics, details)
    if missing:
        line = f"{tokens} tokens scored, {missing} more needed"
        return Evidence("audit", Status.unknown, line, metrics, details)
    if tokens < total:
        line = f"only {tokens:,} of {total:,} tokens scored; in these no fault [{summary}]"
        return Evidence("audit", Status.unknown, line, metrics, details)
    return Evidence("audit", Status.ok, summary, metrics, details)


def _distribution(pairs: list[tuple[Generation, TokenScores]], audits: list[TokenAudit]) -> dict[str, float]:
    """Both distribution tests over the supported tokens of all generations."""
    pit = np.concatenate([a.pit for a in audits]) if audits else np.empty(0)
    inside = ~np.isnan(pit)
    if not inside.any():  # the violations, or their number at the edge, have decided already
        return {"ks_statistic": 0.0, "p_ks": 1.0, "z": 0.0, "p_z": 1.0}
    logprob, entropy, variance = (
        np.concatenate([getattr(s, name) for _, s in pairs]).astype(np.float64)[inside]
        for name in ("logprob", "entropy", "variance")
    )
    ks = stats.kstest(pit[inside], "uniform")
    z, p_z = z_test(logprob, entropy, variance)
    return {"ks_statistic": float(ks.statistic), "p_ks": float(ks.pvalue), "z": z, "p_z": p_z}


def _rejections(metrics: dict[str, float], alpha: float) -> list[str]:
    faults = []
    if metrics["p_edge"] < alpha:
        faults.append(
            f"{metrics['edge']:,.0f} tokens at the edge of the support are too many for rounding "
            f"(p = {metrics['p_edge']:.2g} < {alpha:.2g})"
        )
    if metrics["p_ks"] < alpha:
        faults.append(f"tokens are not draws from the reference (KS p = {metrics['p_ks']:.2g} < {alpha:.2g})")
    if metrics["p_z"] < alpha:
        way = "likelier" if metrics["z"] > 0 else "less likely"
        faults.append(
            f"tokens are {way} than the reference's draws (z = {metrics['z']:+.1f}, p = {metrics['p_z']:.2g})"
        )
    return faults


def _first_bad(
    pairs: list[tuple[Generation, TokenScores]], audits: list[TokenAudit], greedy: bool
) -> dict[str, Any]:
    for (generation, scores), audit in zip(pairs, audits, strict=True):
        if audit.violation.any():
            index = int(np.argmax(audit.violation))
            return {
                "generation": generation.key,
                "index": index,
                "token": int(generation.token_ids[index]),
                "rule": "argmax" if greedy else str(scores.cut_rule[index]),
                "gap": float(_greedy_gap(scores)[index] if greedy else scores.cut_gap[index]),
                "place": _place(generation, index),
            }
    raise ValueError("no violation in these audits")


def _place(generation: Generation, index: int) -> str:
    """Where in its round a token stands: an accepted draft, or the target's own token."""
    for number, r in enumerate(generation.rounds):
        if r.position <= index < r.position + r.emitted:
            draft = index - r.position
            kind = f"accepted draft {draft + 1}" if draft < r.accepted else "the target's own token"
            return f"{kind} of round {number}"
    return "in no round"
