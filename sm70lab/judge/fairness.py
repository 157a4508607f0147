"""What two runs must have in common before one is called better than the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sm70lab.dotted import dotted
from sm70lab.errors import UsageError
from sm70lab.judge.comparison import Arm

# What a comparison is about, or what is shown and kept but not run.
FREE = ("route", "name", "tracking", "display", "force", "seed", "repeats", "first_repeat", "sprt")
# Covered by the model's hash, or a mere name of what is compared in full.
COVERED = ("model.path", "model.name", "model.shape", "model.seed", "workload.name")
# The machine and how it is used: outcomes stay comparable, speeds do not.
SPEED_ONLY = (
    "hardware",
    "target.device",
    "target.threads",
    "target.kernels",
    "target.max_num_seqs",
)
VALUE_CHARS = 60
MISSING = "not recorded"


def facts(
    config: dict[str, Any], model_hash: str | None, hardware: str, threads: int | None = None
) -> dict[str, Any]:
    """Dotted field → value of everything that must agree, from a run's plain configuration.

    ``threads`` is what the run really used, where ``target.threads`` left it open.
    """
    found: dict[str, Any] = {"model_hash": model_hash, "hardware": hardware}
    compared = {key: value for key, value in config.items() if key not in FREE}
    found |= {key: value for key, value in dotted(compared, "") if not _under(key, COVERED)}
    if threads is not None and (config.get("target") or {}).get("name", "engine") == "engine":
        found["target.threads"] = threads
    return found


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(field, value in a, value in b) wherever they differ, in order of name."""
    keys = sorted(a.keys() | b.keys())
    return [(k, a.get(k, MISSING), b.get(k, MISSING)) for k in keys if a.get(k, MISSING) != b.get(k, MISSING)]


def refuse_unfair(arms: Sequence[Arm], allow: Collection[str] = ()) -> tuple[dict[str, str], list[str]]:
    """Check every arm against the first. Returns (label → why its speed is not comparable, notes).

    Raises ``UsageError`` that names each differing field and both values, unless ``allow`` names the
    field or the section it is in, and for a name in ``allow`` under which nothing differs.
    """
    baseline = arms[0]
    refused: dict[str, str] = {}
    notes: list[str] = []
    used: set[str] = set()
    for arm in arms[1:]:
        found = differences(_facts_of(baseline), _facts_of(arm))
        allowed = [entry for entry in found if _under(entry[0], allow)]
        others = [entry for entry in found if entry not in allowed]
        unfair = [entry for entry in others if not _under(entry[0], SPEED_ONLY)]
        speed = [entry for entry in others if _under(entry[0], SPEED_ONLY)]
        if unfair:
            fields = ",".join([*allow, *(entry[0] for entry in unfair)])
            raise UsageError(
                f"unfair: {baseline.label} against {arm.label} differ in {in_words(unfair)}; "
                f"where that is on purpose: allow={fields}"
            )
        if speed:
            refused[arm.label] = f"differs in {in_words(speed)}"
        if allowed:
            notes.append(f"{arm.label} differs on purpose in {in_words(allowed)}")
        used |= {name for name in allow for entry in allowed if _under(entry[0], [name])}
    idle = [name for name in allow if name not in used]
    if idle:
        raise UsageError(f"allow={','.join(idle)}: does not differ; name only what does")
    return refused, notes


def _facts_of(arm: Arm) -> dict[str, Any]:
    """One value a field; of an arm whose runs differ among themselves, the values joined."""
    merged: dict[str, Any] = {}
    for key in sorted({key for run in arm.runs for key in run.facts}):
        values = [run.facts.get(key, MISSING) for run in arm.runs]
        first = values[0]
        same = all(value == first for value in values)
        merged[key] = first if same else " and ".join(sorted({str(value) for value in values}))
    return merged


def in_words(entries: Sequence[tuple[str, Any, Any]]) -> str:
    """Differences for a person: field, value against value."""
    return "; ".join(f"{key} {_short(a)} against {_short(b)}" for key, a, b in entries)


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str) and (not value or value != value.strip()) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= VALUE_CHARS else text[: VALUE_CHARS - 1] + "…"


def _under(key: str, names: Collection[str]) -> bool:
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in names)
