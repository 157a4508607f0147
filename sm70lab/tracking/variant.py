"""Variants: runs whose configurations differ in nothing but seed, repeats, and what is shown and kept."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any

from sm70lab.config import conf_dir, defaults_beside, plain
from sm70lab.config_checks import RANDOM_MODELS
from sm70lab.config_checks_target import REACHING, own_settings
from sm70lab.raw_text import load_yaml
from sm70lab.schema import PromptSpec

NOT_A_VARIANT = ("seed", "repeats", "first_repeat", "sprt", "display", "tracking", "force", "name")
ID_DIGITS = 7
LONGEST_VALUE = 40  # characters of a value in a difference

Settings = dict[str, Any]


def settings_of(recorded: Settings, weights: str | None) -> Settings:
    """The settings that make a run's variant, from its ``config.yaml``.

    Settings that a later version added get their default; ``weights``, the model's hash, stands in for
    the model's path (a drawn model is known by its shape and seed). Raises ``ValueError`` where a group
    of settings is something else.
    """
    defaults = defaults_beside(recorded)
    found = own_settings(_merged(defaults, recorded))
    for key, value in defaults.items():
        if isinstance(value, dict) and not isinstance(found[key], dict):
            raise ValueError(f"{key} is not a group of settings")
    for key in NOT_A_VARIANT:
        found.pop(key, None)
    drawn = found["model"].get("name") in RANDOM_MODELS
    found["model"]["weights"] = None if drawn or weights is None else weights[:12]
    del found["model"]["path"]
    found["target"] = {key: value for key, value in found["target"].items() if key not in REACHING}
    return found


def variant_id(settings: Settings) -> str:
    """``v`` and seven hexadecimal digits (no run's name or fingerprint starts so).

    The route's name does not count: two names for the same flags are one variant. Defaults of the
    schema do not count either, so that a new setting gives no old run another id.
    """
    route = {key: value for key, value in settings["route"].items() if key != "name"}
    defaults = defaults_beside(settings)
    counted = _without(
        settings | {"route": route}, defaults | {"model": defaults["model"] | {"weights": None}}
    )
    digest = hashlib.sha256(json.dumps(counted, sort_keys=True, default=str).encode()).hexdigest()
    return f"v{digest[:ID_DIGITS]}"


def difference(found: Settings, base: Settings) -> list[str]:
    """``key=value`` of every setting in which ``found`` differs from ``base``; empty where in none.

    A group that was chosen by another name is told by that name, and by what differs from its YAML.
    """
    parts: list[str] = []
    for key, value in found.items():
        beside = base.get(key)
        if not isinstance(value, dict) or not isinstance(beside, dict):
            if value != beside:
                parts.append(f"{key}={_short(value)}")
            continue
        name = value.get("name")
        if key != "route" and name != beside.get("name"):
            parts.append(f"{key}={name}")
            beside = _stock(key, str(name)) or beside
            if key == "model" and name != "checkpoint":
                beside = beside | {"weights": value.get("weights")}  # they follow from the name
        parts += _differing(key, value, beside)
    return parts


def _differing(prefix: str, value: Settings, beside: Settings) -> list[str]:
    parts: list[str] = []
    for key in [*value, *(k for k in beside if k not in value)]:
        here, there = value.get(key), beside.get(key)
        if here == there or key == "name":
            continue
        if isinstance(here, dict) and isinstance(there, dict):
            parts += _differing(f"{prefix}.{key}", here, there)
        else:
            parts.append(f"{prefix}.{key}={_short(here)}")
    return parts


@cache
def _stock(group: str, name: str) -> Settings | None:
    """What ``group=name`` sets, defaults filled in; None where it is nobody's YAML here."""
    file = conf_dir() / group / f"{name}.yaml"
    if not file.is_file():
        return None
    own = {"target": {"name": name}} if group == "target" else {}
    section: Settings = _merged(defaults_beside(own)[group], load_yaml(file))
    section.pop("defaults", None)  # Hydra's own
    if group == "model":
        del section["path"]
    if group == "target":
        section = {key: value for key, value in section.items() if key not in REACHING}
    if group == "workload":
        section["prompts"] = [_merged(plain(PromptSpec()), prompt) for prompt in section["prompts"]]
    return section


def _merged(base: Settings, over: Settings) -> Settings:
    result = dict(base)
    for key, value in over.items():
        beside = base.get(key)
        both = isinstance(value, dict) and isinstance(beside, dict)
        result[key] = _merged(beside, value) if both else value  # type: ignore[arg-type]
    return result


def _without(value: Settings, defaults: Settings) -> Settings:
    """``value`` less what equals its default."""
    kept: Settings = {}
    for key, item in value.items():
        default = defaults.get(key)
        if isinstance(item, dict) and isinstance(default, dict):
            item = _without(item, default)
            if not item:
                continue
        elif key in defaults and item == default:
            continue
        kept[key] = item
    return kept


def _short(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list) and value and all(isinstance(v, dict) and "name" in v for v in value):
        value = [v["name"] for v in value]  # prompts
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
