"""From the configuration to the fields of one request, and what a server cannot take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sm70lab.errors import UsageError
from sm70lab.schema import PromptSpec, Sampling

VLLM, SGLANG, LLAMA_CPP, SM70LAB, UNKNOWN = "vllm", "sglang", "llama.cpp", "sm70lab", "unknown"
BAN = -100.0  # the API's least logit bias
MOST_BIAS = 100.0
SHORT_SEED = (1 << 31) - 1  # llama.cpp's seeds have 32 bits, and all of them set means a random one
# Fields that the API itself does not have, and the value at which they do nothing. They are sent all the
# same: vLLM's own defaults come from the checkpoint's generation_config.json.
NEUTRAL: dict[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "repeat_penalty": 1.0,
    "return_token_ids": True,
    "min_tokens": 0,
    "stop_token_ids": [],
}
SETTINGS = {  # of the sampling, by their field
    "repeat_penalty": "repetition_penalty",
    "stop_token_ids": "stop_ids",
}


@dataclass
class RequestFields:
    """The body of a request, and what it could not say."""

    body: dict[str, Any]
    notes: list[str] = field(default_factory=list)  # settings that act in another way, or not at all


def sampling_fields(sampling: Sampling, seed: int, family: str) -> RequestFields:
    """The sampling parameters and the seed as request fields of a server of this ``family``.

    Raises ``UsageError`` for a setting that the server has no field for.
    """
    s = sampling
    penalty = "repeat_penalty" if family == LLAMA_CPP else "repetition_penalty"
    body: dict[str, Any] = {
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k or -1,
        "min_p": s.min_p,
        penalty: s.repetition_penalty,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "seed": seed & SHORT_SEED if family == LLAMA_CPP else seed,
    }
    found = RequestFields(body)
    if family == LLAMA_CPP:
        for name, given in (("min_tokens", s.min_tokens), ("stop_ids", s.stop_ids)):
            if given:
                raise UsageError(f"sampling.{name}={given}: llama.cpp's server has no field for it")
    if s.min_tokens:
        body["min_tokens"] = s.min_tokens
    if s.stop_ids:
        body["stop_token_ids"] = list(s.stop_ids)
    if s.stop_strings:
        body["stop"] = list(s.stop_strings)
    _bias(s, found)
    return found


def _bias(s: Sampling, found: RequestFields) -> None:
    for token, bias in s.logit_bias.items():
        if abs(bias) > MOST_BIAS:
            raise UsageError(
                f"sampling.logit_bias={{{token}: {bias}}}: the API takes −100 to 100; to forbid a token use "
                "sampling.banned_ids"
            )
    biases = {str(token): float(value) for token, value in s.logit_bias.items()}
    biases |= {str(token): BAN for token in s.banned_ids}
    if biases:
        found.body["logit_bias"] = biases
    if s.banned_ids:
        found.notes.append("sampling.banned_ids: sent as logit_bias −100, the API's strongest")


def prompt_fields(spec: PromptSpec, chat: bool, text: str) -> dict[str, Any]:
    """``messages`` or ``prompt``."""
    if chat:
        return {"messages": [{"role": "user", "content": spec.user if spec.user is not None else spec.text}]}
    return {"prompt": text}


def without_refused(body: dict[str, Any], message: str) -> tuple[dict[str, Any], list[str]] | None:
    """The body without fields that the server's ``message`` names as unknown, and their names.

    None where it names none of those that may be left out. Raises ``UsageError`` where a setting would
    be lost.
    """
    named = [name for name in NEUTRAL if name in body and name in message]
    if not named:
        return None
    for name in named:
        if body[name] != NEUTRAL[name]:
            setting = f"sampling.{SETTINGS.get(name, name)}"
            raise UsageError(f"{setting}={body[name]}: the server refuses the field {name} ({message})")
    return {key: value for key, value in body.items() if key not in named}, named
