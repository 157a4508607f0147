"""What a report reads of a run folder, whatever state the run is in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sm70lab.raw_text import load_yaml
from sm70lab.schema import Round
from sm70lab.tracking import result as results
from sm70lab.tracking import tables
from sm70lab.tracking.result import NO_HAZARD
from sm70lab.tracking.run_folder import CONFIG, ENVIRONMENT, GENERATIONS, RESULT, RunFolder

FINISHED, INTERRUPTED, RUNNING, DAMAGED = "finished", "interrupted", "running", "damaged"


@dataclass
class Record:
    """One run as its folder tells it. ``result`` is empty where there is none that can be read."""

    folder: RunFolder
    state: str  # finished, interrupted, running or damaged
    note: str  # what ended it, who is at work, what is damaged; empty for a finished run
    result: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    evidence: dict[str, dict[str, Any]] = field(default_factory=dict)  # by kind

    @property
    def name(self) -> str:
        return self.folder.path.name

    @property
    def route(self) -> str:
        found = self.config.get("route")
        named = found.get("name") if isinstance(found, dict) else None
        return str(self.result.get("route") or named or "?")

    @property
    def seed(self) -> Any:
        return self.config.get("seed", self.result.get("seed", "?"))

    @property
    def verdict(self) -> str | None:
        """The verdict's kind; None for a run without one."""
        return str(self.result["verdict"]["kind"]) if self.state == FINISHED else None

    @property
    def hazard(self) -> str | None:
        """The fault put in on purpose, if there was one."""
        name = self.config.get("hazard", self.result.get("hazard", NO_HAZARD))
        return None if name == NO_HAZARD else str(name)

    @property
    def idle_hazard(self) -> bool:
        """Whether the hazard could change nothing in this run."""
        return bool((self.result.get("loaded") or {}).get("hazard_cannot_act"))

    @property
    def started(self) -> str:
        return str(self.environment.get("started") or self.result.get("started") or "")

    def metric(self, kind: str, name: str) -> float | None:
        """A number of one kind of evidence; None where it was not recorded."""
        value = self.evidence.get(kind, {}).get("metrics", {}).get(name)
        return float(value) if isinstance(value, int | float) else None

    def detail(self, kind: str, name: str) -> Any:
        """A detail of one kind of evidence; None where it was not recorded."""
        return self.evidence.get(kind, {}).get("details", {}).get(name)

    def speed(self) -> float | None:
        """tok/s that may be ranked; None where it may not."""
        values = self.result.get("speed") or {}
        found = values.get("tokens_per_second")
        return float(found) if values.get("valid") and found else None

    def windows(self) -> list[dict[str, Any]]:
        """The acceptance windows: see ``judge.acceptance.evidence``."""
        return list(self.detail("acceptance", "windows") or [])

    def rounds(self) -> dict[str, list[Round]]:
        """Generation key → rounds; empty where the table is not there or cannot be read."""
        import pyarrow

        try:
            return tables.read_rounds(self.folder.path / tables.ROUNDS)
        except (OSError, KeyError, pyarrow.ArrowException):
            return {}

    def text(self, key: str) -> str | None:
        """One output's text; None where it is not there. Never outside the run folder."""
        if Path(key).name != key:
            return None
        try:
            path = self.folder.path / GENERATIONS / f"{key}.txt"
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None


def read(folder: RunFolder) -> Record:
    """Read one run folder; what cannot be read becomes ``damaged`` and says which file it is."""
    damage: list[str] = []
    config = _mapping(_load_yaml(folder.path / CONFIG), CONFIG, damage)
    environment = _mapping(_load_json(folder.path / ENVIRONMENT), ENVIRONMENT, damage)
    result = _mapping(_load_json(folder.path / RESULT), RESULT, []) or {}
    if folder.owner() is not None and not folder.done:
        return Record(folder, RUNNING, "its process is still at work", {}, config, environment)
    if result and (missing := results.incomplete(result)):
        return Record(folder, DAMAGED, f"{RESULT}: {missing}", {}, config, environment)
    if not result and (folder.path / RESULT).exists():
        damage.append(f"{RESULT}: cannot be read")
    ended = folder.interruption()
    if damage and not result:
        return Record(folder, DAMAGED, "; ".join(damage), {}, config, environment)
    if not result or result["status"] == "interrupted":
        what = result.get("interrupted") or ended.get("what") or "no result was written"
        return Record(folder, INTERRUPTED, str(what), result, config, environment)
    if not folder.done:
        what = "its process is gone before it was closed; the next run closes it"
        return Record(folder, INTERRUPTED, what, result, config, environment)
    evidence = {e["kind"]: e for e in result["verdict"]["evidence"]}
    return Record(folder, FINISHED, "; ".join(damage), result, config, environment, evidence)


def runs_in(folder: Path) -> Iterator[RunFolder]:
    """The run folders right below ``folder``, in order of name, those that lost a file too."""
    for path in sorted(folder.iterdir()):
        known = any((path / name).is_file() for name in (CONFIG, RESULT, ENVIRONMENT))
        if known and not path.name.startswith("."):
            yield RunFolder(path)


def newest(folders: Iterable[RunFolder]) -> Record | None:
    """The record of the run that was started last."""
    records = [read(folder) for folder in folders]
    return max(records, key=lambda r: (r.started, r.name), default=None)


def _mapping(value: Any, name: str, damage: list[str]) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    damage.append(f"{name}: cannot be read")
    return {}


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _load_yaml(path: Path) -> Any:
    try:
        return load_yaml(path)
    except (OSError, ValueError, yaml.YAMLError):
        return None
