"""Scripts of a text's letters, and the salad of them: many scripts, changing every few letters.

Sound text holds many scripts in lists of languages and in tables of characters, but then a script lasts
a word or a column. A broken decoder strings together tokens of one to three letters each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_NONE, _LATIN, _CJK = 0, 1, 2
# (first code point, script). A range goes up to the next entry; scripts of one system of writing (Han,
# Kana, Bopomofo) have one number. Letters and marks alike; digits, punctuation and symbols are none.
# Source: the blocks of the Unicode Character Database, version 15.
_STARTS = (
    (0x0000, _NONE), (0x0041, _LATIN), (0x005B, _NONE), (0x0061, _LATIN), (0x007B, _NONE), (0x00AA, _LATIN),
    (0x00AB, _NONE), (0x00C0, _LATIN), (0x00D7, _NONE), (0x00D8, _LATIN), (0x00F7, _NONE), (0x00F8, _LATIN),
    (0x02B0, _NONE), (0x0370, 3), (0x0400, 4), (0x0530, 5), (0x0590, 6), (0x0600, 7), (0x0660, _NONE),
    (0x066E, 7), (0x0700, 8), (0x0750, 7), (0x0780, 9), (0x07C0, 10), (0x0800, 11), (0x0840, 12), (0x0860, 8),
    (0x0870, 7), (0x0900, 13), (0x0980, 14), (0x0A00, 15), (0x0A80, 16), (0x0B00, 17), (0x0B80, 18),
    (0x0C00, 19), (0x0C80, 20), (0x0D00, 21), (0x0D80, 22), (0x0E00, 23), (0x0E80, 24), (0x0F00, 25),
    (0x1000, 26), (0x10A0, 27), (0x1100, 28), (0x1200, 29), (0x13A0, 30), (0x1400, 31), (0x1680, 32),
    (0x16A0, 33), (0x1700, 34), (0x1780, 35), (0x1800, 36), (0x18B0, 31), (0x1900, 37), (0x1950, 38),
    (0x19E0, 35), (0x1A00, 39), (0x1AB0, _NONE), (0x1B00, 40), (0x1C00, 41), (0x1C80, 4), (0x1C90, 27),
    (0x1CC0, _NONE), (0x1D00, _LATIN), (0x1DC0, _NONE), (0x1E00, _LATIN), (0x1F00, 3), (0x2000, _NONE),
    (0x2C00, 42), (0x2C60, _LATIN), (0x2C80, 43), (0x2D00, 27), (0x2D30, 44), (0x2D80, 29), (0x2DE0, 4),
    (0x2E00, _NONE), (0x2E80, _CJK), (0x3000, _NONE), (0x3005, _CJK), (0x3008, _NONE), (0x3021, _CJK),
    (0x302A, _NONE), (0x3031, _CJK), (0x3130, 28), (0x3190, _CJK), (0x3200, _NONE), (0x3400, _CJK),
    (0x4DC0, _NONE), (0x4E00, _CJK), (0xA000, 45), (0xA4D0, 46), (0xA500, 47), (0xA640, 4), (0xA6A0, 48),
    (0xA700, _NONE), (0xA720, _LATIN), (0xA800, 49), (0xA830, _NONE), (0xA840, 50), (0xA880, 51),
    (0xA8E0, 13), (0xA900, 52), (0xA930, 53), (0xA960, 28), (0xA980, 54), (0xA9E0, 26), (0xAA00, 55),
    (0xAA60, 26), (0xAA80, 56), (0xAAE0, 57), (0xAB00, 29), (0xAB30, _LATIN), (0xAB70, 30), (0xABC0, 57),
    (0xAC00, 28), (0xD800, _NONE), (0xF900, _CJK), (0xFB00, _LATIN), (0xFB13, 5), (0xFB1D, 6), (0xFB50, 7),
    (0xFE00, _NONE), (0xFE70, 7), (0xFEFF, _NONE), (0xFF21, _LATIN), (0xFF3B, _NONE), (0xFF41, _LATIN),
    (0xFF5B, _NONE), (0xFF66, _CJK), (0xFFA0, 28), (0xFFE0, _NONE), (0x10000, 58), (0x10900, 59),
    (0x11000, 60), (0x12000, 61), (0x13000, 62), (0x14400, 63), (0x16000, 64), (0x17000, _CJK),
    (0x1B300, _NONE), (0x1E000, 42), (0x1E100, 65), (0x1F000, _NONE), (0x20000, _CJK), (0x40000, _NONE),
)  # fmt: skip
_FIRST = np.array([first for first, _ in _STARTS], dtype=np.int64)
_SCRIPT = np.array([script for _, script in _STARTS], dtype=np.int64)
SCRIPTS = int(_SCRIPT.max()) + 1


@dataclass(frozen=True)
class Salad:
    """A stretch [start, end) of characters in which scripts change every few letters."""

    start: int
    end: int
    letters: int  # neither Latin nor without a script
    scripts: int
    switches: int


def scripts_of(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """A small number for each code point's script: 0 none, 1 Latin, 2 Han and Kana, 3 and up others."""
    return _SCRIPT[np.searchsorted(_FIRST, codes, side="right") - 1]


def salads(codes: NDArray[np.int64], window: int, switches: int, scripts: int) -> list[Salad]:
    """Stretches where each ``window`` letters in a row hold so many ``switches`` and ``scripts``.

    Latin letters are left out, since names and terms stand in texts of every script; what is counted
    are switches between two other scripts, one after the other. A script counts with two letters.
    """
    script = scripts_of(codes)
    places = np.flatnonzero(script > _LATIN)
    letters = script[places]
    if letters.size < window:
        return []
    switch = np.concatenate(([0], np.cumsum(letters[1:] != letters[:-1])))
    full = switch[window - 1 :] - switch[: letters.size - window + 1] >= switches
    if not full.any():
        return []
    present = np.zeros(full.size, dtype=np.int64)
    for number in np.unique(letters):
        counts = np.concatenate(([0], np.cumsum(letters == number)))
        present += counts[window:] - counts[:-window] >= 2
    bad = np.flatnonzero(full & (present >= scripts))
    if not bad.size:
        return []
    found = []
    for group in np.split(bad, np.flatnonzero(np.diff(bad) > window) + 1):
        first, last = int(group[0]), int(group[-1]) + window
        first = int(np.searchsorted(switch, switch[first] + 1)) - 1  # the letter before the first switch
        part = letters[first:last]
        found.append(
            Salad(
                start=int(places[first]),
                end=int(places[last - 1]) + 1,
                letters=last - first,
                scripts=np.unique(part).size,
                switches=int(np.count_nonzero(part[1:] != part[:-1])),
            )
        )
    return found
