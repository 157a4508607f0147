"""Acceptance health of a server's run: from its counters, read while it ran, and its word on each request.

A counter window stands for its rounds: all of them drafted the same number of tokens, and none was cut.
Where positions are told, rates are per position; else there is one rate over all drafts. Counters are
the server's: what others had of it is in them, and is said. The findings are those of ``acceptance``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70lab.judge.acceptance import (
    LOW_NOVELTY,
    Pooled,
    Window,
    findings_of,
    novel,
    series,
)
from sm70lab.schema import CounterWindow, Evidence, Generation, Status

NO_HAZARD = "none"
OTHER_ROUTE = "other_route"  # finding: the server does not run the route that was named
WORD = re.compile(r"\w+|\s+|[^\w\s]")  # tokens of a text whose ids are not known


def evidence(
    generations: Sequence[Generation],
    counters: Sequence[CounterWindow],
    draft_tokens: int | None,
    hazard: str = NO_HAZARD,
) -> Evidence:
    """Acceptance over a server's run; ``draft_tokens``: of the route that the server is said to run;
    ``hazard``: the fault that it says to run with.

    ``bad`` where a window is at the plateau while its text repeats; ``unknown`` where the server tells
    nothing, or where one of route and server drafts and the other does not (finding ``other_route``);
    ``warn`` on any other finding; else ``ok``. ``metrics`` and ``details`` have the keys of
    ``acceptance.evidence``; ``rates`` are over all drafts, as ``rate_all``, where no positions are told.
    """
    shown = _Novelty(generations)
    parts = [
        Window(w.spans[0][0] if w.spans else "", _start(w), _pooled(w), shown.of(w.spans)) for w in counters
    ]
    own = [w for part, w in zip(parts, counters, strict=True) if not w.other_traffic]
    clean = [part for part, w in zip(parts, counters, strict=True) if not w.other_traffic]
    total, source = _total(generations, counters)
    found = findings_of(total, clean, [])
    if len(own) < len(counters):
        found["other_traffic"] = _traffic(counters)
    drafted = _drafted(total, counters, generations)
    if draft_tokens is not None and drafted is not None and round(drafted) != draft_tokens:
        if (draft_tokens == 0) == (round(drafted) == 0):
            found["route"] = f"the route drafts {draft_tokens} tokens a round, the server {drafted:.3g}"
        else:
            found[OTHER_ROUTE] = (
                f"the named route drafts {draft_tokens} tokens a round, the server {drafted:.3g}: "
                "this is not that route"
            )
    if hazard != NO_HAZARD:
        found["hazard"] = f"the server runs hazard={hazard} (its /version says so)"
    metrics = _metrics(total, generations, bool(len(own) < len(counters)), drafted)
    windows = [
        entry | {"other_traffic": w.other_traffic} for entry, w in zip(series(parts), counters, strict=True)
    ]
    details: dict[str, Any] = {"findings": found, "windows": windows, "accounting": [], "source": source}
    if not total.rounds and not total.tested:
        return _without_drafts(generations, counters, found, metrics, details)
    bad = any(w.plateau and w.novelty < LOW_NOVELTY for w in clean)
    status = Status.bad if bad else _status(found, Status.ok)
    line = f"{_words(total)} ({source}){_found_words(found, counters)}"
    return Evidence("acceptance", status, line, metrics, details)


def _without_drafts(
    generations: Sequence[Generation],
    counters: Sequence[CounterWindow],
    found: dict[str, str],
    metrics: dict[str, float],
    details: dict[str, Any],
) -> Evidence:
    counted = any(w.tokens for w in counters)
    line = "the server's counters show no drafts" if counted else "the server tells nothing of its drafts"
    line += _found_words(found, counters)
    status = _status(found, Status.ok if counted else Status.unknown)
    return Evidence("acceptance", status, line, metrics, details)


def _status(found: dict[str, str], otherwise: Status) -> Status:
    return Status.unknown if OTHER_ROUTE in found else Status.warn if found else otherwise


def _found_words(found: dict[str, str], counters: Sequence[CounterWindow]) -> str:
    words = "".join(f"; {name}: {text}" for name, text in found.items())
    if "other_traffic" not in found and not all(w.own_known for w in counters):
        words += "; other traffic is not known: this run's own tokens are not all counted"
    return words


def _pooled(w: CounterWindow) -> Pooled:
    if w.accepted_per_position:
        tested, accepted = (w.drafts,) * len(w.accepted_per_position), w.accepted_per_position
        return Pooled(tested, accepted, w.drafts, accepted, w.drafts, w.tokens, w.seconds)
    tested, accepted = ((w.draft_tokens,), (w.accepted,)) if w.draft_tokens else ((), ())
    return Pooled(tested, accepted, w.drafts, (w.accepted,), w.drafts, w.tokens, w.seconds)


def _total(generations: Sequence[Generation], counters: Sequence[CounterWindow]) -> tuple[Pooled, str]:
    """Everything added up: each request's own numbers where all have them, else the counters."""
    told = [g.speculation for g in generations if g.speculation is not None]
    seconds = sum(g.decode_seconds for g in generations)
    tokens = sum(g.tokens for g in generations)
    if told and len(told) == len(generations) and all(s.drafts for s in told):
        whole = CounterWindow(
            tokens,
            seconds,
            sum(s.drafts for s in told),
            sum(s.draft_tokens for s in told),
            sum(s.accepted_tokens for s in told),
            _added([s.accepted_per_position for s in told]),
            other_traffic=False,
        )
        return _pooled(whole), "each request's own metrics"
    whole = CounterWindow(
        tokens,
        seconds,
        sum(w.drafts for w in counters),
        sum(w.draft_tokens for w in counters),
        sum(w.accepted for w in counters) if any(w.drafts for w in counters) else 0,
        _added([w.accepted_per_position for w in counters]),
        other_traffic=any(w.other_traffic for w in counters),
    )
    if not whole.drafts and told:
        drafts, accepted = sum(s.draft_tokens for s in told), sum(s.accepted_tokens for s in told)
        return Pooled(
            (drafts,), (accepted,), 0, (accepted,), 0, tokens, seconds
        ), "each request's own metrics"
    return _pooled(whole), "the server's counters"


def _added(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    length = max(map(len, rows), default=0)
    return tuple(sum(row[i] for row in rows if i < len(row)) for i in range(length))


def _drafted(
    total: Pooled, counters: Sequence[CounterWindow], generations: Sequence[Generation]
) -> float | None:
    """Draft tokens a round; None where they are not told, 0 where a server that counts shows none."""
    drafts = sum(w.drafts for w in counters)
    tokens = sum(w.draft_tokens for w in counters)
    if drafts:
        return tokens / drafts if tokens else None
    told = [g.speculation for g in generations if g.speculation is not None and g.speculation.drafts]
    if told:
        return sum(s.draft_tokens for s in told) / sum(s.drafts for s in told)
    return 0.0 if any(w.tokens for w in counters) and not total.tested else None


def _metrics(
    total: Pooled, generations: Sequence[Generation], shared: bool, drafted: float | None
) -> dict[str, float]:
    positions = len(total.tested) > 1 or (drafted is not None and round(drafted) == 1)
    values = {f"rate_{i}" if positions else "rate_all": rate for i, rate in enumerate(total.rates, 1)}
    values |= {"rounds": float(total.rounds), "tokens_per_second": tokens_per_second(generations)}
    if drafted is not None:
        values["draft_tokens"] = drafted
    if total.rounds:
        values["acceptance_length"] = total.acceptance_length
        if not shared:
            values["rounds_per_second"] = total.rounds_per_second
    return {name: value for name, value in values.items() if not np.isnan(value)}


def tokens_per_second(generations: Sequence[Generation]) -> float:
    """Tokens after each request's first chunk over the seconds in which they came; NaN without."""
    tokens = sum(decoded(g) for g in generations)
    seconds = sum(g.decode_seconds for g in generations)
    return tokens / seconds if tokens > 0 and seconds > 0 else float("nan")


def decoded(generation: Generation) -> int:
    """Tokens that came after the first chunk of this output."""
    first = generation.arrivals[0][0] if generation.arrivals else -1
    return max(0, generation.tokens - (first if first > 0 else 1))


def _words(total: Pooled) -> str:
    parts = []
    if total.complete_rounds:
        parts.append(f"{total.acceptance_length:.2f} tokens a round over {total.rounds:,} rounds")
    if len(total.tested) > 1:
        parts.append("by position " + " ".join(f"{rate:.3f}" for rate in total.rates))
    elif total.tested:
        parts.append(f"{total.accepted[0]:,} of {total.tested[0]:,} drafts accepted")
    return ", ".join(parts)


def _traffic(counters: Sequence[CounterWindow]) -> str:
    number = sum(w.other_traffic for w in counters)
    return (
        f"in {number} of {len(counters)} windows the server worked for others, too: "
        "acceptance is everybody's, and speed is no measure"
    )


def _start(window: CounterWindow) -> int:
    return window.spans[0][1] if window.spans else 0


@dataclass
class _Novelty:
    """Share of 8-grams in a part of an output that were not seen before in it."""

    generations: Sequence[Generation]
    _flags: dict[str, tuple[NDArray[np.int64], NDArray[np.bool_]]] = field(default_factory=dict)

    def of(self, spans: Sequence[tuple[str, int, int]]) -> float:
        """Over the spans of a window; NaN where nothing is known of them."""
        found = [self._part(*span) for span in spans]
        flags = np.concatenate(found) if found else np.zeros(0, dtype=bool)
        return float(flags.mean()) if flags.size else float("nan")

    def _part(self, key: str, start: int, end: int) -> NDArray[np.bool_]:
        if key not in self._flags:
            generation = next((g for g in self.generations if g.key == key), None)
            self._flags[key] = _grams(generation)
        places, flags = self._flags[key]
        return flags[(places >= start) & (places < end)]


def _grams(generation: Generation | None) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where each 8-gram begins (in tokens, without ids in characters), and whether it is new there."""
    if generation is None:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)
    if generation.token_ids:
        flags = novel(generation.token_ids)
        return np.arange(flags.size), flags
    words = list(WORD.finditer((generation.reasoning or "") + generation.text))
    known: dict[str, int] = {}
    flags = novel([known.setdefault(word[0], len(known)) for word in words])
    return np.array([word.start() for word in words[: flags.size]], dtype=np.int64), flags
