"""The runs behind ``sm70lab compare``: found where they are finished, made where they are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sm70lab.config import plain
from sm70lab.errors import UsageError
from sm70lab.judge.comparison import Arm, RunRecord
from sm70lab.judge.fairness import differences, facts, in_words
from sm70lab.schema import AUTO_REPEATS, ExperimentConfig, VerdictKind
from sm70lab.tracking import ledger
from sm70lab.tracking.find_runs import config_of, runs_of
from sm70lab.tracking.fingerprint import fingerprint, hardware, model_hash
from sm70lab.tracking.run_folder import RunFolder

# What may differ between a finished run and the settings asked for: which draws it made, what it is
# called, what was shown and kept. The model's path is covered by its hash.
LOOSE = ("name", "seed", "repeats", "first_repeat", "sprt", "display", "tracking", "force")
NEAREST_FIELDS = 3  # named where no run fits

Unit = tuple[int, int]  # seed, repeat


@dataclass
class Side:
    """One argument of the command."""

    label: str
    folders: list[RunFolder]
    config: ExperimentConfig | None = None  # of a route; None for a run named by itself
    made: int = 0  # runs that this command made

    def covered(self) -> dict[Unit, RunFolder]:
        """(seed, repeat) → the run that holds it, the latest of several."""
        found: dict[Unit, RunFolder] = {}
        for folder in sorted(self.folders, key=lambda f: str((f.result() or {}).get("finished"))):
            for generation in (folder.result() or {}).get("generations", []):
                found[(generation["seed"], generation["repeat"])] = folder
        return found


@dataclass
class Plan:
    """What the comparison covers, and what has to be run for it, in order."""

    units: list[Unit]
    missing: list[tuple[Side, Unit]] = field(default_factory=list)


def finished_runs(config: ExperimentConfig, any_code: bool, by_name: bool) -> list[RunFolder]:
    """Finished runs of a route with exactly these settings, whatever their seed and repeats.

    Unless ``any_code``, only those that this code, model and machine would repeat: their fingerprint is
    what the same settings give now. ``by_name``: of this experiment name only.
    """
    weights = model_hash(config.model, config.target)
    wanted = _settings(plain(config))
    found = []
    for folder in runs_of(config.route.name, Path(config.tracking.runs_dir)):
        result = folder.result() or {}
        if not folder.done or not result.get("verdict"):
            continue
        try:
            recorded = config_of(folder)
        except UsageError:
            continue  # the ledger shows damaged folders; here one is no reason to stop
        if _settings(recorded) != wanted or (result.get("loaded") or {}).get("model_hash") != weights:
            continue
        if by_name and recorded.get("name") != config.name:
            continue
        if any_code or result.get("fingerprint") == _fingerprint_now(config, recorded, weights):
            found.append(folder)
    return found


def plan(sides: Sequence[Side], seeds: Sequence[int] | None, repeats: int | None) -> Plan:
    """The (seed, repeat) units of a comparison, and the missing ones in ABBA order.

    Units: all ``seeds`` × ``repeats`` where either was given, else all that any side has finished, else
    one run of the default seed. Two routes run A B, B A, A B …, more of them forwards and backwards in
    turn, so that a drift of the machine hits each alike.
    """
    covered = {id(side): side.covered() for side in sides}
    units = sorted({unit for found in covered.values() for unit in found})
    routes = [side for side in sides if side.config is not None]
    if routes and (seeds is not None or repeats is not None or not units):
        known = sorted({seed for seed, _ in units}) if seeds is None else list(seeds)
        default = [side.config.seed for side in routes[:1] if side.config is not None]
        units = [(seed, repeat) for seed in known or default for repeat in range(repeats or 1)]
    missing = [(side, unit) for side, unit in interleaved(routes, units) if unit not in covered[id(side)]]
    return Plan(units, missing)


def interleaved(sides: Sequence[Side], units: Sequence[Unit]) -> Iterator[tuple[Side, Unit]]:
    """Every side at every unit: A B, then B A, and so on."""
    for number, unit in enumerate(units):
        for side in sides if number % 2 == 0 else reversed(sides):
            yield side, unit


def run_missing(
    todo: Plan, run: Callable[[ExperimentConfig], tuple[RunFolder, str]], tell: Callable[[str], None]
) -> None:
    """Make the missing runs, one repeat each, in the plan's order; ``run`` gives folder and verdict.

    Raises ``UsageError`` before the first of them where one's variant is rejected.
    """
    for side in {id(side): side for side, _ in todo.missing}.values():
        assert side.config is not None
        rejected = ledger.rejection(side.config, model_hash(side.config.model, side.config.target))
        if rejected is not None and not side.config.force:
            raise UsageError(f"{rejected.line}: compare its finished runs with --no-run, or force=true")
    for number, (side, (seed, repeat)) in enumerate(todo.missing, 1):
        assert side.config is not None
        what = f"run {number} of {len(todo.missing)}: {side.label}, seed {seed}, repeat {repeat}"
        tell(what)
        folder, verdict = run(replace(side.config, seed=seed, repeats=1, first_repeat=repeat))
        tell(f"{what}: {verdict}, {folder}")
        side.folders.append(folder)
        side.made += 1


def keep_to(side: Side, units: Sequence[Unit]) -> None:
    """Leave out runs of a route that hold none of the units asked for."""
    if side.config is not None:
        holding = side.covered()
        wanted = {str(holding[unit].path) for unit in units if unit in holding}
        side.folders = [folder for folder in side.folders if str(folder.path) in wanted]


def arm_to_be(side: Side) -> Arm:
    """What can be said of a route's arm before it has run: enough to refuse an unfair comparison."""
    assert side.config is not None
    config = side.config
    known = facts(
        plain(config), model_hash(config.model, config.target), hardware(config.target), config.target.threads
    )
    run = RunRecord(
        name=side.label,
        seed=config.seed,
        first_repeat=config.first_repeat,
        verdict=VerdictKind.inconclusive,
        reason="not run yet",
        speed_valid=False,
        by_generation=True,
        sequential=config.repeats == AUTO_REPEATS,
        samples=[],
        facts=known,
        tokens_keyed=False,
    )
    return Arm(side.label, [run])


def refuse_none(side: Side) -> None:
    """Raise ``UsageError`` for a route without a run; it says how the nearest of its runs differs."""
    if side.folders or side.config is None:
        return
    tracking = side.config.tracking
    raise UsageError(
        f"{side.label}: no finished run with these settings in {tracking.runs_dir}{_nearest(side.config)}; "
        f"leave out --no-run, or start it: sm70lab route={side.label}"
    )


def _nearest(config: ExperimentConfig) -> str:
    """In words, the run of this route whose settings differ least; empty where there is none."""
    wanted = _flat(plain(config), model_hash(config.model, config.target))
    found = []
    for folder in runs_of(config.route.name, Path(config.tracking.runs_dir)):
        result = folder.result() or {}
        with suppress(UsageError):  # damaged
            if result.get("verdict"):
                weights = (result.get("loaded") or {}).get("model_hash")
                found.append((differences(_flat(config_of(folder), weights), wanted), folder.path.name))
    if not found:
        return ""
    differing, name = min(found, key=lambda entry: len(entry[0]))
    if not differing:
        return f" (the nearest is {name}: another seed, name or code)"
    more = f" and {len(differing) - NEAREST_FIELDS} more" if len(differing) > NEAREST_FIELDS else ""
    return f" ({name} has {in_words(differing[:NEAREST_FIELDS])}{more})"


def _flat(config: dict[str, Any], weights: str | None) -> dict[str, Any]:
    """Dotted settings that must be equal, the route's own among them."""
    return facts(config, weights, "") | facts({"of_route": config.get("route", {})}, weights, "")


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in LOOSE}
    if isinstance(kept.get("model"), dict):
        kept["model"] = {key: value for key, value in kept["model"].items() if key != "path"}
    return kept


def _fingerprint_now(config: ExperimentConfig, recorded: dict[str, Any], weights: str) -> str:
    """The fingerprint that a recorded run would get today."""
    loose = {key: recorded[key] for key in ("name", "seed", "repeats", "first_repeat") if key in recorded}
    sprt = replace(config.sprt, **recorded["sprt"]) if isinstance(recorded.get("sprt"), dict) else config.sprt
    return fingerprint(replace(config, **loose, sprt=sprt), weights)
