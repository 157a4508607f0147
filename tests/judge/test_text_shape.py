"""Each threshold at its edge, degenerate shapes, legitimate texts, and the field's false alarms."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sm70lab.errors import UsageError
from sm70lab.judge import strict_gate, text_shape
from sm70lab.schema import Gate, Status

STRICT = Gate(name="strict")


def prose(count: int, seed: int = 0) -> str:
    """Words that do not repeat in any window of 20 characters more than by chance."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return " ".join("".join(rng.choice(letters, rng.integers(3, 9))) for _ in range(count))


def failed(generation: Any, gate: Gate) -> set[str]:
    return {f.metric for f in text_shape.failures(text_shape.measure(generation, gate.bad_markers), gate)}


def block(lines: int, seed: int = 1) -> str:
    words = prose(lines * 4, seed).split()
    return "".join("  ".join(words[4 * i : 4 * i + 4]) + ";\n" for i in range(lines))


# At the threshold the text passes, one beyond it fails by just this metric.
EDGES = {
    "max_digit_run": (lambda n: prose(50) + " " + "".join(islice(cycle("1234567"), n)) + " end", 80),
    "max_same_char_run": (lambda n: prose(50) + " " + "=" * n + " end", 120),
    "max_same_line_run": (lambda n: prose(50) + "\n" + "short line\n" * n + "end", 12),
    "repeat20": (lambda n: "".join(f"{word} border-radius: 12px; " for word in prose(n, 3).split()), 80),
    "repeat50": (lambda n: "".join(f"{w} {prose(20, 8)[:50]} " for w in prose(n, 4).split()), 40),
    "repeat100": (lambda n: "".join(f"{w} {prose(30, 9)[:100]} " for w in prose(n, 5).split()), 20),
}


@pytest.mark.parametrize("metric", EDGES)
def test_threshold_and_one_beyond(metric: str, make: Any, gate: Gate) -> None:
    build, limit = EDGES[metric]
    assert getattr(gate, metric) == limit
    at, beyond = make(build(limit)), make(build(limit + 1))
    assert getattr(text_shape.measure(at), metric).value == limit
    assert failed(at, gate) == set()
    assert failed(beyond, gate) == {metric}


def test_token_count_and_run_at_the_edge(make: Any, gate: Gate) -> None:
    assert failed(make("x y", token_ids=range(64)), gate) == set()
    assert failed(make("x y", token_ids=range(63)), gate) == {"tokens"}
    assert failed(make("x y", token_ids=[*range(50), *[5] * 48]), gate) == set()
    assert failed(make("x y", token_ids=[*range(50), *[5] * 49]), gate) == {"max_same_token_run"}


def test_markers(make: Any, gate: Gate) -> None:
    for marker in gate.bad_markers:
        assert "bad_markers" in failed(make(f"{prose(30)} {marker} x"), gate)
    near = f"rgba( rgb UTF-8 25555555 {'0' * 19} {'5' * 19}"
    assert failed(make(f"{prose(30)} {near}"), gate) == set()


def test_a_character_cut_by_the_budget_is_no_fault(make: Any, gate: Gate) -> None:
    assert failed(make(prose(30) + "\ufffd", finish_reason="length"), gate) == set()
    assert failed(make(prose(30) + "\ufffd x", finish_reason="length"), gate) == {"bad_markers"}
    assert failed(make(prose(30) + "\ufffd"), gate) == {"bad_markers"}


def test_the_line_names_unit_and_position(make: Any, gate: Gate) -> None:
    start = prose(2000)[:8112] + "\n"
    generation = make(start + "transform: translateY(-50%);\n" * 227)
    [line] = [
        f.line
        for f in text_shape.failures(text_shape.measure(generation), gate)
        if f.metric == "max_same_line_run"
    ]
    assert line == "line run 227 (limit 12) at character 8,113: 'transform: translateY(-50%);'"


DEGENERATE = {
    "one character for ever": "ok then " + "!" * 400,
    "one digit for ever": "width: " + "5" * 3752,
    "one word for ever": "display: " * 500,
    "chained runs": prose(40) + " word" * 90 + "\\" * 130 + "0" * 200,
    "two lines in turn": prose(40) + "\n  top: 0;\n  left: 50%;\n" * 120,
    "a 92-line block 32 times": block(92) * 32,
    "a loop with a counter": "".join(f'<div class="card item" id="c{i}">Item</div>\n' for i in range(300)),
    "replacement characters": prose(40) + "\ufffd" * 50 + prose(4),
    "a flood of newlines": prose(40) + "\n" * 500 + "end",
    "a flood of blanks": prose(40) + " " * 500 + "end",
    "good CSS, then 400 marks": "a { color: red; }\n" + prose(60) + "!" * 400,
    "a repeated attribute": prose(40) + " showMenu: false," * 300,
}


@pytest.mark.parametrize("text", DEGENERATE.values(), ids=DEGENERATE.keys())
def test_degenerate_shapes_are_caught(text: str, make: Any, gate: Gate) -> None:
    assert failed(make(text, finish_reason="length"), gate)
    assert strict_gate.findings(make(text, finish_reason="length"), STRICT)


def test_an_early_stop_is_caught(make: Any, gate: Gate) -> None:
    assert failed(make("Sure.", token_ids=[1, 2]), gate) == {"tokens"}


# What the field's gate cannot see. Listed so that nobody takes its pass for more than it is.
ECHOED = "Write a page about pricing, with three plans and a table."
MISSED = {
    "a salad of scripts": "".join(chr(c) for c in np.random.default_rng(3).integers(0x3B1, 0x2FFF, 4000)),
    "thinking that never ends": "<think>\n" + prose(2000),
    "the prompt echoed": f"{ECHOED} {ECHOED} {prose(100)}",
}


@pytest.mark.parametrize("text", MISSED.values(), ids=MISSED.keys())
def test_known_blind_spots(text: str, make: Any, gate: Gate) -> None:
    generation = make(text, prompt_text=ECHOED)
    assert failed(generation, gate) == set()
    assert strict_gate.findings(generation, STRICT)


rng = np.random.default_rng(11)
LEGITIMATE = {
    "CSS with repeated properties": "".join(
        f".{name} {{\n  display: flex;\n  color: #{i:06x};\n}}\n"
        for i, name in enumerate(prose(75, 6).split(), 4096)
    ),
    "hex colours": ", ".join(f"#{v:06x}" for v in rng.integers(0, 1 << 24, 400)),
    "a JSON array": str(rng.integers(0, 1000, 800).tolist()),
    "base64": "".join(rng.choice(list("ABCDEFGHIJKLMNOPqrstuvwxyz0123456789+/"), 4000)),
    "minified code": "".join(f"function {w}(a,b){{return a+{i}*b}}" for i, w in enumerate(prose(70).split())),
    "log lines": "".join(
        f"2026-06-{i % 28:02d}T0{i % 10}:11:{i % 60:02d} INFO {w}\n" for i, w in enumerate(prose(200).split())
    ),
    "a list of numbers": "\n".join(map(str, range(2000))),
    "box drawing": "┌" + "─" * 78 + "┐\n" + "".join(f"│ {w:<76} │\n" for w in prose(30).split()),
    "a markdown table": "|a|b|\n|---|---|\n" + "".join(f"| {w} | {w[::-1]} |\n" for w in prose(200).split()),
    "rules": "".join(f"{'=' * 78}\n{w}\n{'#' * 60}\n" for w in prose(10).split()),
    "near-identical SQL": "".join(f"INSERT INTO t VALUES ('{w}', 1);\n" for w in prose(75).split()),
    "a refrain": "".join(prose(60, i) + "\nla la la, the river runs to the sea\n" for i in range(12)),
    "deep indentation": "".join(" " * 70 + w + "\n" for w in prose(100).split()),
}  # fmt: skip


@pytest.mark.parametrize("text", LEGITIMATE.values(), ids=LEGITIMATE.keys())
def test_legitimate_texts_pass(text: str, make: Any, gate: Gate) -> None:
    assert failed(make(text), gate) == set()
    for finish_reason in ("stop", "length"):
        assert strict_gate.findings(make(text, finish_reason=finish_reason), STRICT) == []


# Sound texts that the field's thresholds fail: a limit of this gate, kept in view (docs/verdict.md).
FALSE_ALARMS = {
    "a decorative row of 121": (prose(60) + "\n" + "=" * 121 + "\n" + prose(60), "max_same_char_run"),
    "100 like components": (
        "".join(f'<li class="nav-item"><a class="nav-link" href="/{w}">x</a>\n' for w in prose(100).split()),
        "repeat20",
    ),
    "100 like INSERTs": (
        "".join(f"INSERT INTO users VALUES ({i}, '{w}');\n" for i, w in enumerate(prose(100).split())),
        "repeat20",
    ),
    "an unbroken number": (prose(60) + " pi = 3." + "1415926535" * 9, "max_digit_run"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "metric"), FALSE_ALARMS.values(), ids=FALSE_ALARMS.keys())
def test_known_false_alarms(text: str, metric: str, make: Any, gate: Gate) -> None:
    assert metric in failed(make(text), gate)
    assert strict_gate.findings(make(text), STRICT) == []


def test_evidence_over_generations(make: Any, gate: Gate) -> None:
    good, loop = make(prose(300), name="good"), make("a b c d\n" * 90, name="loop")
    found = text_shape.evidence([good, loop], gate)
    assert found.status is Status.bad
    assert "1 of 2 outputs fail; loop-r0" in found.line
    assert found.metrics["failed_outputs"] == 1
    assert found.metrics["max_same_line_run"] == 90
    assert found.details["generations"]["good-r0"]["failures"] == []
    assert text_shape.evidence([good], gate).status is Status.ok


@pytest.mark.parametrize("reason", ["length", "interrupted"])
def test_a_short_cut_text_is_no_evidence(reason: str, make: Any, gate: Gate) -> None:
    found = text_shape.evidence([make("a b", token_ids=range(20), finish_reason=reason)], gate)
    assert found.status is Status.unknown
    assert "44" in found.line
    assert text_shape.evidence([], gate).status is Status.unknown


def test_unknown_contract_is_a_usage_error(make: Any) -> None:
    with pytest.raises(UsageError, match="'python'"):
        text_shape.measure(make("x", contract="python"))


def test_yaml_is_the_schema_with_the_markers(gate: Gate) -> None:
    path = Path(__file__).parents[2] / "conf" / "gate" / "fixed_quality.yaml"
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert read == {key: value for key, value in vars(gate).items() if key != "strict"}
