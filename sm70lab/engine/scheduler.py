"""Which sequence runs when: continuous batching in the simplest order that is right.

Requests wait in a queue. While a sequence is in its prefill, each turn runs one chunk of it, and
the sequences that decode get a step without drafts beside it; otherwise each turn is one round of
all of them, and one step of those whose requests want no drafts. A finished sequence gives its slot to
the next request at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from sm70lab.engine.decoder import Decoder
from sm70lab.engine.sequence import Request, Sequence, Step


class Scheduler:
    """Runs requests through one decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.waiting: deque[tuple[int, Request]] = deque()
        self.running: dict[int, Sequence] = {}
        self._next = 0

    def add(self, request: Request) -> int:
        """Queue a request; returns its number."""
        self._next += 1
        self.waiting.append((self._next - 1, request))
        return self._next - 1

    def finish(self, number: int) -> None:
        """Stop a sequence: end, budget, or nobody waits for it any more."""
        self.decoder.release(self.running.pop(number))

    def turns(self) -> Iterator[tuple[int, Step]]:
        """(request number, its step), until nothing waits or runs; the caller calls ``finish``."""
        while self.waiting or self.running:
            yield from self.turn()

    def turn(self) -> Iterator[tuple[int, Step]]:
        """One turn: what waits takes the free slots, then a prefill chunk, a round, or both."""
        while self.waiting and self.decoder.free:
            number, request = self.waiting.popleft()
            self.running[number] = self.decoder.admit(request)
        decoding = [n for n, sequence in self.running.items() if not sequence.in_prefill]
        prefilling = [n for n, sequence in self.running.items() if sequence.in_prefill]
        drafting = [n for n in decoding if self.running[n].request.drafts and not prefilling]
        if prefilling:
            sequence, started = self.running[prefilling[0]], time.perf_counter()
            step = self.decoder.prefill(sequence)
            sequence.prefill_seconds += time.perf_counter() - started
            if step is not None:
                step.seconds = sequence.prefill_seconds
                yield prefilling[0], step
        yield from self._round(drafting, draft=True)
        yield from self._round([n for n in decoding if n not in drafting], draft=False)

    def _round(self, numbers: list[int], draft: bool) -> Iterator[tuple[int, Step]]:
        numbers = [n for n in numbers if n in self.running]  # the caller may have finished some by now
        if not numbers:
            return
        started = time.perf_counter()
        steps = self.decoder.round([self.running[n] for n in numbers], draft)
        share = (time.perf_counter() - started) / len(steps)
        for step in steps:
            step.seconds = share
        for number, round_step in zip(numbers, steps, strict=True):
            if number in self.running:
                yield number, round_step
