"""Pin a route with its evidence, and hold later code against what was pinned."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sm70lab.config import from_plain, plain
from sm70lab.config_checks_target import ENGINE
from sm70lab.dotted import dotted
from sm70lab.errors import UsageError
from sm70lab.experiment import build_target
from sm70lab.schema import ExperimentConfig, Generation, Route, VerdictKind
from sm70lab.targets.base import Target
from sm70lab.tracking import accepted as accepted_file
from sm70lab.tracking import ledger, notes, tables
from sm70lab.tracking.accepted import Accepted
from sm70lab.tracking.environment import package_versions
from sm70lab.tracking.find_runs import config_of, finished_result
from sm70lab.tracking.fingerprint import fingerprint, hardware, model_hash
from sm70lab.tracking.ledger import Row
from sm70lab.tracking.marker import now
from sm70lab.tracking.report.records import Record
from sm70lab.tracking.result import NO_HAZARD, token_hash
from sm70lab.tracking.run_folder import RunFolder
from sm70lab.tracking.variant import NOT_A_VARIANT

FAULTS = (VerdictKind.route_fault.value, VerdictKind.model_degenerate.value)
SUBSTANTIAL_DIGITS = 6


# --------------------------------------------------------------------------- pinning


def pin(
    run: RunFolder, runs_dir: Path, tokens: int, into: Path, say: Callable[[str], None]
) -> tuple[Accepted, Row]:
    """Write ``into`` for a passing run: route, conditions, evidence, and fresh greedy outputs.

    ``tokens``: greedy output tokens a prompt, at most. The variant becomes ``accepted`` in the ledger, an
    earlier pinned one ``superseded``. Raises ``UsageError`` for a run that is not finished, passed,
    audited and honest, one of other code, weights or hardware, and one whose variant failed elsewhere.
    """
    result = _passing(run)
    config = from_plain(config_of(run))
    if config.target.name != ENGINE:
        raise UsageError(
            f"{run}: target={config.target.name}; only the engine's routes are pinned, since no code here "
            "makes a server's outputs again"
        )
    weights = model_hash(config.model, config.target)
    if fingerprint(config, weights) != result["fingerprint"]:
        raise UsageError(
            f"{run}: made by other code, packages, weights or hardware than these; "
            "run it again here and pin that run"
        )
    book = ledger.build(runs_dir)
    row, _ = book.holding(run)
    if row.state == "rejected":
        note = f'sm70lab note {row.variant} "why" state=open'
        raise UsageError(f"{run}: its variant {row.variant} is rejected ({row.conclusion}); first: {note}")
    # A run repeated with the same seed is no new evidence: one a fingerprint.
    of_code = [record for record in row.runs if ledger.code_of(record) == book.revision]
    same = list({str(record.result.get("fingerprint")): record for record in of_code}.values())
    for record in of_code:
        if record.verdict in FAULTS:
            raise UsageError(
                f"{run}: {record.folder}, a run of the same variant and code, is {record.verdict}; "
                "a route that fails on another seed is not accepted"
            )
    say(f"greedy outputs of {config.model.name}, {tokens} tokens a prompt")
    greedy = greedy_config(config, tokens)
    target = build_target(greedy)
    outputs = _decode(target)
    values = {
        "run": run.full_name,
        "variant": row.variant,
        "fingerprint": result["fingerprint"],
        "code_revision": book.revision,
        "pinned": now(),
        "route": plain(config.route),
        "conditions": _conditions(config),
        "weights": weights,
        "evidence": _evidence(same, hardware(config.target)),
        "greedy": {**_held_for(config), "tokens": tokens, "outputs": [_output(g, target) for g in outputs]},
    }
    pinned = accepted_file.save(into, values)
    _tell_ledger(book, row, run, pinned)
    return pinned, row


def _passing(run: RunFolder) -> dict[str, Any]:
    result = finished_result(run)
    verdict = result["verdict"]
    if (hazard := result.get("hazard", NO_HAZARD)) != NO_HAZARD:
        raise UsageError(f"{run}: hazard={hazard} put a fault in on purpose; only an honest run is pinned")
    if verdict["kind"] != VerdictKind.passed.value:
        raise UsageError(f"{run}: its verdict is {verdict['kind']}, not pass ({verdict['reason']})")
    audit: dict[str, float] = next((e["metrics"] for e in verdict["evidence"] if e["kind"] == "audit"), {})
    if not audit.get("audited"):
        raise UsageError(f"{run}: passed on its text alone, without an audit; run it with audit=true")
    run.token_ids()  # raises where outputs are missing or are not those of the result
    if not (run.path / tables.AUDIT).is_file():
        raise UsageError(f"{run.path / tables.AUDIT}: missing; the record is damaged, run it again")
    return result


def _conditions(config: ExperimentConfig) -> dict[str, Any]:
    """What the route was accepted under: everything else that makes a variant."""
    kept = plain(config)
    return {key: value for key, value in kept.items() if key != "route" and key not in NOT_A_VARIANT}


def _evidence(runs: list[Record], device: str) -> dict[str, Any]:
    from sm70lab.judge.statistics import pass_rate

    judged = [run for run in runs if run.verdict in (VerdictKind.passed.value, *FAULTS)]
    passed = [run for run in judged if run.verdict == VerdictKind.passed.value]
    rate = pass_rate(len(passed), len(judged))
    fast = [run for run in passed if run.speed() is not None and ledger.hardware_of(run) == device]
    return {
        "runs": len(judged),
        "passed": len(passed),
        "inconclusive": sum(run.verdict == VerdictKind.inconclusive.value for run in runs),
        "pass_rate": {
            "low": round(rate.low, 4),
            "high": round(rate.high, 4),
            "interval": "Clopper-Pearson, 95 %",
        },
        "audited_tokens": int(sum(run.metric("audit", "tokens") or 0 for run in passed)),
        "p_values": {run.folder.full_name: _rounded(run.metric("audit", "p_value")) for run in passed},
        "speed": {
            "hardware": device,
            "runs": len(fast),
            **{
                key: _rounded(median(found)) if (found := _speeds(fast, key)) else None
                for key in ("tokens_per_second", "rounds_per_second", "acceptance_length")
            },
        },
    }


def _speeds(runs: list[Record], key: str) -> list[float]:
    found = [run.result["speed"].get(key) for run in runs]
    return [float(value) for value in found if isinstance(value, int | float)]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{SUBSTANTIAL_DIGITS}g}")


def _tell_ledger(book: ledger.Ledger, row: Row, run: RunFolder, pinned: Accepted) -> None:
    evidence = pinned.values["evidence"]
    low, high = evidence["pass_rate"]["low"], evidence["pass_rate"]["high"]
    text = f"pinned: {evidence['passed']} of {evidence['runs']} passed (95 %: {low:.2f} to {high:.2f})"
    made = {"code_revision": book.revision, "by": "pin"}
    notes.append(book.runs_dir, notes.Note(row.variant, run.full_name, text, "accepted", **made))
    for other in book.rows:
        ruling = other.ruling
        if other is not row and ruling is not None and (ruling.state, ruling.by) == ("accepted", "pin"):
            text = f"superseded by {row.variant}"
            notes.append(book.runs_dir, notes.Note(other.variant, ruling.run, text, "superseded", **made))


# --------------------------------------------------------------------------- greedy outputs


def greedy_config(config: ExperimentConfig, tokens: int) -> ExperimentConfig:
    """The same run at temperature 0, at most ``tokens`` a prompt, without records."""
    greedy = deepcopy(config)
    greedy.sampling.temperature = 0.0
    for prompt in greedy.workload.prompts:
        prompt.max_tokens = min(prompt.max_tokens or greedy.workload.max_tokens, tokens)
    greedy.tracking.mlflow = False
    return greedy


def _decode(target: Target) -> list[Generation]:
    target.load()
    return list(target.generate(target.prompts(), 0, lambda progress: None))


def _output(generation: Generation, target: Target) -> dict[str, Any]:
    return {
        "prompt": generation.prompt.name,
        "prompt_sha256": token_hash(generation.prompt.token_ids),
        "sha256": token_hash(generation.token_ids),
        "smallest_margin": _smallest_margin(generation, target),
        "token_ids": list(generation.token_ids),
    }


def _smallest_margin(generation: Generation, target: Target) -> dict[str, Any] | None:
    """Where another machine's rounding would change the output first: the closest race of two tokens."""
    scores = target.score(generation)
    if scores is None:
        return None
    index = int(scores.top2_margin.argmin())
    return {"logits": _rounded(float(scores.top2_margin[index])), "token": index}


def _held_for(config: ExperimentConfig) -> dict[str, Any]:
    """The machine on which the same outputs are expected to the last token."""
    return {
        "hardware": hardware(config.target),
        "dtype": config.model.dtype.value,
        "torch": package_versions().get("torch"),
    }


# --------------------------------------------------------------------------- drift


@dataclass(frozen=True)
class Drift:
    """One difference between what was pinned and what is now."""

    line: str
    tie: bool = False  # a near-equal choice that fell the other way on another machine


def config_drift(pinned: Accepted, route: Route) -> list[Drift]:
    """Flags of ``route`` that are not the pinned ones. Its name is no flag."""
    then, here = dict(dotted(pinned.route, "route")), dict(dotted(plain(route), "route"))
    lines = []
    for key in sorted((then | here).keys() - {"route.name"}):
        if key not in here:
            lines.append(f"{key}: pinned {_value(then[key])}, no longer a setting")
        elif key not in then:
            lines.append(f"{key}: not pinned, now {_value(here[key])}")
        elif then[key] != here[key]:
            lines.append(f"{key}: pinned {_value(then[key])}, now {_value(here[key])}")
    return [Drift(line) for line in lines]


def output_drift(pinned: Accepted, route: Route) -> list[Drift]:
    """Decode the pinned prompts greedily along ``route`` and compare token by token.

    Raises ``UsageError`` where the pinned model cannot be had.
    """
    values = pinned.values
    try:
        config = from_plain({"route": plain(route), **values["conditions"]})
    except UsageError as error:
        raise UsageError(f"{pinned.path}: its conditions cannot be had here ({error}); pin again") from error
    if model_hash(config.model, config.target) != values["weights"]:
        return [Drift(f"model={config.model.name}: the weights are not the pinned ones")]
    held = values["greedy"]
    target = build_target(greedy_config(config, held["tokens"]))
    found = {generation.prompt.name: generation for generation in _decode(target)}
    elsewhere = any(held[key] != value for key, value in _held_for(config).items())
    drifts = [
        _compare(output, found[output["prompt"]], target, config, elsewhere) for output in held["outputs"]
    ]
    return [drift for drift in drifts if drift is not None]


def _compare(
    output: dict[str, Any], now: Generation, target: Target, config: ExperimentConfig, elsewhere: bool
) -> Drift | None:
    name, then = output["prompt"], output["token_ids"]
    if token_hash(now.prompt.token_ids) != output["prompt_sha256"]:
        return Drift(f"prompt {name}: its token ids are not the pinned ones")
    if token_hash(now.token_ids) == output["sha256"]:
        return None
    same = next(
        (i for i, pair in enumerate(zip(then, now.token_ids, strict=False)) if pair[0] != pair[1]), None
    )
    if same is None:
        return Drift(
            f"prompt {name}: pinned {len(then)} tokens, now {len(now.token_ids)}; equal as far as both go"
        )
    line = f"prompt {name}, token {same}: pinned {then[same]}, now {now.token_ids[same]}"
    if not elsewhere:
        return Drift(line)
    margin, tie = _race(now, same, then[same], target, config)
    return Drift(f"{line} (on other hardware or torch; the reference's two best are {margin:.2g} apart)", tie)


def _race(
    now: Generation, index: int, pinned_id: int, target: Target, config: ExperimentConfig
) -> tuple[float, bool]:
    """The reference's margin at a differing token, and whether rounding explains the difference."""
    from sm70lab.judge.tolerance import tolerance_for

    scores = target.score(now)
    if scores is None:
        return float("nan"), False
    margin = float(scores.top2_margin[index])
    either = int(scores.argmax[index]) in (pinned_id, now.token_ids[index])
    tolerance = tolerance_for(config.model.dtype, target.rounding(now))
    return margin, either and margin <= tolerance.logit


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
