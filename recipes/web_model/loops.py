"""Repetition: what is thinned out of the corpus, and how a generated text is judged.

The judged criteria are those of a long-output gate in the field (longest runs, most frequent
windows, bad markers) and a stricter block and compression criterion.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, deque

SPACES = re.compile(r"\s+")
WORD_START = re.compile(r"(?:(?<=^)|(?<= ))\S")
BAD_MARKERS = (
    "rgba(rgba",
    "UTF-UTF",
    "propertycorrectly",
    "255555555",
    "0" * 20,
    "5" * 20,
    "\ufffd",
)


def collapse_periods(keys: list[str], keep: int = 2, longest: int = 24) -> list[bool]:
    """Which lines to keep so that no block of up to `longest` lines repeats over `keep` times.

    `keys` are line skeletons; a block that goes on after `keep` copies is dropped copy by copy
    (single lines may come `keep` + 2 times).
    """
    kept = [True] * len(keys)
    i = 0
    while i < len(keys):
        for period in range(1, longest + 1):
            if keys[i] == "" or i + period >= len(keys) or keys[i] != keys[i + period]:
                continue
            allowed = keep if period > 1 else keep + 2
            block = keys[i : i + period]
            copies = 1
            while keys[i + copies * period : i + (copies + 1) * period] == block:
                copies += 1
            if copies > allowed:
                for j in range(i + allowed * period, i + copies * period):
                    kept[j] = False
                i += copies * period - 1
                break
        i += 1
    return kept


class RepeatLimiter:
    """Admits lines of one text while windows of 20, 50 and 100 characters stay below limits.

    The limits are under half of the gate's (80, 40, 20), over a window of `span` characters, and
    windows are counted where a word starts: a fifth of the work, nearly the same maximum.
    """

    def __init__(self, limits: dict[int, int] | None = None, span: int = 18_000) -> None:
        self.limits = limits or {20: 30, 50: 10, 100: 5}
        self.span = span
        self.counts: Counter[str] = Counter()
        self.recent: deque[tuple[int, str]] = deque()
        self.tail = ""
        self.size = 0

    def admit(self, line: str, droppable: bool) -> bool:
        """Count `line` and return True, or return False where it breaks a limit and can go."""
        folded = SPACES.sub(" ", line.strip())
        if not folded:
            return True
        buffer = f"{self.tail} {folded}" if self.tail else folded
        old = len(self.tail)
        starts = [match.start() for match in WORD_START.finditer(buffer)]
        windows = [
            buffer[start : start + width]
            for width in self.limits
            for start in starts
            if old < start + width <= len(buffer)
        ]
        if droppable and any(self.counts[w] >= self.limits[len(w)] for w in windows):
            return False
        for window in windows:
            self.counts[window] += 1
            self.recent.append((self.size, window))
        self.size += len(folded) + 1
        while self.recent and self.recent[0][0] < self.size - self.span:
            _, window = self.recent.popleft()
            if self.counts[window] == 1:
                del self.counts[window]
            else:
                self.counts[window] -= 1
        self.tail = buffer[-max(self.limits) :]
        return True


def repeat_count(text: str, width: int) -> int:
    """Count of the most frequent window of `width` characters, whitespace folded to one blank.

    Windows of one character and windows that are half blank are skipped.
    """
    folded = SPACES.sub(" ", text)
    counts = Counter(folded[i : i + width] for i in range(len(folded) - width + 1))
    for window, count in counts.most_common(50):
        if len(set(window)) > 1 and window.count(" ") * 2 < width:
            return count
    return 0


def longest_run(items: list[str] | list[int] | str) -> int:
    """Length of the longest run of equal items."""
    best = run = 0
    previous: object = None
    for item in items:
        run = run + 1 if item == previous else 1
        previous = item
        best = max(best, run)
    return best


def block_repeats(lines: list[str], longest: int = 12) -> int:
    """Most consecutive copies of one block of 1 to `longest` non-empty stripped lines."""
    best = 1 if lines else 0
    for period in range(1, longest + 1):
        run = 0
        for i in range(len(lines) - period):
            run = run + 1 if lines[i] == lines[i + period] else 0
            best = max(best, 1 + run // period)
    return best


def judge(text: str, tokens: list[int]) -> dict[str, float]:
    """Every measured value of one generated text (characters `text`, token ids `tokens`)."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    raw = text.encode("utf-8", "replace")
    digits = [len(run) for run in re.findall(r"\d+", text)]
    pieces = [raw[i : i + 4096] for i in range(0, max(1, len(raw) - 2048), 4096)]
    return {
        "same_token_run": longest_run(tokens),
        "digit_run": max(digits, default=0),
        "same_char_run": longest_run(text),
        "repeat20": repeat_count(text, 20),
        "repeat50": repeat_count(text, 50),
        "repeat100": repeat_count(text, 100),
        "same_line_run": longest_run(lines),
        "block_repeats": block_repeats(lines),
        "bad_markers": sum(text.count(marker) for marker in BAD_MARKERS),
        "zlib_ratio": min((len(zlib.compress(p, 6)) / len(p) for p in pieces if p), default=0.0),
    }


def failures(values: dict[str, float]) -> list[str]:
    """Names of the criteria that `values` of `judge` break; empty for a sound text."""
    limits = {
        "same_token_run": 48,
        "digit_run": 80,
        "same_char_run": 120,
        "repeat20": 80,
        "repeat50": 40,
        "repeat100": 20,
        "same_line_run": 8,
        "block_repeats": 8,
        "bad_markers": 0,
    }
    broken = [name for name, limit in limits.items() if values[name] > limit]
    if values["zlib_ratio"] < 0.06:
        broken.append("zlib_ratio")
    return broken
