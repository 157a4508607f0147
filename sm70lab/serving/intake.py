"""From a request's fields to a job: what the types cannot say is checked here, against the model."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from sm70lab.engine.capturable import no_captured_request
from sm70lab.engine.decoder import captures
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.routes import graph_is_whole
from sm70lab.engine.sequence import Request
from sm70lab.engine.stopping import Delivery
from sm70lab.errors import UsageError
from sm70lab.schema import Sampling
from sm70lab.serving.errors import ApiError
from sm70lab.serving.job import Drafting, Event, Job
from sm70lab.serving.logprobs import ALL
from sm70lab.serving.protocol import ChatRequest, CompletionRequest, GenerationRequest, TextPart
from sm70lab.serving.repetition import LoopDetector
from sm70lab.targets.engine import EngineTarget

T = TypeVar("T")
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions
LEAST_TEMPERATURE = 1e-4
RESERVED = ("messages", "add_generation_prompt")  # variables of the chat template that are set here


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    positions: int  # tokens of prompt and output
    max_logprobs: int = 20  # ``ALL``: no limit
    timeout_s: float = 3600.0
    repetition_stop: bool = False


class Intake:
    """Makes jobs of requests to one model. Raises ``ApiError`` 400 and 404 with the field at fault."""

    def __init__(self, target: EngineTarget, model: str, limits: Limits) -> None:
        self.target, self.model, self.limits = target, model, limits
        self.text = target.source.text
        self.vocabulary = target.source.arch.vocab_size

    def completion(self, body: CompletionRequest, emit: Callable[[Event], None]) -> Job:
        """The job of a completion."""
        self._common(body)
        prompt = body.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            prompt = prompt[0]
        ids = self._encode(prompt, "prompt") if isinstance(prompt, str) else [int(i) for i in prompt]
        self._ids(ids, "prompt")
        self._count(body.logprobs, "logprobs")
        budget = self._budget(ids, body.max_tokens or COMPLETION_TOKENS, "max_tokens")
        return self._job(body, ids, budget, body.logprobs, emit)

    def chat(self, body: ChatRequest, emit: Callable[[Event], None]) -> tuple[Job, str]:
        """The job of a chat answer, and the text of its prompt."""
        self._common(body)
        extra = dict(body.chat_template_kwargs or {})
        if taken := [name for name in RESERVED if name in extra]:
            raise ApiError(400, f"{taken[0]} cannot be set there", "chat_template_kwargs")
        messages = [
            {**(m.model_extra or {}), "role": m.role, "content": _content(m.content)} for m in body.messages
        ]
        try:
            text = self.text.conversation(messages, extra)
        except UsageError as error:
            raise ApiError(400, str(error), "messages") from error
        ids = self._encode(text, "messages")
        self._ids(ids, "messages")
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
        self._count(body.top_logprobs, "top_logprobs")
        name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
        asked = body.max_completion_tokens or body.max_tokens
        budget = self._budget(ids, asked or self.limits.positions - len(ids), name)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return self._job(body, ids, budget, logprobs, emit), text

    def _common(self, body: GenerationRequest) -> None:
        if body.model is not None and body.model != self.model:
            raise ApiError(404, f"The model `{body.model}` does not exist; this is {self.model}", "model")
        if (name := body.refused()) is not None:
            raise ApiError(400, f"{name} is not supported by this server", name)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream=true", "stream_options")
        if body.prompt_logprobs is not None and body.stream:
            raise ApiError(400, "prompt_logprobs are not available with stream=true", "prompt_logprobs")
        if body.temperature is not None and 0 < body.temperature < LEAST_TEMPERATURE:
            raise ApiError(
                400, f"temperature must be 0 (greedy) or {LEAST_TEMPERATURE} and more", "temperature"
            )
        self._count(body.prompt_logprobs, "prompt_logprobs")

    def _count(self, count: int | None, param: str) -> None:
        most = self.limits.max_logprobs
        if count is not None and most != ALL and (count == ALL or count > most):
            raise ApiError(400, f"{param} must be at most {most}, this server's max_logprobs", param)

    def _encode(self, text: str, param: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(400, "half of a surrogate pair is no text", param) from error
        return self.text.encode(text)

    def _ids(self, ids: list[int], param: str) -> None:
        if not ids:
            raise ApiError(400, "the prompt has no tokens", param)
        if outside := [i for i in ids if i >= self.vocabulary]:
            raise ApiError(
                400, f"token id {outside[0]} is out of vocabulary (0..{self.vocabulary - 1})", param
            )

    def _budget(self, ids: list[int], budget: int, param: str) -> int:
        most = self.limits.positions
        if len(ids) >= most:
            raise ApiError(
                400, f"This model's maximum context length is {most} tokens; the prompt has {len(ids)}", None
            )
        if len(ids) + budget > most:
            raise ApiError(
                400,
                f"This model's maximum context length is {most} tokens; {param}={budget} is too large: "
                f"the prompt has {len(ids)}",
                param,
            )
        return budget

    def _job(
        self,
        body: GenerationRequest,
        ids: list[int],
        budget: int,
        logprobs: int | None,
        emit: Callable[[Event], None],
    ) -> Job:
        default = self.target.config.sampling
        own = frozenset(body.stop_token_ids or ()) | frozenset(default.stop_ids)
        self._ids([0, *own], "stop_token_ids")
        stop_ids = own if body.ignore_eos else own | self.target.stop_ids
        sampling = self._sampling(body)
        if sampling.min_tokens > budget:
            raise ApiError(400, f"min_tokens must be at most max_tokens={budget}", "min_tokens")
        if sampling.min_tokens and len(stop_ids | set(sampling.banned_ids)) >= self.vocabulary:
            raise ApiError(400, "min_tokens leaves no token to draw: all are stop tokens", "min_tokens")
        seed = secrets.randbits(63) if body.seed in (None, -1) else int(body.seed or 0)
        request = Request(
            ids,
            sampling,
            KeyedNoise(seed, 0, 0),
            stop_ids,
            drafts=body.drafts,
            keep_logits=logprobs is not None,
        )
        route = self.target.config.route
        captured = captures(self.target.device) and graph_is_whole(route)
        if captured and (reason := no_captured_request(request, route.draft_tokens)):
            raise ApiError(400, f"this server's route.graph=full captured the round: {reason}")
        looks = body.repetition_stop if body.repetition_stop is not None else self.limits.repetition_stop
        return Job(
            request,
            Delivery(self.text.stream(), stop_ids, sampling.stop_strings, budget),
            seed,
            emit,
            deadline=time.perf_counter() + self.limits.timeout_s,
            drafting=Drafting([0] * (self.target.config.route.draft_tokens + 1)),
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
            loop=LoopDetector() if looks else None,
        )

    def _sampling(self, body: GenerationRequest) -> Sampling:
        """The server's own sampling with what the request says instead."""
        default = self.target.config.sampling
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        return replace(
            default,
            temperature=_or(body.temperature, default.temperature),
            top_p=_or(body.top_p, default.top_p),
            top_k=max(_or(body.top_k, default.top_k), 0),
            min_p=_or(body.min_p, default.min_p),
            repetition_penalty=_or(body.repetition_penalty, default.repetition_penalty),
            presence_penalty=_or(body.presence_penalty, default.presence_penalty),
            frequency_penalty=_or(body.frequency_penalty, default.frequency_penalty),
            logit_bias=_or(self._bias(body.logit_bias), default.logit_bias),
            min_tokens=_or(body.min_tokens, default.min_tokens),
            stop_strings=_or(stop, default.stop_strings),
        )

    def _bias(self, bias: dict[str, float] | None) -> dict[int, float] | None:
        if bias is None:
            return None
        if wrong := [key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 10)]:
            raise ApiError(400, f"logit_bias: {wrong[0][:20]!r} is no token id", "logit_bias")
        self._ids([0, *map(int, bias)], "logit_bias")
        return {int(key): value for key, value in bias.items()}


def _or(given: T | None, default: T) -> T:
    return default if given is None else given


def _content(content: str | list[TextPart] | None) -> str:
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""
