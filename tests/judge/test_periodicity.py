"""Loops, counters and rolling hashes against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm70lab.judge import repeats
from sm70lab.judge.periodicity import (
    GRAM,
    Loop,
    Windows,
    counter_loops,
    exact_loops,
    quiet_suffix,
    without_numbers,
)
from sm70lab.judge.repeats import code_points
from sm70lab.judge.rolling_hash import RollingHash

sequences = st.lists(st.integers(0, 3), max_size=60).map(lambda values: np.array(values, dtype=np.int64))
looping = st.tuples(
    st.text("ab1 ", max_size=20),
    st.text("abc5\n", min_size=1, max_size=9),
    st.integers(1, 40),
    st.text("xy", max_size=9),
)


def loops(text: str) -> list[Loop]:
    return exact_loops(Windows(code_points(text)))


@given(sequences, st.integers(1, 8))
def test_equal_windows_have_equal_hashes(symbols: np.ndarray, size: int) -> None:
    hashes = RollingHash(symbols).windows(size)
    windows = [tuple(symbols[i : i + size]) for i in range(max(0, symbols.size - size + 1))]
    assert len(hashes) == len(windows)
    for i, one in enumerate(windows):
        for j, other in enumerate(windows):
            assert (hashes[i] == hashes[j]) == (one == other)


@given(sequences)
def test_previous_is_the_last_equal_window(symbols: np.ndarray) -> None:
    windows = [tuple(symbols[i : i + GRAM]) for i in range(symbols.size - GRAM + 1)]
    expected = [
        max((j for j in range(i) if windows[j] == window), default=-1) for i, window in enumerate(windows)
    ]
    assert Windows(symbols).previous.tolist() == expected


@settings(max_examples=200, deadline=None)
@given(looping)
def test_every_loop_is_one_and_cannot_be_longer(case: tuple[str, str, int, str]) -> None:
    start, unit, count, end = case
    text = start + unit * count + end
    for loop in loops(text):
        p = loop.period
        assert loop.count >= 3
        assert text[loop.start + p : loop.end] == text[loop.start : loop.end - p]
        assert loop.end == len(text) or text[loop.end] != text[loop.end - p]
        assert loop.start == 0 or text[loop.start - 1] != text[loop.start - 1 + p]


@settings(max_examples=200, deadline=None)
@given(looping)
def test_a_loop_at_the_end_is_always_found(case: tuple[str, str, int, str]) -> None:
    start, unit, count, _ = case
    text = start + unit * count
    if count >= 3 and (count - 1) * len(unit) >= GRAM:
        last = loops(text)[-1]
        assert last.end == len(text)
        assert last.start <= len(start)


def test_the_outermost_loop_is_given() -> None:
    row = "+" + "-" * 40 + "+\n"
    assert loops(row * 20) == [Loop(0, 860, 43)]
    assert loops("abc" + row * 20 + "end") == [Loop(3, 863, 43)]


def test_three_periods_at_the_end_are_enough_and_two_are_not() -> None:
    unit = "the quick brown fox jumps over the lazy dog; "
    assert loops("start " + unit * 3) == [Loop(5, 6 + 3 * len(unit), len(unit))]
    assert loops("start " + unit * 2) == []


def test_numbers_become_one_symbol() -> None:
    symbols, origin = without_numbers(code_points("a12b3456c" + "7" * 16))
    assert "".join(map(chr, symbols)) == "a0b0c" + "7" * 16
    assert origin.tolist() == [0, 1, 3, 4, 8, *range(9, 26)]


@pytest.mark.parametrize(("first", "step"), [(1, 1), (95, 1), (990, 7), (500, -3)])
def test_a_counter_is_foretold(first: int, step: int) -> None:
    piece = "".join(f"item {i} of the list\n" for i in range(first, first + 30 * step, step))
    text = "Here it is:\n" + piece
    found = counter_loops(text, code_points(text), 0.1)
    assert [loop.counter for loop in found] == [True]
    assert found[0].end == len(text)
    assert abs(found[0].start - 12) <= 2
    assert found[0].period in (19, 20, 21, 22)


def test_two_counters_and_numbers_in_turn_are_foretold() -> None:
    for line in ("i{0} at {1}px;\n", "i{0} is {2} px;\n"):
        text = "".join(line.format(i, 12 * i, i % 2) for i in range(40))
        [loop] = counter_loops(text, code_points(text), 0.1)
        assert loop.start <= 20 and loop.end == len(text)


def test_numbers_that_carry_something_are_not_foretold() -> None:
    values = np.random.default_rng(1).integers(0, 1000, 60)
    text = "".join(f"INSERT INTO t VALUES ({i}, {v});\n" for i, v in enumerate(values))
    assert counter_loops(text, code_points(text), 0.1) == []


@given(st.lists(st.booleans(), max_size=40), st.sampled_from([0.0, 0.1, 0.3]))
def test_the_longest_quiet_suffix(flags: list[bool], share: float) -> None:
    quiet = [i for i in range(len(flags)) if sum(flags[i:]) <= share * len(flags[i:])]
    assert quiet_suffix(np.array(flags, dtype=bool), share) == min(quiet, default=len(flags))


def test_window_counts_are_exact_where_hashes_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that sees only each window's first character the counts stay right."""
    text = "".join(f"{a}{b}cd efgh" for a in "xyz" for b in "123") + "the end is the end is near"
    expected = repeats.window_repeats(text, (5, 8, 20))
    blind = lambda self, size: self.symbols[: max(0, self.symbols.size - size + 1)].astype(np.uint64)  # noqa: E731

    def remember(self: RollingHash, symbols: np.ndarray) -> None:
        self.symbols = symbols  # type: ignore[attr-defined]

    monkeypatch.setattr(RollingHash, "__init__", remember)
    monkeypatch.setattr(RollingHash, "windows", blind)
    assert repeats.window_repeats(text, (5, 8, 20)) == expected
