"""Losslessness audit: were these tokens drawn from the reference's own distribution?

Under a lossless route token t is a draw from p'_t, the no-draft reference's truncated distribution
given the tokens before it (speculative sampling is exact: Leviathan, Kalman and Matias 2023; Chen
et al. 2023). Penalties and bans are already inside p'. From strong to weak:

1. Support: a token with p'(token) = 0 cannot be drawn. One beyond the tolerance decides alone.
2. Noise: where the route draws each token by Gumbel-max with noise keyed by its position, the token
   must be the one that p' gives with that noise. One that is behind it by more than the tolerance
   decides alone: a sampled run is then as good as a greedy one.
3. The edge: tokens within the tolerance of 1 and 2 are the arithmetic's doing only while they are
   few: their number is tested against Binomial(n, ``edge_share``).
4. The run's one p-value, over all tokens of all generations pooled once at the end: ``judge.draws``.
5. Evidence that may be looked at after every token: ``judge.betting``.

3, 4 and 5 share ``gate.audit_alpha`` as ¼, ½ and ¼ (Bonferroni). Where 2 has shown every token to be
the reference's own, 4 and 5 can only doubt the noise itself, and need α² for it.

At temperature 0 the token must be the reference's argmax: see ``token_audit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from sm70lab.judge import betting, draws
from sm70lab.judge.tolerance import Tolerance
from sm70lab.schema import Evidence, Gate, Generation, Status, TokenScores

_SEED_TAG = 0x6175646974  # "audit": keeps U apart from every draw of the run with the same seed
CURVE_POINTS = 500
SHARES = {"p_edge": 0.25, "p_value": 0.5, "log10_e": 0.25}  # of audit_alpha


@dataclass(frozen=True)
class TokenAudit:
    """Arrays with one entry an output token."""

    pit: NDArray[np.float64]  # randomised PIT; NaN outside the support and in greedy runs
    violation: NDArray[np.bool_]  # outside the support, not the argmax, not the noise's token
    edge: NDArray[np.bool_]  # the same within the tolerance ("at the edge"; greedy: a tie)
    rule: NDArray[np.str_]  # which: a cut, "argmax" or "noise"; "" where nothing is wrong
    gap: NDArray[np.float64]  # by how much


def token_audit(
    generation: Generation, scores: TokenScores, tolerance: Tolerance, greedy: bool
) -> TokenAudit:
    """Audit one generation's tokens; reproducible, U comes from the generation's seed.

    Greedy: every disagreement with the argmax is a violation, unless the token's logit is within the
    tolerance of it: by ``top2_margin`` for the second choice, by the top-k ``cut_gap`` (greedy is top-1)
    for one further down. A token that was not scored counts for nothing. Raises ``ValueError`` where an
    array's length is not the number of tokens or a supported token's score is not a number.
    """
    count = len(generation.token_ids)
    for name, values in vars(scores).items():
        if len(values) != count:
            raise ValueError(f"{generation.key}: scores.{name} has {len(values)} entries for {count} tokens")
    if greedy:
        wrong = scores.known & (scores.argmax != np.asarray(generation.token_ids, dtype=np.int64))
        gap = _greedy_gap(scores)
        tie = wrong & (gap <= tolerance.logit)
        rule = np.where(wrong, "argmax", "")
        return TokenAudit(np.full(count, np.nan), wrong & ~tie, tie, rule, np.where(wrong, gap, 0.0))
    inside = np.asarray(scores.in_support, dtype=bool)
    for name in ("logprob", "entropy", "variance", "cdf_low", "cdf_high", "collision", "covariance"):
        broken = np.flatnonzero(inside & ~np.isfinite(getattr(scores, name)))
        if broken.size:
            raise ValueError(f"{generation.key}: scores.{name} is not finite at token {broken[0]}")
    allowed = np.zeros(count)
    allowed[np.isin(scores.cut_rule, ("top_k", "min_p"))] = tolerance.logit
    allowed[scores.cut_rule == "top_p"] = tolerance.mass
    explained = np.isin(scores.cut_rule, ("top_k", "min_p", "top_p"))
    # Near-equal candidates may change places: the one beyond a cut is then as good as the last inside.
    near_cut = (scores.cut_gap <= allowed) | (scores.cut_logit <= tolerance.logit)
    edge = ~inside & explained & near_cut
    other = inside & (scores.noise_gap > 0)  # another token won; NaN where the noise is not known
    # The winner may stand so near a cut that the route's own arithmetic cuts it.
    at_cut = (scores.noise_winner_logit <= tolerance.logit) | (scores.noise_winner_mass <= tolerance.mass)
    near = other & ((scores.noise_gap <= tolerance.logit) | at_cut)
    uniform = np.random.default_rng(_key(generation)).random(count)
    pit = scores.cdf_low + uniform * (scores.cdf_high - scores.cdf_low)
    return TokenAudit(
        pit=np.where(inside, np.clip(pit, 0.0, 1.0), np.nan),
        violation=(scores.known & ~inside & ~edge) | (other & ~near),
        edge=edge | near,
        rule=np.where(other, "noise", scores.cut_rule),
        gap=np.where(other, scores.noise_gap, scores.cut_gap),
    )


def _key(generation: Generation) -> tuple[int, ...]:
    return (generation.seed % 2**64, generation.prompt.index, generation.repeat, _SEED_TAG)


def _greedy_gap(scores: TokenScores) -> NDArray[np.float64]:
    """Each token's logit gap to the argmax, where it is not the argmax; infinite where not known."""
    further = np.where(scores.cut_rule == "top_k", scores.cut_gap, np.inf)
    return np.where(scores.rank <= 1, scores.top2_margin, further)


def evidence(
    generations: Sequence[Generation],
    scores: Sequence[TokenScores | None],
    gate: Gate,
    *,
    greedy: bool,
    tolerance: Tolerance,
) -> Evidence:
    """The audit over all generations; ``scores`` lie parallel to them.

    ``bad``: a violation, or one of the tests below its share of ``gate.audit_alpha``. ``unknown``: no
    fault, but fewer than ``gate.min_tokens`` tokens scored in all, or some generation not scored.
    ``metrics``: tokens, audited_share, violations, edge, p_edge, and agreement (greedy) or
    ks_statistic, p_ks, z, z_collision, p_score, p_value, log10_e, noise_share (sampled); p_score is absent
    where the tokens are too sure for it.
    ``details``: tolerance; ``first_bad`` (generation, index, token, rule, gap, place), absent without a
    violation; ``curve``, the running evidence, for sampled runs, and ``limit_log10_e``, where it decides.
    """
    pairs = [(g, s) for g, s in zip(generations, scores, strict=True) if s is not None]
    audits = [token_audit(g, s, tolerance, greedy) for g, s in pairs]
    total = sum(len(g.token_ids) for g in generations)
    tokens = sum(int(s.known.sum()) for _, s in pairs)
    bad = sum(int(a.violation.sum()) for a in audits)
    edge = sum(int(a.edge.sum()) for a in audits)
    missing = max(0, gate.min_tokens - tokens)
    metrics: dict[str, float] = {"tokens": tokens, "audited_share": tokens / total if total else 0.0}
    p_edge = float(stats.binom.sf(edge - 1, tokens, tolerance.edge_share)) if edge else 1.0
    metrics |= {"violations": bad, "edge": edge, "p_edge": p_edge}
    details: dict[str, Any] = {"tolerance": asdict(tolerance), "needs_tokens": missing}
    faults = []
    if bad:
        details["first_bad"] = first = _first_bad(pairs, audits)
        faults.append(f"{bad:,} of {tokens:,} tokens {_in_words(first)}")
    if greedy:
        agreeing = tokens - bad - edge
        metrics["agreement"] = agreeing / tokens if tokens else 0.0
        summary = f"{agreeing:,} of {tokens:,} tokens are the reference's argmax, ties: {edge}"
    else:
        wealth = _wealth(pairs)
        details["curve"] = _curve(pairs, audits, wealth)
        metrics |= _distribution(pairs, audits, wealth)
        summary = (
            f"{tokens:,} tokens: p = {metrics['p_value']:.3g} (KS {metrics['p_ks']:.3g}, "
            f"log-probability z = {metrics['z']:+.2f}, collision z = {metrics['z_collision']:+.2f}), "
            f"evidence 10^{metrics['log10_e']:.1f}, {edge} at the edge of the support"
        )
        if metrics["noise_share"] == 1 and not bad:
            summary += f", {tokens - edge:,} are the token that the reference draws with the same noise"
    alpha = _alphas(metrics, gate.audit_alpha)
    details["limit_log10_e"] = -float(np.log10(alpha["log10_e"]))
    if not missing:
        faults += _rejections(metrics, alpha)
    if faults:
        return Evidence("audit", Status.bad, f"{'; '.join(faults)} [{summary}]", metrics, details)
    if missing:
        line = f"{tokens} tokens scored, {missing} more needed"
        return Evidence("audit", Status.unknown, line, metrics, details)
    if tokens < total:
        line = f"only {tokens:,} of {total:,} tokens scored; in these no fault [{summary}]"
        return Evidence("audit", Status.unknown, line, metrics, details)
    return Evidence("audit", Status.ok, summary, metrics, details)


def _wealth(pairs: list[tuple[Generation, TokenScores]]) -> NDArray[np.float64]:
    """log wealth of the bets over all tokens, one generation after the other."""
    return betting.log_wealth(np.concatenate([s.log_bets for _, s in pairs])) if pairs else np.empty(0)


def _distribution(
    pairs: list[tuple[Generation, TokenScores]], audits: list[TokenAudit], wealth: NDArray[np.float64]
) -> dict[str, float]:
    """The tests over the supported tokens of all generations, and their one p-value."""
    pit = np.concatenate([a.pit for a in audits]) if audits else np.empty(0)
    inside = ~np.isnan(pit)
    known = np.concatenate([~np.isnan(s.noise_gap) for _, s in pairs]) if pairs else np.empty(0)
    found = {"noise_share": float(known.mean()) if len(known) else 0.0}
    found["log10_e"] = float(wealth.max(initial=0.0)) / np.log(10)
    if not inside.any():  # the violations, or their number at the edge, have decided already
        return found | {"ks_statistic": 0.0, "p_ks": 1.0, "z": 0.0, "z_collision": 0.0, "p_value": 1.0}
    found["ks_statistic"], found["p_ks"] = draws.uniformity_test(pit[inside])
    scored = draws.score_test([(s, ~np.isnan(a.pit)) for (_, s), a in zip(pairs, audits, strict=True)])
    found |= {"z": scored.z, "z_collision": scored.z_collision, "p_value": found["p_ks"]}
    if not np.isnan(scored.p_value):  # enough variance for it
        found["p_score"] = scored.p_value
        found["p_value"] = draws.cauchy_combination([found["p_ks"], scored.p_value])
    return found


def _alphas(metrics: dict[str, float], audit_alpha: float) -> dict[str, float]:
    """Each test's share of alpha."""
    proven = metrics.get("noise_share") == 1 and not metrics["violations"]
    return {
        name: share * (audit_alpha**2 if proven and name != "p_edge" else audit_alpha)
        for name, share in SHARES.items()
    }


def _rejections(metrics: dict[str, float], alpha: dict[str, float]) -> list[str]:
    """In words, each test that is below its share of alpha."""
    faults = []
    if metrics["p_edge"] < alpha["p_edge"]:
        faults.append(
            f"{metrics['edge']:,.0f} tokens at the edge of the support are too many for rounding "
            f"(p = {metrics['p_edge']:.2g} < {alpha['p_edge']:.2g})"
        )
    if "p_value" not in metrics:
        return faults
    if metrics["p_value"] < alpha["p_value"]:
        ways = {
            "p_ks": "not spread as the reference's",
            "p_score": f"{'likelier' if metrics['z'] > 0 else 'less likely'} than the reference's",
        }
        least = min(ways, key=lambda name: metrics.get(name, 1.0))
        faults.append(
            f"tokens are not draws from the reference: {ways[least]} "
            f"(p = {metrics['p_value']:.2g} < {alpha['p_value']:.2g}; {least} = {metrics[least]:.2g})"
        )
    if metrics["log10_e"] >= -np.log10(alpha["log10_e"]):
        faults.append(
            f"bets on a changed distribution win 10^{metrics['log10_e']:.1f} times their stake "
            f"(chance: {alpha['log10_e']:.2g})"
        )
    return faults


def _curve(
    pairs: list[tuple[Generation, TokenScores]], audits: list[TokenAudit], wealth: NDArray[np.float64]
) -> list[dict[str, Any]]:
    """The running evidence for a picture: log10 of the wealth over output tokens, faults marked."""
    curve, begin = [], 0
    for (generation, _), audit in zip(pairs, audits, strict=True):
        count = len(generation.token_ids)
        at = np.unique(np.linspace(0, count - 1, min(count, CURVE_POINTS)).astype(int))
        part = wealth[begin : begin + count][at] / np.log(10)
        faults = np.flatnonzero(audit.violation)[:CURVE_POINTS]
        curve.append(
            {
                "generation": generation.key,
                "token": at.tolist(),
                "log10_e": [round(float(value), 3) for value in part],
                "faults": faults.tolist(),
            }
        )
        begin += count
    return curve


def _first_bad(pairs: list[tuple[Generation, TokenScores]], audits: list[TokenAudit]) -> dict[str, Any]:
    for (generation, _), audit in zip(pairs, audits, strict=True):
        if audit.violation.any():
            index = int(np.argmax(audit.violation))
            return {
                "generation": generation.key,
                "index": index,
                "token": int(generation.token_ids[index]),
                "rule": str(audit.rule[index]),
                "gap": float(audit.gap[index]),
                "place": _place(generation, index),
            }
    raise ValueError("no violation in these audits")


def _in_words(first: dict[str, Any]) -> str:
    place = f"{first['generation']} token {first['index']:,}"
    if first["rule"] == "argmax":
        what, gap = "not the reference's argmax", f"behind it by {first['gap']:.3g}"
    elif first["rule"] == "noise":
        what, gap = "not what the reference draws with the same noise", f"behind it by {first['gap']:.3g}"
    else:
        what, gap = (
            "outside the reference's support",
            f"{first['rule'] or 'no cut'}, beyond the cut by {first['gap']:.3g}",
        )
    return f"{what}, first {place} ({gap}; {first['place']})"


def _place(generation: Generation, index: int) -> str:
    """Where in its round a token stands: an accepted draft, or the target's own token."""
    for number, r in enumerate(generation.rounds):
        if r.position <= index < r.position + r.emitted:
            draft = index - r.position
            kind = f"accepted draft {draft + 1}" if draft < r.accepted else "the target's own token"
            return f"{kind} of round {number}"
    return "in no round" if generation.rounds else "rounds not told"
