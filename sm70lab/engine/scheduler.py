"""Which sequence runs when: continuous batching in the simplest order that is right.

Requests wait in a queue. While a sequence is in its prefill, each turn runs one chunk of it, and
the sequences that decode get a step without drafts beside it; otherwise each turn is one round of
all of them. A finished sequence gives its slot to the next request at once.
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
            while self.waiting and self.decoder.free:
                number, request = self.waiting.popleft()
                self.running[number] = self.decoder.admit(request)
            yield from self._turn()

    def _turn(self) -> Iterator[tuple[int, Step]]:
        decoding = [n for n, sequence in self.running.items() if not sequence.in_prefill]
        prefilling = [n for n, sequence in self.running.items() if sequence.in_prefill]
        if prefilling:
            sequence, started = self.running[prefilling[0]], time.perf_counter()
            step = self.decoder.prefill(sequence)
            sequence.prefill_seconds += time.perf_counter() - started
            if step is not None:
                step.seconds = sequence.prefill_seconds
                yield prefilling[0], step
        decoding = [n for n in decoding if n in self.running]
        if decoding:
            started = time.perf_counter()
            steps = self.decoder.round([self.running[n] for n in decoding], draft=not prefilling)
            share = (time.perf_counter() - started) / len(steps)
            for step in steps:
                step.seconds = share
            for number, round_step in zip(decoding, steps, strict=True):
                if number in self.running:
                    yield number, round_step
