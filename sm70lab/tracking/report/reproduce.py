"""The command that gives a recorded configuration again, checked by composing it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from sm70lab.config import compose, conf_dir, defaults_beside, plain
from sm70lab.errors import UsageError
from sm70lab.tracking.fingerprint import NOT_COUNTED

GROUPS = ("route", "target", "model", "workload", "sampling", "gate")


def command(config: dict[str, Any], default: dict[str, Any]) -> str | None:
    """``sm70lab key=value …`` for this configuration; None where composing it gives another one.

    ``default`` is what the command without settings composes to. Groups are chosen by name and what
    still differs follows as single settings, so a group file that has changed since the run cannot
    change the command's meaning.
    """
    config = _filled(config, defaults_beside(config))
    choices = [f"{group}={name}" for group in GROUPS if (name := _choice(config, group)) is not None]
    try:
        base = plain(compose(choices))
        own = [f"{key}={_literal(value)}" for key, value in _different(config, base, "")]
        settings = [*choices, *own]
        composed = plain(compose(settings)) if own else base
    except UsageError:
        return None
    if _counted(composed) != _counted(config):
        return None
    chosen = [c for c in choices if _choice(default, c.partition("=")[0]) != c.partition("=")[2]]
    return shlex.join(["sm70lab", *chosen, *own])


def _choice(config: dict[str, Any], group: str) -> str | None:
    """The group file of this name, if there is one."""
    section = config.get(group)
    name = section.get("name") if isinstance(section, dict) else None
    return str(name) if (conf_dir() / group / f"{name}.yaml").is_file() else None


def _different(config: dict[str, Any], base: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if prefix == "" and key in NOT_COUNTED:
            continue
        name = f"{prefix}{key}"
        other = base.get(key)
        if isinstance(value, dict) and isinstance(other, dict) and other.keys() == value.keys():
            yield from _different(value, other, f"{name}.")
        elif value != other:
            yield name, value


def _filled(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A recorded configuration with the defaults of settings that a later version added."""
    found = dict(defaults)
    for key, value in config.items():
        beside = defaults.get(key)
        if isinstance(value, dict) and isinstance(beside, dict) and beside:
            value = _filled(value, beside)
        found[key] = value
    return found


def _literal(value: Any) -> str:
    """A value in Hydra's grammar for overrides."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_literal(item) for item in value) + "]"
    if isinstance(value, str):
        plain_word = value and all(c.isalnum() or c in "_-./" for c in value)
        if plain_word and not value[0].isdigit() and value not in ("null", "true", "false"):
            return value
        escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
        return f"'{escaped}'"
    return json.dumps(value)


def _counted(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in NOT_COUNTED}
