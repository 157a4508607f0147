"""Loops in a sequence: stretches that repeat with a period, exactly or but for a counter.

By rolling hashes, "do the two periods before v repeat the one before them?" costs the same for every v
and period and is asked for all places at once. What passes is then compared symbol by symbol: a
collision can hide a loop, with a chance of some 1e-9, and never makes one up. Time: a few sorts of the
whole sequence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sm70lab.judge.rolling_hash import RollingHash

GRAM = 12  # symbols of the windows that are looked up
_STRIDE = 16  # a loop is looked for at every so many places, and at the end
_EARLIER = 12  # earlier occurrences of a window that are tried as the period
_NESTING = 3  # a loop of runs, a loop of such loops
_DIGITS = 15  # a longer run of digits is text, not a number
_NUMBER = re.compile(rf"(?<![0-9])[0-9]{{1,{_DIGITS}}}(?![0-9])")
_COUNTERS = 8  # loops up to so many times the period of the normalised text are tried


@dataclass(frozen=True)
class Loop:
    """A stretch [start, end) that repeats every ``period`` symbols, at least three times.

    In a loop with a ``counter`` the periods are equal but for numbers that go on by constant steps,
    and ``period`` is their mean length.
    """

    start: int
    end: int
    period: int
    counter: bool = False

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def count(self) -> float:
        """Periods."""
        return self.length / self.period


class Windows:
    """Every window of ``GRAM`` symbols of a sequence, and where it last occurred before."""

    def __init__(self, symbols: NDArray[np.int64]) -> None:
        """``symbols``: one entry a symbol, 0 to 2³² − 1."""
        self._size = symbols.size
        self._data = symbols.astype(np.uint32).tobytes()
        self.hash = RollingHash(symbols)
        self.previous = _previous(self.hash.windows(GRAM))

    def __len__(self) -> int:
        """Symbols."""
        return self._size

    def twice_before(self) -> NDArray[np.int64]:
        """For each window the start of the second to last equal one before it, −1 if there is none."""
        once = self.previous
        return np.asarray(np.where(once >= 0, once[once], -1))

    def around(self, place: int, period: int) -> Loop:
        """The longest stretch around ``place`` in which every symbol equals the one ``period`` before."""

        def same(start: int, end: int) -> bool:
            earlier = self._data[4 * (start - period) : 4 * (end - period)]
            return self._data[4 * start : 4 * end] == earlier

        before = _gallop(place - period, lambda at, step: same(place - at - step, place - at))
        after = _gallop(len(self) - place, lambda at, step: same(place + at, place + at + step))
        return Loop(place - before - period, place + after, period)


def _previous(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """For each window the start of the last equal one before it, −1 if there is none."""
    previous = np.full(hashes.size, -1, dtype=np.int64)
    # With the place in the low bits, one plain sort puts equal windows side by side and in order.
    bits = np.uint64(hashes.size.bit_length())
    mask = (np.uint64(1) << bits) - np.uint64(1)
    keys = np.sort((hashes & ~mask) | np.arange(hashes.size, dtype=np.uint64))
    places = (keys & mask).astype(np.int64)
    same = (keys[1:] >> bits) == (keys[:-1] >> bits)
    previous[places[1:][same]] = places[:-1][same]
    return previous


def _gallop(limit: int, same: Callable[[int, int], bool]) -> int:
    """The largest m ≤ limit with all steps up to m the same, by doubling steps and then halving ones."""
    found, step, growing = 0, 16, True
    while step:
        if found + step <= limit and same(found, step):
            found += step
            step = step * 2 if growing else step // 2
        else:
            growing = False
            step //= 2
    return found


def exact_loops(windows: Windows) -> list[Loop]:
    """The loops of a sequence from its beginning to its end.

    A loop of three periods is found for certain at the end of the sequence, elsewhere from three
    periods and 16 symbols on. Where loops are nested the outermost is given.
    """
    found: list[Loop] = []
    open_end = len(windows)  # everything behind it is covered
    for place, period in _hits(windows):
        if place <= open_end:
            loop = _outermost(windows, windows.around(place, period))
            found.append(loop)
            open_end = loop.start
    return found[::-1]


def _hits(windows: Windows) -> list[tuple[int, int]]:
    """(place, period) with three periods right before the place, the last place first."""
    ends = np.arange(len(windows), GRAM - 1, -_STRIDE, dtype=np.int64)
    starts = ends - GRAM
    periods = np.zeros_like(ends)
    earlier = windows.previous[starts]
    for _ in range(_EARLIER):
        period = starts - earlier
        tried = np.flatnonzero((periods == 0) & (earlier >= 0) & (3 * period <= ends))
        hit = tried[windows.hash.repeats(ends[tried], period[tried])]
        periods[hit] = period[hit]
        earlier = np.where(earlier >= 0, windows.previous[earlier], -1)
    hits = np.flatnonzero(periods)
    return list(zip(ends[hits].tolist(), periods[hits].tolist(), strict=True))


def _outermost(windows: Windows, loop: Loop) -> Loop:
    """A loop of which ``loop`` is a part of each period, if there is one."""
    for _ in range(_NESTING):
        outer = loop
        for edge in (loop.start, loop.end):
            start = edge - GRAM // 2
            if not 0 <= start < windows.previous.size:
                continue
            earlier = int(windows.previous[start])
            for _ in range(_EARLIER):
                if earlier < 0:
                    break
                wider = windows.around(start + GRAM, start - earlier)
                if wider.count >= 3 and wider.start <= loop.start and wider.length > outer.length:
                    outer = wider
                    break
                earlier = int(windows.previous[earlier])
        if outer is loop:
            break
        loop = outer
    return loop


def quiet_suffix(surprises: NDArray[np.bool_], share: float) -> int:
    """Start of the longest suffix with at most this share of surprises; the size if there is none."""
    n = surprises.size
    counts = np.cumsum(surprises[::-1])
    quiet = np.flatnonzero(counts <= share * np.arange(1, n + 1))
    return n - 1 - int(quiet[-1]) if quiet.size else n


def without_numbers(codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A text with every number as one ``0``: its symbols, and where each begins in the text.

    ``codes`` has one code point a character. The second array has one entry more: the text's length.
    Runs of over 15 digits are kept.
    """
    digit = (codes >= ord("0")) & (codes <= ord("9"))
    edges = np.flatnonzero(np.diff(digit, prepend=False, append=False))
    starts, ends = edges[::2], edges[1::2]
    short = ends - starts <= _DIGITS
    change = np.zeros(codes.size + 1, dtype=np.int64)  # +1 behind the first digit, −1 behind the last
    np.add.at(change, starts[short] + 1, 1)
    np.add.at(change, ends[short], -1)
    dropped = np.cumsum(change[:-1]) > 0
    symbols = codes.copy()
    symbols[starts[short]] = ord("0")
    return symbols[~dropped], np.append(np.flatnonzero(~dropped), codes.size)


def counter_loops(text: str, codes: NDArray[np.int64], surprises: float) -> list[Loop]:
    """Loops of ``text`` in which only numbers change, and these by constant steps.

    A number is foretold when it goes on the line through the two before it in its place; up to
    ``surprises`` (a share) need not. Exact loops that hold numbers are among them.
    """
    symbols, origin = without_numbers(codes)
    found = []
    for loop in exact_loops(Windows(symbols)):
        start, end = int(origin[loop.start]), int(origin[loop.end])
        numbers = [(match.start(), int(match.group())) for match in _NUMBER.finditer(text, start, end)]
        last_period = int(origin[loop.end - loop.period])
        columns = sum(place >= last_period for place, _ in numbers)
        values = np.array([value for _, value in numbers])
        if end == len(text) and text[-1] in "0123456789":
            values = values[:-1]  # the end may have cut it
        foretold = _foretold(values, columns, surprises)
        if foretold is None:
            continue
        first, multiple = foretold
        start = start if first == 0 else numbers[first][0]
        period = round((end - start) * multiple * loop.period / _symbols_between(origin, start, loop.end))
        if end - start >= 3 * period:
            found.append(Loop(start, end, period, counter=True))
    return found


def _symbols_between(origin: NDArray[np.int64], start: int, end: int) -> int:
    return end - int(np.searchsorted(origin, start))


def _foretold(values: NDArray[np.int64], columns: int, surprises: float) -> tuple[int, int] | None:
    """From which number on the rest is foretold, and after how many periods the pattern recurs.

    ``columns`` is how many numbers a period holds.
    """
    best = None
    for multiple in range(1, _COUNTERS + 1):
        lag = columns * multiple
        if lag == 0 or values.size < 3 * lag:
            break
        bends = values[2 * lag :] - 2 * values[lag:-lag] + values[: -2 * lag] != 0
        first = quiet_suffix(bends, surprises)
        if first < bends.size and (best is None or first < best[0]):
            best = (first, multiple)
        if best is not None and best[0] == 0:
            break
    return best
