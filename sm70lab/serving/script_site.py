"""A script while it is served: which answers are used up, what was asked, what a request asks for."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sm70lab.serving.script import Endpoint, Script
from sm70lab.serving.script_counters import Served
from sm70lab.serving.script_tokens import Request, Tokens, tokens_of

REMEMBERED = 500  # requests told by GET /script
DEFAULT_TOKENS = {Endpoint.chat: 4096, Endpoint.completions: 16}


@dataclass
class Call:
    """One request as it came, and what became of it."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes
    status: int = 0
    ended: str = "open"  # sent, or what ended it early
    tokens: int = 0  # sent
    answer: int | None = None  # index in the script

    def told(self) -> dict[str, Any]:
        """For GET /script."""
        try:
            body = json.loads(self.content)
        except ValueError:
            body = None
        headers = {k: "***" if k in ("authorization", "x-api-key") else v for k, v in self.headers.items()}
        kept = {
            name: getattr(self, name) for name in ("method", "path", "status", "ended", "tokens", "answer")
        }
        return {**kept, "headers": headers, "body": body}


@dataclass
class Site:
    """One script being served under a prefix, with all that changes while it is."""

    prefix: str
    script: Script
    tokens: Tokens = field(init=False)
    served: Served | None = field(init=False)
    used: list[int] = field(init=False)
    calls: deque[Call] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    number: int = 0

    def __post_init__(self) -> None:
        self.tokens = tokens_of(self.script.tokenizer)
        model = (self.script.served_models or ["scripted"])[0]
        self.served = Served(self.script.counters, model) if self.script.counters is not None else None
        self.used = [0] * len(self.script.answers)

    def take(self, request: Request) -> int | None:
        """The first answer for this request that is not used up."""
        for index, answer in enumerate(self.script.answers):
            m = answer.match
            fits = (
                m.model in (None, request.model)
                and m.endpoint in (None, request.endpoint)
                and m.seed in (None, request.seed)
                and (m.prompt is None or m.prompt in request.prompt)
            )
            if fits and (answer.times is None or self.used[index] < answer.times):
                self.used[index] += 1
                return index
        return None


def told(site: Site) -> dict[str, Any]:
    """What GET /script says: what was asked, and how each answer ended."""
    return {"about": site.script.about, "used": site.used, "requests": [call.told() for call in site.calls]}


def request_of(site: Site, call: Call, endpoint: Endpoint) -> Request | tuple[int, str]:
    """The request, or the status and message with which vLLM would refuse it."""
    try:
        body = json.loads(call.content)
    except ValueError as error:
        return 400, f"JSON decode error: {error}"
    if not isinstance(body, dict):
        return 400, "the body must be an object"
    refused = [name for name in site.script.refuses if name in body]
    if refused:
        return 400, f"Extra inputs are not permitted: {', '.join(refused)}"
    model = str(body.get("model") or "")
    names = site.script.served_models
    if names is not None and model not in names:
        return 404, f"The model `{model}` does not exist."
    asked = body.get("max_completion_tokens", body.get("max_tokens"))
    budget = DEFAULT_TOKENS[endpoint] if asked is None else asked
    if not isinstance(budget, int) or budget < 1:
        return 400, f"max_tokens must be at least 1, got {asked}."
    prompt, ids = _prompt(site, body, endpoint)
    if not ids:
        return 400, "The prompt is empty."
    longest = site.script.max_model_len
    if longest is not None and len(ids) + budget > longest:
        return 400, (
            f"This model's maximum context length is {longest} tokens. However, you requested "
            f"{len(ids) + budget} tokens ({len(ids)} in the messages, {budget} in the completion)."
        )
    seed = body.get("seed")
    return Request(endpoint, model, prompt, ids, budget, seed if isinstance(seed, int) else None, body)


def _prompt(site: Site, body: dict[str, Any], endpoint: Endpoint) -> tuple[str, list[int]]:
    if endpoint is Endpoint.chat:
        messages = body.get("messages") or []
        prompt = "\n".join(_message(message) for message in messages if isinstance(message, dict))
        return prompt, site.tokens.encode(prompt)
    prompt = body.get("prompt") or ""
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return "".join(site.tokens.texts(prompt)), prompt
    text = "".join(prompt) if isinstance(prompt, list) else str(prompt)
    return text, site.tokens.encode(text)


def _message(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):  # parts
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
