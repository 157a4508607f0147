"""Runs of ``target=openai`` in this process, and everything they left behind."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_runs import Nobody

from sm70lab.config import check, compose
from sm70lab.errors import UsageError
from sm70lab.experiment import run_experiment
from sm70lab.schema import ExperimentConfig, Generation, PromptSpec
from sm70lab.serving.script import Good
from sm70lab.serving.script_text import sound
from sm70lab.targets.base import request_seed

TOKENS = 160
ASKED = "Write a page about tea."


class Recorder(Nobody):
    """Keeps what a terminal would have shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.generations: list[Generation] = []

    def stage(self, line: str) -> None:
        self.lines.append(line)

    def note(self, line: str) -> None:
        self.lines.append(line)

    def generated(self, generation: Generation) -> None:
        self.generations.append(generation)


@dataclass
class Ran:
    """How a run ended: a result with its exit code, or one line of complaint (exit code 2)."""

    code: int
    line: str = ""  # of the complaint
    result: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None  # the run's folder, also of a run that ended in a complaint; None: discarded
    generations: list[Generation] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return str((self.result.get("verdict") or {}).get("kind"))

    @property
    def reason(self) -> str:
        return str((self.result.get("verdict") or {}).get("reason"))

    def output(self, name: str = "page") -> Generation:
        """The output of one prompt."""
        return next(g for g in self.generations if g.prompt.name == name)

    def evidence(self, kind: str) -> dict[str, Any]:
        """One kind of evidence, as recorded."""
        found: dict[str, Any] = next(e for e in self.result["verdict"]["evidence"] if e["kind"] == kind)
        return found

    def kept(self, name: str = "page") -> tuple[str, dict[str, Any]]:
        """Text and record of one output on disk."""
        assert self.folder is not None
        base = self.folder / "generations"
        record = json.loads((base / f"{name}-r0.tokens.json").read_text(encoding="utf-8"))
        return (base / f"{name}-r0.txt").read_text(encoding="utf-8"), record


@functools.cache
def _composed() -> ExperimentConfig:
    return compose(["target=openai", "target.base_url=http://127.0.0.1:1", "tracking=off"])


def configured(base_url: str, runs_dir: Path, **changes: Any) -> ExperimentConfig:
    """One chat prompt of ``TOKENS`` tokens; ``changes``: ``target__retries=0`` and the like."""
    config = copy.deepcopy(_composed())
    config.target.base_url = base_url
    config.target.read_timeout_s = 5.0
    config.tracking.runs_dir = str(runs_dir)
    config.workload.max_tokens = TOKENS
    config.workload.prompts = [PromptSpec("page", user=ASKED)]
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        setattr(getattr(config, section) if section else config, name, value)
    return config


def run(base_url: str, runs_dir: Path, **changes: Any) -> Ran:
    """Run once; a complaint must be one line."""
    recorder = Recorder()
    config = configured(base_url, runs_dir, **changes)
    try:
        check(config)
        outcome = run_experiment(config, recorder)
    except UsageError as error:
        line = str(error)
        assert line and "\n" not in line.strip(), line
        folders = sorted(runs_dir.glob("*/[!.]*/"), key=lambda path: path.stat().st_mtime)
        return Ran(2, line, {}, folders[-1] if folders else None, recorder.generations, recorder.lines)
    return Ran(outcome.exit_code, "", outcome.result, outcome.folder, recorder.generations, recorder.lines)


def told(asked: str = ASKED, index: int = 0, seed: int = 20260620) -> str:
    """The beginning of what a scripted server makes up for this prompt of a run."""
    return sound(Good.html, 4 * TOKENS, f"{asked}/{request_seed(seed, index, 0)}")
