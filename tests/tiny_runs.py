"""Real run folders of the tiny model, made in this process."""

from __future__ import annotations

import os
from pathlib import Path

from sm70lab.config import compose
from sm70lab.experiment import run_experiment
from sm70lab.schema import Generation, Prompt
from sm70lab.targets.base import Progress
from sm70lab.tracking.run_folder import RunFolder


class Nobody:
    """Watches nothing."""

    def stage(self, line: str) -> None: ...

    def waiting(self, line: str) -> None: ...

    def plan(self, prompts: list[Prompt], repeats: int) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def generated(self, generation: Generation) -> None: ...

    def note(self, line: str) -> None: ...


def overrides(runs_dir: Path, *more: str) -> list[str]:
    """A run of a hundred tokens."""
    return [
        "experiment=tiny",
        "tracking=off",
        f"tracking.runs_dir={runs_dir}",
        "workload.max_tokens=100",
        "gate=fixed_quality",  # random tokens have no shape to be strict about
        *more,
    ]


def make_run(runs_dir: Path, *more: str) -> RunFolder:
    """Run the tiny model once."""
    return RunFolder(run_experiment(compose(overrides(runs_dir, *more)), Nobody()).folder)


def make_running(folder: Path) -> None:
    """Turn a finished run's folder into one that this very process is at work in."""
    from sm70lab.tracking.atomic import write_json
    from sm70lab.tracking.marker import this_process

    (folder / "DONE").unlink()
    (folder / "result.json").unlink()
    write_json(folder / "RUNNING", this_process())
    assert this_process()["pid"] == os.getpid()
