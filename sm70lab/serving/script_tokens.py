"""Tokens of scripted answers: ids, the text each completes, and the chunks they come in."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sm70lab.errors import UsageError
from sm70lab.serving.script import Endpoint

WEB = Path(__file__).resolve().parents[1] / "models" / "web"


@dataclass(frozen=True)
class Request:
    """A request to generate, as far as the script cares."""

    endpoint: Endpoint
    model: str
    prompt: str  # of a chat: its messages, one a line
    prompt_ids: list[int]
    max_tokens: int
    seed: int | None
    body: dict[str, Any]

    @property
    def key(self) -> str:
        """What draws the made-up texts: equal requests get equal answers."""
        return f"{self.prompt}/{self.seed}"


@dataclass(frozen=True)
class Token:
    """One output token and the text that it completes."""

    id: int
    text: str
    reasoning: bool = False


@dataclass(frozen=True)
class Step:
    """What one chunk tells: the tokens of a round, or a recorded event."""

    tokens: tuple[Token, ...]
    drafted: int = 0
    accepted: int = 0
    event: str | None = None  # a recorded event's lines, without the blank one


@dataclass(frozen=True)
class Plan:
    """A whole answer."""

    steps: list[Step]
    finish: str | None

    @property
    def completion_tokens(self) -> int:
        return sum(len(step.tokens) for step in self.steps)


class Tokens(Protocol):
    """Text to ids and back."""

    end: int | None  # id of the end token

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""

    def texts(self, ids: Sequence[int]) -> Iterator[str]:
        """The text that each id completes; a character of several tokens comes with its last."""


class ByteTokens:
    """An id a byte of UTF-8; 256 is the end token."""

    end: int | None = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def texts(self, ids: Sequence[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in ids:
            yield decoder.decode(bytes([token])) if token < 256 else ""


class FileTokens:
    """``tokenizer.json`` of a model folder, with the end token of its ``config.json``."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise UsageError(f"tokenizer: {file} cannot be used ({error})") from error
        self.end = _end_token(folder / "config.json")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def texts(self, ids: Sequence[int]) -> Iterator[str]:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        for token in ids:
            yield stream.step(self._tokenizer, token) or ""


def tokens_of(name: str) -> Tokens:
    """The tokenizer that a script names. Raises ``UsageError`` where it cannot be read."""
    if name == "bytes":
        return ByteTokens()
    return FileTokens(WEB if name == "web" else Path(name))


def _end_token(config: Path) -> int | None:
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    end = values.get("eos_token_id")
    return end[0] if isinstance(end, list) and end else end if isinstance(end, int) else None


@dataclass(frozen=True)
class Round:
    """A round of a scripted or recorded answer; the prefill drafts nothing."""

    drafted: int
    accepted: int
    emitted: int


def told(tokens: Tokens, ids: Sequence[int], reasoning: bool = False) -> list[Token]:
    """Ids with the text that each completes."""
    texts = tokens.texts(ids)
    return [Token(token, text, reasoning) for token, text in zip(ids, texts, strict=True)]
