"""What ends a run early: Ctrl-C and its kin, and what is known of them afterwards."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP, after the record is safe."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


class StopSignals:
    """While active, SIGTERM and SIGHUP end a run as Ctrl-C does, and which of them came is known.

    A second signal gets the system's own treatment: the process ends at once, and the next run
    closes the folder. Signals that the parent ignores stay ignored.
    """

    def __init__(self) -> None:
        self.signal = signal.SIGINT
        self._before: dict[signal.Signals, Any] = {}

    @property
    def what(self) -> str:
        return "Ctrl-C" if self.signal == signal.SIGINT else self.signal.name

    @property
    def exit_code(self) -> int:
        return 128 + self.signal

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python takes handlers nowhere else
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.signal = signal.Signals(number)
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt
