"""The ledger: every variant ever run under a runs folder, with its verdicts and what was concluded.

Computed from the run folders each time, so it cannot get out of step with them. Only the conclusions
are kept, in ``ledger.jsonl`` (see ``notes``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from sm70lab.config import plain
from sm70lab.config_checks_target import SERVER_HARDWARE
from sm70lab.errors import UsageError
from sm70lab.schema import ExperimentConfig
from sm70lab.tracking import notes as note_file
from sm70lab.tracking.accepted import Accepted, baseline
from sm70lab.tracking.find_runs import resolve_run
from sm70lab.tracking.fingerprint import code_revision
from sm70lab.tracking.notes import Note
from sm70lab.tracking.report import records
from sm70lab.tracking.report.records import Record
from sm70lab.tracking.result import NO_HAZARD
from sm70lab.tracking.run_folder import CONFIG, DONE, ENVIRONMENT, INTERRUPTED, RESULT, RUNNING, RunFolder
from sm70lab.tracking.variant import ID_DIGITS, Settings, difference, settings_of, variant_id

RUN_FILES = (CONFIG, RESULT, DONE, RUNNING, INTERRUPTED)  # a folder with one of them is or was a run
STATUS_ORDER = ("ok", "warn", "unknown", "bad")
STRENGTH = ("shape", "acceptance", "audit")
THE_ACCEPTED_ROUTE = "as the accepted route"
VARIANT = re.compile(rf"v[0-9a-f]{{3,{ID_DIGITS}}}")


@dataclass(frozen=True)
class Speed:
    """Valid speed of one variant on one device: medians over its passing runs."""

    hardware: str
    runs: int
    tokens_per_second: float
    rounds_per_second: float | None


@dataclass
class Row:
    """One variant."""

    variant: str
    settings: Settings  # empty where only its notes are left
    differs: list[str]  # key=value of what differs from the accepted route; empty for itself
    revision: str  # this code's own, which a rejection is held against
    hazard: str | None = None
    pinned: bool = False  # accepted.yaml holds this variant
    runs: list[Record] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)  # oldest first

    @property
    def routes(self) -> list[str]:
        """The names its runs gave the route."""
        return sorted({run.route for run in self.runs})

    @property
    def seeds(self) -> list[Any]:
        by_text = {str(run.seed): run.seed for run in self.runs}
        return [by_text[text] for text in sorted(by_text, key=lambda text: (len(text), text))]

    @property
    def verdicts(self) -> Counter[str]:
        """How often each verdict; runs without one count as interrupted, running or damaged."""
        return Counter(run.verdict or run.state for run in self.runs)

    @property
    def ruling(self) -> Note | None:
        """The note that says the state, if there is one."""
        return next((note for note in reversed(self.notes) if note.state is not None), None)

    @property
    def state(self) -> str:
        """accepted, rejected, open or superseded."""
        if self.ruling is not None and self.ruling.state is not None:
            return self.ruling.state
        return "accepted" if self.pinned else "open"

    @property
    def blocks(self) -> bool:
        """Whether a new run is refused: rejected from a run of this code."""
        return (
            self.state == "rejected"
            and self.ruling is not None
            and self.ruling.code_revision == self.revision
        )

    @property
    def state_words(self) -> str:
        """The state, and where a rejection holds no more."""
        if self.state != "rejected" or self.blocks:
            return self.state
        known = self.ruling is not None and self.ruling.code_revision is not None
        return f"rejected at {'another' if known else 'an unknown'} revision"

    @property
    def conclusion(self) -> str:
        """What was last noted; empty where nothing was."""
        return self.notes[-1].text if self.notes else ""

    @property
    def worst(self) -> tuple[Record, str, str, str] | None:
        """(run, kind, status, line) of the evidence that speaks most against it."""
        found = [
            (STATUS_ORDER.index(e["status"]), STRENGTH.index(kind), -_p_value(run, kind), run, e)
            for run in self.runs
            for kind, e in run.evidence.items()
            if e["status"] in STATUS_ORDER and kind in STRENGTH
        ]
        if not found:
            return None
        *_, run, e = max(found, key=lambda one: one[:3])
        return run, str(e["kind"]), str(e["status"]), str(e["line"])

    @property
    def speeds(self) -> list[Speed]:
        """Valid speeds, one a device."""
        by_device: dict[str, list[Record]] = {}
        for run in self.runs:
            if run.speed() is not None:
                by_device.setdefault(hardware_of(run), []).append(run)
        return [
            Speed(device, len(runs), median(run.speed() or 0.0 for run in runs), _median_rounds(runs))
            for device, runs in sorted(by_device.items())
        ]

    @property
    def newest(self) -> Record | None:
        """The run started last, a finished one if there is any."""
        return max(self.runs, key=lambda run: (run.verdict is not None, run.started), default=None)

    @property
    def what(self) -> str:
        """Route and difference in one line."""
        names = "/".join(self.routes) or "runs are gone"
        return f"{names}: {' '.join(self.differs) or THE_ACCEPTED_ROUTE}" if self.runs else names

    @property
    def line(self) -> str:
        """The row in one line."""
        counts = ", ".join(f"{n} {verdict}" for verdict, n in sorted(self.verdicts.items())) or "no run"
        said = f'; "{self.conclusion}"' if self.conclusion else ""
        return f"{self.variant} {self.state_words} ({counts}) {self.what}{said}"


@dataclass
class Ledger:
    """All rows of a runs folder."""

    runs_dir: Path
    base: Settings  # what rows differ from
    accepted: Accepted | None  # its file; None where nothing is pinned and ``base`` is the defaults
    revision: str
    rows: list[Row]
    damaged: list[Record]  # run folders whose configuration cannot be read
    unreadable_notes: int

    def row(self, variant: str) -> Row | None:
        """The row of a variant id."""
        return next((row for row in self.rows if row.variant == variant), None)

    def find(self, text: str) -> tuple[Row, Record | None]:
        """The row that a variant id (or its beginning) or a run names, and that run.

        Raises ``UsageError`` where there is none, or several.
        """
        if not VARIANT.fullmatch(text):
            return self.holding(resolve_run(text, self.runs_dir))
        rows = [row for row in self.rows if row.variant.startswith(text)]
        if len(rows) != 1:
            found = f"{len(rows)} variants fit; give more of the id" if rows else "no such variant"
            raise UsageError(f"{text}: {found} in {self.runs_dir} (sm70lab ledger lists them)")
        return rows[0], None

    def holding(self, run: RunFolder) -> tuple[Row, Record]:
        """The row that holds a run, and the run as read. Raises ``UsageError`` where none does."""
        path = run.path.resolve()
        for row in self.rows:
            for record in row.runs:
                if record.folder.path.resolve() == path:
                    return row, record
        damaged = any(record.folder.path.resolve() == path for record in self.damaged)
        why = "its config.yaml cannot be read" if damaged else f"not under tracking.runs_dir={self.runs_dir}"
        raise UsageError(f"{run}: {why}, so it is of no variant here")


def build(runs_dir: Path, accepted: str | None = None) -> Ledger:
    """Read every run folder and note. ``accepted``: another ``accepted.yaml`` than the usual.

    Raises ``UsageError`` for a damaged ``accepted.yaml`` or notes that cannot be read, for no run folder.
    """
    base, pinned = baseline(accepted)
    revision = code_revision()
    rows: dict[str, Row] = {}
    by_run: dict[str, Row] = {}
    damaged: list[Record] = []
    pinned_id = variant_id(base) if pinned is not None else None
    for folder in run_folders(runs_dir):
        run, settings = _read(folder)
        if settings is None:
            damaged.append(run)
            continue
        mark = variant_id(settings)
        if mark not in rows:
            hazard = None if settings["hazard"] == NO_HAZARD else str(settings["hazard"])
            rows[mark] = Row(mark, settings, difference(settings, base), revision, hazard, mark == pinned_id)
        rows[mark].runs.append(run)
        by_run[folder.full_name] = rows[mark]
    notes, unreadable = note_file.read(runs_dir)
    for note in notes:
        row = by_run.get(note.run or "") or rows.get(note.variant)
        if row is None:
            row = rows[note.variant] = Row(note.variant, {}, [], revision)
        row.notes.append(note)
    ordered = sorted(
        rows.values(), key=lambda row: max((run.started for run in row.runs), default=""), reverse=True
    )
    ordered.sort(key=lambda row: row.state != "accepted")
    return Ledger(runs_dir, base, pinned, revision, ordered, damaged, unreadable)


def run_folders(runs_dir: Path) -> Iterator[RunFolder]:
    """Every folder that is or was a run, whole or not, in order of name."""
    for path in sorted(runs_dir.glob("*/*/")):
        hidden = path.name.startswith(".") or path.parent.name.startswith(".")
        if not hidden and any((path / name).exists() for name in RUN_FILES):
            yield RunFolder(path)


def variant_of(config: ExperimentConfig, weights: str) -> str:
    """The variant id of a configuration that may never have run."""
    return variant_id(settings_of(plain(config), weights))


def rejection(config: ExperimentConfig, weights: str) -> Row | None:
    """The row that refuses to start this configuration: its variant is rejected at this code revision.

    Run folders are read only where some note rejects something at this revision.
    """
    runs_dir, revision = Path(config.tracking.runs_dir), code_revision()
    notes, _ = note_file.read(runs_dir)
    if not any(note.state == "rejected" and note.code_revision == revision for note in notes):
        return None
    row = build(runs_dir).row(variant_of(config, weights))
    return row if row is not None and row.blocks else None


def row_line(config: ExperimentConfig, weights: str) -> str | None:
    """The ledger's line of a configuration; None where it has no row or the ledger cannot be read."""
    try:
        row = build(Path(config.tracking.runs_dir)).row(variant_of(config, weights))
    except UsageError:
        return None
    return None if row is None else row.line


def code_of(run: Record) -> str | None:
    """The code revision a run was made by; None for records older than that field."""
    found = run.environment.get("code_revision")
    return found if isinstance(found, str) else None


def hardware_of(run: Record) -> str:
    """The name of the device a run used."""
    device = str((run.result.get("loaded") or {}).get("device", ""))
    if device == SERVER_HARDWARE:
        return device
    gpus = run.environment.get("gpus") or []
    if device.startswith("cuda") and gpus:
        index = int(device.partition(":")[2] or 0)
        return str(gpus[index if index < len(gpus) else 0].get("name"))
    return str((run.environment.get("cpu") or {}).get("name") or "unknown hardware")


def _read(folder: RunFolder) -> tuple[Record, Settings | None]:
    """A run and its settings; None where these cannot be read."""
    if not folder.done:
        return _parse(folder.path)
    files = (folder.path / name for name in (CONFIG, RESULT, ENVIRONMENT))
    return _parse_finished(folder.path, tuple(file.stat().st_mtime_ns for file in files if file.exists()))


@lru_cache(maxsize=10_000)
def _parse_finished(path: Path, changed: tuple[int, ...]) -> tuple[Record, Settings | None]:
    """Finished runs are parsed once a process: a restarted sweep asks for the ledger at every skipped job."""
    return _parse(path)


def _parse(path: Path) -> tuple[Record, Settings | None]:
    run = records.read(RunFolder(path))
    try:
        return run, settings_of(run.config, _weights(run)) if run.config else None
    except (ValueError, TypeError):
        return run, None


def _p_value(run: Record, kind: str) -> float:
    found = run.metric(kind, "p_value")
    return 1.0 if found is None else found


def _weights(run: Record) -> str | None:
    found = run.environment.get("model_hash") or (run.result.get("loaded") or {}).get("model_hash")
    return found if isinstance(found, str) and found else None


def _median_rounds(runs: list[Record]) -> float | None:
    rates = [run.result["speed"].get("rounds_per_second") for run in runs]
    known = [float(rate) for rate in rates if isinstance(rate, int | float)]
    return median(known) if known else None
