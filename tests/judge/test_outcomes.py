"""Each generation by itself, and the sequential test over repeats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sm70lab.judge.outcomes import GenerationOutcome, SequentialRepeats, generation_outcome
from sm70lab.judge.statistics import Decision
from sm70lab.judge.tolerance import tolerance_for
from sm70lab.judge.verdict import RouteFacts
from sm70lab.schema import Gate, ModelDtype, Round, ShapeGate, Sprt

FACTS = RouteFacts(draft_tokens=4, temperature=1.0, tolerance=tolerance_for(ModelDtype.float32, None))
GOOD_TEXT = " ".join(f"{i * 7919 % 9973:x}" for i in range(200))
LOOP_TEXT = "color: red;\n" * 200
PASS, FAIL, UNKNOWN = (GenerationOutcome(passed) for passed in (True, False, None))


@pytest.mark.parametrize(
    ("what", "passed", "words"),
    [
        ("sound", True, ""),
        ("loop", False, "repeat20 199"),
        ("non_finite", False, "not finite in round 9"),
        ("wrong token", False, "token 17 is not one"),
        ("plateau", False, "plateau"),
        ("interrupted", None, "interrupted"),
        ("short", None, "24 tokens below"),
    ],
)
def test_one_generation(what: str, passed: bool | None, words: str, draw: Any, gate: Gate) -> None:
    generation, scores = draw(3, 40 if what == "short" else 1000)
    generation.text, generation.finish_reason = GOOD_TEXT, "length"
    generation.rounds = [Round(i, 4, 3, 4, 0.1) for i in range(0, len(generation.token_ids), 4)]
    if what == "loop":
        generation.text = LOOP_TEXT
    elif what == "wrong token":
        inside = np.arange(1000) != 17
        scores = replace(scores, in_support=inside, cut_rule=np.where(inside, "", "banned"))
    elif what == "plateau":
        generation.token_ids = list(range(40)) * 25
        generation.rounds = [Round(i, 4, 4, 5, 0.1) for i in range(0, 1000, 5)]
    elif what in ("non_finite", "interrupted"):
        generation.finish_reason, generation.note = what, "logits are not finite in round 9"
    found = generation_outcome(generation, scores, gate, FACTS)
    assert found.passed is passed
    assert words in found.line


def test_the_gate_of_the_run_judges_the_text(make: Any, gate: Gate) -> None:
    counting = make("".join(f".item-{i} {{ margin: {i}px; }}\n" for i in range(400)))
    strict = replace(gate, shape=ShapeGate.strict)
    assert generation_outcome(counting, None, gate, FACTS).passed is True
    ours = generation_outcome(counting, None, strict, FACTS)
    assert (ours.passed, "a loop to the end" in ours.line) == (False, True)


def test_without_a_reference_the_text_decides(make: Any, gate: Gate) -> None:
    assert generation_outcome(make(GOOD_TEXT), None, gate, FACTS).passed is True
    assert generation_outcome(make(LOOP_TEXT), None, gate, FACTS).passed is False


def test_repeats_stop_when_decided() -> None:
    run = SequentialRepeats(Sprt())
    for _ in range(8):
        assert run.add([PASS, PASS]) is Decision.undecided
    assert run.add([PASS, PASS]) is Decision.good
    assert run.line == (
        "pass rate 0.95 rather than 0.8 after 9 repeats (18 passed, 0 failed; log-likelihood ratio -3.09, "
        "good at -2.94, bad at +2.94)"
    )
    assert run.record()["decision"] == "good"


def test_a_decision_inside_a_repeat_stands() -> None:
    run = SequentialRepeats(Sprt())
    assert run.add([FAIL, FAIL, FAIL, *[PASS] * 40]) is Decision.bad
    assert run.line.startswith("pass rate 0.8 rather than 0.95 after 1 repeat (40 passed, 3 failed")


def test_an_undecided_end_says_what_is_missing() -> None:
    run = SequentialRepeats(Sprt(max_repeats=2))
    run.add([PASS, UNKNOWN])
    assert run.line.startswith("undecided after 1 repeat (1 passed, 0 failed, 1 not judged")
    run.add([FAIL, PASS])
    assert run.line.startswith("undecided at max_repeats=2 after 2 repeats (2 passed, 1 failed")
    more = int(run.line.rsplit("; ", 1)[1].split(" ")[0])
    assert run.test.decide(2 + more, 1) is Decision.good
    assert run.test.decide(1 + more, 1) is Decision.undecided
