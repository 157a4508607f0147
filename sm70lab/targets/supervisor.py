"""A small process between a run and the server it started: it takes the server's whole tree down.

``python -m sm70lab.targets.supervisor`` reads one JSON line from standard input (``command``,
``environment``, ``log``, ``grace_s``), starts the command, and writes ``{"pid": …}`` and, at its end,
``{"exit": code}`` to standard output, negative for a signal. When standard input ends, because the run
closed it or is gone by whatever means, the tree is ended: SIGTERM to the command, after ``grace_s``
seconds SIGKILL to all that is left.

Descendants that leave their session or lose their parent come back here, since the supervisor is their
subreaper (Linux), and each carries ``MARK`` in its environment. Nothing else is ever signalled.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import psutil

MARK = "SM70LAB_SERVER"  # variable that tells a server's processes from all others
SET_CHILD_SUBREAPER, SET_PDEATHSIG = 36, 1  # of prctl(2)
POLL_SECONDS = 0.2
AGAIN_SECONDS = 0.02  # a tree may grow while it is being killed: look again
KILL_SECONDS = 20.0  # a process in an uninterruptible driver call cannot be ended sooner


def main() -> None:
    """Start what standard input says, and stay until it has ended or is to end."""
    parent = os.getppid()
    _prctl(SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGHUP):  # the run decides what ends its server
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    spec = json.loads(sys.stdin.readline())
    code, process = 1, None
    try:
        process = _start(spec)
        _say({"pid": process.pid})
        _watch(process, parent)
    except _StoppedError:
        pass
    except OSError as error:
        _say({"error": f"{error.strerror or error}: {error.filename or spec['command'][0]}"})
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if process is not None and process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(float(spec["grace_s"]))
        end_tree(spec["environment"][MARK], psutil.Process())
        if process is not None:
            code = process.wait()
    with suppress(BrokenPipeError):
        _say({"exit": code})


class _StoppedError(Exception):
    """SIGTERM came."""


def _stop(number: int, frame: object) -> None:
    raise _StoppedError


def _start(spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    with open(spec["log"], "ab", buffering=0) as log:  # noqa: PTH123 (the package's own Path is not needed here)
        return subprocess.Popen(
            spec["command"],
            env=spec["environment"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    """Should the supervisor itself be killed, its child goes too; the run looks for the rest by ``MARK``."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _prctl(SET_PDEATHSIG, signal.SIGKILL)


def _watch(process: subprocess.Popen[bytes], parent: int) -> None:
    """Until the command has ended by itself. Raises ``_StoppedError`` when it is to be ended."""
    while process.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
        if (readable and not os.read(sys.stdin.fileno(), 4096)) or os.getppid() != parent:
            raise _StoppedError
        _reap(process)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Collect adopted grandchildren that have ended; the command itself is ``Popen``'s to collect."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == process.pid:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def end_tree(mark: str, root: psutil.Process | None = None) -> None:
    """Kill every process that carries ``mark`` or descends from one, and all descendants of ``root``."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        below = root.children(recursive=True) if root is not None else []
        left = {one.pid: one for one in [*marked(mark), *filter(_alive, below)]}.values()
        if not left:
            return
        for one in left:
            with suppress(psutil.Error):
                one.kill()
        time.sleep(AGAIN_SECONDS)


def marked(mark: str) -> list[psutil.Process]:
    """Live processes that carry ``mark``, and those that descend from one of them.

    Only processes of this user can be read, and only those are ours.
    """
    found: dict[int, psutil.Process] = {}
    own = os.getpid()
    for one in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if one.pid != own and one.status() != psutil.STATUS_ZOMBIE and one.environ().get(MARK) == mark:
                found[one.pid] = one
                for child in one.children(recursive=True):
                    found.setdefault(child.pid, child)
    return [one for one in found.values() if _alive(one)]


def _alive(one: psutil.Process) -> bool:
    try:
        return bool(one.is_running() and one.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _prctl(option: int, value: int) -> None:
    """prctl(2), where there is one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _say(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
