"""What requests may say, and what answers hold: OpenAI's fields, and of vLLM's those that are known here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

MAX_SEED = 2**63 - 1
MAX_STOPS = 64
FinishReason = Literal[
    "stop", "length", "abort", "timeout", "repetition", "non_finite", "model_non_finite", "error"
]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Whole = Annotated[int, Field(strict=True)]  # true is no 1
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenId = Annotated[Whole, Field(ge=0)]

# What a field that takes several kinds of value takes.
EITHER = {
    "prompt": "a string or a list of token ids (one prompt a request)",
    "stop": f"a string or a list of up to {MAX_STOPS} strings, none of them empty",
    "content": "a string or a list of parts {type: text, text: …}",
}

# Fields that vLLM or OpenAI know and this server does not do, with the values that ask for nothing.
REFUSED: dict[str, tuple[JsonValue, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "prompt_embeds": (),
    "modalities": (["text"],),
    "audio": (),
}


class StreamOptions(BaseModel):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Xargs(BaseModel):
    """vLLM's place for a server's own fields."""

    model_config = ConfigDict(extra="allow")
    speculative_decoding: bool | None = None


class GenerationRequest(BaseModel):
    """The fields of both endpoints. Sampling fields that are left out are the server's own settings."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    max_tokens: Whole | None = Field(None, ge=1)
    min_tokens: Whole | None = Field(None, ge=0)
    temperature: Number | None = Field(None, ge=0, le=10_000)
    top_p: Number | None = Field(None, ge=1e-6, le=1)
    top_k: Whole | None = Field(None, ge=-1, description="0 and -1 are off")
    min_p: Number | None = Field(None, ge=0, lt=1)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    repetition_penalty: Number | None = Field(None, ge=0.1, le=10)
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    seed: Whole | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED, description="-1 is none")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    n: Whole | None = Field(None, ge=1, le=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Whole | None = Field(None, ge=-1)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    speculative_decoding: bool | None = Field(None, description="false: no drafts for this request")
    repetition_stop: bool | None = Field(None, description="end a loop; default: the server's setting")
    vllm_xargs: Xargs | None = None

    @property
    def drafts(self) -> bool:
        """Whether the request may be drafted for."""
        in_xargs = self.vllm_xargs.speculative_decoding if self.vllm_xargs else None
        return self.speculative_decoding is not False and in_xargs is not False

    def refused(self) -> str | None:
        """The first field that asks for what this server does not do."""
        given = self.model_extra or {}
        return next(
            (name for name, harmless in REFUSED.items() if given.get(name) not in (None, *harmless)), None
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | list[TokenId] | Annotated[list[str], Field(min_length=1, max_length=1)]
    logprobs: Whole | None = Field(None, ge=-1)


class TextPart(BaseModel):
    """One part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation; other fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Whole | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0)
    chat_template_kwargs: dict[str, JsonValue] | None = None


# --------------------------------------------------------------------------- answers


class ErrorBody(BaseModel):
    """Why a request was refused; ``code`` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorBody


class PromptDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class SpeculativeDecoding(BaseModel):
    """One request's drafts: vLLM's fields, and the accepted ones by position."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # rounds by accepted drafts, 0..k
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    num_accepted_tokens_per_pos: list[int]


class RequestMetrics(BaseModel):
    """What one request cost. ``seed`` is the one it was drawn with."""

    seed: int
    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpeculativeDecoding | None


class PromptLogprob(BaseModel):
    """One token at one place of a prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion's tokens, by columns."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(BaseModel):
    """The one choice of a completion, or of one chunk of it."""

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class TokenLogprob(BaseModel):
    """One token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TokenLogprob):
    """A token of a chat answer and the likeliest ones at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat answer's tokens."""

    content: list[ChatLogprob]


class ChatMessage(BaseModel):
    """The answer, or in a chunk what it grew by."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None


class ChatChoice(BaseModel):
    """The one choice of a chat answer."""

    index: int = 0
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunkChoice(BaseModel):
    """The one choice of a chunk of a chat answer."""

    index: int = 0
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class Answer(BaseModel):
    """What all answers and chunks share."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class CompletionAnswer(Answer):
    """A completion, or a chunk of one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ChatAnswer(Answer):
    """A chat answer."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatChunk(Answer):
    """A chunk of a chat answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None


class ModelCard(BaseModel):
    """The model that is served."""

    model_config = ConfigDict(protected_namespaces=())
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "sm70lab"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(BaseModel):
    """GET /version: what runs here.

    ``draws``: ``keyed`` where every token is the reference's own draw with the request's noise, that of
    ``KeyedNoise(seed, 0, 0)``.
    """

    model_config = ConfigDict(protected_namespaces=())
    version: str
    engine: Literal["sm70lab"] = "sm70lab"
    model_hash: str
    route: dict[str, JsonValue]
    dtype: str
    draws: Literal["keyed", "other"]
    hazard: str
