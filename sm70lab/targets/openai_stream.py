"""Server-sent events as bytes come in, and what one event of an OpenAI stream says.

Events follow the WHATWG standard: lines end with LF, CR or CRLF, wherever the network cut them; a line
that begins with a colon is a comment; several ``data`` lines make one event, joined by line feeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sm70lab.schema import Speculation

MAX_EVENT_BYTES = 16 << 20  # no server's event is near it; an endless line must not take the memory
DONE = "[DONE]"
BOM = b"\xef\xbb\xbf"
SHOWN_CHARS = 120  # of a broken event


class MalformedError(ValueError):
    """An event that is no JSON, or not of the shape that the API has."""


class EventStream:
    """Turns bytes into the data of events. A UTF-8 character may be cut anywhere."""

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self.limit = limit
        self.bad_utf8 = 0  # lines that were not UTF-8; their bad bytes became U+FFFD
        self._line = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False
        self._begun = False

    def feed(self, data: bytes) -> Iterator[str]:
        """The data of each event that ``data`` completes. Raises ``MalformedError`` beyond the limit."""
        start = 0
        while start < len(data):
            if self._after_cr and data[start] == 0x0A:
                self._after_cr = False
                start += 1
                continue
            self._after_cr = False
            ends = [place for mark in (b"\n", b"\r") if (place := data.find(mark, start)) >= 0]
            end = min(ends, default=len(data))
            self._size += end - start
            if self._size > self.limit:
                raise MalformedError(f"an event is longer than {self.limit >> 20} MiB")
            self._line += data[start:end]
            if not ends:
                return
            self._after_cr = data[end] == 0x0D
            start = end + 1
            event = self._end_of_line()
            if event is not None:
                yield event

    @property
    def pending(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._data or self._line.strip())

    def _end_of_line(self) -> str | None:
        line = bytes(self._line)
        self._line.clear()
        if not self._begun:
            self._begun, line = True, line.removeprefix(BOM)
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif not self._data:
            self._size = 0  # comments and other fields are not kept
        return None

    def _dispatch(self) -> str | None:
        data, self._data, self._size = self._data, [], 0
        if not data:
            return None
        whole = b"\n".join(data)
        try:
            return whole.decode("utf-8")
        except UnicodeDecodeError:
            self.bad_utf8 += 1
            return whole.decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Chunk:
    """What one event (or one whole answer without streaming) says."""

    id: str | None = None
    model: str | None = None
    content: str = ""
    reasoning: str = ""
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int | None = None  # of usage
    completion_tokens: int | None = None
    speculation: Speculation | None = None
    error: ServerError | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # of the server's own, for the record


@dataclass(frozen=True)
class ServerError:
    """An error as a server words it."""

    message: str
    kind: str = ""
    code: int | None = None

    def __str__(self) -> str:
        return " ".join(self.message.split())[:500] or self.kind or "an error without a message"


def read_chunk(data: str) -> Chunk:
    """Read one event's data. Raises ``MalformedError``."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not JSON: {_shown(data)}") from error
    return chunk_of(value, data)


def chunk_of(value: Any, shown: str = "") -> Chunk:
    """Read one decoded event or answer, of either endpoint. Raises ``MalformedError``."""
    if not isinstance(value, dict):
        raise MalformedError(f"no JSON object: {_shown(shown or str(value))}")
    if (error := error_of(value)) is not None:
        return Chunk(error=error)
    choices = value.get("choices", [])
    if not isinstance(choices, list) or any(not isinstance(choice, dict) for choice in choices):
        raise MalformedError(f"choices is no list of objects: {_shown(shown)}")
    if len(choices) > 1 or any(choice.get("index", 0) not in (0, None) for choice in choices):
        raise MalformedError(f"several choices, and one was asked for: {_shown(shown)}")
    choice: dict[str, Any] = choices[0] if choices else {}
    part = choice.get("delta") or choice.get("message") or {}
    if not isinstance(part, dict):
        raise MalformedError(f"delta is no object: {_shown(shown)}")
    usage, timings = value.get("usage") or {}, value.get("timings") or {}
    counted = _typed(usage, "completion_tokens", int) if isinstance(usage, dict) else None
    if counted is None and isinstance(timings, dict):  # llama.cpp, asked for timings_per_token
        counted = _typed(timings, "predicted_n", int)
    return Chunk(
        id=_typed(value, "id", str),
        model=_typed(value, "model", str),
        content=_text(part.get("content"), shown) or _text(choice.get("text"), shown),
        reasoning=_text(part.get("reasoning"), shown) or _text(part.get("reasoning_content"), shown),
        token_ids=_ids(choice.get("token_ids"), shown),
        prompt_token_ids=_ids(choice.get("prompt_token_ids", value.get("prompt_token_ids")), shown),
        finish_reason=_typed(choice, "finish_reason", str),
        stop_reason=_typed(choice, "stop_reason", (str, int)),
        prompt_tokens=_typed(usage, "prompt_tokens", int) if isinstance(usage, dict) else None,
        completion_tokens=counted,
        speculation=_speculation(value),
        extra={key: value[key] for key in ("system_fingerprint", "metrics", "timings") if value.get(key)},
    )


def error_of(value: Any) -> ServerError | None:
    """The error in an answer's body, in the shapes of OpenAI, vLLM, SGLang, llama.cpp and FastAPI."""
    if not isinstance(value, dict):
        return None
    found = value.get("error")
    if found is None and value.get("object") == "error":
        found = value
    if found is None and "detail" in value and "choices" not in value:
        found = value["detail"]
    if found is None:
        return None
    if not isinstance(found, dict):
        return ServerError(found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))
    code = found.get("code")
    message, kind = found.get("message"), found.get("type")
    return ServerError(
        message if isinstance(message, str) else "",
        kind if isinstance(kind, str) else "",
        code if isinstance(code, int) else None,
    )


def _speculation(value: dict[str, Any]) -> Speculation | None:
    """vLLM's ``metrics.speculative_decoding``, or llama.cpp's ``timings``."""
    metrics, timings = value.get("metrics"), value.get("timings")
    found = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    try:
        if isinstance(found, dict):
            histogram = found.get("acceptance_histogram") or []
            return Speculation(
                drafts=int(found["num_spec_steps"]),
                draft_tokens=int(found["num_draft_tokens"]),
                accepted_tokens=int(found["num_accepted_draft_tokens"]),
                accepted_per_position=tuple(sum(histogram[i:]) for i in range(1, len(histogram))),
            )
        if isinstance(timings, dict) and timings.get("draft_n"):
            # llama.cpp tells no rounds here
            return Speculation(0, int(timings["draft_n"]), int(timings["draft_n_accepted"]))
    except (KeyError, TypeError, ValueError):
        return None
    return None


def _text(value: Any, shown: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list):  # content as parts
        value = "".join(part.get("text", "") for part in value if isinstance(part, dict))
    if not isinstance(value, str):
        raise MalformedError(f"a text that is no string: {_shown(shown)}")
    return value


def _ids(value: Any, shown: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or any(type(i) is not int or i < 0 for i in value):
        raise MalformedError(f"token ids that are no numbers: {_shown(shown)}")
    return tuple(value)


def _typed(value: dict[str, Any], key: str, kind: Any) -> Any:
    found = value.get(key)
    return found if isinstance(found, kind) and not isinstance(found, bool) else None


def _shown(data: str) -> str:
    return repr(data if len(data) <= SHOWN_CHARS else data[:SHOWN_CHARS] + "…")
