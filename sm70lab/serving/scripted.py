"""The scripted server: an OpenAI-compatible server that does what a script says, byte by byte.

It stands on bare sockets, since a script must reach what a framework takes care of: single bytes, cut
and reset connections, wrong lengths, lines that are no events. Beside the usual pages, GET /script tells
what was asked and how each answer ended; the key of a request is not in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

from sm70lab.errors import UsageError
from sm70lab.serving.script import BEFORE_STATUS, Answer, Endpoint, Fault, FaultKind, Framing, Page
from sm70lab.serving.script_site import Call, Site, request_of, told
from sm70lab.serving.script_stream import plan
from sm70lab.serving.script_tokens import Plan, Request
from sm70lab.serving.script_wire import DONE, Events, error_body, framing_headers, head, pieces

LEAVE = 30.0  # seconds that an idle connection is kept
LONGEST_HEAD = 1 << 16  # bytes
LONGEST_BODY = 1 << 28
BLOCK = 1 << 20  # bytes of a huge line written at once
BEFORE_RESET = 0.05  # seconds in which a client can read what came before a reset
ENDPOINTS = {"/v1/chat/completions": Endpoint.chat, "/v1/completions": Endpoint.completions}


class Ended(Exception):  # noqa: N818 - no error: a script's way to end a connection
    """The connection is over; ``how`` says why."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class ScriptedServer:
    """Serves scripts by prefix until it is closed."""

    def __init__(self, sites: list[Site]) -> None:
        self.sites = sorted(sites, key=lambda site: -len(site.prefix))  # the longest prefix first
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen; returns the port. Raises ``OSError`` where the address cannot be used."""
        self._server = await asyncio.start_server(self._accept, host, port, ssl=tls, limit=LONGEST_HEAD)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def close(self) -> None:
        """Stop listening and drop what is still being served."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writer.transport.set_write_buffer_limits(high=1)  # drain waits until the system has it all
        try:
            while await Connection(self.sites, reader, writer).serve_one():
                pass
        except asyncio.CancelledError:  # the server stops; Python 3.11 takes a cancelled handler for a fault
            writer.transport.abort()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client has left, or never spoke HTTP
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class Connection:
    """One request on a connection, from its first byte to the answer's last."""

    def __init__(self, sites: list[Site], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sites, self.reader, self.writer = sites, reader, writer

    async def serve_one(self) -> bool:
        """Read a request and answer it; whether the connection goes on."""
        call = await self._read()
        if call is None:
            return False
        site = next((s for s in self.sites if call.path.startswith(s.prefix + "/")), None)
        if site is None:
            prefixes = ", ".join(f"{s.prefix}/v1" for s in self.sites[::-1])
            return await self._json(call, 404, error_body(404, f"no script here; there are {prefixes}"))
        path = call.path.removeprefix(site.prefix).partition("?")[0]
        if path == "/script":
            return await self._json(call, 200, told(site))
        site.calls.append(call)
        try:
            kept = await self._answer(site, call, path)
            call.ended = "sent"
        except Ended as end:
            call.ended = end.how
            return False
        except OSError:
            call.ended = "the client left"
            return False
        except asyncio.CancelledError:
            call.ended = "the server stopped"
            raise
        return kept

    async def _read(self) -> Call | None:
        try:
            begun = await asyncio.wait_for(self.reader.readexactly(1), LEAVE)
            if not begun.isalpha():  # such as a TLS handshake: answered at once, as servers do
                await self._send(head(400, {"connection": "close", "content-length": "0"}))
                return None
            text = begun + await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), LEAVE)
        except (TimeoutError, asyncio.IncompleteReadError):
            return None
        first, *lines = text.decode("latin-1").split("\r\n")
        method, _, rest = first.partition(" ")
        headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if colon:
                headers[name.strip().lower()] = value.strip()
        length = int(headers.get("content-length") or 0)
        if not 0 <= length <= LONGEST_BODY:
            return None
        content = await self.reader.readexactly(length)
        return Call(method, rest.rpartition(" ")[0], headers, content)

    async def _answer(self, site: Site, call: Call, path: str) -> bool:
        script = site.script
        if path in script.pages:
            return await self._page(call, script.pages[path])
        needs_key = script.api_key is not None and path.startswith("/v1/")
        if needs_key and call.headers.get("authorization") != f"Bearer {script.api_key}":
            return await self._json(call, 401, error_body(401))
        if call.method == "GET":
            return await self._get(site, call, path)
        endpoint = ENDPOINTS.get(path)
        if call.method != "POST" or endpoint is None or endpoint not in script.endpoints:
            return await self._json(call, 404, {"detail": "Not Found"})
        request = request_of(site, call, endpoint)
        if isinstance(request, tuple):
            return await self._json(call, request[0], error_body(*request))
        call.answer = site.take(request)
        if call.answer is None:
            what = "the script has no answer left for this request"
            return await self._json(call, 500, error_body(500, what))
        return await self._generate(site, call, script.answers[call.answer], request)

    async def _get(self, site: Site, call: Call, path: str) -> bool:
        script = site.script
        if path == "/health":
            return await self._send_body(call, 200, b"", {})
        if path == "/version" and script.version is not None:
            return await self._json(call, 200, {"version": script.version})
        if path == "/v1/models" and script.served_models is not None:
            length = script.max_model_len
            models = [
                {
                    "id": name,
                    "object": "model",
                    "created": 1,
                    "owned_by": script.owned_by,
                    "max_model_len": length,
                }
                for name in script.served_models
            ]
            return await self._json(call, 200, {"object": "list", "data": models})
        if path == "/metrics" and site.served is not None:
            kind = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}
            return await self._send_body(call, 200, site.served.text(), kind)
        return await self._json(call, 404, {"detail": "Not Found"})

    async def _page(self, call: Call, page: Page) -> bool:
        await self._pause(page.delay_s)
        return await self._send_body(call, page.status, page.body.encode(), page.headers)

    async def _json(self, call: Call, status: int, value: Any) -> bool:
        content = json.dumps(value, ensure_ascii=False).encode()
        return await self._send_body(call, status, content, {"content-type": "application/json"})

    async def _send_body(self, call: Call, status: int, content: bytes, headers: dict[str, str]) -> bool:
        call.status, call.ended = status, "sent"
        await self._send(head(status, {**headers, "content-length": str(len(content))}) + content)
        return True

    async def _generate(self, site: Site, call: Call, answer: Answer, request: Request) -> bool:
        await self._pause(answer.delay_s)
        for fault in answer.faults:
            if fault.at == BEFORE_STATUS:
                await self._end_or_stall(fault)
        if answer.body is not None or answer.status != 200:
            return await self._own_body(call, answer)
        try:
            planned = await asyncio.to_thread(plan, answer, request, site.tokens, site.script.counters)
        except UsageError as error:  # a recorded file has gone since the start
            return await self._json(call, 500, error_body(500, str(error)))
        site.number += 1
        events = Events(answer, request, planned, site.number)
        if site.served is not None:
            site.served.running += 1
            site.served.prompt_tokens += len(request.prompt_ids)
        try:
            if request.body.get("stream"):
                kept = await self._stream(site, call, answer, planned, events)
            else:
                kept = await self._at_once(site, call, planned, events)
        except BaseException:
            self._finished(site, "abort")
            raise
        self._finished(site, planned.finish or "stop")
        return kept

    def _finished(self, site: Site, how: str) -> None:
        if site.served is not None:
            site.served.running -= 1
            site.served.finished[how] += 1

    async def _own_body(self, call: Call, answer: Answer) -> bool:
        if answer.body is None:
            content = json.dumps(error_body(answer.status, answer.error)).encode()
            headers = {"content-type": "application/json"}
        else:
            content, headers = answer.body.encode(), {"content-type": "text/html"}
        if answer.wire.framing is Framing.none:
            await self._send(content)
            raise Ended("bytes that are not HTTP")
        return await self._send_body(call, answer.status, content, {**headers, **answer.headers})

    async def _at_once(self, site: Site, call: Call, planned: Plan, events: Events) -> bool:
        for step in planned.steps:
            call.tokens += len(step.tokens)
            if site.served is not None:
                site.served.count(step)
        return await self._json(call, 200, events.whole())

    async def _stream(self, site: Site, call: Call, answer: Answer, planned: Plan, events: Events) -> bool:
        wire, call.status = answer.wire, 200
        headers = {"content-type": "text/event-stream; charset=utf-8", **answer.headers}
        body = self._events(site, call, answer, planned, events)
        if wire.framing in (Framing.too_long, Framing.too_short):
            whole = b"".join([data async for data in body])
            await self._send(head(200, {**headers, **framing_headers(wire, len(whole))}) + whole)
            raise Ended("a wrong length")
        if wire.framing is not Framing.none:
            await self._send(head(200, {**headers, **framing_headers(wire, 0)}))
        async for data in body:
            if wire.framing is Framing.chunked:
                await self._send(b"".join(pieces(wire, data)))  # every piece is a chunk of its own
            else:
                for piece in pieces(wire, data):
                    await self._send(piece)
        if wire.framing is Framing.chunked:
            await self._send(b"0\r\n\r\n")
            return True
        raise Ended("sent, and closed")

    async def _events(
        self, site: Site, call: Call, answer: Answer, planned: Plan, events: Events
    ) -> AsyncIterator[bytes]:
        """The body's bytes in time; ends early or raises ``Ended`` where the script has a fault."""
        if answer.wire.byte_order_mark:
            yield "\ufeff".encode()
        for data in events.opening():
            yield data
        faults = sorted((f for f in answer.faults if f.at >= 0), key=lambda fault: fault.at)
        started, before, other_id = time.monotonic(), b"", False
        for index, step in enumerate(planned.steps):
            while faults and faults[0].at <= call.tokens:
                fault = faults.pop(0)
                other_id = other_id or fault.kind is FaultKind.other_id
                async for data in self._fault(fault, events, before):
                    yield data
                if fault.kind is FaultKind.error:
                    return
            if answer.tokens_per_second:
                due = started + (call.tokens + len(step.tokens)) / answer.tokens_per_second
                await self._pause(due - time.monotonic())
            if answer.wire.comment_every and index % answer.wire.comment_every == 0:
                yield events.comment()
            if site.served is not None:
                site.served.count(step)
            call.tokens += len(step.tokens)
            before, other_id = events.step(step, other_id), False
            yield before
        for fault in faults:
            async for data in self._fault(fault, events, before):
                yield data
            if fault.kind is FaultKind.error:
                return
        for data in events.closing():
            yield data

    async def _fault(self, fault: Fault, events: Events, before: bytes) -> AsyncIterator[bytes]:
        match fault.kind:
            case FaultKind.stall | FaultKind.cut | FaultKind.reset:
                await self._end_or_stall(fault)
            case FaultKind.malformed:
                yield events.raw_line(fault.text)
            case FaultKind.huge_line:
                yield b"data: "
                for start in range(0, fault.bytes, BLOCK):
                    yield b"x" * min(BLOCK, fault.bytes - start)
                yield events.raw_line("")
            case FaultKind.error:
                value = error_body(fault.code, fault.message, fault.code)
                yield events.line(json.dumps(value, ensure_ascii=False))
                yield events.line(DONE)
            case FaultKind.duplicate:
                yield before

    async def _end_or_stall(self, fault: Fault) -> None:
        if fault.kind is FaultKind.stall:
            await self._pause(fault.seconds)
        elif fault.kind is FaultKind.reset:
            await asyncio.sleep(BEFORE_RESET)
            raw = self.writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
            raise Ended("reset")
        else:
            raise Ended("cut")

    async def _pause(self, seconds: float | None) -> None:
        """Wait, for ever where None; raises ``Ended`` once the client has left."""
        if seconds is not None and seconds <= 0:
            return
        try:
            data = await asyncio.wait_for(self.reader.read(1), seconds)
        except TimeoutError:
            return
        raise Ended("the client left" if not data else "the client spoke out of turn")

    async def _send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()
