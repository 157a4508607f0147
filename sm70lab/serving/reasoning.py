"""Reasoning and content of a chat answer, told apart as the text comes."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplit:
    """Splits at the think markers. The two parts hold all of the text but the markers."""

    def __init__(self, prompt: str) -> None:
        self._inside = prompt.rstrip().endswith(OPEN)  # as some chat templates begin the answer
        self._started = self._inside
        self._buffer = ""

    def push(self, text: str, last: bool) -> tuple[str, str]:
        """(reasoning, content) that ``text`` adds; ``last``: nothing comes after it."""
        self._buffer += text
        if not self._started and not self._start(last):
            return "", ""
        if not self._inside:
            return "", self._take(len(self._buffer))
        end = self._buffer.find(CLOSE)
        if end >= 0:
            reasoning = self._take(end)
            self._buffer = self._buffer.removeprefix(CLOSE)
            self._inside = False
            return reasoning, self._take(len(self._buffer))
        held = 0 if last else _begun(self._buffer, CLOSE)
        return self._take(len(self._buffer) - held), ""

    def _start(self, last: bool) -> bool:
        """Whether it is known by now if the text begins with the opening marker."""
        begin = self._buffer.lstrip()
        if begin.startswith(OPEN):
            self._buffer, self._inside = begin.removeprefix(OPEN), True
        elif OPEN.startswith(begin) and not last:
            return False
        self._started = True
        return True

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


def _begun(text: str, marker: str) -> int:
    """Characters at the end of ``text`` that may begin ``marker``."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)
