"""Acceptance of a server's run from its counters; reasoning that the server told apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sm70lab.judge import served_acceptance, tolerance
from sm70lab.judge.reasoning import split
from sm70lab.judge.strict_gate import findings
from sm70lab.judge.text_shape import judged_tokens, measure
from sm70lab.judge.verdict import RouteFacts, judge
from sm70lab.schema import CounterWindow, Gate, Generation, ShapeGate, Speculation, Status, VerdictKind

LOOP_FROM, TOKENS = 1000, 2000
SOUND = " ".join(f"{i * 7919 % 9973:x}" for i in range(200))


def window(
    start: int, end: int, drafts: int, accepted: tuple[int, ...], other: bool = False
) -> CounterWindow:
    spans = (("page-r0", start, end),)
    return CounterWindow(end - start, 1.0, drafts, 2 * drafts, sum(accepted), accepted, other, spans)


@pytest.fixture
def looping(make: Any) -> Generation:
    """1,000 new tokens, then the same eight."""
    ids = [*range(LOOP_FROM), *(i % 8 for i in range(TOKENS - LOOP_FROM))]
    found: Generation = replace(make(SOUND, token_ids=ids, finish_reason="length"), decode_seconds=4.0)
    return found


HEALTHY = [window(0, 500, 200, (160, 100)), window(500, 1000, 200, (150, 110))]
COLLAPSED = [window(1000, 1500, 167, (167, 167)), window(1500, 2000, 167, (167, 166))]


def test_rates_are_pooled_and_per_position(looping: Generation) -> None:
    found = served_acceptance.evidence([looping], HEALTHY, 2)
    assert found.metrics["rate_1"] == 310 / 400 and found.metrics["rate_2"] == 210 / 400
    assert found.metrics["acceptance_length"] == 1 + 520 / 400
    assert (found.metrics["rounds"], found.metrics["rounds_per_second"]) == (400, 100)
    assert found.metrics["draft_tokens"] == 2
    assert found.status is Status.ok and "by position 0.775 0.525 (the server's counters)" in found.line
    assert [w["novelty"] for w in found.details["windows"]] == [1.0, pytest.approx(1.0, abs=0.02)]


def test_full_acceptance_of_a_repeating_text_is_bad(looping: Generation) -> None:
    found = served_acceptance.evidence([looping], HEALTHY + COLLAPSED, 2)
    assert found.status is Status.bad
    assert "from token 1,000" in found.details["findings"]["plateau"]
    facts = RouteFacts(2, 1.0, tolerance.FLOAT32, served=True)
    verdict = judge([looping], None, Gate(), facts, HEALTHY + COLLAPSED)
    assert verdict.kind is VerdictKind.inconclusive and verdict.reason.startswith("the text fails")


def test_full_acceptance_of_new_text_is_only_worth_reading(looping: Generation) -> None:
    agreeing = [replace(COLLAPSED[0], spans=(("page-r0", 0, 500),))]
    found = served_acceptance.evidence([looping], agreeing, 2)
    assert found.status is Status.warn and "0 of them repeating" in found.details["findings"]["plateau"]


def test_the_plateau_shows_without_ids_and_without_positions(looping: Generation) -> None:
    text = " ".join(f"w{i}" for i in range(800)) + " the same line again;" * 300
    blind = replace(looping, token_ids=[], text=text, counted_tokens=TOKENS)
    whole = len(text)
    parts = [
        CounterWindow(900, 1.0, 300, 600, 400, (), False, (("page-r0", 0, whole // 3),)),
        CounterWindow(900, 1.0, 300, 600, 600, (), False, (("page-r0", 2 * whole // 3, whole),)),
    ]
    found = served_acceptance.evidence([blind], parts, None)
    assert found.status is Status.bad and "1,000 of 1,200 drafts accepted" in found.line
    assert found.metrics["rate_all"] == pytest.approx(1000 / 1200)


def test_windows_with_other_peoples_traffic_accuse_nobody_and_spoil_the_speed(looping: Generation) -> None:
    shared = [*HEALTHY, *(replace(w, other_traffic=True) for w in COLLAPSED)]
    found = served_acceptance.evidence([looping], shared, 2)
    assert found.status is Status.warn and found.details["findings"].keys() == {"other_traffic"}
    assert "rounds_per_second" not in found.metrics
    sound = replace(looping, token_ids=list(range(TOKENS)))
    facts = RouteFacts(2, 1.0, tolerance.FLOAT32, served=True)
    verdict = judge([sound], None, Gate(), facts, shared)
    assert verdict.kind is VerdictKind.passed and verdict.evidence[1].metrics["speed_valid"] == 0


def test_a_route_that_is_not_the_servers_is_noticed(looping: Generation) -> None:
    found = served_acceptance.evidence([looping], HEALTHY, 4)
    assert found.details["findings"]["route"] == "the route drafts 4 tokens a round, the server 2"
    assert "route" not in served_acceptance.evidence([looping], HEALTHY, None).details["findings"]
    idle = [replace(HEALTHY[0], drafts=0, draft_tokens=0, accepted=0, accepted_per_position=())]
    told = served_acceptance.evidence([looping], idle, 4)
    line = "the named route drafts 4 tokens a round, the server 0: this is not that route"
    assert told.details["findings"]["other_route"] == line and told.status is Status.unknown
    sound = replace(looping, token_ids=list(range(TOKENS)))
    verdict = judge([sound], None, Gate(), RouteFacts(4, 1.0, tolerance.FLOAT32, served=True), idle)
    assert (verdict.kind, verdict.reason) == (VerdictKind.inconclusive, line)
    assert served_acceptance.evidence([looping], idle, 0).line == "the server's counters show no drafts"


def test_nothing_told_is_not_known(looping: Generation) -> None:
    found = served_acceptance.evidence([looping], [], None)
    assert found.status is Status.unknown and found.line == "the server tells nothing of its drafts"
    facts = RouteFacts(0, 1.0, tolerance.FLOAT32, reference="target.reference=none", served=True)
    sound = replace(looping, token_ids=list(range(TOKENS)))
    verdict = judge([sound], None, Gate(), facts)
    assert verdict.kind is VerdictKind.passed
    assert "acceptance is not known" in verdict.reason and "target.reference=none" in verdict.reason


def test_each_requests_own_numbers_come_first(looping: Generation) -> None:
    told = replace(looping, speculation=Speculation(100, 200, 130, (80, 50)))
    found = served_acceptance.evidence([told], HEALTHY, 2)
    assert found.metrics["rate_1"] == 0.8 and "each request's own metrics" in found.line
    llama = replace(looping, speculation=Speculation(0, 200, 130))
    found = served_acceptance.evidence([llama], [], None)
    assert found.metrics["rate_all"] == 0.65 and "acceptance_length" not in found.metrics


def test_speed_counts_tokens_and_never_chunks(looping: Generation) -> None:
    chunks = [(3, 0.5), (TOKENS, 2.5)]
    measured = replace(looping, arrivals=chunks, decode_seconds=2.0)
    assert served_acceptance.tokens_per_second([measured]) == (TOKENS - 3) / 2.0
    blind = replace(measured, token_ids=[], arrivals=[(-1, 0.5), (-1, 2.5)])
    assert np.isnan(served_acceptance.tokens_per_second([blind]))


def test_reasoning_that_the_server_told_apart(make: Any) -> None:
    told = replace(make("the answer"), reasoning="hm, </think> is a marker")
    parts = split(told)
    assert [(p.name, p.text) for p in parts.parts] == [
        ("reasoning", "hm, </think> is a marker"),
        ("content", "the answer"),
    ]
    assert all(told.full_text[p.start :].startswith(p.text) for p in parts.parts) and not parts.open
    assert split(replace(told, text="")).open


def test_a_loop_in_the_reasoning_alone_is_found_there(make: Any) -> None:
    told = replace(make("A sound answer."), reasoning="Wait, let me think again. " * 200)
    found = findings(told, Gate(shape=ShapeGate.strict))
    assert [f.part for f in found] == ["reasoning"] and "in the reasoning" in found[0].line
    assert measure(told).repeat20.value > 100


def test_an_output_whose_tokens_nobody_counts_is_judged_by_its_text(make: Any) -> None:
    blind = make("word " * 400, token_ids=[])
    assert 400 <= judged_tokens(blind) <= 1200
    assert judged_tokens(replace(blind, counted_tokens=7)) == 7
    assert measure(replace(blind, text="two words")).tokens < 64
