"""The routes: OpenAI's endpoints, and those by which tools know a vLLM server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from sm70lab import __version__
from sm70lab.serving.answers import ChatWriter, CompletionWriter, Writer, joined
from sm70lab.serving.errors import ApiError, error_object
from sm70lab.serving.gate import Gate, refusal
from sm70lab.serving.intake import Intake
from sm70lab.serving.job import ABORT, Delta, Event, Failure, Job
from sm70lab.serving.protocol import (
    EITHER,
    ChatAnswer,
    ChatRequest,
    CompletionAnswer,
    CompletionRequest,
    ErrorAnswer,
    ModelCard,
    ModelList,
    Version,
)
from sm70lab.serving.reasoning import ReasoningSplit
from sm70lab.serving.worker import Worker

DONE = "data: [DONE]\n\n"
REFUSALS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}


@dataclass(frozen=True)
class Served:
    """What the routes serve."""

    worker: Worker
    intake: Intake
    version: Version
    api_key: str | None
    max_body: int


def build(served: Served) -> FastAPI:
    """The application."""
    app = FastAPI(
        title="sm70lab serve",
        version=__version__,
        description="The built-in engine behind an OpenAI-compatible API.",
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    routes = Routes(served)
    app.add_middleware(Gate, api_key=served.api_key, max_body=served.max_body)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unforeseen)
    for path, answer in (("completions", CompletionAnswer), ("chat/completions", ChatAnswer)):
        endpoint: Callable[..., Any] = routes.chat if answer is ChatAnswer else routes.completion
        app.add_api_route(
            f"/v1/{path}",
            endpoint,
            methods=["POST"],
            response_model=None,
            responses={200: {"model": answer, "content": {"text/event-stream": {}}}, **REFUSALS},
        )
    app.add_api_route("/v1/models", routes.models, response_model=ModelList, responses=REFUSALS)
    app.add_api_route("/v1/models/{name}", routes.one_model, response_model=ModelCard, responses=REFUSALS)
    app.add_api_route("/version", routes.version, response_model=Version, responses=REFUSALS)
    app.add_api_route("/health", routes.health, response_class=Response, responses=REFUSALS)
    app.add_api_route(
        "/metrics",
        routes.metrics,
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}, **REFUSALS},
    )
    return app


class Routes:
    """One method a route."""

    def __init__(self, served: Served) -> None:
        self.served, self.worker, self.intake = served, served.worker, served.intake
        self._created = int(time.time())
        self._fingerprint = f"sm70lab-{__version__}-{served.version.model_hash[:8]}"

    async def completion(self, body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt."""
        events, emit = _channel()
        job = await asyncio.to_thread(self.intake.completion, body, emit)
        writer = CompletionWriter(job, body, self.intake.text, self.intake.model, self._fingerprint)
        return await self._answer(job, events, writer, bool(body.stream), request)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        events, emit = _channel()
        job, prompt = await asyncio.to_thread(self.intake.chat, body, emit)
        writer = ChatWriter(job, body, self.intake.text, self.intake.model, self._fingerprint)
        writer.split = ReasoningSplit(prompt) if self.intake.text.thinks else None
        return await self._answer(job, events, writer, bool(body.stream), request)

    async def models(self) -> ModelList:
        """The one model that is served."""
        return ModelList(data=[self._card()])

    async def one_model(self, name: str) -> ModelCard:
        """The model by its name."""
        if name != self.intake.model:
            raise ApiError(404, f"The model `{name}` does not exist; this is {self.intake.model}", "name")
        return self._card()

    async def version(self) -> Version:
        """What runs here."""
        return self.served.version

    async def health(self) -> Response:
        """200 while the engine runs."""
        if not self.worker.is_alive():
            raise ApiError(503, "the engine has ended")
        return Response()

    async def metrics(self) -> Response:
        """Prometheus metrics under vLLM's names."""
        return Response(self.worker.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    def _card(self) -> ModelCard:
        name, positions = self.intake.model, self.intake.limits.positions
        return ModelCard(id=name, created=self._created, root=name, max_model_len=positions)

    async def _answer(
        self, job: Job, events: asyncio.Queue[Event], writer: Writer, stream: bool, request: Request
    ) -> Response:
        self.worker.submit(job)
        if stream:
            pieces = self._pieces(job, events, writer)
            return StreamingResponse(pieces, media_type="text/event-stream")
        try:
            deltas = await _unless_gone(_collect(events), request)
        finally:
            self.worker.cancel(job, ABORT)
        content = await asyncio.to_thread(writer.whole, joined(deltas))
        return Response(content, media_type="application/json")

    async def _pieces(self, job: Job, events: asyncio.Queue[Event], writer: Writer) -> AsyncIterator[str]:
        """Server-sent events. A client that goes away cancels this, and so the job."""
        try:
            while True:
                event = await events.get()
                if isinstance(event, Failure):
                    yield f"data: {json.dumps(error_object(500, event.message))}\n\n"
                    break
                for chunk in writer.chunks(event):
                    yield f"data: {chunk}\n\n"
                if event.finish_reason:
                    if writer.usage_last:
                        yield f"data: {writer.usage_chunk(event.total)}\n\n"
                    break
            yield DONE
        finally:
            self.worker.cancel(job, ABORT)


def _channel() -> tuple[asyncio.Queue[Event], Callable[[Event], None]]:
    """A queue on this loop, and what fills it from another thread."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def emit(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(events.put_nowait, event)

    return events, emit


async def _collect(events: asyncio.Queue[Event]) -> list[Delta]:
    deltas: list[Delta] = []
    while not deltas or deltas[-1].finish_reason is None:
        event = await events.get()
        if isinstance(event, Failure):
            raise ApiError(500, event.message)
        deltas.append(event)
    return deltas


async def _unless_gone(collecting: Any, request: Request) -> list[Delta]:
    """What ``collecting`` gives; raises ``ApiError`` 400, which nobody reads, once the client is away."""
    answer = asyncio.ensure_future(collecting)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ApiError(400, "the client went away")
        deltas: list[Delta] = answer.result()
        return deltas
    finally:
        answer.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --------------------------------------------------------------------------- errors


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    content = error_object(error.status_code, str(error.detail))
    return JSONResponse(content, error.status_code, headers=error.headers)


async def _invalid(request: Request, error: Exception) -> Response:
    """The first complaint."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    message = str(first["msg"]).replace("Input should be", "must be")
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":  # its place is a character's
        return refusal(ApiError(400, f"the body is not JSON: {first['ctx']['error']}"))
    if not place:
        return refusal(ApiError(400, _no_object(request, first["type"])))
    either = next((at for at, part in enumerate(place) if part in EITHER), None)
    if either is not None and first["type"] != "missing":  # the complaint is about one kind of several
        message, place = f"must be {EITHER[place[either]]}", place[: either + 1]
    return refusal(ApiError(400, f"{'.'.join(place)}: {message}", place[0]))


def _no_object(request: Request, kind: str) -> str:
    """Why a body is no JSON object at all."""
    if kind == "missing":
        return "the body is empty; send a JSON object"
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media == "application/json" or media.endswith("+json"):
        return "the body must be a JSON object"
    return "the body was not read as JSON; send Content-Type: application/json"


async def _unforeseen(request: Request, error: Exception) -> Response:
    return refusal(ApiError(500, f"the server failed ({type(error).__name__})"))
