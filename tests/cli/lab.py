"""Start the command line as a user does: its own process, its own working folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTED = Path(__file__).with_name("scripted.py")
SECONDS = 110


def default_signals() -> None:
    """A test runner in the background ignores Ctrl-C, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Lab:
    """A working folder with a command line over the scripted target (or the product's own)."""

    folder: Path

    def command(self, *arguments: str, engine: bool = False) -> list[str]:
        program = ["-m", "sm70lab"] if engine else [str(SCRIPTED)]
        return [sys.executable, *program, *arguments]

    def run(self, *arguments: str, engine: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments, engine=engine),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            **options,
        )

    def start(self, *arguments: str, engine: bool = False) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments, engine=engine),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=default_signals,
        )

    def wait_for(self, pattern: str) -> Path:
        """The first file under runs/ that matches, once it is there."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for found in sorted(self.folder.glob(f"runs/*/[!.]*/{pattern}")):
                return found
            time.sleep(0.05)
        raise AssertionError(f"no {pattern} after {SECONDS} s")

    def folders(self, experiment: str = "t") -> list[Path]:
        return sorted((self.folder / "runs" / experiment).iterdir())

    def result(self, folder: Path) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return value
