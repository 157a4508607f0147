"""Degenerate text, found by what it lacks: anything new.

A loop goes on to the end of the output, and each period repeats the one before but for a number at
most; sound text that repeats (tables, rules, markup, refrains) ends or varies. So what counts is how
much of the *end* of a text is foretold by what stands just before it, in tokens; where the text went on,
only a much longer loop counts. Thresholds: ``schema.StrictGate``, measured on real files
(docs/calibration.md).
"""

from __future__ import annotations

import bz2
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sm70lab.judge import repeats, scripts, text_shape
from sm70lab.judge.periodicity import Loop, Windows, counter_loops, exact_loops, quiet_suffix
from sm70lab.judge.reasoning import Part
from sm70lab.schema import StrictGate

_UNIT_CHARS = 120  # a record keeps no more of a unit than this
_ENDING = 24  # characters behind a loop that still is at the end
_LINK = 4  # characters between the loops of a chain
_PERIODS = 4.5  # of a loop at the end; with fewer it must be twice as long
_FEW_SYMBOLS = 4  # a loop of so short a period is of one token: every byte may be one
_COUNTER_LETTERS = 3  # in its unit; a bare list of numbers is no loop
_COUNTER_SURPRISES = 0.1
_STALE_REACH = 600  # characters: seen twice within the last so many is not new
_STALE_SURPRISES = 0.05
_SALAD_SWITCHES = 0.3  # a letter
_SALAD_SCRIPTS = 3
_LITTLE_CHARS = 8000
_SPACE = np.array([ord(c) for c in repeats.WHITESPACE], dtype=np.int64)


@dataclass(frozen=True)
class Finding:
    """One degenerate shape in one part of an output.

    ``position`` counts characters of the whole text, ``token`` output tokens: −1 where neither can be
    told. ``period`` is in characters, 0 where nothing is periodic.
    """

    metric: str  # the shape's name
    value: int  # what was counted
    limit: int  # the threshold it is beyond
    line: str
    part: str = "content"
    position: int = -1
    token: int = -1
    period: int = 0
    count: float = 0.0  # periods
    unit: str = ""


class _Measured:
    """A part with what its detectors share."""

    def __init__(self, part: Part) -> None:
        self.part, self.text = part, part.text
        self.codes = repeats.code_points(part.text)
        self.windows = Windows(self.codes)
        self.bytes = _sum(repeats.byte_counts(self.codes))
        self.tokens = _sum(repeats.token_shares(self.codes))

    def loop_tokens(self, loop: Loop) -> int:
        """About how many tokens a loop takes, rather too many than too few."""
        sums = self.bytes if loop.period <= _FEW_SYMBOLS else self.tokens
        return int(sums[loop.end] - sums[loop.start])


def _sum(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate(([0.0], np.cumsum(shares)))


def in_part(part: Part, strict: StrictGate) -> Iterator[Finding]:
    """Everything degenerate in one part of an output; positions count from the whole text's beginning."""
    if not part.text:
        return
    measured = _Measured(part)
    found = [shape for look in (_blanks, _replacements, _salad, _loops) for shape in look(measured, strict)]
    yield from found or list(_stale(measured, strict)) or _little(measured, strict)


def _little(measured: _Measured, strict: StrictGate) -> Iterator[Finding]:
    """An ending that holds next to nothing, whatever its order: a few pieces shuffled or slightly varied.

    Sorted blocks (bzip2) see every repetition at once. No sound file of 8,000 looked at packs below 4.2 %.
    """
    start = len(measured.text) - _LITTLE_CHARS
    if start < 0:
        return
    ending = measured.text[start:]
    plain = ending.encode("utf-8", "surrogatepass")
    value = round(1000 * len(bz2.compress(plain)) / len(plain))
    if value < strict.packed_per_mille:
        unit, count = Counter(line for line in ending.splitlines() if line.strip()).most_common(1)[0]
        line = (
            f"the last {_LITTLE_CHARS:,} characters hold next to nothing: packed they are {value / 10:.1f} % "
            f"(limit {strict.packed_per_mille / 10:g} %), most often {text_shape.quoted(unit)}"
        )
        yield Finding(
            "little", value, strict.packed_per_mille, line, measured.part.name, measured.part.start + start,
            count=count, unit=unit[:_UNIT_CHARS],
        )  # fmt: skip


def _blanks(measured: _Measured, strict: StrictGate) -> Iterator[Finding]:
    edges = np.flatnonzero(np.diff(np.isin(measured.codes, _SPACE), prepend=False, append=False))
    if not edges.size:
        return
    lengths = measured.bytes[edges[1::2]] - measured.bytes[edges[::2]]
    longest = int(np.argmax(lengths))
    start, value = int(edges[2 * longest]), int(lengths[longest])
    if value > strict.blanks:
        unit = measured.text[start : start + 2]
        line = (
            f"{value:,} bytes of blanks in a row (limit {strict.blanks}), {text_shape.quoted(unit)} and so on"
        )
        yield Finding(
            "blanks", value, strict.blanks, line, measured.part.name, measured.part.start + start, unit=unit
        )


def _replacements(measured: _Measured, strict: StrictGate) -> Iterator[Finding]:
    value = measured.text.count("\ufffd")
    if value > strict.replacements:
        line = f"{value:,} replacement characters U+FFFD (limit {strict.replacements})"
        start = measured.part.start + measured.text.find("\ufffd")
        yield Finding(
            "replacements", value, strict.replacements, line, measured.part.name, start, unit="\ufffd"
        )


def _salad(measured: _Measured, strict: StrictGate) -> Iterator[Finding]:
    window = strict.salad_letters
    found = scripts.salads(measured.codes, window, round(_SALAD_SWITCHES * window), _SALAD_SCRIPTS)
    for salad in found[:1]:
        line = f"a salad of {salad.scripts} scripts: {salad.switches:,} changes in {salad.letters:,} letters"
        unit = measured.text[salad.start : salad.start + _UNIT_CHARS]
        start = measured.part.start + salad.start
        yield Finding("script_salad", salad.letters, window, line, measured.part.name, start, unit=unit)


def _loops(measured: _Measured, strict: StrictGate) -> Iterator[Finding]:
    loops = _disjoint(measured, strict)
    chain = ending_chain(loops, len(measured.text), measured.loop_tokens, strict)
    value = sum(map(measured.loop_tokens, chain))
    if value > strict.loop_tokens:
        yield _chain_finding(measured, chain, value, strict.loop_tokens)
    for loop in loops:
        if loop not in chain and not loop.counter:
            value = measured.loop_tokens(loop)
            if value > strict.ended_loop_tokens:
                line = f"a loop that ended, {_loop_words(measured.text, loop)}"
                yield _loop_finding("ended_loop", measured, loop, value, strict.ended_loop_tokens, line)


def _disjoint(measured: _Measured, strict: StrictGate) -> list[Loop]:
    """The loops of a part in their order, the longest where they overlap by more than half."""
    counting = [
        loop
        for loop in counter_loops(measured.text, measured.codes, _COUNTER_SURPRISES)
        if loop.count >= strict.counter_periods and _letters(measured.text, loop) >= _COUNTER_LETTERS
    ]
    kept: list[Loop] = []
    for loop in sorted(
        [*exact_loops(measured.windows), *counting], key=lambda loop: (-loop.length, loop.counter)
    ):
        if measured.text[loop.start : loop.end].isspace():
            continue  # a flood of blanks has its own measure
        if all(2 * _overlap(loop, other) <= loop.length for other in kept):
            kept.append(loop)
    return sorted(kept, key=lambda loop: loop.start)


def _letters(text: str, loop: Loop) -> int:
    return sum(map(str.isalpha, text[loop.end - loop.period : loop.end]))


def _overlap(one: Loop, other: Loop) -> int:
    return max(0, min(one.end, other.end) - max(one.start, other.start))


def ending_chain(
    loops: Sequence[Loop], end: int, tokens: Callable[[Loop], int], strict: StrictGate
) -> list[Loop]:
    """The loops of a sequence that follow one another right up to its end, without those of few periods."""
    chain: list[Loop] = []
    edge, gap = end, _ENDING
    for loop in reversed(loops):
        if loop.end < edge - gap:
            break
        chain.append(loop)
        edge, gap = loop.start, _LINK
    enough = [loop for loop in chain if loop.count >= _PERIODS or tokens(loop) > 2 * strict.loop_tokens]
    return enough[::-1]


def _chain_finding(measured: _Measured, chain: Sequence[Loop], value: int, limit: int) -> Finding:
    main = max(chain, key=measured.loop_tokens)
    real = [loop for loop in chain if 5 * measured.loop_tokens(loop) >= measured.loop_tokens(main)]
    if len(real) == 1:
        name = "counter_loop" if main.counter else "loop"
        line = f"a loop to the end, {_loop_words(measured.text, main)}"
        return _loop_finding(name, measured, main, value, limit, line)
    words = ", ".join(_loop_words(measured.text, loop) for loop in real[:3])
    more = f" and {len(real) - 3} more" if len(real) > 3 else ""
    line = f"a chain of {len(real)} loops to the end: {words}{more}"
    finding = _loop_finding("chain", measured, main, value, limit, line)
    return replace(finding, position=measured.part.start + _unit(measured.text, real[0])[0])


def _unit(text: str, loop: Loop) -> tuple[int, str]:
    """Where a loop is said to begin, and what it repeats: whole lines where it is of lines.

    A period may begin at any of its characters; the line break before the first line of a loop is no
    part of it, though it fits.
    """
    start = loop.start
    line_end = text.find("\n", start, start + loop.period)
    if line_end >= 0 and start > 0 and text[start - 1] != "\n":
        start = line_end + 1
    return start, text[start : start + min(loop.period, _UNIT_CHARS)]


def _loop_words(text: str, loop: Loop) -> str:
    start, unit = _unit(text, loop)
    counted = " but for its numbers" if loop.counter else ""
    return f"{text_shape.quoted(unit)} × {(loop.end - start) / loop.period:,.4g}{counted}"


def _loop_finding(name: str, measured: _Measured, loop: Loop, value: int, limit: int, line: str) -> Finding:
    start, unit = _unit(measured.text, loop)
    return Finding(
        name, value, limit, line, measured.part.name, measured.part.start + start,
        period=loop.period, count=round((loop.end - start) / loop.period, 2), unit=unit,
    )  # fmt: skip


def _stale(measured: _Measured, strict: StrictGate) -> Iterator[Finding]:
    """An ending of a few pieces in no order, or of a loop with slips: every window was there just before."""
    before = measured.windows.twice_before()
    places = np.arange(before.size)
    start = quiet_suffix((before < 0) | (places - before > _STALE_REACH), _STALE_SURPRISES)
    if start >= places.size:
        return
    value = int(measured.tokens[-1] - measured.tokens[start])
    if value <= strict.stale_tokens:
        return
    onset = int(before[start]) if before[start] >= 0 else start
    ending = measured.text[onset:]
    if ending.isspace():
        return  # a flood of blanks has its own measure
    unit, count = Counter(line for line in ending.splitlines() if line.strip()).most_common(1)[0]
    line = f"nothing new to the end in {len(ending):,} characters, most often {text_shape.quoted(unit)}"
    yield Finding(
        "stale",
        value,
        strict.stale_tokens,
        line,
        measured.part.name,
        measured.part.start + onset,
        count=count,
        unit=unit[:_UNIT_CHARS],
    )
