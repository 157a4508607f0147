"""The page of one run: verdict, evidence, first fault, pictures, outputs, configuration, machine."""

from __future__ import annotations

from typing import Any

from sm70lab.tracking import drawing
from sm70lab.tracking import result as results
from sm70lab.tracking.report import parts, pictures, reproduce
from sm70lab.tracking.report.records import Record
from sm70lab.tracking.variant import Settings, settings_of

TEXT_CHARS = 20_000  # of an output shown in the page; the whole is in the run folder


def build(record: Record, base: tuple[str, Settings], default: dict[str, Any]) -> dict[str, Any]:
    """What the template shows. ``base`` names the settings to compare with (see ``variant.settings_of``)
    and is them; ``default`` is what a command without settings composes to.
    """
    result, config = record.result, record.config
    gate = config.get("gate") or {}
    valid = record.speed() is not None
    name, settings = base
    return {
        "title": f"{record.route}, seed {record.seed}",
        "record": record,
        "label": parts.label(record),
        "style": parts.style(record),
        "reason": _reason(record),
        "hazard": _hazard(record),
        "damage": record.note if record.verdict and record.note else None,
        "reproduces": results.reproduces_line(result) if result.get("reproduces") else None,
        "numbers": _numbers(record),
        "evidence": list(record.evidence.values()),
        "excerpts": list(parts.excerpts(record)),
        "pictures": list(
            pictures.run_pictures(
                record.windows(),
                _pooled(record, int(gate.get("window_tokens") or 500)),
                record.detail("audit", "curve") or [],
                record.detail("audit", "limit_log10_e"),
                valid or not record.verdict,
            )
        ),
        "outputs": [_output(record, g) for g in result.get("generations", [])],
        "base": name,
        "differences": _differences(record, name, settings),
        "command": reproduce.command(config, default) if config else None,
        "typed": parts.typed(record.environment),
        "environment": parts.environment_rows(record.environment),
        "facts": _facts(record),
    }


def _differences(record: Record, name: str, settings: Settings) -> list[parts.Difference]:
    if not record.config:
        return []
    known = (settings.get("model") or {}).get("weights") is not None
    weights = (record.result.get("loaded") or {}).get("model_hash") if known else None
    return parts.differences({name: settings, "this run": settings_of(record.config, weights)})


def _reason(record: Record) -> str:
    """Why the run ended so; without the numbers in brackets where an evidence line below has them."""
    if not record.verdict:
        return record.note
    reason = str(record.result["verdict"]["reason"])
    repeated = any(e["line"] == reason for e in record.evidence.values())
    return reason.rpartition(" [")[0] if repeated and reason.endswith("]") else reason


def _numbers(record: Record) -> list[dict[str, Any]]:
    """The few numbers under the verdict; a speed that does not count says so."""
    result = record.result
    shown: list[dict[str, Any]] = []
    values = result.get("speed") or {}
    for key, digits, unit in (
        ("tokens_per_second", 1, "tok/s"),
        ("rounds_per_second", 1, "rounds/s"),
        ("acceptance_length", 2, "tokens a round"),
    ):
        if values.get(key) is not None:
            ranked = key != "tokens_per_second" or values.get("valid")
            note = None if ranked else "invalid, not ranked"
            shown.append({"value": f"{values[key]:.{digits}f}", "unit": unit, "note": note})
    if result.get("generations"):
        tokens = sum(g["tokens"] for g in result["generations"])
        count = len(result["generations"])
        outputs = f"tokens in {count} output{'s' if count != 1 else ''}"
        shown.append({"value": f"{tokens:,}", "unit": outputs, "note": None})
    for kind, key, unit in (("audit", "p_value", "audit p-value"), ("audit", "log10_e", "log₁₀ evidence")):
        if (number := record.metric(kind, key)) is not None:
            shown.append({"value": f"{number:.3g}", "unit": unit, "note": None})
    return shown


def _output(record: Record, generation: dict[str, Any]) -> dict[str, Any]:
    text = record.text(generation["key"])
    decode = generation["decode_seconds"]
    return {
        **generation,
        "prefill": parts.seconds(generation["prefill_seconds"]),
        "decode": parts.seconds(decode),
        "text": None if text is None else text[:TEXT_CHARS],
        "cut": None if text is None or len(text) <= TEXT_CHARS else f"{len(text) - TEXT_CHARS:,}",
        "failures": [f["line"] for f in _shape_of(record, generation["key"]).get("failures") or []],
    }


def _shape_of(record: Record, key: str) -> dict[str, Any]:
    found = (record.detail("shape", "generations") or {}).get(key)
    return found if isinstance(found, dict) else {}


def _pooled(record: Record, window_tokens: int) -> list[list[drawing.Rate]]:
    rounds = [r for group in record.rounds().values() for r in group]
    return drawing.pooled_rates(rounds, window_tokens)


def _hazard(record: Record) -> str | None:
    if record.hazard is None:
        return None
    return results.hazard_line({"loaded": {}, **record.result, "hazard": record.hazard})


def _facts(record: Record) -> list[tuple[str, str]]:
    result = record.result
    rows = [("record", str(record.folder)), ("started", record.started), ("finished", result.get("finished"))]
    rows += [("fingerprint", result.get("fingerprint")), ("sm70lab", result.get("sm70lab"))]
    rows += [(f"loaded: {key}", value) for key, value in (result.get("loaded") or {}).items()]
    return [(name, str(value)) for name, value in rows if value not in (None, "")]
