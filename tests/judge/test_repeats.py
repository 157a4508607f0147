"""Runs and windows against brute force, and their reported positions."""

from __future__ import annotations

import re
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm70lab.judge import repeats
from sm70lab.judge.repeats import Found

texts = st.one_of(
    st.text("ab \n", max_size=80),
    st.text("a5\t é😀\u3000", max_size=60),
    st.text(max_size=40),
    st.tuples(st.text("abc \n", min_size=1, max_size=9), st.integers(1, 30)).map(lambda t: t[0] * t[1]),
)


def brute_windows(text: str, size: int) -> int:
    folded = re.sub(r"\s+", " ", text)
    windows = [folded[i : i + size] for i in range(len(folded) - size + 1)]
    counted = Counter(w for w in windows if len(set(w)) > 1 and 2 * w.count(" ") < size)
    return max(counted.values(), default=0)


def brute_line_run(text: str) -> int:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return max((sum(1 for _ in _same(lines, i)) for i in range(len(lines))), default=0)


def _same(lines: list[str], start: int) -> list[str]:
    end = start
    while end < len(lines) and lines[end] == lines[start]:
        end += 1
    return lines[start:end]


def brute_char_run(text: str) -> int:
    return max((len(m.group()) for m in re.finditer(r"(.)\1*", text, re.DOTALL)), default=0)


@settings(max_examples=300, deadline=None)
@given(texts)
def test_windows_equal_brute_force(text: str) -> None:
    sizes = (3, 4, 5, 7, 20, 50)
    found = repeats.window_repeats(text, sizes)
    for size in sizes:
        assert found[size].value == brute_windows(text, size), size
        if found[size].value:
            at = found[size].position
            assert re.sub(r"\s+", " ", text[at:])[:size] == found[size].unit
            folded = re.sub(r"\s+", " ", text)
            assert (
                sum(folded.startswith(found[size].unit, i) for i in range(len(folded))) == found[size].value
            )


@settings(max_examples=300, deadline=None)
@given(texts)
def test_runs_equal_brute_force(text: str) -> None:
    assert repeats.line_run(text).value == brute_line_run(text)
    assert repeats.char_run(text).value == brute_char_run(text)
    assert repeats.digit_run(text).value == max(map(len, re.findall(r"\d+", text)), default=0)
    for found in (repeats.line_run(text), repeats.char_run(text), repeats.digit_run(text)):
        if found.value:
            assert text.startswith(found.unit, found.position)


@given(st.lists(st.integers(0, 2), max_size=30))
def test_longest_run_equals_brute_force(values: list[int]) -> None:
    length, start = repeats.longest_run(np.array(values, dtype=np.int64))
    if not values:
        assert (length, start) == (0, -1)
        return
    runs = [len(_same([str(v) for v in values], i)) for i in range(len(values))]
    assert length == max(runs)
    assert start == runs.index(max(runs))


def test_whitespace_is_what_python_calls_whitespace() -> None:
    assert set(repeats.WHITESPACE) == {c for c in map(chr, range(sys.maxunicode + 1)) if c.isspace()}


def test_positions_point_into_the_original_text() -> None:
    text = "a {\n\n\n   color: red;\n}\n" + "transform: translateY(-50%);\n" * 30
    assert repeats.line_run(text) == Found(30, "transform: translateY(-50%);", 23)
    found = repeats.window_repeats(text, (20,))[20]
    assert found == Found(30, " transform: translat", 22)  # the line break before it is its blank
    assert repeats.token_run([5, 9, 9, 9, 5]) == Found(3, "token 9", 1)


def test_blank_lines_do_not_end_a_line_run() -> None:
    assert repeats.line_run("x\n\n  x  \n\t\nx\ny\n").value == 3


def test_a_record_keeps_a_short_unit() -> None:
    assert len(repeats.digit_run("7" * 5000).unit) == 120
    assert repeats.digit_run("7" * 5000).value == 5000


@pytest.mark.parametrize("text", ["", "a", "ab", "\n", " " * 300, "x" * 300, "\ud800" * 30 + "ab" * 30])
def test_odd_texts(text: str) -> None:
    found = repeats.window_repeats(text, (20, 50, 100))
    assert {size: f.value for size, f in found.items()} == {s: brute_windows(text, s) for s in (20, 50, 100)}
