"""Pass or fail of each generation by itself, and the sequential test that ``repeats=auto`` runs on them.

A generation fails on what it shows alone: logits that are not finite, a text beyond the gate's
shape, full acceptance of a repeating text, a token that the reference could not have given. The
audit's pooled tests (p-value, evidence) belong to the run; so a run may fail while each of its
generations passes, never the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sm70lab.judge.audit import token_audit
from sm70lab.judge.statistics import Decision, SequentialTest
from sm70lab.judge.verdict import NON_FINITE, RouteFacts, acceptance_evidence, shape_evidence
from sm70lab.schema import BROKEN_ENDS, Gate, Generation, Sprt, Status, TokenScores


@dataclass(frozen=True)
class GenerationOutcome:
    """One generation's own result; ``line`` says why it failed or is not judged."""

    passed: bool | None  # None: too little to say
    line: str = ""


def generation_outcome(
    generation: Generation, scores: TokenScores | None, gate: Gate, facts: RouteFacts
) -> GenerationOutcome:
    """Judge one generation by itself. Raises as ``verdict.judge`` does."""
    if generation.finish_reason in NON_FINITE:
        return GenerationOutcome(False, generation.note)
    if scores is not None and generation.token_ids:
        greedy = facts.temperature == 0
        wrong = token_audit(generation, scores, facts.tolerance, greedy).violation
        if wrong.any():
            index = int(wrong.argmax())
            return GenerationOutcome(False, f"token {index:,} is not one the reference could have given")
    shape = shape_evidence([generation], gate)
    if shape.status is Status.bad:
        return GenerationOutcome(
            False, str(shape.details["generations"][generation.key]["failures"][0]["line"])
        )
    accept = acceptance_evidence([generation], gate, facts)
    if accept.status is Status.bad:
        return GenerationOutcome(False, accept.line)
    if generation.finish_reason in BROKEN_ENDS:
        return GenerationOutcome(None, generation.note)
    if generation.finish_reason == "interrupted":
        return GenerationOutcome(None, "interrupted")
    return GenerationOutcome(None, shape.line) if shape.status is Status.unknown else GenerationOutcome(True)


@dataclass
class SequentialRepeats:
    """The sequential test of one run: takes each repeat's outcomes, says when to stop."""

    config: Sprt
    passed: int = 0
    failed: int = 0
    not_judged: int = 0
    repeats: int = 0
    decision: Decision = Decision.undecided
    test: SequentialTest = field(init=False)

    def __post_init__(self) -> None:
        c = self.config
        self.test = SequentialTest(c.p0, c.p1, c.alpha, c.beta)

    def add(self, outcomes: Sequence[GenerationOutcome]) -> Decision:
        """Count one repeat's generations, in order; the first decision stands whatever follows it."""
        self.repeats += 1
        for outcome in outcomes:
            if outcome.passed is None:
                self.not_judged += 1
            elif outcome.passed:
                self.passed += 1
            else:
                self.failed += 1
            if self.decision is Decision.undecided:
                self.decision = self.test.decide(self.passed, self.failed)
        return self.decision

    @property
    def line(self) -> str:
        """The decision, its numbers and its boundaries, for a person."""
        c, test = self.config, self.test
        words = {
            Decision.good: f"pass rate {c.p0:g} rather than {c.p1:g}",
            Decision.bad: f"pass rate {c.p1:g} rather than {c.p0:g}",
            Decision.undecided: f"undecided at max_repeats={c.max_repeats}"
            if self.repeats >= c.max_repeats
            else "undecided",
        }[self.decision]
        counts = f"{self.passed} passed, {self.failed} failed"
        counts += f", {self.not_judged} not judged" if self.not_judged else ""
        repeats = f"{self.repeats} repeat" + ("s" if self.repeats != 1 else "")
        ratio = test.log_ratio(self.passed, self.failed)
        line = (
            f"{words} after {repeats} ({counts}; log-likelihood ratio {ratio:+.2f}, "
            f"good at {test.lower:.2f}, bad at {test.upper:+.2f})"
        )
        if self.decision is Decision.undecided:
            line += f"; {test.passes_to_good(self.failed) - self.passed} more passes in a row would decide"
        return line

    def record(self) -> dict[str, Any]:
        """For ``result.json``: what was asked, found and decided, and Wald's expected numbers."""
        test = self.test
        return {
            **vars(self.config),
            "decision": self.decision.value,
            "line": self.line,
            "repeats": self.repeats,
            "passed": self.passed,
            "failed": self.failed,
            "not_judged": self.not_judged,
            "log_likelihood_ratio": test.log_ratio(self.passed, self.failed),
            "lower": test.lower,
            "upper": test.upper,
            "expected_outcomes_p0": test.expected_outcomes(self.config.p0),
            "expected_outcomes_p1": test.expected_outcomes(self.config.p1),
        }
