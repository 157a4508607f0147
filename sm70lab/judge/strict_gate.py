"""Text shape, the strict gate: every degenerate shape of an output, with its onset, period and unit.

Loops, floods, salads and stale endings are sought in the reasoning and in the content apart
(``judge.degenerate``); early stops, thinking that never ends, an echoed prompt, bad markers and the
page contract concern the output as a whole. The field's metrics are recorded beside and decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from sm70lab.judge import repeats, text_shape
from sm70lab.judge.degenerate import Finding, ending_chain, in_part
from sm70lab.judge.periodicity import Windows, exact_loops
from sm70lab.judge.reasoning import Part, Parts, split
from sm70lab.judge.text_shape import ShapeMetrics, quoted
from sm70lab.schema import Evidence, Gate, Generation, Status, StrictGate

_OF_THE_FIELD = {"tokens": "early_stop", "bad_markers": "bad_markers", "contract": "contract"}
_LOOPS = ("loop", "chain")
_ECHO_LENGTH = 200  # characters: nobody quotes so long a question whole before the answer
_CHAT_USER, _CHAT_END = "<|im_start|>user\n", "<|im_end|>"


def findings(generation: Generation, gate: Gate) -> list[Finding]:
    """Everything degenerate in one output, in the order of the text; empty if it is sound.

    Raises ``UsageError`` for a contract that nobody knows.
    """
    return _findings(generation, text_shape.measure(generation, gate.bad_markers), gate)


def _findings(generation: Generation, metrics: ShapeMetrics, gate: Gate) -> list[Finding]:
    strict = gate.strict
    parts = split(generation)
    found = [*_as_the_field(metrics, gate), *_thinking(generation, parts, strict)]
    for part in parts.parts:
        found += in_part(part, strict)
    if parts.content is not None:
        found += _echo(generation, parts.content, strict)
    found = found or list(_digits(metrics, strict))
    if not found:
        return list(_unseen_loop(generation, strict))
    found.sort(key=lambda f: f.position)
    ends = found[-1].metric in _LOOPS and found[-1].part == parts.parts[-1].name
    first_token = _token_loop(generation, strict)[0] if ends else -1
    return [*(_located(f, generation, -1) for f in found[:-1]), _located(found[-1], generation, first_token)]


def _as_the_field(metrics: ShapeMetrics, gate: Gate) -> Iterator[Finding]:
    for failure in text_shape.failures(metrics, gate):
        if failure.metric in _OF_THE_FIELD:
            name = _OF_THE_FIELD[failure.metric]
            yield Finding(name, failure.value, failure.limit, failure.line, part="")


def _digits(metrics: ShapeMetrics, strict: StrictGate) -> Iterator[Finding]:
    """A flood of digits in no order; the longest run in 8,000 sound files has 76."""
    run = metrics.max_digit_run
    if run.value > strict.digits:
        line = f"{run.value:,} digits in a row (limit {strict.digits})"
        yield Finding("digits", run.value, strict.digits, line, "", run.position, unit=run.unit[:120])


def _thinking(generation: Generation, parts: Parts, strict: StrictGate) -> Iterator[Finding]:
    tokens, limit = text_shape.judged_tokens(generation), strict.thinking_tokens
    stopped = generation.finish_reason == "stop"
    if parts.open and stopped:
        line = f"stopped inside its thinking after {tokens:,} tokens; there is no content"
        yield Finding("open_thinking", tokens, limit, line, part="reasoning")
    elif parts.open and generation.finish_reason == "length" and tokens > limit:
        line = f"the thinking never ended: {tokens:,} tokens (limit {limit:,}) and no content"
        yield Finding("open_thinking", tokens, limit, line, part="reasoning")
    content = parts.content
    if content is not None and len(parts.parts) > 1 and stopped and not content.text.strip():
        line = "stopped right behind its thinking; there is no content"
        yield Finding("early_stop", 0, 1, line, part="content")


def _echo(generation: Generation, content: Part, strict: StrictGate) -> Iterator[Finding]:
    """The whole question again in place of an answer: with little besides, more than once, or long.

    A sound answer may well begin by quoting a short question, and may give back a text out of a long
    one, but not the words of the request around it.
    """
    user = _user_text(generation.prompt.text)
    asked = _fold(generation.prompt.text if user is None else user)
    answer = _fold(content.text)
    if len(asked) <= strict.echo_characters or not answer.startswith(asked):
        return
    times = answer.count(asked)
    if 2 * len(asked) >= len(answer) or times > 1 or len(asked) >= _ECHO_LENGTH:
        again = f" {times:,} times" if times > 1 else ""
        line = f"the prompt is echoed{again}: {quoted(asked)}"
        start = content.start + len(content.text) - len(content.text.lstrip())
        yield Finding(
            "prompt_echo", len(asked), strict.echo_characters, line, "content", start,
            count=times, unit=asked[:120],
        )  # fmt: skip


def _user_text(prompt: str) -> str | None:
    """The last user message of a ChatML prompt; None where a text is to be continued."""
    start = prompt.rfind(_CHAT_USER)
    if start < 0:
        return None
    start += len(_CHAT_USER)
    end = prompt.find(_CHAT_END, start)
    return prompt[start : end if end >= 0 else len(prompt)]


def _fold(text: str) -> str:
    return " ".join(text.split())


def _token_loop(generation: Generation, strict: StrictGate) -> tuple[int, int]:
    """First token of the loops that end the token ids, and how many tokens they hold; (−1, 0) if none."""
    ids = np.asarray(generation.token_ids, dtype=np.int64)
    chain = ending_chain(exact_loops(Windows(ids)), ids.size, lambda loop: loop.length, strict)
    return (chain[0].start, sum(loop.length for loop in chain)) if chain else (-1, 0)


def _unseen_loop(generation: Generation, strict: StrictGate) -> Iterator[Finding]:
    """A loop of tokens that the text does not show: ids without a text of their own."""
    start, value = _token_loop(generation, strict)
    if value > strict.loop_tokens:
        unit = " ".join(map(str, generation.token_ids[-8:]))
        line = f"a loop of {value:,} tokens to the end, not seen in the text, from token {start:,}: … {unit}"
        yield Finding("token_loop", value, strict.loop_tokens, line, "", token=start, unit=unit)


def _located(finding: Finding, generation: Generation, token: int) -> Finding:
    """With its token (estimated where it is −1 and there are ids) and, in the line, place and part."""
    if finding.position < 0:
        return finding
    about = ""
    if token < 0 and generation.token_ids:
        shares = repeats.token_shares(repeats.code_points(generation.full_text))
        share = shares[: finding.position].sum() / shares.sum()
        token, about = round(len(generation.token_ids) * float(share)), "about "
    place = f"from character {finding.position:,}" + (f" ({about}token {token:,})" if token >= 0 else "")
    where = ", in the reasoning" if finding.part == "reasoning" else ""
    return replace(finding, token=token, line=f"{finding.line}, {place}{where}")


def evidence(generations: Sequence[Generation], gate: Gate) -> Evidence:
    """Text shape over all generations: bad if anything degenerate is found in any of them.

    ``unknown`` if nothing is found but one was cut below ``gate.min_tokens`` or inside its thinking.
    ``metrics`` holds the worst value of each of the field's metrics, ``failed_outputs`` and
    ``fixed_quality_failed`` (outputs that the field's gate would fail); ``details['generations']`` each
    generation's metrics and ``failures`` (a ``Finding`` each).
    """
    measured = [text_shape.measure(generation, gate.bad_markers) for generation in generations]
    found = {g.key: _findings(g, metrics, gate) for g, metrics in zip(generations, measured, strict=True)}
    fields = {m.key: [f.metric for f in text_shape.failures(m, gate)] for m in measured}
    bad = [(key, failures) for key, failures in found.items() if failures]
    lacking = [text for g, m in zip(generations, measured, strict=True) if (text := _lacking(g, m, gate))]
    if bad:
        status = Status.bad
        more = sum(len(failures) for _, failures in bad) - 1
        line = f"{len(bad)} of {len(measured)} outputs fail; {bad[0][0]}: {bad[0][1][0].line}"
        line += f"; and {more} more" if more else ""
    elif lacking or not measured:
        status, line = Status.unknown, lacking[0] if lacking else "no output"
    else:
        status = Status.ok
        outputs = f"{len(measured):,} output" + ("" if len(measured) == 1 else "s")
        line = f"{outputs}, {text_shape.token_words(generations)}: no loop, flood, salad or echo"
    failed = sum(map(bool, fields.values()))
    if failed:
        names = ", ".join(dict.fromkeys(name for names in fields.values() for name in names))
        line += f" (fixed_quality would fail {failed} of {len(measured)}: {names})"
    excused = [f"{m.key}: {text}" for m in measured if (text := text_shape.not_applicable(m))]
    line += f" ({'; '.join(excused[:1])})" if excused else ""
    metrics = text_shape.worst(measured) | {
        "failed_outputs": float(len(bad)),
        "fixed_quality_failed": float(failed),
    }
    return Evidence("shape", status, line, metrics if measured else {}, _details(measured, found, fields))


def _lacking(generation: Generation, metrics: ShapeMetrics, gate: Gate) -> str:
    """In words, what is missing to say that an output is sound; empty if nothing."""
    if short := text_shape.shortfall(metrics, gate):
        if not generation.came:
            return f"{generation.key}: no token came"
        return f"an output was cut {short} tokens below the {gate.min_tokens} needed"
    if split(generation).open and generation.finish_reason == "length":
        tokens = metrics.tokens
        return f"{generation.key}: {tokens:,} tokens ended inside the thinking; there is no content to judge"
    return ""


def _details(
    measured: Sequence[ShapeMetrics], found: dict[str, list[Finding]], fields: dict[str, list[str]]
) -> dict[str, Any]:
    return {
        "generations": {
            m.key: asdict(m)
            | {
                "failures": [asdict(f) for f in found[m.key]],
                "fixed_quality": fields[m.key],
                "excused": text_shape.not_applicable(m),
            }
            for m in measured
        }
    }
