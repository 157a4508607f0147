"""``ledger.jsonl``: what people concluded of variants, one JSON object a line, only ever appended to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sm70lab.errors import UsageError
from sm70lab.tracking.atomic import disk_error
from sm70lab.tracking.marker import now

NOTES = "ledger.jsonl"
LOCK = ".ledger.lock"
LOCK_SECONDS = 30.0
STATES = ("accepted", "rejected", "open", "superseded")
LONGEST_TEXT = 2000  # characters


@dataclass(frozen=True)
class Note:
    """One conclusion, of the variant that holds ``run``, or of ``variant`` once that run is gone."""

    variant: str
    run: str | None  # experiment/folder
    text: str
    state: str | None  # one of STATES; None leaves the variant's state as it is
    code_revision: str | None  # of the run that it concludes from; None where that was not recorded
    by: str  # note or pin
    when: str = ""


def append(runs_dir: Path, note: Note) -> Note:
    """Add one line, on the disk when this returns; several processes may do so at once.

    A line that a killed process left half-written is closed first, so it spoils no other. Returns the
    note as written. Raises ``UsageError`` where the file cannot be written.
    """
    written = Note(**(asdict(note) | {"text": tidy(note.text), "when": now()}))
    line = json.dumps(asdict(written)).encode() + b"\n"
    path = runs_dir / NOTES
    try:
        with _locked(runs_dir), path.open("a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line
            if file.write(line) != len(line):
                os.ftruncate(file.fileno(), size)
                raise UsageError(f"{path}: the disk is full; free space there")
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(path, error) from error
    return written


def read(runs_dir: Path) -> tuple[list[Note], int]:
    """All notes, oldest first, and the number of lines that cannot be read."""
    try:
        lines = (runs_dir / NOTES).read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise UsageError(f"{runs_dir / NOTES}: cannot be read ({error.strerror or error})") from error
    parsed = [_parse(line) for line in lines if line.strip()]
    notes = [note for note in parsed if note is not None]
    return notes, len(parsed) - len(notes)


def tidy(text: str) -> str:
    """One line without control characters. Raises ``UsageError`` for an empty or very long text."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if not words:
        raise UsageError("the text is empty; say what was concluded")
    if len(words) > LONGEST_TEXT:
        raise UsageError(f"the text has {len(words):,} characters; at most {LONGEST_TEXT:,}")
    return words


def _parse(line: bytes) -> Note | None:
    try:
        value = json.loads(line)
        note = Note(**value)
    except (ValueError, TypeError):
        return None
    texts = (note.variant, note.text, note.by, note.when)
    maybe = (note.run, note.code_revision, note.state)
    sound = all(isinstance(v, str) for v in texts) and all(v is None or isinstance(v, str) for v in maybe)
    return note if sound and note.state in (None, *STATES) else None


@contextmanager
def _locked(runs_dir: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    try:
        with FileLock(runs_dir / LOCK, timeout=LOCK_SECONDS):
            yield
    except Timeout as error:
        raise UsageError(f"{runs_dir / LOCK}: another process holds it; try again") from error
