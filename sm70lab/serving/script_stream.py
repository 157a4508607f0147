"""From an answer of a script and a request to the tokens that will be served, step by step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

from sm70lab.serving.script import Answer, Counters, Finish, Good, Synthetic
from sm70lab.serving.script_recorded import recorded_events, recorded_output
from sm70lab.serving.script_text import sound
from sm70lab.serving.script_tokens import Plan, Request, Round, Step, Token, Tokens, told

THINK, END_THINK = "<think>\n", "\n</think>\n\n"


def plan(answer: Answer, request: Request, tokens: Tokens, counters: Counters | None) -> Plan:
    """The answer's tokens, in the chunks in which they will be sent.

    Raises ``UsageError`` for a recorded file that cannot be read.
    """
    if answer.sse is not None:
        return Plan(recorded_events(Path(answer.sse)), None)
    rounds: list[Round] = []
    if answer.run is not None:
        output, finish, rounds = recorded_output(answer.run)
    else:
        output, finish = _source(answer, request, tokens), "stop"
    lead = _reasoning(answer, request, tokens)
    output, rounds = [*lead, *output], [] if lead else rounds
    if len(output) > request.max_tokens:
        output, finish = output[: request.max_tokens], "length"
    if not rounds and counters is not None and counters.drafts:
        loop = len(lead) + answer.collapse.at if answer.collapse and counters.plateau else None
        rounds = _draw_rounds(len(output), counters, request.key, loop)
    if answer.finish is not Finish.auto:
        finish = answer.finish.value
    steps = list(_steps(output, rounds, answer.chunk_tokens))
    return Plan(steps, None if answer.finish is Finish.missing else finish)


def _source(answer: Answer, request: Request, tokens: Tokens) -> list[Token]:
    """The content's tokens: more than the request allows where the source is endless or longer."""
    if answer.text is not None:
        return _whole(tokens, tokens.encode(answer.text * answer.repeat_text))
    if answer.collapse is not None:
        begin, unit = answer.collapse.at, tokens.encode(answer.collapse.unit)
        ids = _at_least(tokens, answer.collapse.good, begin, request.key)[:begin]
        ids += islice(cycle(unit), max(0, request.max_tokens + 1 - begin))
        return told(tokens, ids, answer.collapse.reasoning)
    made = answer.synthetic or Synthetic()
    if made.tokens is None:
        return told(tokens, _at_least(tokens, made.good, request.max_tokens + 1, request.key))
    characters = round(made.tokens * _characters_a_token(tokens, made.good))
    return _whole(tokens, tokens.encode(sound(made.good, characters, request.key)))


def _reasoning(answer: Answer, request: Request, tokens: Tokens) -> list[Token]:
    """What the model thinks first. The closing marker has ids, and a text only where it is content."""
    text = answer.reasoning
    if answer.reasoning_tokens:
        characters = round(answer.reasoning_tokens * _characters_a_token(tokens, Good.prose))
        text = sound(Good.prose, characters, request.key)
    if text is None:
        return []
    if answer.reasoning_field is None:
        return told(tokens, tokens.encode(THINK + text + END_THINK))
    marker = [Token(token, "", reasoning=True) for token in tokens.encode(END_THINK)]
    return [*told(tokens, tokens.encode(text), reasoning=True), *marker]


def _whole(tokens: Tokens, ids: Sequence[int]) -> list[Token]:
    """A text that ends by itself: with the end token, which has no text."""
    return told(tokens, ids) + ([Token(tokens.end, "")] if tokens.end is not None else [])


def _characters_a_token(tokens: Tokens, good: Good) -> float:
    sample = sound(good, 4000, "sample")
    return len(sample) / len(tokens.encode(sample))


def _at_least(tokens: Tokens, good: Good, number: int, key: str) -> list[int]:
    """Ids of an endless sound text, ``number`` or more of them."""
    characters = number * _characters_a_token(tokens, good)
    while len(ids := tokens.encode(sound(good, round(characters), key))) < number:
        characters *= 1.2
    return ids


def _draw_rounds(total: int, counters: Counters, key: str, loop: int | None) -> list[Round]:
    """Rounds for ``total`` tokens: the prefill's token, then accepted drafts and one more each.

    The chance that the first i drafts are accepted is ``counters.acceptance[i − 1]``; from output token
    ``loop`` on all are.
    """
    draw = random.Random(f"rounds/{key}")
    rounds, sent = [Round(0, 0, 1)], 1
    while sent < total:
        if loop is not None and sent >= loop:
            accepted = counters.drafts
        else:
            chance = draw.random()
            accepted = sum(chance < rate for rate in counters.acceptance)
        emitted = min(accepted + 1, total - sent)
        rounds.append(Round(counters.drafts, min(accepted, emitted), emitted))
        sent += emitted
    return rounds


def _steps(output: list[Token], rounds: list[Round], chunk_tokens: int) -> Iterator[Step]:
    start = 0
    for each in rounds:
        yield Step(tuple(output[start : start + each.emitted]), each.drafted, each.accepted)
        start += each.emitted
    for at in range(start, len(output), chunk_tokens):
        yield Step(tuple(output[at : at + chunk_tokens]))
