"""Between text and token ids: the checkpoint's tokenizer, chat template and streaming detokenisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from sm70lab.engine.architecture import read_json_object
from sm70lab.errors import UsageError

LEAST_COVERAGE = 0.95  # of vocab_size; real checkpoints pad the matrix by well under one per cent


class Stream(Protocol):
    """Turns ids into text as they come; holds back bytes of an unfinished character."""

    def push(self, token: int) -> str:
        """The text that this token completes, possibly empty."""


class Text(Protocol):
    """Encoding and decoding of one model's tokens."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, special tokens recognised."""

    @property
    def thinks(self) -> bool:
        """Whether the chat template knows the think markers."""

    def chat(self, user: str) -> str:
        """The prompt text of one user message."""

    def conversation(self, messages: Sequence[Mapping[str, object]], extra: Mapping[str, object]) -> str:
        """The prompt text of a conversation; ``extra``: further variables of the template."""

    def stream(self) -> Stream:
        """A fresh streaming detokeniser."""

    def show(self, ids: list[int]) -> str:
        """The text of some tokens for a person, special ones included; U+FFFD for half characters."""


class TokenizerText:
    """``tokenizer.json`` with the chat template of ``tokenizer_config.json``."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise UsageError(f"{folder}: no tokenizer.json there")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UsageError(f"{path}: not a usable tokenizer ({error})") from error
        ids = self.tokenizer.get_vocab(with_added_tokens=True).values()
        if len(ids) < LEAST_COVERAGE * vocab_size or max(ids, default=0) >= vocab_size:
            raise UsageError(
                f"{path}: {len(ids)} tokens up to id {max(ids, default=0)} do not fit "
                f"vocab_size {vocab_size} of config.json"
            )
        self.template = _chat_template(folder)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @property
    def thinks(self) -> bool:
        return self.template is not None and "</think>" in self.template

    def chat(self, user: str) -> str:
        if self.template is None:
            raise UsageError(
                "workload: a prompt with 'user' needs a chat template, "
                "and the model's tokenizer has none; use 'text'"
            )
        return self.conversation([{"role": "user", "content": user}], {})

    def conversation(self, messages: Sequence[Mapping[str, object]], extra: Mapping[str, object]) -> str:
        if self.template is None:
            raise UsageError("the model's tokenizer has no chat template")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            template = environment.from_string(self.template)
            rendered: str = template.render(**extra, messages=messages, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the checkpoint's: it may raise anything
            raise UsageError(f"the model's chat template fails ({type(error).__name__}: {error})") from error
        return rendered

    def stream(self) -> Stream:
        return _TokenizerStream(self.tokenizer)

    def show(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


class _TokenizerStream:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        return self.decoder.step(self.tokenizer, token) or ""


class NumberText:
    """For models without a tokenizer: a token's text is its number, a character's token its code."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [ord(c) % self.vocab_size for c in text]

    @property
    def thinks(self) -> bool:
        return False

    def chat(self, user: str) -> str:
        return user

    def conversation(self, messages: Sequence[Mapping[str, object]], extra: Mapping[str, object]) -> str:
        return "".join(str(message["content"]) for message in messages)

    def stream(self) -> Stream:
        return _NumberStream()

    def show(self, ids: list[int]) -> str:
        return "".join(f"{token} " for token in ids)


class _NumberStream:
    def push(self, token: int) -> str:
        return f"{token} "


def _chat_template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"{file}: cannot be read as text ({error})") from error
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return None
    template = read_json_object(path).get("chat_template")
    return template if isinstance(template, str) else None
