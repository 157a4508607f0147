"""Child processes that leave nothing behind: each runs in its own group, and the group is ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sm70lab.errors import UsageError

GRACE_SECONDS = 10.0


@contextmanager
def tree(
    command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A running command, output appended to ``log``; on leaving, it and its children are ended."""
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"{command[0]}: cannot be started ({error.strerror})") from error
        try:
            yield process
        finally:
            _end(process)


def run(command: Sequence[str | Path], log: Path, what: str) -> None:
    """Run a command to its end. Raises ``UsageError`` with its last line of output if it fails."""
    with tree(command, log) as process:
        code = process.wait()
    if code:
        raise UsageError(f"{what} failed with exit code {code}: {last_line(log)} (whole output: {log})")


def last_line(log: Path) -> str:
    """The last line of output that looks like an error, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-60:] if "error" in line.lower()]
    return (errors or lines or ["no output"])[-1][:300]


def end_on_signals() -> None:
    """Let a terminated or hung-up command clean up as it does on Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the whole group, then kill what is left; also when interrupted meanwhile."""
    try:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
