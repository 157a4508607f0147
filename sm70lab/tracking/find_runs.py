"""Find run folders by path, name, fingerprint or route, and read them with one-line complaints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sm70lab.errors import UsageError
from sm70lab.raw_text import load_yaml
from sm70lab.tracking.run_folder import CONFIG, RESULT, RunFolder, all_runs

SHOWN = 4  # candidates named where a text fits several
FINGERPRINT_CHARS = 4  # a shorter beginning is a typing mistake rather than a fingerprint


def resolve_run(text: str, runs_dir: Path) -> RunFolder:
    """The one run that ``text`` names: a folder's path, or a name or fingerprint under ``runs_dir``.

    Names may be cut (``split-s7``), fingerprints too (four characters or more), as long as one run
    fits; a whole name (``split-s7-1a2b3c4d``, beside which ``-2`` may exist) wins over a beginning. An
    experiment's name (``name=``) names its run where it has one.
    Raises ``UsageError`` where none or several fit.
    """
    path = Path(text).expanduser()
    if (path / CONFIG).is_file():
        return RunFolder(path.absolute())
    runs = list(all_runs(runs_dir))
    named = [run for run in runs if text in (run.path.name, run.full_name)]
    of_experiment = [run for run in runs if run.path.parent.name == text]
    found = named or of_experiment or [run for run in runs if _fits(text, run)]
    if len(found) == 1:
        return found[0]
    if not found:
        what = "a folder without config.yaml" if path.is_dir() else "no such run folder"
        raise UsageError(f"{text}: {what}, and no run of that name or fingerprint in {runs_dir}")
    names = ", ".join(run.full_name for run in found[:SHOWN])
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    raise UsageError(f"{text}: {len(found)} runs fit ({names}{more}); give more of the name")


def runs_of(route: str, runs_dir: Path) -> list[RunFolder]:
    """Every run of a route under ``runs_dir``, in order of name, finished or not.

    A run without a readable result is known by its configuration; one with neither is left out.
    """
    return [run for run in all_runs(runs_dir) if _route(run) == route]


def config_of(run: RunFolder) -> dict[str, Any]:
    """``config.yaml`` as plain data. Raises ``UsageError`` where it cannot be read."""
    file = run.path / CONFIG
    try:
        value = load_yaml(file)
    except FileNotFoundError as error:
        raise UsageError(f"{run}: no {CONFIG}; not a run folder, or a damaged one") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{file}: damaged ({' '.join(str(error).split())})") from error
    if not isinstance(value, dict):
        raise UsageError(f"{file}: damaged (no settings in it)")
    return value


def finished_result(run: RunFolder) -> dict[str, Any]:
    """``result.json`` of a finished, judged run. Raises ``UsageError`` for any other."""
    if (owner := run.owner()) is not None and not run.done:
        raise UsageError(f"{run}: still going on as process {owner.get('pid')} on {owner.get('host')}")
    result = run.result()
    if result is None:
        state = "damaged" if (run.path / RESULT).exists() else "missing: the run did not finish"
        raise UsageError(f"{run.path / RESULT}: {state}")
    if not result.get("verdict"):
        what = result.get("interrupted") or run.interruption().get("what") or "no verdict"
        raise UsageError(f"{run}: not finished ({what}); run it again")
    if not run.done:
        raise UsageError(f"{run}: not closed (no DONE), its process is gone; the next sm70lab run closes it")
    return result


def _fits(text: str, run: RunFolder) -> bool:
    if run.path.name.startswith(text):
        return True
    fingerprint = (run.result() or {}).get("fingerprint") or run.path.name
    return len(text) >= FINGERPRINT_CHARS and str(fingerprint).startswith(text)


def _route(run: RunFolder) -> str | None:
    result = run.result()
    if result is not None and isinstance(result.get("route"), str):
        return str(result["route"])
    try:
        route = config_of(run).get("route")
    except UsageError:
        return None
    return str(route["name"]) if isinstance(route, dict) and "name" in route else None
