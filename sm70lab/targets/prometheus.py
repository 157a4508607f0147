"""A server's Prometheus counters: read before, during and after a run, and told apart from others' traffic.

Names by server. vLLM: ``vllm:generation_tokens_total``, ``vllm:spec_decode_num_drafts_total`` and its
kin (only where drafting is configured). llama.cpp (``--metrics``): the same behind ``llamacpp:``, tokens as
``tokens_predicted_total``. SGLang (``--enable-metrics``): ``generation_tokens_total`` and the verify steps
alone (``spec_verify_calls_total``), so that accepted = tokens − verify steps, and drafts are not told.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sm70lab.schema import CounterWindow

SLACK_TOKENS = 32  # by which counters and a client's own count may differ while tokens are on their way
SLACK_SHARE = 0.1
CROWDED_READINGS = 2  # one may show a request of this run that has just ended


@dataclass(frozen=True)
class Names:
    """What one server family calls its counters; an empty name: it has none such."""

    family: str
    tokens: str
    running: str
    drafts: str
    draft_tokens: str
    accepted: str
    per_position: str


def _names(family: str, prefix: str, tokens: str, running: str) -> Names:
    spec = f"{prefix}:spec_decode_num"
    return Names(
        family,
        f"{prefix}:{tokens}",
        f"{prefix}:{running}",
        f"{spec}_drafts_total",
        f"{spec}_draft_tokens_total",
        f"{spec}_accepted_tokens_total",
        f"{spec}_accepted_tokens_per_pos_total",
    )


FAMILIES = (
    _names("vllm", "vllm", "generation_tokens_total", "num_requests_running"),
    _names("llama.cpp", "llamacpp", "tokens_predicted_total", "requests_processing"),
    Names(
        "sglang",
        "sglang:generation_tokens_total",
        "sglang:num_running_reqs",
        "sglang:spec_verify_calls_total",
        "",
        "",
        "",
    ),
)


@dataclass(frozen=True)
class Reading:
    """The counters at one moment."""

    family: str
    at: float  # seconds, monotonic
    tokens: int
    running: int | None
    drafts: int | None  # None: the server drafts nothing, or does not tell
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]

    def record(self) -> dict[str, Any]:
        """For the run's record."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in vars(self).items() if key != "at"}


def read(page: str, model: str | None, at: float) -> Reading | None:
    """The counters of a metrics page, of ``model`` alone where it is labelled; None where there are none.

    Raises ``ValueError`` for a page that is not in Prometheus' text format.
    """
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for metric in text_string_to_metric_families(page):
        for sample in metric.samples:
            samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    for names in FAMILIES:
        if names.tokens in samples or names.drafts in samples:
            return _reading(names, samples, model, at)
    return None


def _reading(
    names: Names, samples: dict[str, list[tuple[dict[str, str], float]]], model: str | None, at: float
) -> Reading:
    def own(name: str) -> list[tuple[dict[str, str], float]]:
        found = samples.get(name, [])
        ours = [entry for entry in found if entry[0].get("model_name") == model]
        return ours or found

    def total(name: str) -> int:
        return int(sum(value for _, value in own(name)))

    per_position: dict[int, int] = {}
    for labels, value in own(names.per_position):
        if labels.get("position", "").isdigit():
            position = int(labels["position"])
            per_position[position] = per_position.get(position, 0) + int(value)
    tokens, drafts = total(names.tokens), total(names.drafts) if names.drafts in samples else None
    return Reading(
        family=names.family,
        at=at,
        tokens=tokens,
        running=total(names.running) if names.running in samples else None,
        drafts=drafts,
        draft_tokens=total(names.draft_tokens),
        accepted=total(names.accepted) if names.accepted else tokens - (drafts or 0),
        per_position=tuple(per_position.get(i, 0) for i in range(max(per_position, default=-1) + 1)),
    )


@dataclass(frozen=True)
class Own:
    """How far one of the run's own answers was at a reading."""

    position: int  # its tokens where it has ids, else its characters
    tokens: int | None  # None: not known yet


@dataclass
class Watch:
    """The readings of one run, in order, each with how far the run itself was."""

    readings: list[tuple[Reading, dict[str, Own], int]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, reading: Reading, own: dict[str, Own], running: int) -> None:
        """A reading; ``own`` by generation key; ``running``: own requests at work."""
        self.readings.append((reading, own, running))

    def fault(self, line: str) -> None:
        """A reading that failed."""
        if line not in self.faults:
            self.faults.append(line)

    def holds(self, reading: Reading, own: dict[str, Own], since: int) -> bool:
        """Whether the counters have taken in all own tokens since the reading number ``since``."""
        first, before, _ = self.readings[since]
        mine = _tokens(before, own)
        return mine is None or reading.tokens - first.tokens >= mine

    def windows(self) -> list[CounterWindow]:
        """What the counters rose by from reading to reading, where anything came in between."""
        found: list[CounterWindow] = []
        for (a, before, _), (b, after, _) in zip(self.readings, self.readings[1:], strict=False):
            if b.tokens < a.tokens or (b.drafts or 0) < (a.drafts or 0):
                continue  # the server began again
            starts = {key: before[key].position if key in before else 0 for key in after}
            spans = tuple(
                (k, starts[k], own.position) for k, own in after.items() if own.position > starts[k]
            )
            if b.tokens == a.tokens and not spans:
                continue
            mine = _tokens(before, after)
            found.append(
                CounterWindow(
                    tokens=b.tokens - a.tokens,
                    seconds=b.at - a.at,
                    drafts=(b.drafts or 0) - (a.drafts or 0),
                    draft_tokens=b.draft_tokens - a.draft_tokens,
                    accepted=b.accepted - a.accepted,
                    accepted_per_position=_rise(a.per_position, b.per_position),
                    other_traffic=mine is not None
                    and b.tokens - a.tokens > mine + SLACK_TOKENS + SLACK_SHARE * mine,
                    spans=spans,
                )
            )
        if not self._own_known():
            found = [replace(window, own_known=False) for window in found]
        shared = bool(self.traffic())
        if shared and not any(window.other_traffic for window in found):
            return [replace(window, other_traffic=True) for window in found]  # somewhere among them
        if not shared and not self._restarted():
            # A window's surplus was on its way to a busy client: in the end every token was the run's own.
            return [replace(window, other_traffic=False) for window in found]
        return found

    def traffic(self) -> str:
        """In words, whether anybody else was served during the run; empty where nothing says so."""
        if len(self.readings) < 2:
            return ""
        (first, before, alone), (last, after, _) = self.readings[0], self.readings[-1]
        mine, rise = _tokens(before, after), last.tokens - first.tokens
        signs = []
        if mine is not None and rise > mine + SLACK_TOKENS:
            signs.append(f"the server counted {rise:,} tokens, this run's are {mine:,}")
        more = [extra for r, _, own in self.readings if (extra := (r.running or 0) - own) > 0]
        if len(more) >= CROWDED_READINGS or (first.running or 0) > alone:
            signs.append(f"{max(more)} more requests ran than this run's")
        return "; ".join(signs)

    def _own_known(self) -> bool:
        """Whether all own tokens are known in the end; else a surplus of the counters may be the run's."""
        return not self.readings or _tokens(self.readings[0][1], self.readings[-1][1]) is not None

    def record(self) -> dict[str, Any]:
        """Every reading (``seconds`` since the first), and what was noticed. A counter that fell says that
        the server began again."""
        start = self.readings[0][0].at if self.readings else 0.0
        return {
            "readings": [
                {"seconds": r.at - start, **r.record(), "own_requests": running}
                for r, _, running in self.readings
            ],
            "other_traffic": self.traffic(),
            "own_tokens_known": self._own_known(),
            "restarted": self._restarted(),
            "faults": self.faults,
        }

    def _restarted(self) -> bool:
        pairs = zip(self.readings, self.readings[1:], strict=False)
        return any(b.tokens < a.tokens for (a, _, _), (b, _, _) in pairs)


def _tokens(before: dict[str, Own], after: dict[str, Own]) -> int | None:
    """Own tokens between two readings; None where not all are known."""
    known = [own.tokens for own in (*before.values(), *after.values())]
    if any(tokens is None for tokens in known):
        return None
    return sum(own.tokens or 0 for own in after.values()) - sum(own.tokens or 0 for own in before.values())


def _rise(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value - (a[i] if i < len(a) else 0) for i, value in enumerate(b))


def now() -> float:
    """The clock of readings."""
    return time.perf_counter()
