"""The server that outlives a run: a sweep's next job takes it over where nothing of it has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


class Stoppable(Protocol):
    """A running server."""

    def stop(self) -> None:
        """End it with its whole tree."""


@dataclass
class Kept:
    """At most one server at a time: two would share a device's memory."""

    server: Stoppable | None = None

    def stop(self) -> None:
        """End what is kept."""
        server, self.server = self.server, None
        if server is not None:
            server.stop()


_kept: ContextVar[Kept | None] = ContextVar("sm70lab_kept_server", default=None)


@contextmanager
def keep_server() -> Iterator[Kept]:
    """Within it servers outlive the runs that started them; at its end they are gone, whatever happened."""
    kept = Kept()
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)
        kept.stop()


def kept() -> Kept | None:
    """Where a run may leave its server; None: it ends it itself."""
    return _kept.get()
