"""The file format of the scripted server: what it serves, as typed YAML.

A script names the pages of a server (versions, models, counters) and its answers to requests. Each
answer has one source of tokens, a way to write them on the wire, and faults at output tokens. The
defaults are those of a healthy server. Every key stands here; an unknown one is one clear error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

BEFORE_STATUS = -1  # of ``Fault.at``: before the status line


class Good(str, Enum):
    """Sound text to make up."""

    html = "html"  # a page: doctype, style, sections, script, all closed
    prose = "prose"


class Endpoint(str, Enum):
    """The two kinds of request that generate."""

    chat = "chat"  # POST /v1/chat/completions
    completions = "completions"  # POST /v1/completions


class Finish(str, Enum):
    """The last chunk's ``finish_reason``."""

    auto = "auto"  # length where max_tokens cut the source, else stop
    stop = "stop"
    length = "length"
    missing = "missing"  # no chunk has one


class Usage(str, Enum):
    """When the usage chunk is sent."""

    asked = "asked"  # as vLLM: with stream_options.include_usage
    always = "always"
    absent = "absent"


class Framing(str, Enum):
    """How the body's end is told."""

    chunked = "chunked"
    close = "close"  # by closing the connection
    too_long = "too_long"  # Content-Length says 100 bytes more than come
    too_short = "too_short"  # Content-Length says half of what comes
    none = "none"  # no HTTP at all: the body's bytes alone


class LineEnd(str, Enum):
    """Line ends of the event stream; all three are allowed by its standard."""

    lf = "lf"
    crlf = "crlf"
    cr = "cr"


class FaultKind(str, Enum):
    """What goes wrong before an output token."""

    stall = "stall"  # nothing for ``seconds`` (for ever where null), then on
    cut = "cut"  # the connection is closed
    reset = "reset"  # the same by RST
    malformed = "malformed"  # ``text`` is sent as a line of its own, then on
    huge_line = "huge_line"  # a data line of ``bytes`` bytes, then on
    error = "error"  # an error object, as vLLM sends it within a stream, then [DONE]
    duplicate = "duplicate"  # the chunk before comes once more
    other_id = "other_id"  # the next chunk carries another answer's id


@dataclass
class Synthetic:
    """Sound text, made up from the prompt and the request's seed: the same for the same request."""

    good: Good = Good.html
    tokens: int | None = None  # about so many, then closed; null: the request's max_tokens and beyond


@dataclass
class Collapse:
    """Sound text of ``at`` tokens, then one unit for ever."""

    at: int = 2000  # output tokens
    unit: str = "5"
    good: Good = Good.html
    reasoning: bool = False  # all of it is thinking that never ends


@dataclass
class RecordedRun:
    """An output of a finished run: its ids, its text, and its rounds where it has them."""

    folder: str = ""  # a run folder
    generation: str | None = None  # such as page-r0; null: its first


@dataclass
class Fault:
    """One thing that goes wrong in a stream."""

    kind: FaultKind = FaultKind.stall
    at: int = 0  # output tokens sent before it; −1: before the status line (stall, cut, reset)
    seconds: float | None = None  # of stall
    bytes: int = 100_000_000  # of huge_line
    text: str = 'data: {"choices": ['  # of malformed
    message: str = "EngineCore encountered an issue."  # of error
    code: int = 500  # of error


@dataclass
class Wire:
    """How an answer's bytes are written."""

    split: int | None = None  # bytes a write; null: an event a write
    framing: Framing = Framing.chunked
    line_end: LineEnd = LineEnd.lf
    blank: bool = True  # ``data: x``; false: ``data:x``
    two_lines: bool = False  # an event's JSON in two data lines, which a client must join
    byte_order_mark: bool = False
    comment_every: int = 0  # a keep-alive comment before every so many chunks; 0: none
    done: bool = True  # the stream ends with [DONE]


@dataclass
class Match:
    """Which requests an answer is for: all that is given here must hold."""

    model: str | None = None
    endpoint: Endpoint | None = None
    prompt: str | None = None  # stands in the prompt or a message
    seed: int | None = None


@dataclass
class Answer:
    """The answer to a request: the first that matches and is not used up."""

    match: Match = field(default_factory=Match)
    times: int | None = None  # requests it answers; null: all
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    error: str | None = None  # message of an error object; null: the status's own words
    body: str | None = None  # instead of an error object or a stream
    delay_s: float = 0.0  # before the status line
    # one source of tokens; without any: synthetic
    text: str | None = None
    synthetic: Synthetic | None = None
    collapse: Collapse | None = None
    run: RecordedRun | None = None
    sse: str | None = None  # a file with a recorded event stream, replayed as it is
    reasoning: str | None = None  # reasoning text before the source's
    reasoning_tokens: int = 0  # or made up, about so many
    reasoning_field: str | None = "reasoning_content"  # null: in the content, between <think> markers
    repeat_text: int = 1  # the text so many times
    # how it is told
    chunk_tokens: int = 1  # tokens a chunk where there are no drafts
    tokens_per_second: float | None = None  # null: as fast as they are read
    token_ids: bool = True  # sent when return_token_ids asks for them
    finish: Finish = Finish.auto
    usage: Usage = Usage.asked
    usage_tokens: int | None = None  # what the usage says of completion_tokens; null: the truth
    wire: Wire = field(default_factory=Wire)
    faults: list[Fault] = field(default_factory=list)


@dataclass
class Counters:
    """GET /metrics in vLLM's names; the counters move with the tokens served."""

    drafts: int = 0  # draft tokens a round; 0: no speculative decoding, and no counters of it
    # chance that a round's first 1, 2, … drafts are all accepted: one a draft, falling
    acceptance: list[float] = field(default_factory=list)
    plateau: bool = False  # every draft is accepted once a collapse began
    other_traffic: float = 0.0  # tokens/s of other people's requests


@dataclass
class Page:
    """A page with an answer of its own, such as a /metrics that fails."""

    status: int = 200
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


@dataclass
class Script:
    """One server."""

    about: str = ""
    tokenizer: str = "bytes"  # bytes (an id a byte), web (the embedded model's), or a model folder
    api_key: str | None = None  # requests without it get 401
    served_models: list[str] | None = field(default_factory=lambda: ["scripted"])  # null: no /v1/models
    owned_by: str = "vllm"  # of the models: the family of servers that it passes for
    version: str | None = "0.0.0+scripted"  # null: no /version
    counters: Counters | None = field(default_factory=Counters)  # null: no /metrics
    endpoints: list[Endpoint] = field(default_factory=lambda: list(Endpoint))
    refuses: list[str] = field(default_factory=list)  # request fields that get 400
    max_model_len: int | None = None  # tokens; a request for more gets 400
    pages: dict[str, Page] = field(default_factory=dict)  # by path, before everything else
    answers: list[Answer] = field(default_factory=lambda: [Answer()])
