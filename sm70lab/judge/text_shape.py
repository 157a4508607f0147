"""Text shape: the field's long-output gate ``fixed_quality``, metric by metric.

Source of the metrics and thresholds: the fixed-quality gate of the SM70 MTP output-quality audit
(June and July 2026). A metric fails when its value is beyond the threshold (``>``), the token count
when it is below. It judges what a text looks like, never who is to blame: see ``judge.verdict``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sm70lab.errors import UsageError
from sm70lab.judge import html_contract, repeats
from sm70lab.judge.html_contract import Contract
from sm70lab.judge.repeats import Found
from sm70lab.schema import Evidence, Gate, Generation, Status

# Metric (as in Gate and in records) → the words used in an evidence line.
RUN_METRICS = {
    "max_same_token_run": "token run",
    "max_digit_run": "digit run",
    "max_same_char_run": "character run",
    "repeat20": "repeat20",
    "repeat50": "repeat50",
    "repeat100": "repeat100",
    "max_same_line_run": "line run",
}
_CUT = {
    "length": "cut by the token budget",
    "interrupted": "interrupted",
    "connection_lost": "cut when the connection was lost",
    "timeout": "cut by a time limit",
}


@dataclass(frozen=True)
class ShapeMetrics:
    """Every metric of one generation, with what was found. Characters count from 0 in ``text``."""

    key: str
    finish_reason: str
    tokens: int
    max_same_token_run: Found
    max_digit_run: Found
    max_same_char_run: Found
    repeat20: Found
    repeat50: Found
    repeat100: Found
    max_same_line_run: Found
    bad_markers: tuple[Found, ...]  # one a marker present: value is its count
    contract: Contract | None  # None: the prompt has none

    @property
    def cut(self) -> bool:
        """Whether the text did not end by itself."""
        return self.finish_reason != "stop"


@dataclass(frozen=True)
class Failure:
    """One metric beyond its threshold; ``line`` names the unit and its position."""

    metric: str
    value: int
    limit: int
    line: str


def measure(generation: Generation, bad_markers: Sequence[str] = ()) -> ShapeMetrics:
    """Measure one generation. Raises ``UsageError`` for a contract that nobody knows."""
    text = generation.full_text
    windows = repeats.window_repeats(text, (20, 50, 100))
    return ShapeMetrics(
        key=generation.key,
        finish_reason=generation.finish_reason,
        tokens=judged_tokens(generation),
        max_same_token_run=repeats.token_run(generation.token_ids),
        max_digit_run=repeats.digit_run(text),
        max_same_char_run=repeats.char_run(text),
        repeat20=windows[20],
        repeat50=windows[50],
        repeat100=windows[100],
        max_same_line_run=repeats.line_run(text),
        bad_markers=_markers(generation, bad_markers),
        contract=_contract(generation),
    )


def judged_tokens(generation: Generation) -> int:
    """Output tokens; of a server that counts none, about how many the text has."""
    if generation.tokens:
        return generation.tokens
    return round(float(repeats.token_shares(repeats.code_points(generation.full_text)).sum()))


def token_words(generations: Sequence[Generation]) -> str:
    """How many tokens these outputs have, and where that is only estimated."""
    total = sum(map(judged_tokens, generations))
    uncounted = sum(not generation.tokens and bool(generation.full_text) for generation in generations)
    if not uncounted:
        return f"{total:,} tokens"
    whose = "" if uncounted == len(generations) else f" of {uncounted} outputs"
    return f"about {total:,} tokens (the server tells no number of tokens{whose}: it is unknown)"


def _markers(generation: Generation, bad_markers: Sequence[str]) -> tuple[Found, ...]:
    text = generation.full_text
    if generation.finish_reason != "stop":
        text = text.rstrip("\ufffd")  # the cut may fall inside a multi-byte character: no fault
    return tuple(Found(text.count(m), m, text.find(m)) for m in bad_markers if m in text)


def _contract(generation: Generation) -> Contract | None:
    prompt = generation.prompt
    if prompt.contract is None:
        return None
    if prompt.contract != "html":
        raise UsageError(f"prompt {prompt.name}: contract is {prompt.contract!r}, known is 'html'")
    cut = generation.finish_reason != "stop"
    return html_contract.check(generation.text, cut, html_contract.page_prefix(prompt))


def failures(metrics: ShapeMetrics, gate: Gate) -> list[Failure]:
    """The metrics beyond the gate's thresholds, in the gate's order; empty if the text is sound.

    Too few tokens are a failure only where the model stopped by itself; where a budget or an
    interruption ended the text, they are missing evidence (``shortfall``).
    """
    found: list[Failure] = []
    if metrics.tokens < gate.min_tokens and not metrics.cut:
        line = f"stopped by itself after {metrics.tokens} tokens (at least {gate.min_tokens})"
        found.append(Failure("tokens", metrics.tokens, gate.min_tokens, line))
    for name, label in RUN_METRICS.items():
        run: Found = getattr(metrics, name)
        limit: int = getattr(gate, name)
        if run.value > limit:
            place = "token" if name == "max_same_token_run" else "character"
            line = f"{label} {run.value:,} (limit {limit}) at {place} {run.position:,}: {quoted(run.unit)}"
            found.append(Failure(name, run.value, limit, line))
    for marker in metrics.bad_markers:
        line = f"bad marker {quoted(marker.unit)} × {marker.value:,} at character {marker.position:,}"
        found.append(Failure("bad_markers", marker.value, 0, line))
    if metrics.contract and metrics.contract.missing:
        missing = metrics.contract.missing
        line = "html contract: missing " + ", ".join(missing)
        found.append(Failure("contract", len(missing), 0, line))
    return found


def shortfall(metrics: ShapeMetrics, gate: Gate) -> int:
    """Tokens missing to ``gate.min_tokens`` in a text that was cut; 0 otherwise."""
    return max(0, gate.min_tokens - metrics.tokens) if metrics.cut else 0


def evidence(generations: Sequence[Generation], gate: Gate) -> Evidence:
    """Text shape over all generations: bad if any metric of any of them fails.

    ``unknown`` if none fails but one was cut below ``gate.min_tokens``. ``metrics`` holds the worst
    value of each metric; ``details['generations']`` each generation's metrics, failures and what
    was not applicable.
    """
    measured = [measure(generation, gate.bad_markers) for generation in generations]
    failed = {m.key: failures(m, gate) for m in measured}
    short = max((shortfall(m, gate) for m in measured), default=0)
    excused = [f"{m.key}: {text}" for m in measured if (text := not_applicable(m))]
    bad = [(key, found) for key, found in failed.items() if found]
    if bad:
        status = Status.bad
        first = f"{bad[0][0]}: {bad[0][1][0].line}"
        more = sum(len(found) for _, found in bad) - 1
        line = f"{len(bad)} of {len(measured)} outputs fail; {first}" + (f"; and {more} more" if more else "")
    elif short or not measured:
        status = Status.unknown
        empty = next((g.key for g in generations if not g.came), None)
        if empty is not None:
            line = f"{empty}: no token came"
        elif short:
            line = f"an output was cut {short} tokens below the {gate.min_tokens} needed"
        else:
            line = "no output"
    else:
        status = Status.ok
        highest = {name: max(getattr(m, name).value for m in measured) for name in RUN_METRICS}
        listed = ", ".join(f"{RUN_METRICS[n]} {v} of {getattr(gate, n)}" for n, v in highest.items())
        line = f"{_count(len(measured), 'output')}, {token_words(generations)}: {listed}"
    if excused:
        line += f" ({excused[0]}" + (f"; {len(excused) - 1} more)" if len(excused) > 1 else ")")
    numbers = worst(measured)
    if measured:
        numbers["failed_outputs"] = float(len(bad))
    return Evidence("shape", status, line, numbers, _details(measured, failed))


def worst(measured: Sequence[ShapeMetrics]) -> dict[str, float]:
    """The worst value of each metric over these outputs; empty if there are none."""
    if not measured:
        return {}
    values = {name: float(max(getattr(m, name).value for m in measured)) for name in RUN_METRICS}
    values["tokens"] = float(min(m.tokens for m in measured))
    values["bad_markers"] = float(max(len(m.bad_markers) for m in measured))
    values["contract_missing"] = float(max(len(m.contract.missing) if m.contract else 0 for m in measured))
    return values


def _details(measured: list[ShapeMetrics], failed: dict[str, list[Failure]]) -> dict[str, Any]:
    return {
        "generations": {
            m.key: asdict(m) | {"failures": [asdict(f) for f in failed[m.key]], "excused": not_applicable(m)}
            for m in measured
        }
    }


def not_applicable(metrics: ShapeMetrics) -> str:
    """In words, what the contract could not ask of a text that was cut; empty if nothing."""
    if metrics.contract is None or not metrics.contract.not_applicable:
        return ""
    demands = ", ".join(metrics.contract.not_applicable)
    return f"{demands} not applicable, {_CUT.get(metrics.finish_reason, 'cut')}"


def quoted(unit: str, width: int = 60) -> str:
    """The unit in quotes with its invisible characters escaped, cut to ``width`` characters."""
    return repr(unit if len(unit) <= width else unit[: width - 1] + "…")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
