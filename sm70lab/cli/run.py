"""``sm70lab [run]``: one experiment, or with ``-m`` a sweep."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from sm70lab.addresses import without_password
from sm70lab.cli import one_line
from sm70lab.cli.options import parse
from sm70lab.cli.overrides import check_overrides, expand_model_path
from sm70lab.cli.streams import tolerant_streams
from sm70lab.config import VERSION_BASE, explain, register_schema, to_config
from sm70lab.errors import UsageError
from sm70lab.raw_text import raw_override, shown_override
from sm70lab.schema import EXIT_USAGE, Display, ExperimentConfig
from sm70lab.targets.vllm_flags import launch
from sm70lab.tracking.atomic import finite
from sm70lab.tracking.environment import CONFIG_DIR, NOT_TYPED
from sm70lab.tracking.mlflow_sweep import sweep_name

OUTCOME = "outcome.json"  # a job's word to the process that started the sweep, whichever launcher ran it
SEVERITY = (0, 3, 1, 2)  # exit codes from good to bad: a sweep returns the worst


def main(arguments: list[str]) -> int:
    """Run, and return the exit code; in a sweep the worst job's."""
    options = parse(arguments)
    overrides = expand_model_path(options.overrides, options.multirun)
    overrides = [raw_override(override) for override in overrides]
    check_overrides(overrides, options.folders, options.multirun)
    if options.shows_something:
        _hydra([*options.flags, *overrides], options.folders)
        return 0
    overrides += _sweep(overrides) if options.multirun else []
    with tempfile.TemporaryDirectory(prefix="sm70lab-") as scratch:
        _hydra([*options.flags, *overrides, *_keep_folders_in(scratch, overrides)], options.folders)
        outcomes = _outcomes(Path(_sweep_dir(overrides) or scratch))
    return _finish(outcomes, options.multirun)


def job(node: DictConfig) -> float:
    """One experiment inside Hydra. Never raises but on Ctrl-C, since that would end a sweep.

    Returns tok/s of a passing run, else 0: what an optimising sweeper maximises.
    """
    with tolerant_streams():  # a launcher may have brought the job into a process of its own
        outcome = {"display": node.display.name, **_run(node)}
    folder = Path(HydraConfig.get().runtime.output_dir)
    (folder / OUTCOME).write_text(json.dumps(outcome), encoding="utf-8")
    speed = (outcome.get("result") or {}).get("speed") or {}
    return float(speed["tokens_per_second"] or 0) if speed.get("valid") else 0.0


def _run(node: DictConfig) -> dict[str, Any]:
    given = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(given, list)
    typed = [str(override) for override in given if not str(override).startswith(NOT_TYPED)]
    overrides = [without_password(shown_override(override)) for override in typed]
    try:
        config = to_config(node, HydraConfig.get().runtime.choices.get("serving"))
        if config.target.dry_run:
            return {"overrides": overrides, "exit_code": 0, "launch": _show_launch(config)}
        from sm70lab.cli.display import make_display
        from sm70lab.experiment import run_experiment

        with make_display(config.display) as display:
            outcome = run_experiment(config, display)
            display.verdict(outcome)
    except UsageError as error:
        print(f"sm70lab: {one_line(error)}", file=sys.stderr)
        return {"overrides": overrides, "exit_code": EXIT_USAGE, "error": one_line(error)}
    except (Exception, SystemExit) as error:
        print(without_password(traceback.format_exc()), end="", file=sys.stderr)
        print(f"sm70lab: this is a fault of sm70lab itself: {one_line(error)}", file=sys.stderr)
        what = f"{type(error).__name__}: {one_line(error)}"
        return {"overrides": overrides, "exit_code": EXIT_USAGE, "error": what}
    return {
        "overrides": overrides,
        "exit_code": outcome.exit_code,
        "folder": str(outcome.folder),
        "skipped": outcome.skipped,
        "ledger": outcome.ledger,
        "mlflow_pending": outcome.pending,
        "result": outcome.result,
    }


def _show_launch(config: ExperimentConfig) -> dict[str, Any]:
    """What ``target=vllm`` would start, as a command for a shell, with where each part comes from."""
    from sm70lab.targets.process import free_port

    started, target = launch(config), config.target
    port = target.port or free_port(target.host)
    shell = started.shell(target.host, port)
    if target.pythonpath is not None:
        shell = f"PYTHONPATH={shlex.quote(target.pythonpath)} \\\n{shell}"
    if config.display is not Display.json:
        print(shell)
        for what, source in started.sources():
            print(f"# {what}  # {source}")
        for setting in started.not_applied:
            print(f"# not applied: {setting}")
    return {
        "shell": shell,
        "command": started.command(target.host, port),
        "environment": started.environment,
        "sources": dict(started.sources()),
        "not_applied": list(started.not_applied),
    }


def _finish(outcomes: list[dict[str, Any]], multirun: bool) -> int:
    code = max((o["exit_code"] for o in outcomes), key=SEVERITY.index, default=EXIT_USAGE)
    if any(o.pop("display") == Display.json.name for o in outcomes):
        print(json.dumps(finite({"exit_code": code, "runs": outcomes} if multirun else outcomes[0])))
    elif multirun:
        from sm70lab.cli.display import print_sweep

        print_sweep([outcome for outcome in outcomes if "launch" not in outcome])
    return code


def _outcomes(root: Path) -> list[dict[str, Any]]:
    """What the jobs left behind, in order; one that left nothing crashed without a word."""
    if (root / OUTCOME).exists():
        return [json.loads((root / OUTCOME).read_text(encoding="utf-8"))]
    jobs = sorted((path for path in root.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    crashed = {"exit_code": EXIT_USAGE, "error": "the job's process died", "display": "rich"}
    return [
        json.loads((path / OUTCOME).read_text(encoding="utf-8"))
        if (path / OUTCOME).exists()
        else dict(crashed)
        for path in jobs
    ]


def _sweep(overrides: Sequence[str]) -> list[str]:
    """A name for this sweep where the user gave none: its runs get one parent run in MLflow."""
    if any(override.lstrip("+").startswith("tracking.sweep=") for override in overrides):
        return []
    return [f"tracking.sweep={sweep_name(overrides)}"]


def _keep_folders_in(scratch: str, overrides: Sequence[str]) -> list[str]:
    """Hydra insists on folders of its own: they go where nobody sees them."""
    places = [f"hydra.run.dir='{scratch}'"]
    if _sweep_dir(overrides) is None:
        places.append(f"hydra.sweep.dir='{scratch}'")
    return places


def _sweep_dir(overrides: Sequence[str]) -> str | None:
    """A sweep folder of the user's, which a launcher on other machines needs."""
    found = [o.partition("=")[2] for o in overrides if o.startswith("hydra.sweep.dir=")]
    return found[-1].strip("'\"") if found else None


def _hydra(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Let Hydra compose and run ``job``; its complaints become one line.

    Of a group file that is in several folders the first one's counts. Hydra itself would search its
    ``--config-dir`` last, so the shipped folder takes that place.
    """
    register_schema()
    later = [f"{CONFIG_DIR}{folder}" for folder in folders[1:]]
    with _argv([*arguments, *later]):
        try:
            hydra.main(config_path=str(folders[0]), config_name="config", version_base=VERSION_BASE)(job)()
        except SystemExit as stop:  # Hydra's own end after --help, or after an argument error it printed
            if stop.code:
                raise UsageError("Hydra could not use these arguments") from stop
        except Exception as error:  # composition, parsing, plugins: the user's input in many types
            raise explain(error) from error


@contextlib.contextmanager
def _argv(arguments: Sequence[str]) -> Iterator[None]:
    """Hydra reads ``sys.argv``, and hides its errors from its caller unless this variable is set."""
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full
