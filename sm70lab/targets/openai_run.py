"""Requests side by side, their answers as they end, and the counters read in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from sm70lab.errors import UsageError
from sm70lab.schema import Generation
from sm70lab.targets.base import OnProgress, Progress
from sm70lab.targets.openai_answer import Answer, RefusedError
from sm70lab.targets.openai_client import Client, in_words, refusal
from sm70lab.targets.openai_request import without_refused
from sm70lab.targets.openai_stream import EventStream, MalformedError, chunk_of
from sm70lab.targets.prometheus import Own, Reading, Watch, now, read

RETRY_STATUS = (408, 425, 429, 500, 502, 503, 504)
BACKOFF_SECONDS = 0.5  # before the first retry, then doubled
LONGEST_WAIT = 30.0  # whatever Retry-After says
PROGRESS_SECONDS = 0.2
LEAST_WINDOW_SECONDS = 0.3  # between readings of the counters
SETTLE_READINGS, SETTLE_SECONDS = 8, 0.1  # for the counters to take in the last tokens
METRICS_SECONDS = 5.0
CHARACTERS_A_TOKEN = 4  # about, where nobody counts tokens: for the time between readings alone
MAX_ANSWER_BYTES = 64 << 20  # of an answer that is not streamed
STREAM = "text/event-stream"


class NoAnswerError(Exception):
    """No token came after all tries; ``reason`` is the finish reason of an empty answer."""

    def __init__(self, reason: str, line: str) -> None:
        super().__init__(line)
        self.reason = reason


class _RetryError(Exception):
    """One try failed before the first token, and another may help."""

    def __init__(self, reason: str, line: str, wait: float | None = None) -> None:
        super().__init__(line)
        self.reason, self.wait = reason, wait


@dataclass
class Ask:
    """One request to make: where, what, and the answer that will hold what comes."""

    path: str
    body: dict[str, Any]
    answer: Answer


@dataclass
class Batch:
    """All requests of one repeat. ``answers`` runs them and gives generations in the order they end."""

    client: Client
    asks: list[Ask]
    metrics: str | None  # address of the counters
    model: str
    window_tokens: int
    watch: Watch
    anything: bool  # whether this run has any token yet
    on_progress: OnProgress
    _out: queue.SimpleQueue[Generation | Progress | BaseException | None] = field(
        default_factory=queue.SimpleQueue
    )
    earlier: dict[str, Own] = field(default_factory=dict)  # of the repeats before
    _work: asyncio.Task[None] | None = None
    _running: int = 0
    _first: int = 0  # number of this repeat's first reading
    _read_at: int = 0  # tokens of all answers at the last reading
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    def answers(self) -> Iterator[Generation]:
        """Generations as they end. A ``KeyboardInterrupt`` here cuts the open ones short: they are
        yielded as interrupted, then it is raised again. Raises ``UsageError`` for a refused request.

        The requests run in a thread of their own, so that what is done with an answer that has ended does
        not hold up the clock of the others.
        """
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._thread, args=(loop,), name="requests", daemon=True)
        thread.start()
        try:
            while (found := self._out.get()) is not None:
                if isinstance(found, Progress):
                    self.on_progress(found)
                elif isinstance(found, BaseException):
                    raise found
                else:
                    yield found
        except KeyboardInterrupt:
            self._stop(loop, thread)
            yield from self._cut_short()
            raise
        except UsageError:
            self._stop(loop, thread)
            yield from self._cut_short()
            raise
        finally:
            self._stop(loop, thread)

    def _stop(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(self._cancel)
        thread.join()

    def _cancel(self) -> None:
        if self._work is not None:
            self._work.cancel()

    def _cut_short(self) -> Iterator[Generation]:
        """What had ended and not been given out yet, then the open answers."""
        while True:
            with contextlib.suppress(queue.Empty):
                found = self._out.get_nowait()
                if isinstance(found, Generation):
                    yield found
                continue
            break
        for ask in self.asks:
            if not ask.answer.closed and ask.answer.begun:
                ask.answer.end("interrupted", "")
                yield self._finish(ask.answer)

    def _thread(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            self._work = loop.create_task(self._all())
            loop.run_until_complete(self._work)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._out.put(error)
        finally:
            self._out.put(None)
            loop.run_until_complete(loop.shutdown_asyncgens())  # of connections that were cut
            loop.close()

    async def _all(self) -> None:
        limit = asyncio.Semaphore(self.client.target.max_num_seqs)
        async with httpx.AsyncClient(**self.client.options()) as http:
            self._first = len(self.watch.readings)
            if (found := await self._read(http)) is not None:
                self.watch.add(found, self.own(), 0)
            watching = asyncio.create_task(self._watch(http))
            try:
                async with asyncio.TaskGroup() as group:
                    for ask in self.asks:
                        group.create_task(self._one(http, ask, limit))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
            await self._settle(http)

    # ------------------------------------------------------------------ one request

    async def _one(self, http: httpx.AsyncClient, ask: Ask, limit: asyncio.Semaphore) -> None:
        async with limit:
            self._running += 1
            try:
                await self._tries(http, ask)
            except NoAnswerError as error:
                if not self.anything:
                    raise UsageError(f"{self.client.url(ask.path)}: {error}") from None
                ask.answer.end(error.reason, f"no token came: {error}")
            finally:
                self._running -= 1
            self._out.put(self._finish(ask.answer))
            self._moved.set()

    async def _tries(self, http: httpx.AsyncClient, ask: Ask) -> None:
        """Ask until a token comes; tries that failed before are recorded."""
        tries = self.client.target.retries + 1
        failed: list[dict[str, Any]] = ask.answer.record.setdefault("failed_tries", [])
        for number in range(tries):
            started = time.perf_counter()
            try:
                await self._try(http, ask)
                return
            except _RetryError as error:
                line = f"{error}: {ask.answer.faults[0]}" if ask.answer.faults else str(error)
                failed.append({"error": line, "seconds": round(time.perf_counter() - started, 3)})
                ask.answer.again()
                if number + 1 == tries:
                    count = f"{tries} tries" if tries > 1 else "one try"
                    raise NoAnswerError(error.reason, f"{line} (after {count})") from None
                wait = BACKOFF_SECONDS * 2**number if error.wait is None else error.wait
                await asyncio.sleep(min(wait, LONGEST_WAIT))

    async def _try(self, http: httpx.AsyncClient, ask: Ask) -> None:
        answer = ask.answer
        try:
            async with asyncio.timeout(self.client.target.total_timeout_s):
                await self._stream(http, ask)
        except RefusedError as error:
            code = error.error.code
            if code is None or code >= 500 or code in RETRY_STATUS:
                raise _RetryError("server_error", str(error)) from None
            raise UsageError(f"{self.client.url(ask.path)}: the server refuses: {error}") from None
        except (httpx.HTTPError, TimeoutError) as error:
            late = isinstance(error, httpx.TimeoutException | TimeoutError)
            reason, line = "timeout" if late else "connection_lost", in_words(error, self.client.target)
            if not answer.begun:
                raise _RetryError(reason, line) from None
            answer.end(reason, f"{line}, after {answer.so_far()}")
        except MalformedError as error:
            if not answer.begun:
                raise _RetryError("malformed", str(error)) from None
            answer.end("malformed", f"{error}, after {answer.so_far()}")

    async def _stream(self, http: httpx.AsyncClient, ask: Ask) -> None:
        answer, events = ask.answer, EventStream()
        started = time.perf_counter()
        async with http.stream("POST", self.client.url(ask.path), json=ask.body) as response:
            answer.record["status"] = response.status_code
            if request_id := response.headers.get("x-request-id"):
                answer.record["request_id"] = request_id
            if response.status_code != 200:
                await response.aread()
                if await self._ask_for_less(http, ask, response):
                    return
                self._refused(ask, response)
            if STREAM not in response.headers.get("content-type", ""):
                await self._whole(ask, response, started)
                return
            shown = 0.0
            async for data in response.aiter_bytes():
                seconds = time.perf_counter() - started
                for event in events.feed(data):
                    answer.event(event, seconds)
                self._note_tokens()
                if answer.finish_reason == "server_error":
                    break
                if seconds - shown > PROGRESS_SECONDS:
                    shown = seconds
                    self._out.put(answer.progress(seconds))
        if events.bad_utf8:
            answer.fault(f"{events.bad_utf8} events were not UTF-8")
        if not answer.begun and answer.finish_reason is None:
            raise _RetryError("connection_lost", "the stream ended before the first token")
        answer.close(events.pending)

    async def _ask_for_less(self, http: httpx.AsyncClient, ask: Ask, response: httpx.Response) -> bool:
        """Ask again without fields of which the server says that it does not know them."""
        if response.status_code not in (400, 422):
            return False
        less = without_refused(ask.body, refusal(self.client, response))
        if less is None:
            return False
        ask.body, names = less
        ask.answer.record.setdefault("refused_fields", []).extend(names)
        await self._stream(http, ask)
        return True

    def _refused(self, ask: Ask, response: httpx.Response) -> None:
        """Raise what a status that is not 200 means."""
        line = refusal(self.client, response)
        if response.status_code in RETRY_STATUS:
            raise _RetryError("server_error", line, _retry_after(response))
        raise UsageError(f"{self.client.url(ask.path)}: {line}")

    async def _whole(self, ask: Ask, response: httpx.Response, started: float) -> None:
        """An answer in one piece, of a server that does not stream."""
        body = bytearray()
        async for data in response.aiter_bytes():
            body += data
            if len(body) > MAX_ANSWER_BYTES:
                raise MalformedError(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
        kind = response.headers.get("content-type", "no content type")
        try:
            value = json.loads(body)
        except ValueError:
            raise MalformedError(f"neither a stream of events nor JSON came ({kind})") from None
        answer = ask.answer
        answer.take(chunk_of(value, body[:200].decode("utf-8", "replace")), time.perf_counter() - started)
        answer.fault(f"not streamed ({kind}): the time to the first token is that of the whole answer")
        answer.done = True
        answer.close(False)

    def _finish(self, answer: Answer) -> Generation:
        answer.closed = True
        generation = answer.generation()
        self.anything = self.anything or answer.begun
        return generation

    # ------------------------------------------------------------------ counters

    def _note_tokens(self) -> None:
        begun = [ask.answer for ask in self.asks if ask.answer.begun]
        self.anything = self.anything or bool(begun)
        tokens = sum(a.tokens or a.characters // CHARACTERS_A_TOKEN for a in begun)
        if tokens - self._read_at >= self.window_tokens:
            self._read_at = tokens
            self._moved.set()

    def own(self) -> dict[str, Own]:
        """How far each answer of the run is, by generation key."""
        found = {}
        for answer in (ask.answer for ask in self.asks):
            if answer.begun:
                position = answer.tokens if answer.token_ids else answer.characters
                found[answer.key] = Own(position, answer.tokens if answer.tokens_known else None)
        return self.earlier | found

    async def _watch(self, http: httpx.AsyncClient) -> None:
        """Read the counters whenever a window's tokens have come, and when an answer has ended."""
        while self.metrics is not None:
            await self._moved.wait()
            self._moved.clear()
            own = self.own()
            if (found := await self._read(http)) is not None:
                self.watch.add(found, own, self._running)
            await asyncio.sleep(LEAST_WINDOW_SECONDS)

    async def _settle(self, http: httpx.AsyncClient) -> None:
        """The last reading, once the counters hold all tokens that came."""
        for number in range(SETTLE_READINGS):
            found, own = await self._read(http), self.own()
            if found is None:
                return
            whole = not self.watch.readings or self.watch.holds(found, own, self._first)
            if whole or number + 1 == SETTLE_READINGS:
                self.watch.add(found, own, 0)
                return
            await asyncio.sleep(SETTLE_SECONDS)

    async def _read(self, http: httpx.AsyncClient) -> Reading | None:
        if self.metrics is None:
            return None
        try:
            page = await http.get(self.metrics, timeout=METRICS_SECONDS)
            return read(page.text, self.model, now()) if page.status_code == 200 else None
        except (httpx.HTTPError, ValueError) as error:
            self.watch.fault(f"{self.metrics}: {in_words(error)}")
            return None


def _retry_after(response: httpx.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None
