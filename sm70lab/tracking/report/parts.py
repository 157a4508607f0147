"""Pieces that the page of a run and the page of a sweep share."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sm70lab.tracking import mlflow_rows
from sm70lab.tracking.fingerprint import NOT_COUNTED
from sm70lab.tracking.report.records import FINISHED, Record

EXCERPT_CHARS, EXCERPT_LINES = 320, 8  # at most, of the text on either side of a fault
LABELS = {
    "pass": "pass",
    "route_fault": "route fault",
    "model_degenerate": "model degenerate",
    "inconclusive": "inconclusive",
}
NOT_COMPARED = (*NOT_COUNTED, "name", "seed", "model.path")
VALUE_CHARS = 160


@dataclass(frozen=True)
class Alternative:
    """A token that the reference could have drawn at the fault, with its probability there."""

    text: str
    probability: float

    @property
    def percent(self) -> float:
        return 100 * self.probability


@dataclass(frozen=True)
class Excerpt:
    """Text around a fault, the faulty part by itself."""

    title: str
    line: str
    before: str
    fault: str
    after: str
    alternatives: list[Alternative] = field(default_factory=list)
    drawn: Alternative | None = None  # with the run's own noise


@dataclass(frozen=True)
class Difference:
    """One setting and its value in each column."""

    key: str
    values: list[str]


def label(record: Record) -> str:
    """The words for a run's end: its verdict, or the state of a run that has none."""
    kind = record.verdict
    return LABELS.get(kind, kind) if kind is not None else record.state


def style(record: Record) -> str:
    """The style sheet's class for a run's end."""
    kind = record.verdict
    return kind if kind in LABELS else record.state if kind is None else "inconclusive"


def excerpts(record: Record) -> Iterator[Excerpt]:
    """The text around the audit's first fault, and around the first that text shape found."""
    if (audit := audit_excerpt(record)) is not None:
        yield audit
    if (shape := shape_excerpt(record)) is not None:
        yield shape


def audit_excerpt(record: Record) -> Excerpt | None:
    """The first token that the reference could not have drawn; None where none, or not recorded."""
    first = record.detail("audit", "first_bad")
    if not isinstance(first, dict) or not isinstance(first.get("context"), dict):
        return None
    context = first["context"]
    other = [found for a in first.get("alternatives") or [] if (found := _alternative(a)) is not None]
    line = f"{first['generation']}, token {first['index']:,} (id {first['token']}): {_rule(first)}"
    line += f"; {first['place']}" if first.get("place") else ""
    return Excerpt(
        "The first token that the reference could not have drawn",
        line,
        _before(str(context.get("before", ""))),
        str(context.get("token", "")),
        _after(str(context.get("after", ""))),
        other,
        _alternative(first.get("drawn")),
    )


def _alternative(recorded: Any) -> Alternative | None:
    if not isinstance(recorded, dict) or recorded.get("probability") is None:
        return None
    return Alternative(str(recorded["text"]), float(recorded["probability"]))


def shape_excerpt(record: Record) -> Excerpt | None:
    """The first place at which text shape failed, in the recorded text."""
    for key, measured in (record.detail("shape", "generations") or {}).items():
        for failure in measured.get("failures") or []:
            place = _place(failure, measured)
            text = record.text(key) if place is not None else None
            if place is None or text is None or not 0 <= place[0] < len(text):
                continue
            start, unit = place
            end = start + (len(unit) if unit and text.startswith(unit, start) else 1)
            return Excerpt(
                "Where the text's shape fails first",
                f"{key}: {failure.get('line', failure.get('metric'))}",
                _before(text[:start]),
                text[start:end],
                _after(text[end:]),
            )
    return None


def differences(columns: Mapping[str, dict[str, Any]]) -> list[Difference]:
    """The settings in which configurations differ, flattened to dotted names; one value a column."""
    flat = [mlflow_rows.params(config) for config in columns.values()]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    found = []
    for key in keys:
        values = [settings.get(key, "null") for settings in flat]  # a setting of a later version
        if len(set(values)) > 1 and not _skipped(key):
            found.append(Difference(key, [_short(value) for value in values]))
    return found


def environment_rows(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value) of the machine and the software."""
    cpu, git = environment.get("cpu") or {}, environment.get("git") or {}
    rows = [("host", environment.get("host")), ("system", environment.get("platform"))]
    if cpu:
        memory = f", {cpu['memory_bytes'] / 2**30:.0f} GiB" if cpu.get("memory_bytes") else ""
        rows.append(("CPU", f"{cpu.get('name')}, {cpu.get('cores')} cores{memory}"))
    for gpu in environment.get("gpus") or []:
        size = (gpu.get("memory_bytes") or 0) / 2**30
        rows.append(("GPU", f"{gpu.get('name')}, compute capability {gpu.get('capability')}, {size:.0f} GiB"))
    rows.append(("driver", environment.get("driver")))
    if git:
        rows.append(("code", f"{git.get('commit')}{' with uncommitted changes' if git.get('dirty') else ''}"))
    rows.append(("Python", environment.get("python")))
    packages = environment.get("packages") or {}
    rows.append(("packages", ", ".join(f"{name} {version}" for name, version in packages.items())))
    return [(name, str(value)) for name, value in rows if value]


def typed(environment: dict[str, Any]) -> str | None:
    """The command as it was typed: a sweep's jobs all have the sweep's."""
    words = [str(word) for word in environment.get("command") or []]
    return shlex.join(["sm70lab", *words[1:]]) if words else None


def seconds(value: Any) -> str:
    """A duration with its unit; a dash where it was not measured."""
    return f"{value:.2f} s" if isinstance(value, int | float) else "–"


def finished(records: Sequence[Record]) -> list[Record]:
    """Those with a verdict."""
    return [record for record in records if record.state == FINISHED]


def _before(text: str) -> str:
    return "\n".join(text[-EXCERPT_CHARS:].split("\n")[-EXCERPT_LINES:])


def _after(text: str) -> str:
    return "\n".join(text[:EXCERPT_CHARS].split("\n")[:EXCERPT_LINES])


def _place(failure: dict[str, Any], measured: dict[str, Any]) -> tuple[int, str] | None:
    """(character, repeated unit) of what failed: gate=strict puts it into the failure itself,
    gate=fixed_quality into the metric's own measure. None where it has no such place.
    """
    metric = str(failure.get("metric"))
    found = failure if "position" in failure else measured.get(metric)
    if isinstance(found, list):
        found = found[0] if found else None
    if metric == "max_same_token_run" or not isinstance(found, dict):
        return None  # its position counts tokens
    position = found.get("position")
    return (position, str(found.get("unit", ""))) if isinstance(position, int) else None


def _rule(first: dict[str, Any]) -> str:
    """Which rule the token broke, and by how much."""
    words = {
        "argmax": "not the reference's argmax, behind it by",
        "noise": "not what the reference draws with the same noise, behind it by",
        "banned": "a banned token, beyond the cut by",
    }
    gap = first.get("gap")
    size = f"{gap:.3g}" if isinstance(gap, int | float) else "more than any number"
    broken = words.get(first["rule"]) or f"outside {first['rule']}, beyond the cut by"
    return f"{broken} {size}"


def _skipped(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in NOT_COMPARED)


def _short(value: str) -> str:
    return value if len(value) <= VALUE_CHARS else f"{value[: VALUE_CHARS - 1]}…"
