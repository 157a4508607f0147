"""Runs and repeats in a text, each with the repeated unit and where it starts.

Everything is exact: what a hash finds is compared character by character. Runs are linear in the
length of the text, window counts take one sort a window size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sm70lab.judge.rolling_hash import RollingHash

WHITESPACE = (
    "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680"
    "\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)  # the characters of str.isspace()
_WHITESPACE_CODES = np.array([ord(c) for c in WHITESPACE], dtype=np.int64)
_BLANK = ord(" ")
_DIGITS = re.compile(r"\d+")
_UNIT_CHARS = 120  # a record keeps no more of a repeated line or digit run than this
_CODE_BITS = 21  # a Unicode code point; three of them fit into an int64


@dataclass(frozen=True)
class Found:
    """A measured run or repeat.

    ``value`` is its length or count, ``unit`` what is repeated (at most 120 characters of
    it), ``position`` where it starts: a character of the original text, or a token index for runs
    of tokens; −1 if nothing was found.
    """

    value: int = 0
    unit: str = ""
    position: int = -1


def code_points(text: str) -> NDArray[np.int64]:
    """The text's code points, one entry a character. Lone surrogates are kept."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.int64)


def longest_run(values: NDArray[np.int64]) -> tuple[int, int]:
    """Length and start of the longest run of equal entries, the first of several; (0, −1) if empty."""
    if values.size == 0:
        return 0, -1
    starts = np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))
    lengths = np.diff(np.append(starts, values.size))
    best = int(np.argmax(lengths))
    return int(lengths[best]), int(starts[best])


def token_run(token_ids: Sequence[int]) -> Found:
    """Longest run of one token id; ``position`` is a token index."""
    length, start = longest_run(np.asarray(token_ids, dtype=np.int64))
    return Found(length, f"token {token_ids[start]}", start) if length else Found()


def char_run(text: str) -> Found:
    """Longest run of one character, blanks and newlines too."""
    length, start = longest_run(code_points(text))
    return Found(length, text[start], start) if length else Found()


def digit_run(text: str) -> Found:
    """Longest run of decimal digits (of any script, as ``\\d`` has it)."""
    best = Found()
    for match in _DIGITS.finditer(text):
        if match.end() - match.start() > best.value:
            best = Found(match.end() - match.start(), match.group()[:_UNIT_CHARS], match.start())
    return best


def line_run(text: str) -> Found:
    """Longest run of equal stripped lines. Empty lines are left out, so they do not end a run."""
    best, best_line, best_start = 0, "", -1
    before, line, count, start, offset = "", "", 0, 0, 0
    for raw in text.splitlines(keepends=True):
        stripped = line if raw == before else raw.strip()
        if stripped:
            if stripped != line:
                line, count, start = stripped, 0, offset + raw.index(stripped)
            count += 1
            if count > best:
                best, best_line, best_start = count, line, start
            before = raw
        offset += len(raw)
    return Found(best, best_line[:_UNIT_CHARS], best_start)


def _fold(codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Whitespace runs as one blank: the folded code points, and each one's original position."""
    space = np.isin(codes, _WHITESPACE_CODES)
    keep = ~space
    keep[:1] = True
    keep[1:] |= ~space[:-1]
    return np.where(space, _BLANK, codes)[keep], np.flatnonzero(keep)


def _window_ids(codes: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """An id a sliding window of ``size`` characters (at least 3), equal exactly for equal windows.

    Prefix doubling (Karp, Miller and Rosenberg 1972): a window is the pair of two shorter,
    overlapping windows whose ids are known, and the pairs are numbered anew by sorting. Several times
    slower than hashing: for the texts that are made to collide.
    """
    length = 3
    keys = (codes[:-2] << 2 * _CODE_BITS) | (codes[1:-1] << _CODE_BITS) | codes[2:]
    ids: NDArray[np.int64] = np.unique(keys, return_inverse=True)[1]
    while length < size:
        step = min(length, size - length)
        keys = ids[:-step] * np.int64(ids.size) + ids[step:]
        ids = np.unique(keys, return_inverse=True)[1]
        length += step
    return ids


def window_repeats(text: str, sizes: Sequence[int]) -> dict[int, Found]:
    """Count of the most frequent sliding window of each size (rising, each at least 3).

    Whitespace is folded to one blank first. Windows of one character only and windows that are
    half blank are skipped. ``unit`` is the folded window, ``position`` its first occurrence in the
    original text. A text shorter than the window gives ``Found()``.
    """
    found = dict.fromkeys(sizes, Found())
    codes, origin = _fold(code_points(text))
    if codes.size < 3:
        return found
    blanks = np.concatenate(([0], np.cumsum(codes == _BLANK)))
    changes = np.concatenate(([0], np.cumsum(codes[1:] != codes[:-1])))
    rolling = RollingHash(codes)
    for size in sizes:
        if size > codes.size:
            break
        half_blank = 2 * (blanks[size:] - blanks[:-size]) >= size
        one_character = changes[size - 1 :] == changes[: changes.size - size + 1]
        starts = np.flatnonzero(~(half_blank | one_character))
        if starts.size:
            same = _most_frequent(rolling.windows(size)[starts])
            if not _all_equal(codes, starts[same], size):
                ids = _window_ids(codes, size)[starts]
                same = _most_frequent(ids.astype(np.uint64))
            start = int(starts[same[0]])
            unit = "".join(map(chr, codes[start : start + size]))
            found[size] = Found(same.size, unit, int(origin[start]))
    return found


def _most_frequent(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The places of the most frequent key; of several, the one that occurs first.

    Equal windows have equal keys, so no window is more frequent than its key. If the windows at these
    places are all equal, theirs is therefore the most frequent window.
    """
    ordered = np.sort(keys)
    firsts = np.concatenate(([0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1))
    counts = np.diff(np.append(firsts, ordered.size))
    most = ordered[firsts[counts == counts.max()]]
    if most.size == ordered.size:  # nothing occurs twice
        return np.zeros(1, dtype=np.int64)
    nearest = most[np.minimum(np.searchsorted(most, keys), most.size - 1)] if most.size > 1 else most
    first = keys[np.argmax(keys == nearest)]
    return np.flatnonzero(keys == first)


def _all_equal(codes: NDArray[np.int64], starts: NDArray[np.int64], size: int) -> bool:
    """Whether the windows at ``starts`` hold the same characters."""
    steps = np.diff(starts)
    lags = np.unique(steps)
    if lags.size > size:
        first = int(starts[0])
        return all(bool((codes[starts + i] == codes[first + i]).all()) for i in range(size))
    for lag in lags.tolist():
        unequal = np.concatenate(([0], np.cumsum(codes[lag:] != codes[:-lag])))
        windows = starts[:-1][steps == lag]
        if (unequal[windows + size] != unequal[windows]).any():
            return False
    return True


def byte_counts(codes: NDArray[np.int64]) -> NDArray[np.float64]:
    """UTF-8 bytes of each character."""
    return np.asarray(1.0 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000))


def token_shares(codes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Tokens of each character, for a tokenizer nobody knows: a byte-level one with few merges.

    Half a token a letter, one a digit or mark, one a run of blanks, one a byte outside ASCII.
    """
    lower = codes | 0x20
    letter = (lower >= ord("a")) & (lower <= ord("z"))
    blank = codes == ord(" ")
    inside = np.zeros(codes.size, dtype=bool)
    inside[1:] = blank[1:] & blank[:-1]
    shares = byte_counts(codes)
    shares[letter] = 0.5
    shares[inside] = 0.0
    return shares
