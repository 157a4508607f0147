"""From YAML and overrides to a checked ``ExperimentConfig``.

Hydra composes, OmegaConf checks types, ``check`` checks what types cannot say. Everything here
runs before torch is imported, and every complaint is a one-line ``UsageError``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sm70lab.config_checks import complaints
from sm70lab.engine.routes import resolve
from sm70lab.errors import UsageError
from sm70lab.raw_text import escape_texts, raw_override, register_source
from sm70lab.schema import ExperimentConfig

VERSION_BASE = "1.3"


def conf_dir() -> Path:
    """The folder of YAML groups: inside an installed wheel, else beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise UsageError(f"{package}: its conf/ folder is missing; install sm70lab again")


def register_schema() -> None:
    """Make ``ExperimentConfig`` the typed base node of ``conf/config.yaml``, and prompts plain text."""
    register_source()
    node = OmegaConf.structured(ExperimentConfig)
    OmegaConf.set_struct(node.sampling.logit_bias, False)  # its keys are the user's, not settings
    ConfigStore.instance().store(name="schema", node=node)


def compose(overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Compose and check a configuration without running anything.

    Raises ``UsageError`` for anything the user can mend.
    """
    register_schema()
    outer = GlobalHydra.instance().hydra  # of the job within which this composes, if there is one
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
            node = hydra_compose("config", [raw_override(override) for override in overrides])
    except Exception as error:  # Hydra and its parsers raise many types; each is the user's input
        raise explain(error) from error
    finally:
        GlobalHydra.instance().hydra = outer
    return to_config(node)


def to_config(node: DictConfig) -> ExperimentConfig:
    """A composed node as a typed, checked object. Raises ``UsageError``."""
    try:
        config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise explain(error) from error
    assert isinstance(config, ExperimentConfig)
    for section in (config.model, config.tracking):
        key = "path" if section is config.model else "runs_dir"
        if (value := getattr(section, key)) is not None:
            name = "model" if section is config.model else "tracking"
            setattr(section, key, str(_folder(value, f"{name}.{key}")))
    check(config)
    return config


def _folder(path: str, setting: str) -> Path:
    if not path.strip():  # would be the working folder
        raise UsageError(f"{setting}={path}: must name a folder")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # ~name of nobody here
        raise UsageError(f"{setting}={path}: no such user's folder") from error


def check(config: ExperimentConfig) -> None:
    """Check values that types cannot. Raises ``UsageError`` for the first that cannot work."""
    for setting, value, must in complaints(config):
        raise UsageError(f"{setting}={value}: {must}")
    resolve(config.route)  # contradictory flags


def plain(value: Any) -> Any:
    """A configuration value as JSON and YAML can hold it: enums by name, lists and dicts copied."""
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def from_plain(values: dict[str, Any]) -> ExperimentConfig:
    """The inverse of ``plain``: a recorded configuration, checked. Settings it lacks get their default.

    Raises ``UsageError`` for settings that this version does not know or cannot use.
    """
    try:
        base = OmegaConf.structured(ExperimentConfig)
        OmegaConf.set_struct(base.sampling.logit_bias, False)
        node = OmegaConf.merge(base, OmegaConf.create(escape_texts(values)))
    except (OmegaConfBaseException, ValueError) as error:
        raise explain(error) from error
    assert isinstance(node, DictConfig)
    return to_config(node)


def explain(error: BaseException) -> UsageError:
    """Any error of Hydra, OmegaConf or the YAML parser as one line."""
    if isinstance(error, UsageError):
        return error
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return UsageError(f"{mark.name}:{mark.line + 1}: not YAML ({getattr(error, 'problem', error)})")
    text = str(error)
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and str(cause).split("\n")[0] not in text:
        text = f"{text}\n{cause}"
    text = text.split("Config search path:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
    place = re.search(r"In '([^']*)': \w+ raised while composing config:", text)
    where = f"{place[1]}.yaml: {key}" if place else key
    unknown = re.search(r"Key '([^']*)' not in '\w+'", text)
    if place and unknown:
        return UsageError(f"{where}: no such setting; {near(unknown[1], settings_beside(key))}")
    skipped = ("full_key:", "object_type=", "reference_type=", "In '")
    kept = [line for line in lines if not line.startswith(skipped)] or lines
    message = re.sub(r":;", ":", "; ".join(kept)) or type(error).__name__
    return UsageError(f"{where}: {message}" if where and where not in message else message)


def near(word: str, known: Sequence[str]) -> str:
    """``did you mean …?`` with the choices, or the choices alone."""
    close = difflib.get_close_matches(word, known, n=2)
    choices = f"({', '.join(known)})"
    return f"did you mean {' or '.join(close)}? {choices}" if close else f"choose from {choices}"


def settings_beside(key: str) -> list[str]:
    """Names of the settings in the same section as the dotted ``key``."""
    section: Any = ExperimentConfig
    for part in key.split(".")[:-1]:
        section = get_type_hints(section).get(part)
    return [f.name for f in fields(section)] if is_dataclass(section) else []
