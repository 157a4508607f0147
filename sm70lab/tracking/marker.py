"""``RUNNING``: which process works in a folder, and whether it still does."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BEAT_SECONDS = 10.0
DEAD_SECONDS = 600.0  # a marker of another host that was not touched for so long has no process


def this_process() -> dict[str, Any]:
    """What ``RUNNING`` says."""
    import psutil

    process = psutil.Process()
    return {
        "pid": process.pid,
        "host": platform.node(),
        "created": process.create_time(),
        "started": now(),
    }


def live_owner(marker: Path) -> dict[str, Any] | None:
    """The live process that a marker names, or None.

    A process of this host is looked up; one of another host lives while its marker is touched.
    """
    try:
        process = json.loads(marker.read_text(encoding="utf-8"))
        age = time.time() - marker.stat().st_mtime
    except (OSError, ValueError):
        return None
    if not isinstance(process, dict):
        return None
    alive = age < DEAD_SECONDS if foreign(process) else _alive(process)
    return process if alive else None


def foreign(process: dict[str, Any]) -> bool:
    """Whether a process runs on another host, so that nobody here can look for it."""
    return process.get("host") != platform.node()


def now() -> str:
    """The time as markers hold it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Heartbeat:
    """Touches ``marker`` every few seconds, while active and while the marker is there.

    A thread, since loading and auditing report no progress for minutes; it sleeps but for one
    system call a beat, so the decoder that is being timed does not notice.
    """

    def __init__(self, marker: Path, seconds: float = BEAT_SECONDS) -> None:
        self._marker, self._seconds = marker, seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(self._seconds):
            with suppress(OSError):  # a missed beat is no reason to end a run
                os.utime(self._marker)


def _alive(process: dict[str, Any]) -> bool:
    """Whether the same process still runs: a pid alone may have been given to another."""
    import psutil

    try:
        found = psutil.Process(int(process["pid"]))
        same = abs(found.create_time() - float(process["created"])) < 1
        return same and bool(found.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, KeyError, ValueError, TypeError):
        return False
