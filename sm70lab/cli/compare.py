"""``sm70lab compare``: is a route worse than the baseline, is it faster, how many runs would decide?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm70lab.cli import simple
from sm70lab.cli.overrides import find_groups
from sm70lab.config import check, near
from sm70lab.config_checks_target import ENGINE, OPENAI
from sm70lab.errors import UsageError
from sm70lab.schema import Display, ExperimentConfig

if TYPE_CHECKING:
    from sm70lab.cli.compare_runs import Plan, Side
    from sm70lab.judge.comparison import Comparison
    from sm70lab.tracking.run_folder import RunFolder

HELP = """\
sm70lab compare: routes or runs side by side; the first is the baseline

  sm70lab compare no_mtp split seed=1,2,3        finished runs of both routes; run what is missing
  sm70lab compare RUN RUN                        two run folders: a path, a name, or a fingerprint
  sm70lab compare no_mtp split input_core --no-run   only what has been run

Each argument is a route (conf/route) or a run. Of a route, the finished runs in tracking.runs_dir with
the same settings count. Missing (seed, repeat) are run in ABBA order. Generations pair by prompt, repeat
and seed: McNemar (or Boschloo where they do not pair) on pass and fail, a bootstrap on the log-ratio of
speeds; several routes are corrected together. Only passing runs have a speed.

Settings: every setting of run but route and repeats=auto, for the routes named, and
  seed=1,2,3              default: every seed that either side has run, else the usual one
  repeats=1               a run for each repeat
  allow=hazard,…          fields that differ on purpose; any other difference is refused

  --no-run, --config-dir DIR (group files of yours, searched first), --json, --help

Exit codes: 0 no regression, 1 a route is worse, 2 usage or unfair, 3 not decided.
"""
OWN = ("seed", "allow")
KEPT = ("tracking", "display")  # settings that mean something without a route to run


@dataclass
class _Arguments:
    """The command line taken apart."""

    sides: list[str]
    options: simple.SimpleOptions  # its settings are those of the routes
    seeds: list[int] | None
    repeats: int | None  # None where not given
    allow: list[str] = field(default_factory=list)
    may_run: bool = True
    by_name: bool = False  # name= was given: only runs of that experiment count

    @property
    def config(self) -> ExperimentConfig:
        return self.options.config

    @property
    def runs_dir(self) -> Path:
        return Path(self.config.tracking.runs_dir)

    @property
    def json(self) -> bool:
        return self.config.display is Display.json


def main(arguments: list[str]) -> int:
    """Compare, print, and return the exit code."""
    given = _parse(arguments)
    if given is None:
        return 0
    comparison = _compare(given)
    if given.json:
        from sm70lab.tracking.atomic import finite

        print(json.dumps(finite({"exit_code": comparison.exit_code, **asdict(comparison)}), allow_nan=False))
    else:
        from sm70lab.cli.compare_table import show

        show(comparison)
    return comparison.exit_code


def _parse(arguments: Sequence[str]) -> _Arguments | None:
    options = simple.parse(arguments, HELP, own=OWN, flags=("--no-run",), is_word=simple.is_name)
    if options is None:
        return None
    given = {a.partition("=")[0].lstrip("+~"): a for a in arguments if "=" in a}
    if "route" in given:
        raise UsageError(f"{given['route']}: name the routes as arguments: sm70lab compare no_mtp split")
    sides = options.given.words
    if len(sides) < 2:
        raise UsageError(f"compare needs two or more routes or runs, the baseline first; given: {len(sides)}")
    if len(set(sides)) < len(sides):
        raise UsageError(f"{next(s for s in sides if sides.count(s) > 1)}: named twice")
    config = options.config
    if isinstance(config.repeats, str):
        raise UsageError("repeats=auto: a comparison needs a number, the same for every route")
    if "first_repeat" in given:
        raise UsageError(f"{given['first_repeat']}: repeats are counted from 0 here; set repeats")
    return _Arguments(
        sides=sides,
        options=options,
        seeds=_seeds(options.own.get("seed"), config),
        repeats=config.repeats if "repeats" in given else None,
        allow=[name for name in options.own.get("allow", "").split(",") if name],
        may_run="--no-run" not in options.given.flags,
        by_name="name" in given,
    )


def _seeds(text: str | None, config: ExperimentConfig) -> list[int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"seed={text}: must be whole numbers, 0 or more, with commas between")
    seeds = [int(part) for part in parts]
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"seed={text}: names a seed twice")
    check(replace(config, seed=max(seeds)))
    return seeds


def _compare(given: _Arguments) -> Comparison:
    from sm70lab.cli import compare_runs as runs
    from sm70lab.judge.comparison import compare
    from sm70lab.judge.fairness import refuse_unfair
    from sm70lab.tracking.arms import read_arm, software_notes

    sides = _sides(given)
    todo = runs.plan(sides, given.seeds, given.repeats)
    if given.may_run and todo.missing:
        before = [
            runs.arm_to_be(side) if side.config else read_arm(side.label, side.folders) for side in sides
        ]
        refuse_unfair(before, given.allow)  # now, not after hours of running
        _run_missing(todo, given)
    for side in sides:
        runs.keep_to(side, todo.units)
        runs.refuse_none(side)
    arms = [read_arm(side.label, side.folders) for side in sides]
    refused, notes = refuse_unfair(arms, given.allow)
    comparison = compare(arms, refused)
    for side in sides[1:]:
        for line in software_notes(sides[0].folders, side.folders):
            notes.append(f"{side.label}: baseline has {line}")
    if not given.may_run and todo.missing:
        names = sorted({side.label for side, _ in todo.missing})
        notes.append(
            f"{len(todo.missing)} runs are missing ({', '.join(names)}); without --no-run they are made"
        )
    comparison.notes = [*notes, *comparison.notes]
    return comparison


def _sides(given: _Arguments) -> list[Side]:
    from sm70lab.cli.compare_runs import Side, finished_runs

    routes = find_groups(given.options.given.folders)["route"]
    sides = []
    for text in given.sides:
        if text not in routes:
            folder = _named(text, given, routes)
            sides.append(Side(_label(folder), [folder]))
            continue
        config = given.options.compose(*given.options.given.overrides, f"route={text}")
        found = finished_runs(config, any_code=not given.may_run, by_name=given.by_name)
        sides.append(Side(text, found, config))
    _refuse_one_server(sides)
    labels = [side.label for side in sides]
    if len(set(labels)) < len(labels):  # the same run by two names, or twins of two experiments
        paths = [str(side.folders[0].path) for side in sides if side.folders and side.config is None]
        if len(set(paths)) < len(paths):
            raise UsageError(f"{next(s for s in labels if labels.count(s) > 1)}: named twice")
        for side in sides:
            if side.config is None:
                side.label = side.folders[0].full_name
    if all(side.config is None for side in sides):
        _refuse_idle_settings(given)
    return sides


def _label(folder: RunFolder) -> str:
    """A run's own name; of a server's run that of its experiment, since all of them are ``as_served``."""
    from sm70lab.tracking.find_runs import config_of

    target = config_of(folder).get("target")
    served = isinstance(target, dict) and target.get("name", ENGINE) == OPENAI
    return folder.path.parent.name if served else folder.path.name


def _refuse_one_server(sides: Sequence[Side]) -> None:
    """Routes that are but names for the same server."""
    asking: dict[str | None, str] = {}
    for side in sides:
        if side.config is None or side.config.target.name != OPENAI:
            continue
        url = side.config.target.base_url
        if url in asking:
            raise UsageError(
                f"route={asking[url]}, {side.label}: both arms ask the same server at {url}; a route is a "
                "name there: run each with a target.base_url of its own, and compare the runs"
            )
        asking[url] = side.label


def _named(text: str, given: _Arguments, routes: Sequence[str]) -> RunFolder:
    from sm70lab.tracking.find_runs import resolve_run

    try:
        return resolve_run(text, given.runs_dir)
    except UsageError as error:
        if "no run of that name" in str(error):
            raise UsageError(f"{error}; nor a route: {near(text, routes)}") from error
        raise


def _refuse_idle_settings(given: _Arguments) -> None:
    idle = [o for o in given.options.given.overrides if o.partition("=")[0].split(".")[0] not in KEPT]
    idle += [f"seed={','.join(map(str, given.seeds))}"] if given.seeds is not None else []
    if idle:
        raise UsageError(f"{idle[0]}: every side is a run that is finished; settings are for routes")


def _run_missing(todo: Plan, given: _Arguments) -> None:
    from sm70lab.cli.compare_runs import run_missing
    from sm70lab.cli.display import make_display
    from sm70lab.experiment import run_experiment
    from sm70lab.tracking.run_folder import RunFolder

    with make_display(given.config.display) as display:

        def run(config: ExperimentConfig) -> tuple[RunFolder, str]:
            outcome = run_experiment(config, display)
            return RunFolder(outcome.folder), str(outcome.result["verdict"]["kind"])

        run_missing(todo, run, (lambda line: None) if given.json else display.note)
