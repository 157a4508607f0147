"""One answer in the making: chunks in, a ``Generation`` out, whatever happens in between."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sm70lab.schema import BROKEN_ENDS, Generation, Prompt, Speculation
from sm70lab.targets.base import Progress
from sm70lab.targets.openai_stream import DONE, Chunk, MalformedError, ServerError, read_chunk

BAD_ENDS = ("abort", "error")  # finish reasons with which a server gives up
MOST_FAULTS = 20  # kept in a record


class RefusedError(Exception):
    """An error of the server's before the first token."""

    def __init__(self, error: ServerError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class Answer:
    """What has come of one answer so far. Times are seconds since the request was sent."""

    prompt: Prompt
    repeat: int
    seed: int  # of the run
    record: dict[str, Any]  # of the request
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    later_ids: list[int] = field(default_factory=list)  # behind a gap: no place in the output is known
    prompt_token_ids: tuple[int, ...] | None = None
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    note: str = ""
    counted: int | None = None
    prompt_tokens: int | None = None
    speculation: Speculation | None = None
    faults: list[str] = field(default_factory=list)
    done: bool = False  # [DONE] came
    broken: bool = False  # a chunk could not be read: what it held is missing
    ids_stopped: bool = False  # a chunk with text came without ids after chunks with them
    id: str | None = None
    characters: int = 0  # of reasoning and content
    closed: bool = False  # its generation was made

    def again(self) -> None:
        """Forget a try of which no token came."""
        self.id = self.prompt_token_ids = self.finish_reason = None
        self.done = self.broken = False
        self.faults.clear()

    @property
    def key(self) -> str:
        """As of its generation."""
        return f"{self.prompt.name}-r{self.repeat}"

    @property
    def begun(self) -> bool:
        """Whether a token has come."""
        return bool(self.arrivals)

    @property
    def tokens(self) -> int:
        """Tokens so far: by ids or the server's own count, 0 where neither has come."""
        return len(self.token_ids) or self.counted or 0

    def event(self, data: str, seconds: float) -> None:
        """Take one event. Raises ``RefusedError`` for an error before the first token."""
        if data.strip() == DONE:
            self.done = True
            return
        try:
            chunk = read_chunk(data)
        except MalformedError as error:
            self.fault(f"chunk {len(self.arrivals) + 1}: {error}")
            self.broken = True
            return
        self.take(chunk, seconds)

    def take(self, chunk: Chunk, seconds: float) -> None:
        """Take one chunk. Raises as ``event``."""
        if chunk.error is not None:
            if not self.begun:
                raise RefusedError(chunk.error)
            self.end("server_error", f"the server broke off after {self.so_far()}: {chunk.error}")
            return
        if chunk.id is not None and self.id not in (None, chunk.id):
            self.fault(f"the id of the answer changed from {self.id} to {chunk.id}")
        self.id = chunk.id or self.id
        self._tokens(chunk, seconds)
        if chunk.model is not None:
            self.record.setdefault("answered_by", chunk.model)
        for key, value in chunk.extra.items():
            self.record[key] = value
        if chunk.finish_reason is not None:
            if self.finish_reason not in (None, chunk.finish_reason):
                self.fault(f"a second finish_reason: {self.finish_reason}, then {chunk.finish_reason}")
            self.finish_reason = self.finish_reason or chunk.finish_reason
            if chunk.stop_reason is not None:
                self.record["stop_reason"] = chunk.stop_reason
        self.counted = chunk.completion_tokens if chunk.completion_tokens is not None else self.counted
        self.prompt_tokens = chunk.prompt_tokens if chunk.prompt_tokens is not None else self.prompt_tokens
        self.speculation = chunk.speculation or self.speculation

    def _tokens(self, chunk: Chunk, seconds: float) -> None:
        self.prompt_token_ids = self.prompt_token_ids or chunk.prompt_token_ids
        text = bool(chunk.content or chunk.reasoning)
        if self.done and (text or chunk.token_ids):
            self.fault("tokens behind [DONE]")
        self.content.append(chunk.content)
        self.reasoning.append(chunk.reasoning)
        self.characters += len(chunk.content) + len(chunk.reasoning)
        if chunk.token_ids is not None and not (self.broken or self.ids_stopped):
            self.token_ids += chunk.token_ids
        elif chunk.token_ids is not None:
            self.later_ids += chunk.token_ids
        elif text and self.token_ids and chunk.token_ids is None:
            self.ids_stopped = True
        if text or chunk.token_ids:
            known = self.token_ids and not (self.broken or self.ids_stopped)
            count = len(self.token_ids) if known else chunk.completion_tokens
            self.arrivals.append((-1 if count is None else count, seconds))

    def progress(self, seconds: float) -> Progress:
        """For whoever watches."""
        return Progress(self.prompt, self.repeat, self.tokens, 0, 0, seconds, self.characters)

    def fault(self, line: str) -> None:
        """Something that should not have come; kept in the record."""
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(line)

    def end(self, reason: str, note: str) -> None:
        """End it early, unless the server had ended it already: then this is one more fault."""
        if self.finish_reason is not None:
            self.fault(note)
        else:
            self.finish_reason, self.note = reason, note

    def close(self, pending: bool) -> None:
        """The stream is over; ``pending``: inside an event."""
        where = "inside an event" if pending else "without a finish_reason"
        if self.finish_reason is None:
            self.end("connection_lost", f"the stream ended {where} after {self.so_far()}")
        elif not self.done and self.finish_reason not in BROKEN_ENDS:
            self.fault("the stream ended without [DONE]")
        if self.finish_reason in BAD_ENDS:
            said = self.finish_reason
            self.finish_reason, self.note = "server_error", f"the server ended it with finish_reason={said}"

    def so_far(self) -> str:
        """How much had come, for a line."""
        chunks = f"{len(self.arrivals)} chunks"
        return f"{self.tokens:,} tokens in {chunks}" if self.tokens else chunks

    def generation(self) -> Generation:
        """The record. An answer with an unreadable chunk is ``malformed``: some of it is missing."""
        reason, note = self.finish_reason or "connection_lost", self.note
        if self.broken and reason in ("stop", "length"):
            reason, note = "malformed", self.faults[0]
        if self.tokens > self.prompt.max_tokens:
            self.fault(f"{self.tokens:,} tokens came, and max_tokens was {self.prompt.max_tokens:,}")
        lines = [note] if note else []
        if (wrong := self.miscounted) is not None:
            lines.append(wrong)
        lines += [fault for fault in self.faults if fault != note]
        ids = self.token_ids
        first = self.arrivals[0][1] if self.arrivals else None
        last = self.arrivals[-1][1] if self.arrivals else None
        prompt = self.prompt
        if self.prompt_token_ids is not None:
            prompt = replace(prompt, token_ids=list(self.prompt_token_ids))
        record = self.record | {"id": self.id, "faults": self.faults, "prompt_tokens": self.prompt_tokens}
        record |= {"done": self.done, "ids_whole": self.ids_whole, "chunks": len(self.arrivals)}
        record |= {"later_token_ids": self.later_ids} if self.later_ids else {}
        return Generation(
            prompt=prompt,
            repeat=self.repeat,
            seed=self.seed,
            token_ids=ids,
            text="".join(self.content),
            finish_reason=reason,
            rounds=[],
            prefill_seconds=first or 0.0,
            decode_seconds=last - first if first is not None and last is not None else 0.0,
            note="; ".join(lines),
            reasoning="".join(self.reasoning) or None,
            counted_tokens=self.counted,
            arrivals=self.arrivals,
            ttft_seconds=first,
            request=record,
            speculation=self.speculation,
        )

    @property
    def ids_whole(self) -> bool:
        """Whether the ids are all tokens up to the last: each can be scored after those before it."""
        return bool(self.token_ids) and not (self.broken or self.ids_stopped) and self.miscounted is None

    @property
    def tokens_known(self) -> bool:
        """Whether ``tokens`` is all that the server made for this answer, as far as it has come."""
        told = bool(self.token_ids) or self.counted is not None
        whole = not (self.broken or self.ids_stopped) and self.miscounted is None
        return told and whole and self.finish_reason not in BROKEN_ENDS

    @property
    def miscounted(self) -> str | None:
        """In words, where the server's count is not that of the ids."""
        if not self.token_ids or self.counted in (None, len(self.token_ids)) or self.broken:
            return None
        return f"usage counts {self.counted} tokens, and {len(self.token_ids)} ids came"
