"""Where an output ends: end tokens, stop strings and the budget, exactly, also inside accepted drafts."""

from __future__ import annotations

from sm70lab.engine.text import Stream


class Delivery:
    """Takes each round's tokens and delivers them up to the first reason to stop.

    An end token is the last id delivered and has no text. A stop string ends the text before
    itself; the token that completes it is the last id. Nothing after either is delivered.
    """

    def __init__(
        self, stream: Stream, stop_ids: frozenset[int], stop_strings: list[str], max_tokens: int
    ) -> None:
        self.stream, self.stop_ids, self.stop_strings = stream, stop_ids, stop_strings
        self.max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_string: str | None = None  # the one that ended it
        self._pieces: list[str] = []
        self._tail = ""  # enough of the text's end to find a stop string across pieces
        self._reach = max((len(s) for s in stop_strings), default=1) - 1

    @property
    def text(self) -> str:
        """Everything delivered so far."""
        return "".join(self._pieces)

    @property
    def held(self) -> int:
        """Characters at the end of ``text`` that may turn out to begin a stop string."""
        if self.finish_reason:
            return 0
        ends = (n for s in self.stop_strings for n in range(1, len(s)) if self._tail.endswith(s[:n]))
        return max(ends, default=0)

    def push(self, tokens: list[int]) -> int:
        """Deliver tokens until a reason to stop; returns how many were delivered."""
        for count, token in enumerate(tokens, 1):
            self.token_ids.append(token)
            if token in self.stop_ids or self._completes_stop_string(self.stream.push(token)):
                self.finish_reason = "stop"
            elif len(self.token_ids) == self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                return count
        return len(tokens)

    def _completes_stop_string(self, piece: str) -> bool:
        self._pieces.append(piece)
        if not self.stop_strings:
            return False
        window = self._tail + piece
        found = [(at, s) for s in self.stop_strings if (at := window.find(s)) >= 0]
        if found:
            first, self.stop_string = min(found)
            kept = self.text
            self._pieces = [kept[: len(kept) - len(window) + first]]
            return True
        self._tail = window[-self._reach :] if self._reach else ""
        return False
