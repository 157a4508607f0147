"""From a job's events to answers: whole, or chunk by chunk."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Literal, cast

from sm70lab.engine.text import Text
from sm70lab.serving.job import Delta, Job
from sm70lab.serving.logprobs import Entry, Labels, Row
from sm70lab.serving.protocol import (
    Answer,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    GenerationRequest,
    PromptDetails,
    PromptLogprob,
    PromptLogprobs,
    RequestMetrics,
    SpeculativeDecoding,
    TokenLogprob,
    Usage,
)
from sm70lab.serving.reasoning import ReasoningSplit


def joined(deltas: Sequence[Delta]) -> Delta:
    """All of an answer as one delta."""
    last = deltas[-1]
    return Delta(
        "".join(d.text for d in deltas),
        [token for d in deltas for token in d.token_ids],
        [row for d in deltas for row in d.rows],
        last.total,
        last.finish_reason,
        last.note,
    )


class Writer:
    """Writes the answer to one request; each endpoint has its own."""

    prefix = ""

    def __init__(
        self, job: Job, body: GenerationRequest, text: Text, model: str, system_fingerprint: str
    ) -> None:
        self.job, self.body = job, body
        self.labels = Labels(text, bool(body.return_tokens_as_token_ids))
        self._head = (f"{self.prefix}-{uuid.uuid4().hex}", int(time.time()), model, system_fingerprint)
        options = body.stream_options
        self._usage_each = bool(options and options.continuous_usage_stats)
        self.usage_last = bool(options and options.include_usage)
        self._first = True

    def whole(self, delta: Delta) -> str:
        """The answer to a request without ``stream``, as JSON."""
        raise NotImplementedError

    def chunks(self, delta: Delta) -> Iterator[str]:
        """The chunks of one delta, as JSON."""
        raise NotImplementedError

    def usage_chunk(self, total: int) -> str:
        """The chunk without choices that ``include_usage`` asks for."""
        raise NotImplementedError

    def _worth_a_chunk(self, delta: Delta) -> bool:
        """Text held back makes no chunk, unless the token ids or log-probabilities are wanted."""
        asked = self.body.return_token_ids or self.job.logprobs is not None
        return bool(delta.text or delta.finish_reason or self._first or asked)

    def _usage(self, total: int) -> Usage:
        prompt = len(self.job.request.prompt_ids)
        cached = PromptDetails(cached_tokens=self.job.cached)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=total,
            total_tokens=prompt + total,
            prompt_tokens_details=cached,
        )

    def _stop_reason(self, delta: Delta) -> int | str | None:
        """The string or the request's own token that ended it; on NaN logits where they were."""
        if delta.finish_reason != "stop":
            return delta.note or None
        last = self.job.delivery.token_ids[-1]
        own = self.body.stop_token_ids or ()
        return self.job.delivery.stop_string or (last if last in own else None)

    def _metrics(self) -> RequestMetrics:
        job, times = self.job, self.job.times

        def milliseconds(start: float, end: float) -> float | None:
            return (end - start) * 1e3 if start and end else None

        decode = milliseconds(times.first_token, times.last_token)
        generation = milliseconds(times.admitted, times.finished)
        return RequestMetrics(
            seed=job.seed,
            time_to_first_token_ms=milliseconds(times.arrived, times.first_token),
            generation_time_ms=generation,
            queue_time_ms=milliseconds(times.arrived, times.admitted),
            mean_itl_ms=decode / (job.tokens - 1) if decode and job.tokens > 1 else None,
            tokens_per_second=job.tokens / generation * 1e3 if generation else None,
            speculative_decoding=self._speculation(),
        )

    def _speculation(self) -> SpeculativeDecoding | None:
        drafting = self.job.drafting
        k, rounds = len(drafting.histogram) - 1, drafting.rounds
        if not k:
            return None
        return SpeculativeDecoding(
            mean_acceptance_length=1 + drafting.accepted / rounds if rounds else 1.0,
            draft_acceptance_rate=drafting.accepted / drafting.draft_tokens if drafting.draft_tokens else 0.0,
            acceptance_histogram=drafting.histogram,
            num_spec_steps=rounds,
            num_accepted_draft_tokens=drafting.accepted,
            num_draft_tokens=drafting.draft_tokens,
            num_spec_tokens=k,
            num_accepted_tokens_per_pos=drafting.per_position,
        )

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        """As vLLM writes them; None where not asked for or not finished."""
        prompt, found = self.job.request.prompt_ids, self.job.prompt_rows
        if self.job.prompt_logprobs is None or len(found) < len(prompt) - 1:
            return None
        return [None, *(self._place(row) for row in found)]

    def _place(self, row: Row) -> dict[str, PromptLogprob]:
        entries = {entry.token: entry for entry in (row.own, *row.likeliest)}
        return {
            str(token): PromptLogprob.model_construct(
                {"logprob", "rank", "decoded_token"},
                logprob=entry.logprob,
                rank=entry.rank,
                decoded_token=self.labels[token],
            )
            for token, entry in entries.items()
        }

    def _json(self, answer: Answer, delta: Delta | None) -> str:
        """Fields that nobody set are left out."""
        answer.id, answer.created, answer.model, answer.system_fingerprint = self._head
        if delta is not None and (self._usage_each or not self.body.stream):
            answer.usage = self._usage(delta.total)
        if delta is not None and delta.finish_reason:
            answer.metrics = self._metrics()
        return answer.model_dump_json(exclude_unset=True)


class CompletionWriter(Writer):
    """/v1/completions."""

    prefix = "cmpl"
    _offset = 0

    def whole(self, delta: Delta) -> str:
        choice = self._choice(delta)
        choice.prompt_logprobs = self._prompt_logprobs()
        return self._json(self._answer([choice]), delta)

    def chunks(self, delta: Delta) -> Iterator[str]:
        if self._worth_a_chunk(delta):
            yield self._json(self._answer([self._choice(delta)]), delta)

    def usage_chunk(self, total: int) -> str:
        answer = self._answer([])
        answer.usage = self._usage(total)
        return self._json(answer, None)

    def _answer(self, choices: list[CompletionChoice]) -> CompletionAnswer:
        kind: Literal["text_completion"] = "text_completion"
        return CompletionAnswer(
            id="", object=kind, created=0, model="", system_fingerprint="", choices=choices
        )

    def _choice(self, delta: Delta) -> CompletionChoice:
        choice = CompletionChoice(
            index=0,
            text=delta.text,
            logprobs=self._logprobs(delta.rows) if self.job.logprobs is not None else None,
            finish_reason=cast(FinishReason | None, delta.finish_reason),
            stop_reason=self._stop_reason(delta),
        )
        if self.body.return_token_ids:
            choice.token_ids = delta.token_ids
            if self._first:
                choice.prompt_token_ids = list(self.job.request.prompt_ids)
        self._first = False
        return choice

    def _logprobs(self, found: list[Row]) -> CompletionLogprobs:
        tokens = [self.labels[row.own.token] for row in found]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[row.own.logprob for row in found],
            tokens=tokens,
            top_logprobs=[
                {self.labels[entry.token]: entry.logprob for entry in (row.own, *row.likeliest)}
                for row in found
            ],
        )


class ChatWriter(Writer):
    """/v1/chat/completions. ``split`` tells reasoning from content where the chat template has any."""

    prefix = "chatcmpl"
    split: ReasoningSplit | None = None

    def whole(self, delta: Delta) -> str:
        choice = ChatChoice(
            index=0,
            message=self._message(delta, role=True),
            logprobs=self._logprobs(delta.rows) if self.job.logprobs is not None else None,
            finish_reason=cast(FinishReason | None, delta.finish_reason),
            stop_reason=self._stop_reason(delta),
        )
        kind: Literal["chat.completion"] = "chat.completion"
        answer = ChatAnswer(id="", object=kind, created=0, model="", system_fingerprint="", choices=[choice])
        answer.prompt_logprobs = self._prompt_logprobs()
        if self.body.return_token_ids:
            choice.token_ids = delta.token_ids
            answer.prompt_token_ids = list(self.job.request.prompt_ids)
        return self._json(answer, delta)

    def chunks(self, delta: Delta) -> Iterator[str]:
        if self._first:
            first = self._chunk([ChatChunkChoice(index=0, delta=ChatMessage(role="assistant", content=""))])
            first.choices[0].finish_reason = None
            if self.body.return_token_ids:
                first.prompt_token_ids = list(self.job.request.prompt_ids)
            yield self._json(first, None)
            self._first = False
        if not self._worth_a_chunk(delta):
            return
        choice = ChatChunkChoice(
            index=0,
            delta=self._message(delta, role=False),
            logprobs=self._logprobs(delta.rows) if self.job.logprobs is not None else None,
            finish_reason=cast(FinishReason | None, delta.finish_reason),
            stop_reason=self._stop_reason(delta),
        )
        if self.body.return_token_ids:
            choice.token_ids = delta.token_ids
        yield self._json(self._chunk([choice]), delta)

    def usage_chunk(self, total: int) -> str:
        answer = self._chunk([])
        answer.usage = self._usage(total)
        return self._json(answer, None)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        kind: Literal["chat.completion.chunk"] = "chat.completion.chunk"
        return ChatChunk(id="", object=kind, created=0, model="", system_fingerprint="", choices=choices)

    def _message(self, delta: Delta, role: bool) -> ChatMessage:
        message = ChatMessage(role="assistant") if role else ChatMessage()
        if self.split is None:
            message.content = delta.text
            return message
        reasoning, content = self.split.push(delta.text, last=delta.finish_reason is not None)
        if reasoning:
            message.reasoning = reasoning
        if content or not reasoning:
            message.content = content
        return message

    def _logprobs(self, found: list[Row]) -> ChatLogprobs:
        return ChatLogprobs(
            content=[
                ChatLogprob(
                    **self._token(row.own).model_dump(),
                    top_logprobs=[self._token(entry) for entry in row.likeliest],
                )
                for row in found
            ]
        )

    def _token(self, entry: Entry) -> TokenLogprob:
        label = self.labels[entry.token]
        return TokenLogprob(token=label, logprob=entry.logprob, bytes=list(label.encode()))
