"""Standard output and error that may be closed, full or gone: a run goes on without its readers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

STANDARD = (0, 1, 2)


class Tolerant:
    """A text stream that goes silent for good where it cannot be written.

    What Python or C code writes to the same descriptor later, at the latest when Python flushes at
    its end, goes to /dev/null: the exit code stays the command's own.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._silent = False

    def write(self, text: str) -> int:
        """Write, or drop the text."""
        if not self._silent:
            try:
                return self._stream.write(text)
            except OSError:
                self._give_up()
        return len(text)

    def flush(self) -> None:
        """Flush, or drop what is buffered."""
        if not self._silent:
            try:
                self._stream.flush()
            except OSError:
                self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        self._silent = True
        with contextlib.suppress(OSError):  # a stream without a descriptor has no end to spoil
            descriptor = self._stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


@contextlib.contextmanager
def tolerant_streams() -> Iterator[None]:
    """Within, ``sys.stdout`` and ``sys.stderr`` never raise."""
    _fill_closed_descriptors()
    before = sys.stdout, sys.stderr
    inside = [Tolerant(stream or _nowhere()) for stream in before]
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in inside)
    try:
        yield
    finally:
        for stream in inside:
            stream.flush()
        sys.stdout, sys.stderr = before


def _fill_closed_descriptors() -> None:
    """A descriptor closed by the shell (``2>&-``) would be given to the next file that is opened."""
    for descriptor in STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 - it lives as long as the command
