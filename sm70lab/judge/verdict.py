"""From evidence to one of the four verdicts.

| audit | text (shape or acceptance bad) | run | verdict |
|---|---|---|---|
| any | any | logits not finite, from scratch finite | route_fault |
| any | any | logits not finite, from scratch too | model_degenerate |
| bad | any | any | route_fault |
| ok, every token | bad | any | model_degenerate |
| none, or unknown | bad | any | inconclusive: an audit is needed |
| unknown (too few tokens, or not all) | ok | any | inconclusive: how many more |
| any | too short to say | any | inconclusive: how many more |
| ok or none | ok | interrupted | inconclusive: let it finish |
| ok | ok | finished | pass |
| ok or none | ok | connection lost, timeout, server's error, unreadable | inconclusive: what failed |
| ok or none | the server does not run the named route | any | inconclusive: which drafts |
| none, and a reference was asked for by name | ok | finished | inconclusive: why it scored nothing |
| none | ok | finished | pass, on text alone: the reason says so and ``audited`` is 0 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sm70lab.judge import acceptance, audit, served_acceptance, strict_gate, text_shape
from sm70lab.judge.tolerance import Tolerance
from sm70lab.schema import (
    BROKEN_ENDS,
    CounterWindow,
    Evidence,
    Gate,
    Generation,
    ShapeGate,
    Status,
    TokenScores,
    Verdict,
    VerdictKind,
)

# Findings beside which tok/s is no speed.
NO_SPEED = {"accounting", "rise_with_repetition", "other_traffic", "hazard"}
NON_FINITE = {"non_finite": VerdictKind.route_fault, "model_non_finite": VerdictKind.model_degenerate}


@dataclass(frozen=True)
class RouteFacts:
    """What the judge must know of the run besides its records."""

    draft_tokens: int  # 0: the no-draft run
    temperature: float  # 0: greedy
    tolerance: Tolerance  # of the audit: ``tolerance.tolerance_for``
    reference: str = ""  # of a server's run: which reference judged it, or why none could
    served: bool = False  # no rounds, and ``draft_tokens`` is what the route is said to be
    named_route: bool = True  # the route was chosen, and is not whatever the server runs
    hazard: str = served_acceptance.NO_HAZARD  # that a server says to run with
    must_audit: str = ""  # the setting that asks for a reference; empty: without one the text decides


def judge(
    generations: Sequence[Generation],
    scores: Sequence[TokenScores | None] | None,
    gate: Gate,
    facts: RouteFacts,
    counters: Sequence[CounterWindow] = (),
) -> Verdict:
    """Judge a run: one verdict over all its generations. ``counters``: of a server, in order of time.

    ``scores`` lie parallel to the generations; None (or nothing but None) where no reference can
    score. Evidence comes from weak to strong: shape, acceptance, audit. The acceptance evidence
    carries ``speed_valid`` (1 or 0): no speed counts unless the verdict is ``pass`` and the rounds add
    up. The audit evidence carries ``audited`` (1 or 0). Raises ``UsageError`` for an unknown contract,
    ``ValueError`` for scores that do not fit their generation.
    """
    shape = shape_evidence(generations, gate)
    accept = acceptance_evidence(generations, gate, facts, counters)
    scored = scores is not None and any(s is not None for s in scores)
    if scores is not None and scored:
        checked = audit.evidence(
            generations, scores, gate, greedy=facts.temperature == 0, tolerance=facts.tolerance
        )
    else:
        checked = Evidence("audit", Status.unknown, "no reference scored this run")
    if facts.reference:
        checked.line += f"; reference: {facts.reference}" if scored else f": {facts.reference}"
        checked.details["reference"] = facts.reference
    checked.metrics["audited"] = float(scored)
    kind, reason = _decide(generations, shape, accept, checked, scored, facts)
    return Verdict(kind, reason, [shape, _mark_speed(accept, kind), checked])


def acceptance_evidence(
    generations: Sequence[Generation],
    gate: Gate,
    facts: RouteFacts,
    counters: Sequence[CounterWindow] = (),
) -> Evidence:
    """Acceptance from the rounds, or of a server from what it counted."""
    if facts.served:
        wanted = facts.draft_tokens if facts.named_route else None
        return served_acceptance.evidence(generations, counters, wanted, facts.hazard)
    return acceptance.evidence(generations, gate, facts.draft_tokens)


def shape_evidence(generations: Sequence[Generation], gate: Gate) -> Evidence:
    """Text shape by the gate's own rules."""
    if gate.shape is ShapeGate.strict:
        return strict_gate.evidence(generations, gate)
    return text_shape.evidence(generations, gate)


def _decide(
    generations: Sequence[Generation],
    shape: Evidence,
    accept: Evidence,
    checked: Evidence,
    scored: bool,
    facts: RouteFacts,
) -> tuple[VerdictKind, str]:
    for finish, kind in NON_FINITE.items():
        broken = next((g for g in generations if g.finish_reason == finish), None)
        if broken is not None:
            return kind, f"{broken.key}: {broken.note}"
    if not any(g.tokens or g.full_text for g in generations):
        why = next((f": {g.key}: {g.note}" for g in generations if g.note), "")
        return VerdictKind.inconclusive, f"nothing was generated{why}"
    if checked.status is Status.bad:
        return VerdictKind.route_fault, checked.line
    text = next((e for e in (shape, accept) if e.status is Status.bad), None)
    if text is not None:
        if checked.status is Status.ok:
            tokens = int(checked.metrics["tokens"])
            return (
                VerdictKind.model_degenerate,
                f"the text fails, and the reference agrees with all {tokens:,} tokens: {text.line}",
            )
        need = f"the audit needs more ({checked.line})" if scored else "an audit must say whose fault it is"
        return VerdictKind.inconclusive, f"the text fails, and {need}: {text.line}"
    lost = [g for g in generations if g.finish_reason in BROKEN_ENDS]
    if lost:
        more = f"; so ended {len(lost)} of {len(generations)} outputs" if len(lost) > 1 else ""
        line = f"{lost[0].key}: {lost[0].finish_reason}: {lost[0].note}{more}; no fault of the route so far"
        return VerdictKind.inconclusive, line
    if scored and checked.status is Status.unknown:
        return VerdictKind.inconclusive, checked.line
    if shape.status is Status.unknown:
        return VerdictKind.inconclusive, shape.line
    interrupted = sum(g.finish_reason == "interrupted" for g in generations)
    if interrupted:
        return (
            VerdictKind.inconclusive,
            f"interrupted: {interrupted} of {len(generations)} outputs did not finish; no fault so far",
        )
    if other_route := accept.details["findings"].get(served_acceptance.OTHER_ROUTE):
        return VerdictKind.inconclusive, other_route
    if not scored and facts.must_audit:
        why = f": {facts.reference}" if facts.reference else ""
        return VerdictKind.inconclusive, f"{facts.must_audit} scored no token{why}"
    if not scored:
        why = f" ({facts.reference})" if facts.reference else ""
        if accept.status is Status.unknown:
            line = f"the text is sound; acceptance is not known, and losslessness was not audited{why}"
            return VerdictKind.passed, line
        return VerdictKind.passed, f"text and acceptance are sound; losslessness was not audited{why}"
    return VerdictKind.passed, "the text is sound, and every token is one the reference could have drawn"


def _mark_speed(accept: Evidence, kind: VerdictKind) -> Evidence:
    sound = not accept.details["findings"].keys() & NO_SPEED
    valid = kind is VerdictKind.passed and sound
    return replace(accept, metrics=accept.metrics | {"speed_valid": float(valid)})
