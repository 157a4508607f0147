"""The truth table of the verdict, with real evidence behind every row."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sm70lab.judge import tolerance
from sm70lab.judge.verdict import RouteFacts, judge
from sm70lab.schema import Gate, Generation, Round, Status, TokenScores, VerdictKind

FACTS = RouteFacts(draft_tokens=4, temperature=1.0, tolerance=tolerance.FLOAT32)
GOOD_TEXT = " ".join(f"{i * 7919 % 9973:x}" for i in range(200))
LOOP_TEXT = "color: red;\n" * 200
INCONCLUSIVE = VerdictKind.inconclusive


@pytest.fixture
def case(draw: Any) -> Any:
    """Build (generation, scores) with a good or bad text and a clean, faulty, short or absent audit."""

    def build(
        text: str, audited: str, finish: str, count: int = 400
    ) -> tuple[Generation, TokenScores | None]:
        generation, scores = draw(3, 40 if audited == "short" else count)
        generation.text, generation.finish_reason = text, finish
        generation.note = "logits are not finite in round 9" if "non_finite" in finish else ""
        generation.note = "reset by peer" if finish == "connection_lost" else generation.note
        generation.rounds = [Round(i, 4, 3, 4, 0.1) for i in range(0, len(generation.token_ids), 4)]
        if audited == "bad":
            scores = replace(scores, logprob=scores.logprob + 1.0)
        return generation, None if audited == "none" else scores

    return build


@pytest.mark.parametrize(
    ("audited", "text", "finish", "kind", "words"),
    [
        ("bad", GOOD_TEXT, "stop", VerdictKind.route_fault, "z ="),
        ("bad", LOOP_TEXT, "stop", VerdictKind.route_fault, "z ="),
        ("bad", GOOD_TEXT, "interrupted", VerdictKind.route_fault, "z ="),
        ("ok", GOOD_TEXT, "non_finite", VerdictKind.route_fault, "in round 9"),
        ("none", GOOD_TEXT, "non_finite", VerdictKind.route_fault, "in round 9"),
        ("ok", GOOD_TEXT, "model_non_finite", VerdictKind.model_degenerate, "in round 9"),
        ("ok", LOOP_TEXT, "length", VerdictKind.model_degenerate, "all 400 tokens"),
        ("ok", LOOP_TEXT, "interrupted", VerdictKind.model_degenerate, "all 400 tokens"),
        ("none", LOOP_TEXT, "length", INCONCLUSIVE, "an audit must say whose fault"),
        ("short", LOOP_TEXT, "length", INCONCLUSIVE, "24 more needed"),
        ("short", GOOD_TEXT, "length", INCONCLUSIVE, "24 more needed"),
        ("ok", GOOD_TEXT, "interrupted", INCONCLUSIVE, "interrupted: 1 of 1"),
        ("none", GOOD_TEXT, "interrupted", INCONCLUSIVE, "interrupted: 1 of 1"),
        ("none", GOOD_TEXT, "connection_lost", INCONCLUSIVE, "connection_lost: reset by peer"),
        ("ok", GOOD_TEXT, "timeout", INCONCLUSIVE, "no fault of the route so far"),
        ("ok", LOOP_TEXT, "server_error", VerdictKind.model_degenerate, "all 400 tokens"),
        ("none", LOOP_TEXT, "malformed", INCONCLUSIVE, "an audit must say whose fault"),
        ("bad", GOOD_TEXT, "connection_lost", VerdictKind.route_fault, "z ="),
        ("ok", GOOD_TEXT, "stop", VerdictKind.passed, "every token"),
        ("ok", GOOD_TEXT, "length", VerdictKind.passed, "every token"),
        ("none", GOOD_TEXT, "stop", VerdictKind.passed, "losslessness was not audited"),
    ],
)
def test_truth_table(
    audited: str, text: str, finish: str, kind: VerdictKind, words: str, case: Any, gate: Gate
) -> None:
    generation, scores = case(text, audited, finish)
    verdict = judge([generation], [scores], gate, FACTS)
    assert verdict.kind is kind
    assert words in verdict.reason
    by_kind = {e.kind: e for e in verdict.evidence}
    assert list(by_kind) == ["shape", "acceptance", "audit"]
    assert by_kind["audit"].metrics["audited"] == (audited != "none")
    assert by_kind["acceptance"].metrics["speed_valid"] == (kind is VerdictKind.passed)


def test_no_scores_at_all_is_no_audit(case: Any, gate: Gate) -> None:
    generation, _ = case(GOOD_TEXT, "none", "stop")
    assert judge([generation], None, gate, FACTS).kind is VerdictKind.passed
    assert judge([generation], [None], gate, FACTS) == judge([generation], None, gate, FACTS)


def test_partial_scores_never_pass_nor_blame_the_model(case: Any, draw: Any, gate: Gate) -> None:
    first, second = case(GOOD_TEXT, "ok", "stop"), draw(4, 400, index=1)
    second[0].text = GOOD_TEXT
    assert judge([first[0], second[0]], [first[1], None], gate, FACTS).kind is INCONCLUSIVE
    second[0].text = LOOP_TEXT
    assert judge([first[0], second[0]], [first[1], None], gate, FACTS).kind is INCONCLUSIVE
    assert (
        judge([first[0], second[0]], [first[1], second[1]], gate, FACTS).kind is VerdictKind.model_degenerate
    )


def test_one_faulty_generation_decides(case: Any, draw: Any, gate: Gate) -> None:
    first, second = case(GOOD_TEXT, "ok", "stop"), draw(4, 400, index=1)
    second[0].text = GOOD_TEXT
    wrong = replace(second[1], in_support=np.arange(400) != 17, cut_rule=np.full(400, "banned"))
    verdict = judge([first[0], second[0]], [first[1], wrong], gate, FACTS)
    assert verdict.kind is VerdictKind.route_fault
    assert "p1-r0 token 17" in verdict.reason


def test_a_plateau_on_repeating_text_fails_the_text(draw: Any, gate: Gate) -> None:
    """Every shape metric is within its threshold, yet the window repeats at full acceptance."""
    generation, scores = draw(3, 1000)
    generation.text = GOOD_TEXT
    generation.token_ids = list(range(40)) * 25
    generation.rounds = [Round(i, 4, 4, 5, 0.1) for i in range(0, 1000, 5)]
    assert judge([generation], [scores], gate, FACTS).kind is VerdictKind.model_degenerate
    assert judge([generation], None, gate, FACTS).kind is INCONCLUSIVE


def test_a_text_cut_short_needs_more_tokens(draw: Any, gate: Gate) -> None:
    long, scores = draw(3, 400)
    long.text = GOOD_TEXT
    short, short_scores = draw(4, 20, index=1)
    short.text, short.finish_reason = "a b c", "length"
    verdict = judge([long, short], [scores, short_scores], gate, replace(FACTS, draft_tokens=0))
    assert verdict.kind is INCONCLUSIVE
    assert "44 tokens below" in verdict.reason
    short.finish_reason = "stop"  # the same length by the model's own choice
    verdict = judge([long, short], [scores, short_scores], gate, replace(FACTS, draft_tokens=0))
    assert verdict.kind is VerdictKind.model_degenerate


def test_rounds_that_do_not_add_up_void_the_speed_only(case: Any, gate: Gate) -> None:
    generation, scores = case(GOOD_TEXT, "ok", "stop")
    generation.rounds[3] = replace(generation.rounds[3], emitted=9)
    verdict = judge([generation], [scores], gate, FACTS)
    assert verdict.kind is VerdictKind.passed
    assert verdict.evidence[1].status is Status.warn
    assert verdict.evidence[1].metrics["speed_valid"] == 0.0


def test_a_rise_with_repetition_is_no_speed(draw: Any, gate: Gate) -> None:
    """Acceptance climbs while the text turns stale: the run may pass, its tok/s may not be ranked."""
    generation, scores = draw(3, 6000)
    rng = np.random.default_rng(1)
    accepts, position = [], 0
    while position < 6000:
        accepts.append(int(min(rng.geometric(1 - 0.5 - 0.07 * (position // 1000)) - 1, 4)))
        position += accepts[-1] + 1
    generation.rounds, position = [], 0
    for accepted in accepts:
        generation.rounds.append(Round(position, 4, accepted, accepted + 1, 0.1))
        position += accepted + 1
    generation.token_ids = [i if rng.random() > i / position else i % 40 for i in range(position)]
    scores = TokenScores(**{k: np.resize(v, (position, *v.shape[1:])) for k, v in vars(scores).items()})
    generation.text = GOOD_TEXT
    verdict = judge([generation], [scores], gate, FACTS)
    assert verdict.kind is VerdictKind.passed
    assert "rise_with_repetition" in verdict.evidence[1].details["findings"]
    assert verdict.evidence[1].metrics["speed_valid"] == 0.0


def test_greedy_runs_use_the_argmax(draw: Any, gate: Gate) -> None:
    generation, scores = draw(5, 300)
    generation.text, generation.token_ids = GOOD_TEXT, scores.argmax.tolist()
    facts = RouteFacts(0, 0.0, tolerance.FLOAT32)
    assert judge([generation], [scores], gate, facts).kind is VerdictKind.passed
    generation.token_ids[9] += 1
    scores.rank[9], scores.top2_margin[9] = 1, 1.0
    assert judge([generation], [scores], gate, facts).kind is VerdictKind.route_fault


def test_nothing_generated(make: Any, gate: Gate) -> None:
    for generations in ([], [make("", token_ids=[], finish_reason="interrupted")]):
        verdict = judge(generations, None, gate, FACTS)
        assert (verdict.kind, verdict.reason) == (INCONCLUSIVE, "nothing was generated")


@pytest.mark.parametrize("audited", ["ok", "bad", "none"])
def test_the_record_is_strict_json(audited: str, case: Any, gate: Gate) -> None:
    generation, scores = case(LOOP_TEXT, audited, "length")
    generation.rounds[-1] = Round(396, 4, 1, 1, 0.0)  # a window of its own would have no rate to give
    generation.rounds[:-1] = [Round(i, 4, 4, 4, 0.1) for i in range(0, 396, 4)]
    verdict = judge([generation], [scores], replace(gate, window_tokens=3), FACTS)
    assert json.dumps([vars(e) for e in verdict.evidence], allow_nan=False)


def test_the_line_names_the_reference_that_judged_or_why_none_could(case: Any, gate: Gate) -> None:
    judged = replace(FACTS, reference="the server's own prefill")
    generation, scores = case(GOOD_TEXT, "ok", "stop")
    audit = judge([generation], [scores], gate, judged).evidence[-1]
    assert audit.line.endswith("; reference: the server's own prefill")
    assert audit.details["reference"] == "the server's own prefill"
    generation, scores = case(GOOD_TEXT, "bad", "stop")
    assert judge([generation], [scores], gate, judged).reason.endswith("reference: the server's own prefill")
    nobody = judge([generation], [None], gate, replace(FACTS, reference="target.reference=none"))
    assert nobody.evidence[-1].line == "no reference scored this run: target.reference=none"
    plain = judge([generation], [scores], gate, FACTS)
    assert "; reference:" not in plain.reason and "reference" not in plain.evidence[-1].details
