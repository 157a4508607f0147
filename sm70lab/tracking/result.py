"""``result.json`` and ``summary.md``: what a run found, in one plain dictionary."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from sm70lab import __version__
from sm70lab.judge.served_acceptance import decoded
from sm70lab.schema import (
    EXIT_CODES,
    RESULT_SCHEMA_VERSION,
    ExperimentConfig,
    Generation,
    Verdict,
    VerdictKind,
)
from sm70lab.tracking.latency import latency, latency_line

NO_HAZARD = "none"
SERVER_ROUTE, SERVER_HAZARD = "server.version.route.name", "server.version.hazard"  # of what was loaded
SHARED = "other_traffic"  # finding of the acceptance beside which a speed is no measure
MOST_TOKENS = 10**9
LEAST_SECONDS = 1e-6
SPEED = ("tokens_per_second", "rounds_per_second", "acceptance_length")
VERDICT_KEYS = ("kind", "reason", "evidence")
EVIDENCE_KEYS = ("kind", "status", "line", "metrics", "details")
GENERATION_KEYS = ("key", "tokens", "finish_reason", "prefill_seconds", "decode_seconds")


def build(
    config: ExperimentConfig,
    fingerprint: str,
    started: datetime,
    target: dict[str, str | int | float],
    generations: Sequence[Generation],
    verdict: Verdict | None,
    interrupted: str | None = None,
) -> dict[str, Any]:
    """The record of one run. ``verdict`` is None for a run that ``interrupted`` names the end of."""
    return {
        "schema_version": RESULT_SCHEMA_VERSION,
        "sm70lab": __version__,
        "status": "finished" if verdict is not None else "interrupted",
        "interrupted": interrupted,
        "experiment": config.name,
        "route": config.route.name,
        "target": config.target.name,
        "model": config.model.name,
        "workload": config.workload.name,
        "seed": config.seed,
        "draft_tokens": config.route.draft_tokens,
        "hazard": config.hazard,
        "fingerprint": fingerprint,
        "started": started.isoformat(timespec="milliseconds"),
        "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "loaded": target,
        "verdict": None if verdict is None else _verdict(verdict),
        "speed": None if verdict is None else speed(verdict, config.hazard),
        "latency": latency(generations),
        "generations": [_generation(generation) for generation in generations],
        "reproduces": None,
        "sequential": None,
    }


def speed(verdict: Verdict, hazard: str = NO_HAZARD) -> dict[str, Any]:
    """Pooled speed. Only a passing run's is valid, so that it may be ranked: a loop is fast too."""
    metrics = next((e.metrics for e in verdict.evidence if e.kind == "acceptance"), {})
    valid = verdict.kind == VerdictKind.passed and bool(metrics.get("speed_valid", 1))
    valid = valid and hazard == NO_HAZARD
    shared = any(SHARED in e.details.get("findings", {}) for e in verdict.evidence if e.kind == "acceptance")
    return {"valid": valid, "shared": shared, **{key: metrics.get(key) for key in SPEED}}


def incomplete(result: Any) -> str | None:
    """What a result lacks that every version of the schema has; None where it is whole."""
    if not isinstance(result, dict) or "status" not in result:
        return "not a result"
    version = result.get("schema_version")
    if not isinstance(version, int) or version > RESULT_SCHEMA_VERSION:
        return (
            f"written by a later sm70lab (schema_version {version}, known are 1 to {RESULT_SCHEMA_VERSION})"
        )
    generations = result.get("generations")
    if not isinstance(generations, list) or any(not _has(g, GENERATION_KEYS) for g in generations):
        return "an output lacks what every output has"
    if odd := next((f for g in generations for f in _odd(g)), None):
        return f"an output's {odd}"
    if result["status"] == "interrupted":
        return None
    verdict = result.get("verdict")
    if not isinstance(verdict, dict) or not _has(verdict, VERDICT_KEYS):
        return "finished without a verdict"
    if not isinstance(verdict["evidence"], list):
        return "a verdict without evidence"
    if verdict["kind"] not in {kind.value for kind in VerdictKind}:
        return f"no such verdict: {verdict['kind']}"
    for evidence in verdict["evidence"]:
        if not _has(evidence, EVIDENCE_KEYS) or not isinstance(evidence["metrics"], dict):
            return "evidence without its line or numbers"
    values = result.get("speed")
    numbers = [values.get(key) for key in SPEED] if isinstance(values, dict) else ["none"]
    if any(number is not None and not isinstance(number, int | float) for number in numbers):
        return "speed is not a number"
    if isinstance(values, dict) and not isinstance(values.get("valid", False), bool):
        return "speed is neither valid nor invalid"
    return None


def _odd(generation: dict[str, Any]) -> Iterator[str]:
    """What cannot be true of an output, so that nobody adds it up."""
    tokens, decoded = (generation.get(key, 0) for key in ("tokens", "decoded"))
    for name, value in (("tokens", tokens), ("decoded", decoded)):
        if not _is_whole(value) or not 0 <= value <= MOST_TOKENS:
            yield f"{name} are no count"
            return
    if decoded > tokens:
        yield "decoded tokens are more than its tokens"
    for name in ("prefill_seconds", "decode_seconds"):
        value = generation[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            yield f"{name} are no time"
        elif 0 < value < LEAST_SECONDS:
            yield f"{name} are less than a clock can tell"
    if generation.get("passed") not in (None, True, False) or _is_whole(generation.get("passed")):
        yield "passed is neither true, false nor null"
    for name in ("seed", "repeat"):
        if name in generation and not _is_whole(generation[name]):
            yield f"{name} is no whole number"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _has(value: Any, keys: Sequence[str]) -> bool:
    return isinstance(value, dict) and all(key in value for key in keys)


def exit_code(result: dict[str, Any]) -> int:
    """The exit code of a recorded verdict."""
    return EXIT_CODES[VerdictKind(result["verdict"]["kind"])]


def compare_tokens(name: str, earlier: dict[str, list[int]], now: dict[str, list[int]]) -> dict[str, Any]:
    """Whether a repeated run gave the earlier run's tokens; ``first_difference`` says where not."""
    for key in sorted(earlier.keys() | now.keys()):
        a, b = earlier.get(key), now.get(key)
        if a == b:
            continue
        if a is None or b is None:
            return {"run": name, "equal": False, "first_difference": f"{key} is in one run only"}
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        return {"run": name, "equal": False, "first_difference": f"{key}, token {same}"}
    return {"run": name, "equal": True, "first_difference": None}


def not_compared(name: str, reason: str) -> dict[str, Any]:
    """A repeated run beside an earlier record that cannot be read: nothing is known, neither way."""
    return {"run": name, "equal": None, "first_difference": None, "reason": reason}


def evidence_lines(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(kind, status, line) of each evidence, in order."""
    return [(e["kind"], e["status"], e["line"]) for e in result["verdict"]["evidence"]]


def speed_line(result: dict[str, Any]) -> str:
    """tok/s beside rounds/s and the acceptance length, marked where it may not be ranked."""
    values = result["speed"]
    parts = [
        f"{values[key]:.{digits}f} {unit}"
        for key, digits, unit in (
            ("tokens_per_second", 1, "tok/s"),
            ("rounds_per_second", 1, "rounds/s"),
            ("acceptance_length", 2, "tokens a round"),
        )
        if values[key] is not None
    ]
    line = ", ".join(parts) or "not measured"
    why = "the server worked for others, too" if values.get("shared") else "only a passing run's speed counts"
    return line if values["valid"] else f"{line} (invalid: {why})"


def hazard_line(result: dict[str, Any]) -> str | None:
    """What to say first and loudest of a run with a fault put in on purpose; None for an honest one."""
    name = result.get("hazard", NO_HAZARD)
    told = (result.get("loaded") or {}).get(SERVER_HAZARD, NO_HAZARD)
    if name == NO_HAZARD:
        return None if told == NO_HAZARD else f"{told}: the server runs with this fault, its /version says so"
    idle = result["loaded"].get("hazard_cannot_act")
    return f"{name}: a fault put in on purpose" + (f"; it cannot act here: {idle}" if idle else "")


def reproduces_line(result: dict[str, Any]) -> str | None:
    """What a forced re-run says about the earlier one; None for a first run."""
    found = result["reproduces"]
    if found is None:
        return None
    if found["equal"] is None:
        return f"unknown against {found['run']}: {found['reason']}"
    if found["equal"]:
        return f"the same tokens as {found['run']}"
    return f"NOT the tokens of {found['run']}: first difference at {found['first_difference']}"


def repeats_line(result: dict[str, Any]) -> str | None:
    """What the sequential test of ``repeats=auto`` found; None for a run with a number of repeats."""
    found = result.get("sequential")
    return None if found is None else str(found["line"])


def summary(result: dict[str, Any]) -> str:
    """``summary.md``: the verdict, its evidence, speed and generations."""
    head = f"# {result['experiment']}: {result['route']}, seed {result['seed']}"
    if result["verdict"] is None:
        lines = [head, "", f"**interrupted**: {result['interrupted']}"]
    else:
        lines = [head, "", f"**{result['verdict']['kind']}**: {result['verdict']['reason']}", ""]
        lines += [f"- {kind} ({status}): {line}" for kind, status, line in evidence_lines(result)]
        lines.append(f"- speed: {speed_line(result)}")
    if (line := latency_line(result.get("latency"))) is not None:
        lines.append(f"- latency: {line}")
    if (line := repeats_line(result)) is not None:
        lines.append(f"- repeats: {line}")
    if (line := reproduces_line(result)) is not None:
        lines.append(f"- reproduces: {line}")
    if (line := hazard_line(result)) is not None:
        lines[1:1] = ["", f"**HAZARD {line}**"]
    lines += ["", "| generation | tokens | end | prefill s | decode s |", "|---|---|---|---|---|"]
    lines += [
        f"| {g['key']} | {g['tokens']} | {g['finish_reason']} "
        f"| {g['prefill_seconds']:.2f} | {g['decode_seconds']:.2f} |"
        for g in result["generations"]
    ]
    notes = [f"- {g['key']}: {g['note']}" for g in result["generations"] if g["note"]]
    lines += ["", *notes] if notes else []
    made = f"sm70lab {result['sm70lab']}, {result['finished']}"
    lines += ["", f"Fingerprint `{result['fingerprint']}`, {made}."]
    return "\n".join(lines) + "\n"


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "kind": verdict.kind.value,
        "reason": verdict.reason,
        "evidence": [
            {
                "kind": e.kind,
                "status": e.status.value,
                "line": e.line,
                "metrics": e.metrics,
                "details": e.details,
            }
            for e in verdict.evidence
        ],
    }


def token_hash(token_ids: Sequence[int]) -> str:
    """SHA-256 of an output, as ``result.json`` keeps it."""
    return hashlib.sha256(json.dumps([int(i) for i in token_ids]).encode()).hexdigest()


def _generation(generation: Generation) -> dict[str, Any]:
    return {
        "key": generation.key,
        "prompt": generation.prompt.name,
        "repeat": generation.repeat,
        "seed": generation.seed,
        "prompt_tokens": len(generation.prompt.token_ids),
        "tokens": generation.tokens,
        "max_tokens": generation.prompt.max_tokens,
        "characters": len(generation.full_text),
        "rounds": len(generation.rounds),
        "finish_reason": generation.finish_reason,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.decode_seconds,
        "token_ids_sha256": token_hash(generation.token_ids),
        "note": generation.note,
        **({} if not generation.request else _served(generation)),
    }


def _served(generation: Generation) -> dict[str, Any]:
    """What a server's output has besides."""
    return {
        "ids": len(generation.token_ids),
        "reasoning_characters": len(generation.reasoning or ""),
        "ttft_seconds": generation.ttft_seconds,
        "decoded": decoded(generation),
        "chunks": len(generation.arrivals),
        "retries": len(generation.request.get("failed_tries", ())),
        "faults": len(generation.request.get("faults", ())),
    }
