"""What a run folder becomes in MLflow: params, metrics, series and tags, within MLflow's limits.

Pure functions over the recorded files; mlflow itself is not imported here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sm70lab.dotted import dotted
from sm70lab.judge.acceptance import Pooled, pool
from sm70lab.schema import Round

TABLE = "generations.json"  # the table of outputs, in the form that MLflow's pages show
PARAM_CHARS, TAG_CHARS, KEY_CHARS = 6000, 8000, 250
NOT_ALLOWED = re.compile(r"[^\w\-./ ]")  # MLflow refuses % = [ ] , and more in names


@dataclass(frozen=True)
class Point:
    """One metric value. ``step`` counts output tokens."""

    key: str
    value: float
    step: int


def params(config: dict[str, Any]) -> dict[str, str]:
    """The configuration, flattened to dotted names and cut to MLflow's limits."""
    return {_name(key): _text(value)[:PARAM_CHARS] for key, value in dotted(config, "", ".{}")}


def tags(result: dict[str, Any], environment: dict[str, Any], folder: str, summary: str) -> dict[str, str]:
    """What a person filters and sorts by."""
    git = environment.get("git") or {}
    verdict = result.get("verdict") or {}
    gpus = environment.get("gpus") or []
    found = {
        "mlflow.runName": folder.rsplit("/", 1)[-1],
        "mlflow.source.name": "sm70lab",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": git.get("commit"),
        "mlflow.note.content": summary,
        "sm70lab.uid": environment.get("uid"),
        "sm70lab.folder": folder,
        "sm70lab.fingerprint": result.get("fingerprint"),
        "sm70lab.version": result.get("sm70lab"),
        "git.dirty": git.get("dirty"),
        "host": environment.get("host"),
        "gpu": gpus[0]["name"] if gpus else None,
        "status": result.get("status"),
        "interrupted": result.get("interrupted"),
        "verdict": verdict.get("kind"),
        "reason": verdict.get("reason"),
        **{key: result.get(key) for key in ("route", "hazard", "target", "model", "workload", "seed")},
        **{f"loaded.{key}": value for key, value in (result.get("loaded") or {}).items()},
    }
    return {_name(key): str(value)[:TAG_CHARS] for key, value in found.items() if value is not None}


def metrics(result: dict[str, Any]) -> Iterator[Point]:
    """One value a run: the evidence's numbers and the speed.

    A speed that may not be ranked goes under ``speed_invalid``, so that sorting by
    ``speed.tokens_per_second`` never puts a loop first.
    """
    tokens = sum(g["tokens"] for g in result["generations"])
    yield Point("tokens", tokens, tokens)
    for evidence in (result.get("verdict") or {}).get("evidence", []):
        for key, value in evidence["metrics"].items():
            if evidence["kind"] == "acceptance" and key.endswith("per_second"):
                continue
            yield from _point(f"{evidence['kind']}.{key}", value, tokens)
    if speed := result.get("speed"):
        prefix = "speed" if speed["valid"] else "speed_invalid"
        for key, value in speed.items():
            if key not in ("valid", "shared"):
                yield from _point(f"{prefix}.{key}", value, tokens)
    for name, percentiles in (result.get("latency") or {}).items():
        if isinstance(percentiles, dict):
            for key, value in percentiles.items():
                yield from _point(f"latency.{name}.{key}", value, tokens)
    for g in result["generations"]:
        yield Point(_name(f"generation.{g['key']}.tokens"), g["tokens"], g["tokens"])
        yield from _point(f"generation.{g['key']}.decode_seconds", g["decode_seconds"], g["tokens"])


def series(rounds: dict[str, list[Round]], window_tokens: int) -> Iterator[Point]:
    """Windowed values over output tokens: all generations pooled, and each by itself."""
    everything = [r for group in rounds.values() for r in group]
    yield from _windows("window", everything, window_tokens)
    if len(rounds) > 1:
        for key, group in rounds.items():
            yield from _windows(f"window.{key}", group, window_tokens)


def generation_table(result: dict[str, Any], texts: dict[str, str], rounds: dict[str, list[Round]]) -> str:
    """One row an output, with its text, as MLflow's table JSON (pandas' ``split`` form)."""
    recorded = ("tokens", "finish_reason", "failure", "prompt", "repeat", "seed")
    measured = ("acceptance_length", "tokens_per_second", "rounds_per_second")
    rows = []
    for g in result["generations"]:
        pooled = pool(rounds.get(g["key"], []))
        numbers = [value if math.isfinite(value := getattr(pooled, name)) else None for name in measured]
        row = [g["key"], g.get("passed"), texts.get(g["key"]), *(g.get(name) for name in recorded)]
        rows.append([*row, *numbers])
    columns = ["generation", "passed", "text", *recorded, *measured]
    return json.dumps({"columns": columns, "data": rows}, ensure_ascii=False)


def milliseconds(timestamp: str) -> int:
    """An ISO timestamp as MLflow's milliseconds."""
    return int(datetime.fromisoformat(timestamp).timestamp() * 1000)


def _windows(prefix: str, rounds: list[Round], size: int) -> Iterator[Point]:
    groups: dict[int, list[Round]] = {}
    for r in rounds:
        groups.setdefault(r.position // size, []).append(r)
    for index, group in sorted(groups.items()):
        for key, value in _values(pool(group)):
            yield from _point(f"{prefix}.{key}", value, (index + 1) * size)


def _values(pooled: Pooled) -> Iterator[tuple[str, float]]:
    yield "tokens_per_second", pooled.tokens_per_second
    yield "rounds_per_second", pooled.rounds_per_second
    if pooled.tested:
        yield "acceptance_length", pooled.acceptance_length
    for position, rate in enumerate(pooled.rates, 1):
        yield f"rate_{position}", rate


def _point(key: str, value: float | None, step: int) -> Iterator[Point]:
    if value is not None and math.isfinite(value):
        yield Point(_name(key), float(value), step)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _name(key: str) -> str:
    return NOT_ALLOWED.sub("_", key)[:KEY_CHARS]
