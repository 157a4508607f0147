"""Reasoning and content of one output, told apart by the server or by the think markers."""

from __future__ import annotations

from dataclasses import dataclass

from sm70lab.schema import Generation

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Part:
    """One part of an output's text: [start, start + len(text)) of it."""

    name: str  # reasoning or content
    start: int
    text: str


@dataclass(frozen=True)
class Parts:
    """The parts of an output in their order; ``open``: the text ended inside its reasoning."""

    parts: tuple[Part, ...]
    open: bool

    @property
    def content(self) -> Part | None:
        return next((part for part in self.parts if part.name == "content"), None)


def split(generation: Generation) -> Parts:
    """Split one output at its think markers; without any, all of it is content.

    The opening marker stands at the beginning of the text or, as some chat templates have it, at the
    end of the prompt. A closing marker alone ends a reasoning that began with the text. Where a server
    told them apart, its word counts; places are those of ``Generation.full_text``.
    """
    text = generation.full_text
    if generation.reasoning is not None:
        reasoning, content = Part("reasoning", len(OPEN), generation.reasoning), generation.text
        if not content:
            return Parts((reasoning,), open=True)
        return Parts((reasoning, Part("content", len(text) - len(content), content)), open=False)
    start = len(text) - len(text.lstrip())
    opened = text.startswith(OPEN, start)
    start = start + len(OPEN) if opened else 0
    end = text.find(CLOSE, start)
    if end >= 0:
        reasoning = Part("reasoning", start, text[start:end])
        return Parts((reasoning, Part("content", end + len(CLOSE), text[end + len(CLOSE) :])), open=False)
    if opened or generation.prompt.text.rstrip().endswith(OPEN):
        return Parts((Part("reasoning", start, text[start:]),), open=True)
    return Parts((Part("content", 0, text),), open=False)
