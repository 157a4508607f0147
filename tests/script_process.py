"""The scripted server as a user starts it: ``sm70lab serve --script``, a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.cli.lab import default_signals

SECONDS = 60
HTTP = httpx.Client(verify=False, trust_env=False, timeout=20)  # one for all: making one takes its time


class ScriptProcess:
    """A running scripted server. Each script of a folder has an address and memory of its own."""

    def __init__(self, script: Path, *settings: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sm70lab", "serve", "--script", str(script), "--json", *settings],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=default_signals,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # the test's own time limit bounds this
        assert line, self.process.communicate(timeout=SECONDS)[1]
        told = json.loads(line)
        self.url: str = told["url"]
        self.scripts: dict[str, str] = told["scripts"]

    def base(self, name: str = "") -> str:
        """``target.base_url`` of one script."""
        return self.scripts[name]

    def told(self, name: str = "") -> dict[str, Any]:
        """What GET /script says."""
        value: dict[str, Any] = HTTP.get(self.base(name).removesuffix("/v1") + "/script").json()
        return value

    def generations(self, name: str = "") -> list[dict[str, Any]]:
        """The streams that were asked of one script, in order."""
        return [call for call in self.told(name)["requests"] if (call["body"] or {}).get("stream")]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """End it; exit code and standard error."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, stderr


@contextmanager
def playing(folder: Path, scripts: dict[str, dict[str, Any]]) -> Iterator[ScriptProcess]:
    """One process that plays all of ``scripts``, each at an address of its own; it must end well."""
    process = ScriptProcess(write_scripts(folder, scripts))
    yield process
    code, stderr = process.stop()
    assert (code, stderr) == (0, "")


def write_scripts(folder: Path, scripts: dict[str, dict[str, Any]]) -> Path:
    """One file a script; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, script in scripts.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(script), encoding="utf-8")
    return folder
