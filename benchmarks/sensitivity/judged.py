"""One run's file, judged after 300, 1,000, 3,000 and all tokens, with and without the noise known."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from sm70lab.config import compose
from sm70lab.judge import acceptance, audit, betting, verdict
from sm70lab.judge.tolerance import Tolerance
from sm70lab.schema import Gate, Generation, Prompt, Round, Status, TokenScores

LENGTHS = (300, 1000, 3000, 6000)
ALPHA = 0.001
NOISE = ("noise_gap", "noise_winner_logit", "noise_winner_mass")
DRAFTS = 4
Pairs = list[tuple[Generation, TokenScores]]


@dataclass
class Judged:
    """What each kind of evidence says of one run; tokens are counted over its outputs in order."""

    seconds: tuple[float, float]  # decoding and auditing
    tokens: int
    first_outside: int | None  # token outside the support, beyond the tolerance
    first_noise: int | None  # token that the noise does not give
    alarm: int | None  # the bets have won 1/ALPHA
    p_value: dict[int, float]  # by length
    outside: dict[int, int]
    wealth: dict[int, float]  # log10, at its highest
    audit_bad: bool  # noise not known
    noise_bad: bool  # noise known
    shape_bad: bool
    acceptance: str  # "", or its findings
    non_finite: bool  # the engine itself stopped: logits not finite

    def first(self, noise: bool) -> int | None:
        """The token at which the audit is certain."""
        found = [self.first_outside, self.alarm, self.first_noise if noise else None]
        return min((at for at in found if at is not None), default=None)

    def score(self, length: int) -> float:
        """One number for an ROC curve, the noise not known: tokens outside first, then the p-value."""
        return 1000.0 * self.outside[length] - float(np.log10(max(self.p_value[length], 1e-300)))


def read(path: Path) -> tuple[Pairs, tuple[float, float]]:
    """The generations of a run's file with their scores."""
    with np.load(path, allow_pickle=False) as file:
        columns = {key: file[key] for key in file.files}
    pairs: Pairs = []
    # An output without a token has no scores, and leaves a gap.
    for number in sorted({int(key.split(".")[0]) for key in columns if "." in key}):
        c = {key.split(".", 1)[1]: v for key, v in columns.items() if key.startswith(f"{number}.")}
        name, text = (str(part) for part in c["prompt"])
        prompt = Prompt(int(c["index"]), name, text, [0], len(c["token_ids"]))
        rounds = [Round(int(p), int(d), int(a), int(e), 0.0) for p, d, a, e in c["rounds"]]
        ids, end = c["token_ids"].tolist(), str(c["finish_reason"])
        seed = int(path.stem.rsplit("-s", 1)[1])
        generation = Generation(prompt, 0, seed, ids, str(c["text"]), end, rounds, 0.0, 1.0)
        c["cdf_high"] = c["cdf_low"].astype(np.float64) + np.exp(c["logprob"].astype(np.float64))
        nothing = np.zeros(len(ids))
        pairs.append(
            (generation, TokenScores(**{f.name: c.get(f.name, nothing) for f in fields(TokenScores)}))
        )
    seconds = columns["seconds"]
    return pairs, (float(seconds[0]), float(seconds[1]))


def judge(path: Path, tolerance: Tolerance, gate: Gate) -> Judged:
    """Judge one file."""
    pairs, seconds = read(path)
    blind = [(g, replace(s, **{name: np.full(len(s.logprob), np.nan) for name in NOISE})) for g, s in pairs]
    audits = [audit.token_audit(g, s, tolerance, greedy=False) for g, s in pairs]
    violation = np.concatenate([a.violation for a in audits])
    rule = np.concatenate([a.rule for a in audits])
    alarm_at = betting.alarm(betting.log_wealth(np.concatenate([s.log_bets for _, s in pairs])), ALPHA)
    p_value, outside, wealth = {}, {}, {}
    for length in LENGTHS:
        metrics = _audit(_first(blind, length), gate, tolerance).metrics
        p_value[length], outside[length] = metrics["p_value"], int(metrics["violations"])
        wealth[length] = metrics["log10_e"]
    generations = [g for g, _ in pairs]
    shape = verdict.shape_evidence(generations, gate)
    accept = acceptance.evidence(generations, gate, DRAFTS)
    findings = accept.details["findings"] if accept.status is not Status.ok else {}
    return Judged(
        seconds=seconds,
        tokens=len(violation),
        first_outside=_first_index(violation & (rule != "noise")),
        first_noise=_first_index(violation & (rule == "noise")),
        alarm=alarm_at,
        p_value=p_value,
        outside=outside,
        wealth=wealth,
        audit_bad=_audit(blind, gate, tolerance).status is Status.bad,
        noise_bad=_audit(pairs, gate, tolerance).status is Status.bad,
        shape_bad=shape.status is Status.bad,
        acceptance=", ".join(findings),
        non_finite=any(g.finish_reason == "non_finite" for g in generations),
    )


def default_gate() -> Gate:
    """The gate of the default configuration."""
    return compose([]).gate


def _audit(pairs: Pairs, gate: Gate, tolerance: Tolerance) -> Any:
    generations, scores = [g for g, _ in pairs], [s for _, s in pairs]
    return audit.evidence(generations, scores, gate, greedy=False, tolerance=tolerance)


def _first(pairs: Pairs, length: int) -> Pairs:
    """The first ``length`` tokens, over the outputs in order."""
    cut: Pairs = []
    for generation, scores in pairs:
        n = min(length, len(generation.token_ids))
        part = TokenScores(**{f.name: getattr(scores, f.name)[:n] for f in fields(TokenScores)})
        cut.append((replace(generation, token_ids=generation.token_ids[:n]), part))
        length -= n
        if not length:
            break
    return cut


def _first_index(flags: np.ndarray) -> int | None:
    found = np.flatnonzero(flags)
    return int(found[0]) if len(found) else None
