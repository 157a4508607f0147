"""The one thread that owns the engine: it runs turns, and tells each request what it got."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

import torch

from sm70lab.engine import reference
from sm70lab.engine.scheduler import Scheduler
from sm70lab.engine.sequence import Step
from sm70lab.errors import NonFiniteError
from sm70lab.serving.errors import ApiError
from sm70lab.serving.job import MODEL_NON_FINITE, NON_FINITE, REPETITION, Delta, Failure, Job
from sm70lab.serving.logprobs import Row, rows
from sm70lab.serving.metrics import Metrics
from sm70lab.serving.repetition import LoopDetector
from sm70lab.targets.engine import EngineTarget


class Worker(threading.Thread):
    """Runs jobs in the order of their arrival, ``target.max_num_seqs`` at once.

    ``submit`` and ``cancel`` may be called on any thread; all else happens on this one, between turns.
    """

    def __init__(self, target: EngineTarget, positions: int, queue: int, metrics: Metrics) -> None:
        super().__init__(name="engine", daemon=True)
        self.target, self.positions, self.metrics = target, positions, metrics
        self.slots = target.config.target.max_num_seqs
        self.limit = self.slots + queue
        self.ready: Future[None] = Future()  # raises what loading raised
        self._changed = threading.Condition()
        self._jobs: set[Job] = set()  # all that have not ended
        self._waiting: deque[Job] = deque()
        self._closing = False
        self._next: Job | None = None  # out of the queue, scored or being scored, without a slot
        self._scoring: Iterator[torch.Tensor] | None = None  # the prompt of ``_next``
        self._running: dict[int, Job] = {}
        self._used = 0
        metrics.watch(
            lambda: len(self._running),
            lambda: len(self._jobs) - len(self._running),
            lambda: self._used / (self.slots * positions),
        )

    def submit(self, job: Job) -> None:
        """Queue a job. Raises ``ApiError`` 429 where the queue is full, 503 while shutting down."""
        with self._changed:
            if self._closing:
                raise ApiError(503, "the server is shutting down")
            if len(self._jobs) >= self.limit:
                self.metrics.rejected()
                running = len(self._running)
                waiting = len(self._jobs) - running
                raise ApiError(
                    429, f"the queue is full ({running} running, {waiting} waiting); try again later"
                )
            self._jobs.add(job)
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job, reason: str) -> None:
        """Let a job end at the next turn; one that has ended stays as it is."""
        with self._changed:
            job.cancelled = job.cancelled or reason
            self._changed.notify()

    def cancel_all(self, reason: str) -> None:
        """Let every job end at the next turn."""
        with self._changed:
            for job in self._jobs:
                job.cancelled = job.cancelled or reason
            self._changed.notify()

    def close(self) -> None:
        """Take no more jobs; the thread ends after the last one."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    # ------------------------------------------------------------------ on the thread

    def run(self) -> None:
        """Load the model, then run turns until closed."""
        try:
            self.target.load(self.positions)
            self._renew()
        except BaseException as error:
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        while self._wait():
            try:
                self._end_due()
                self._take_next()
                self._turn()
            except NonFiniteError as error:
                self._non_finite(error)
            except Exception as error:
                self._broken(error)

    def _wait(self) -> bool:
        """Sleep until there is something to do; False once closed and done."""
        with self._changed:
            while not self._jobs and not self._closing:
                self._changed.wait()
            return bool(self._jobs)

    def _renew(self) -> None:
        """A decoder with empty caches."""
        self.scheduler = Scheduler(self.target.decoder())

    def _end_due(self) -> None:
        """End what was cancelled and what is over its time limit."""
        with self._changed:
            waiting = [(job, reason) for job in self._waiting if (reason := job.due())]
            for job, _ in waiting:
                self._waiting.remove(job)
        for job, reason in waiting:
            self._finish(job, reason)
        if self._next is not None and (reason := self._next.due()):
            job, self._next, self._scoring = self._next, None, None
            self._finish(job, reason)
        for number, job in list(self._running.items()):
            if reason := job.due():
                self._leave(number)
                self._finish(job, reason)

    def _take_next(self) -> None:
        """Score one chunk of the next job's prompt where that is asked for, or give the job a slot."""
        if self._next is None:
            with self._changed:
                self._next = self._waiting.popleft() if self._waiting else None
            if self._next is not None and self._next.prompt_logprobs is not None:
                self._scoring = reference.prompt_logits(
                    self.target.reference_model, list(self._next.request.prompt_ids)
                )
        job = self._next
        if job is None:
            return
        if self._scoring is not None:
            logits = next(self._scoring, None)
            if logits is not None:
                first = 1 + len(job.prompt_rows)
                tokens = list(job.request.prompt_ids[first : first + len(logits)])
                job.prompt_rows += rows(logits, tokens, job.prompt_logprobs or 0)
                return
            self._scoring = None
        if len(self._running) < self.slots:
            self._next = None
            job.times.admitted = time.perf_counter()
            self._running[self.scheduler.add(job.request)] = job

    def _turn(self) -> None:
        tokens = 0
        for number, step in self.scheduler.turn():
            job = self._running[number]
            tokens += len(step.tokens)
            if reason := job.due():
                self._leave(number)
                self._finish(job, reason)
            else:
                self._deliver(number, job, step)
        if tokens:
            self.metrics.iteration.observe(tokens)
        self._used = sum(len(s.prompt_ids) + len(s.output) for s in self.scheduler.running.values())

    def _leave(self, number: int) -> None:
        """Free a slot. A job whose turn has not come yet still stands in the scheduler's queue."""
        if number in self.scheduler.running:
            self.scheduler.finish(number)
        else:
            queued = [one for one in self.scheduler.waiting if one[0] == number]
            self.scheduler.waiting.remove(queued[0])
        del self._running[number]

    # ------------------------------------------------------------------ one job

    def _deliver(self, number: int, job: Job, step: Step) -> None:
        """Take a step: what was delivered before its decoder was lost comes again and is left out."""
        prefill, job.started = not job.started, True
        if prefill and not job.times.first_token:
            job.cached = self.scheduler.running[number].reused
            self.metrics.prompt_tokens.inc(len(job.request.prompt_ids))
            self.metrics.cached_tokens.inc(job.cached)
        again = min(len(job.replay), len(step.tokens))
        if step.tokens[:again] != job.replay[:again]:
            self._leave(number)
            self._finish(
                job, "error", Failure("another request broke the engine, and this one could not go on")
            )
            return
        job.replay = job.replay[again:]
        tokens = step.tokens[again:]
        if not tokens:
            return
        looping = job.loop is not None and self._cut_at_loop(job.loop, tokens)
        emitted = job.delivery.push(tokens)
        if looping and job.delivery.finish_reason is None:
            job.delivery.finish_reason = REPETITION
        if step.drafted and not again:
            passed = min(len(step.tokens) - 1, emitted)
            drafted = step.drafted if emitted == len(step.tokens) else passed
            job.drafting.observe(drafted, passed)
            self.metrics.round(drafted, passed)
        self._clock(job, emitted)
        found = (
            rows(step.logits[again : again + emitted], tokens[:emitted], job.logprobs)
            if job.logprobs is not None and step.logits is not None
            else []
        )
        if job.delivery.finish_reason:
            self._leave(number)
            self._finish(job, job.delivery.finish_reason, self._delta(job, tokens[:emitted], found))
        else:
            job.emit(self._delta(job, tokens[:emitted], found))

    def _cut_at_loop(self, loop: LoopDetector, tokens: list[int]) -> bool:
        """Drop what comes after the token at which the output has looped for long enough."""
        for index, token in enumerate(tokens, 1):
            if loop.push(token):
                del tokens[index:]
                return True
        return False

    def _clock(self, job: Job, tokens: int) -> None:
        now, times = time.perf_counter(), job.times
        self.metrics.generation_tokens.inc(tokens)
        if times.first_token:
            self.metrics.between.observe(now - times.last_token)
        else:
            times.first_token = now
            self.metrics.first_token.observe(now - times.arrived)
        times.last_token = now

    def _delta(self, job: Job, tokens: list[int], found: list[Row], note: str = "") -> Delta:
        """The text that nothing can take back any more, and what came with it."""
        delivery = job.delivery
        settled = delivery.text[: -delivery.held or None]
        text, job.sent = settled[job.sent :], max(job.sent, len(settled))
        return Delta(text, tokens, found, job.tokens, delivery.finish_reason, note)

    def _finish(self, job: Job, reason: str, last: Delta | Failure | None = None, note: str = "") -> None:
        """End a job that has no slot any more, with its last event."""
        if last is None:
            job.delivery.finish_reason = reason
            last = self._delta(job, [], [], note)
        job.times.finished = time.perf_counter()
        self.metrics.finished(job, reason)
        with self._changed:
            self._jobs.discard(job)
        job.emit(last)

    # ------------------------------------------------------------------ what goes wrong

    def _non_finite(self, error: NonFiniteError) -> None:
        """End the one with NaN logits; the others start again: their draws are keyed, so their tokens too."""
        number = next(n for n, sequence in self.scheduler.running.items() if sequence.slot == error.slot)
        job = self._running.pop(number)
        self._finish(job, MODEL_NON_FINITE if error.from_scratch else NON_FINITE, note=str(error))
        others = list(self._running.values())
        self._renew()
        self._running = {}
        for other in others:
            other.replay, other.started = list(other.delivery.token_ids), False
            self._running[self.scheduler.add(other.request)] = other

    def _broken(self, error: Exception) -> None:
        """A fault of the engine's own: nothing that runs can go on."""
        traceback.print_exc(file=sys.stderr)
        failed = [
            *self._running.values(),
            *([self._next] if self._scoring is not None and self._next else []),
        ]
        if self._scoring is not None:
            self._next = self._scoring = None
        self._running = {}
        self._renew()
        for job in failed:
            self._finish(job, "error", Failure(f"the engine failed ({type(error).__name__})"))
