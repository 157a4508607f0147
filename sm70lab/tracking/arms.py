"""Run folders as the arms of a comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sm70lab.config_checks_target import ENGINE, KEYED_DRAWS, SERVER_HARDWARE
from sm70lab.errors import UsageError
from sm70lab.judge.comparison import KEYED, Arm, RunRecord, Sample
from sm70lab.judge.fairness import facts
from sm70lab.schema import AUTO_REPEATS, VerdictKind
from sm70lab.tracking import tables
from sm70lab.tracking.find_runs import config_of, finished_result
from sm70lab.tracking.run_folder import ENVIRONMENT, RunFolder

PACKAGES = ("torch", "triton", "numpy", "tokenizers", "sm70lab")


def read_arm(label: str, folders: Sequence[RunFolder]) -> Arm:
    """An arm from finished runs. Where two hold the same generation the later run's counts.

    Raises ``UsageError`` for a run that is not finished, or whose files are damaged.
    """
    read = sorted(((finished_result(folder), folder) for folder in folders), key=lambda x: x[0]["finished"])
    runs: list[RunRecord] = []
    seen: set[tuple[str, int, int]] = set()
    for result, folder in reversed(read):
        run = _read(folder, result)
        fresh = [sample for sample in run.samples if sample.key not in seen]
        seen.update(sample.key for sample in fresh)
        if fresh:
            runs.append(replace(run, samples=fresh))
    return Arm(label, runs[::-1])


def software_notes(baseline: Sequence[RunFolder], other: Sequence[RunFolder]) -> list[str]:
    """Package versions and commits in which two arms differ: no reason to refuse, but to say so."""
    notes = []
    a, b = (_software(folders) for folders in (baseline, other))
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            notes.append(f"{name} {a.get(name, 'not recorded')} against {b.get(name, 'not recorded')}")
    return notes


def run_facts(folder: RunFolder, result: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What must agree between runs that are compared: see ``judge.fairness``."""
    loaded = result.get("loaded") or {}
    hardware = _hardware(str(loaded.get("device") or "cpu"), _environment(folder))
    threads = loaded.get("threads")
    model_hash = loaded.get("server.version.model_hash") or loaded.get("model_hash")
    return facts(config, None if model_hash is None else str(model_hash), hardware, threads)


def _read(folder: RunFolder, result: dict[str, Any]) -> RunRecord:
    config = config_of(folder)
    try:
        return _record(folder, result, config)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{folder}: damaged record ({type(error).__name__}: {error})") from error


def _record(folder: RunFolder, result: dict[str, Any], config: dict[str, Any]) -> RunRecord:
    tokens, rounds = folder.token_ids(), _rounds(folder)
    verdict = VerdictKind(result["verdict"]["kind"])
    generations = result["generations"]
    samples = [
        Sample(
            (g["prompt"], g["repeat"], g["seed"]),
            g.get("passed"),
            tokens[g["key"]],
            rounds.get(g["key"], []),
            (int(g["decoded"]), float(g["decode_seconds"])) if "decoded" in g else None,
        )
        for g in generations
    ]
    fault = verdict in (VerdictKind.route_fault, VerdictKind.model_degenerate)
    shown_alone = any(g.get("passed") is False for g in generations)
    route, sampling = config["route"], config["sampling"]
    if config.get("target", {}).get("name", ENGINE) == ENGINE:
        drawn = not route["draft_tokens"] or route["draft_sampling"] in KEYED
    else:  # with noise of its own, unless it tells that it is the request's
        drawn = (result.get("loaded") or {}).get("server.version.draws") == KEYED_DRAWS
    keyed = not sampling["temperature"] or drawn
    return RunRecord(
        name=folder.full_name,
        seed=result["seed"],
        first_repeat=config.get("first_repeat", 0),
        verdict=verdict,
        reason=result["verdict"]["reason"],
        speed_valid=bool((result.get("speed") or {}).get("valid")),
        by_generation=all("passed" in g for g in generations) and (shown_alone or not fault),
        sequential=config.get("repeats") == AUTO_REPEATS,
        samples=samples,
        facts=run_facts(folder, result, config),
        tokens_keyed=bool(keyed),
    )


def _rounds(folder: RunFolder) -> dict[str, list[Any]]:
    """``rounds.parquet``; pyarrow's many complaints become one line."""
    path: Path = folder.path / tables.ROUNDS
    if not path.exists():
        raise UsageError(f"{path}: missing; the record is damaged")
    try:
        return dict(tables.read_rounds(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: damaged ({' '.join(str(error).split())[:200]})") from error


def _environment(folder: RunFolder) -> dict[str, Any]:
    path = folder.path / ENVIRONMENT
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: damaged or missing ({error})") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: damaged (no facts in it)")
    return value


def _hardware(device: str, environment: dict[str, Any]) -> str:
    """The name of the device a run used."""
    if device == SERVER_HARDWARE:
        return device
    gpus = environment.get("gpus") or []
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or 0)
        return str(gpus[index]["name"]) if index < len(gpus) else f"unknown {device}"
    return str((environment.get("cpu") or {}).get("name"))


def _software(folders: Sequence[RunFolder]) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for folder in folders:
        environment = _environment(folder)
        git = environment.get("git") or {}
        commit = str(git.get("commit") or "none")[:12] + (" with changes" if git.get("dirty") else "")
        versions = environment.get("packages") or {}
        for name, value in {"commit": commit, **{p: versions.get(p, "none") for p in PACKAGES}}.items():
            found.setdefault(name, set()).add(str(value))
    return {name: " and ".join(sorted(values)) for name, values in found.items()}
