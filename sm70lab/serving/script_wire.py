"""The bytes of scripted answers: chunks of both endpoints as server-sent events, and HTTP around them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from sm70lab.serving.script import Answer, Endpoint, Framing, LineEnd, Usage, Wire
from sm70lab.serving.script_tokens import Plan, Request, Step

_ENDS = {LineEnd.lf: "\n", LineEnd.crlf: "\r\n", LineEnd.cr: "\r"}
_WRONG_LENGTH = 100  # bytes that ``too_long`` promises and does not send
DONE = "[DONE]"


class Events:
    """One answer's events, in the shapes that vLLM sends."""

    def __init__(self, answer: Answer, request: Request, plan: Plan, number: int) -> None:
        self.answer, self.request, self.plan = answer, request, plan
        self.wire = answer.wire
        chat = request.endpoint is Endpoint.chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-scripted-{number}"
        self._with_ids = answer.token_ids and bool(request.body.get("return_token_ids"))
        self._sent = False

    def line(self, data: str) -> bytes:
        """``data`` as one event."""
        end, name = _ENDS[self.wire.line_end], f"data:{' ' if self.wire.blank else ''}"
        if self.wire.two_lines:
            data = data.replace(", ", f",{end}{name}", 1)
        return f"{name}{data}{end}{end}".encode()

    def comment(self) -> bytes:
        """A keep-alive comment, which a client must skip."""
        end = _ENDS[self.wire.line_end]
        return f": keep-alive{end}{end}".encode()

    def raw_line(self, text: str) -> bytes:
        """``text`` and the end of an event, whatever it means."""
        end = _ENDS[self.wire.line_end]
        return f"{text}{end}{end}".encode("utf-8", "surrogateescape")

    def opening(self) -> Iterator[bytes]:
        """What comes before the first token: with the chat endpoint the role."""
        if self.request.endpoint is Endpoint.chat and self.answer.sse is None:
            yield self._chunk({"role": "assistant", "content": ""}, [], None)

    def step(self, step: Step, other_id: bool = False) -> bytes:
        """One chunk; a recorded event is told as it is."""
        if step.event is not None:
            return (step.event + "\n\n").replace("\n", _ENDS[self.wire.line_end]).encode()
        reasoning = "".join(token.text for token in step.tokens if token.reasoning)
        content = "".join(token.text for token in step.tokens if not token.reasoning)
        delta = {"content": content} if content or not reasoning else {}
        if reasoning:
            delta[self.answer.reasoning_field or "content"] = reasoning
        return self._chunk(delta, [token.id for token in step.tokens], None, other_id)

    def closing(self) -> Iterator[bytes]:
        """Finish reason, usage and [DONE], as far as the script has them."""
        if self.answer.sse is None:
            if self.plan.finish is not None:
                yield self._chunk({}, [], self.plan.finish)
            if self._usage_wanted():
                yield self.line(json.dumps(self._body([]) | {"usage": self.usage()}, ensure_ascii=False))
            if self.wire.done:
                yield self.line(DONE)

    def _usage_wanted(self) -> bool:
        options = self.request.body.get("stream_options") or {}
        asked = isinstance(options, dict) and options.get("include_usage")
        return self.answer.usage is Usage.always or (self.answer.usage is Usage.asked and bool(asked))

    def usage(self) -> dict[str, int]:
        """What the server says of the tokens: the truth, unless the script has a number of its own."""
        said = self.answer.usage_tokens
        completion = said if said is not None else self.plan.completion_tokens
        prompt = len(self.request.prompt_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def whole(self) -> dict[str, Any]:
        """The answer to a request without ``stream``."""
        tokens = [token for step in self.plan.steps for token in step.tokens]
        content = "".join(token.text for token in tokens if not token.reasoning)
        reasoning = "".join(token.text for token in tokens if token.reasoning)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self.plan.finish}
        if self.request.endpoint is Endpoint.chat:
            message = {"role": "assistant", "content": content}
            choice["message"] = message | (
                {self.answer.reasoning_field or "content": reasoning} if reasoning else {}
            )
        else:
            choice["text"] = reasoning + content
        if self._with_ids:
            choice |= {"token_ids": [token.id for token in tokens]}
            choice |= {"prompt_token_ids": self.request.prompt_ids}
        body = self._body([choice], "")
        return body if self.answer.usage is Usage.absent else body | {"usage": self.usage()}

    def _chunk(
        self, delta: Mapping[str, str], ids: list[int], finish: str | None, other_id: bool = False
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        chat = self.request.endpoint is Endpoint.chat
        choice |= {"delta": delta} if chat else {"text": "".join(delta.values())}
        choice |= {"logprobs": None, "finish_reason": finish}
        first = not self._sent
        self._sent = True
        body = self._body([choice])
        if self._with_ids:
            choice["token_ids"] = ids
            if first:
                (body if chat else choice)["prompt_token_ids"] = self.request.prompt_ids
        if other_id:
            body["id"] = self.id + "-other"
        return self.line(json.dumps(body, ensure_ascii=False))

    def _body(self, choices: list[dict[str, Any]], kind: str = ".chunk") -> dict[str, Any]:
        chat = self.request.endpoint is Endpoint.chat
        name = f"chat.completion{kind}" if chat else "text_completion"
        return {"id": self.id, "object": name, "created": 1, "model": self.request.model, "choices": choices}


def error_body(status: int, message: str | None = None, code: int | None = None) -> dict[str, Any]:
    """An error object as vLLM sends it."""
    words = phrase(status)
    kind = "".join(words.title().split()) + ("" if words.endswith("Error") else "Error")
    return {
        "error": {"message": message or words, "type": kind, "param": None, "code": code or status},
    }


def phrase(status: int) -> str:
    """The standard words of an HTTP status; empty for one that has none."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def head(status: int, headers: Mapping[str, str]) -> bytes:
    """Status line and headers."""
    lines = [f"HTTP/1.1 {status} {phrase(status)}", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def framing_headers(wire: Wire, length: int) -> dict[str, str]:
    """Headers that tell where a body of ``length`` bytes ends: truly or not."""
    match wire.framing:
        case Framing.chunked:
            return {"transfer-encoding": "chunked"}
        case Framing.too_long:
            return {"content-length": str(length + _WRONG_LENGTH), "connection": "close"}
        case Framing.too_short:
            return {"content-length": str(length // 2), "connection": "close"}
        case _:
            return {"connection": "close"}


def pieces(wire: Wire, data: bytes) -> Iterator[bytes]:
    """``data`` in the writes that the script wants, framed."""
    size = wire.split or len(data) or 1
    for start in range(0, len(data), size):
        piece = data[start : start + size]
        chunked = wire.framing is Framing.chunked
        yield b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece
