"""Command-line arguments before Hydra sees them: the short forms, and mistakes in one line each."""

from __future__ import annotations

import os
import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, QuotedString
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sm70lab.config import near, schema_node
from sm70lab.errors import UsageError
from sm70lab.schema import ExperimentConfig

TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def expand_model_path(overrides: Sequence[str], multirun: bool) -> list[str]:
    """``model=/a/folder`` is short for ``model=checkpoint model.path=/a/folder``.

    A value is a folder when it holds a path separator or starts with ``~``. Paths become absolute,
    since a sweep's job may run elsewhere. In a sweep ``model=/a,/b`` takes each folder in turn.
    """
    expanded: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key != "model" or not (os.sep in value or value.startswith("~")):
            expanded.append(override)
            continue
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        paths = value.split(",") if multirun else [value]
        if not all(os.sep in path or path.startswith("~") for path in paths):
            raise UsageError(f"{override}: folders and names cannot be mixed in a sweep; use model.path")
        quoted = ",".join(_quote(str(Path(path).expanduser().absolute())) for path in paths)
        expanded += ["model=checkpoint", f"model.path={quoted}"]
    return expanded


def check_overrides(overrides: Sequence[str], conf_dirs: Sequence[Path], multirun: bool = False) -> None:
    """Check overrides one by one against groups, keys and types. Raises ``UsageError``."""
    groups = find_groups(conf_dirs)
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except (OverrideParseException, HydraException) as error:
            raise UsageError(_parse_complaint(text)) from error
        key = override.key_or_group
        if key.split("/")[0] == "hydra" or key.startswith("hydra."):
            if key in ("hydra.run.dir", "hydra.output_subdir"):
                raise UsageError(f"{text}: Hydra keeps no folder of its own here; set tracking.runs_dir")
            continue
        if override.is_sweep_override() and not multirun:
            raise UsageError(f"{text}: several values; add -m to run one experiment for each")
        for value in _values(override):
            if key in groups and not isinstance(value, dict | list):
                _check_choice(key, value, groups[key])
            else:
                _check_key(key, value, override, sorted(groups))


def is_sweep(text: str) -> bool:
    """Whether an override has several values; False for what cannot be read."""
    try:
        return OverridesParser.create().parse_override(text).is_sweep_override()
    except (OverrideParseException, HydraException):
        return False


def find_groups(conf_dirs: Sequence[Path]) -> dict[str, list[str]]:
    """Group → its choices, over all folders of YAML."""
    groups: dict[str, set[str]] = {}
    for folder in conf_dirs:
        for file in folder.glob("*/*.yaml"):
            groups.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(choices) for group, choices in sorted(groups.items())}


def _values(override: Override) -> list[Any]:
    if override.is_discrete_sweep():
        return list(override.sweep_iterator())
    return [] if override.is_sweep_override() else [override.value()]


def _check_choice(group: str, value: Any, choices: list[str]) -> None:
    name = value.text if isinstance(value, QuotedString) else str(value)
    if value is None:
        raise UsageError(f"{group}=null: choose from ({', '.join(choices)})")
    if name not in choices:
        raise UsageError(f"{group}={name}: no such {group}; {near(name, choices)}")


def _check_key(key: str, value: Any, override: Override, groups: list[str]) -> None:
    known: Any = ExperimentConfig
    text = override.input_line or key
    walked: list[str] = []
    for part in key.split("."):
        hint = _unwrap(known)
        if get_origin(hint) is dict:
            return
        if not is_dataclass(hint):
            raise UsageError(f"{text}: {'.'.join(walked)} is a single value, it has no {part}")
        names = [f.name for f in fields(hint)]
        if part not in names:
            prefix = ".".join([*walked, ""]) if walked else ""
            choices = names if walked else sorted({*names, *groups})
            raise UsageError(f"{text}: no such setting; {near(part, [prefix + name for name in choices])}")
        known = get_type_hints(hint)[part]
        walked.append(part)
    if override.type == OverrideType.DEL:
        raise UsageError(f"{text}: a setting cannot be deleted; give it a value")
    plain = value.text if isinstance(value, QuotedString) else value
    if "${" in text:
        return  # an interpolation has its value, and so its type, only in the composed whole
    try:
        base = schema_node()
        OmegaConf.update(base, key, plain, merge=True)
        OmegaConf.to_container(base, resolve=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise UsageError(f"{text}: must be {_describe(known)}") from error


def _parse_complaint(text: str) -> str:
    if "=" not in text and not text.startswith("~"):
        return f"{text}: not an override; write key=value"
    return f"{text}: cannot be read; put quotes around the value: {text.partition('=')[0]}='…'"


def _describe(hint: Any) -> str:
    inner = _unwrap(hint)
    if hint == int | str:  # of repeats
        return "a whole number, or auto"
    optional = " or null" if type(None) in get_args(hint) else ""
    if isinstance(inner, type) and issubclass(inner, Enum):
        return f"one of {', '.join(e.name for e in inner)}{optional}"
    if is_dataclass(inner):
        return "a group of settings: {key: value, …}"
    if get_origin(inner) is list:
        return f"a list of {_describe(get_args(inner)[0]).removeprefix('a ')}: [x, y]"
    return TYPE_WORDS.get(inner, str(inner)) + optional


def _unwrap(hint: Any) -> Any:
    """``X`` of ``X | None``."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return hint


def _quote(path: str) -> str:
    escaped = path.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
