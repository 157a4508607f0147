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
from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import BooleanNode, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sm70lab.config_checks import complaints
from sm70lab.config_checks_target import VLLM, own_settings
from sm70lab.engine.routes import check_flags, resolve
from sm70lab.errors import UsageError
from sm70lab.raw_text import escape_texts, raw_override, register_source
from sm70lab.schema import ExperimentConfig, TargetConfig
from sm70lab.targets.vllm_flags import launch

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
    ConfigStore.instance().store(name="schema", node=schema_node())


def schema_node() -> DictConfig:
    """``ExperimentConfig`` with its types, stricter in truth values and laxer in the user's own keys.

    OmegaConf would take any number for true or false; here they are ``true`` and ``false`` alone.
    """
    node: DictConfig = OmegaConf.structured(ExperimentConfig)
    target = node.target
    for free in (node.sampling.logit_bias, target.headers, target.extra_body, target.env, target.arguments):
        OmegaConf.set_struct(free, False)
    _no_numbers_for_bools(node)
    return node


def _no_numbers_for_bools(section: DictConfig) -> None:
    for key in section:
        value = section._get_node(key)
        if isinstance(value, BooleanNode):
            value._set_flag("convert", False)
        elif isinstance(value, DictConfig) and not value._is_none():
            _no_numbers_for_bools(value)


def compose(overrides: Sequence[str] = (), config_dir: Path | None = None) -> ExperimentConfig:
    """Compose and check a configuration without running anything.

    ``config_dir`` is a folder of the user's own group files, searched before the shipped ones.
    Raises ``UsageError`` for anything the user can mend.
    """
    register_schema()
    outer = GlobalHydra.instance().hydra  # of the job within which this composes, if there is one
    GlobalHydra.instance().clear()
    try:
        version.setbase(VERSION_BASE)
        search_path = create_config_search_path(str(conf_dir()))
        if config_dir is not None:
            search_path.prepend("own", f"file://{config_dir}", SearchPathQuery(provider="main"))
        Hydra.create_main_hydra2("sm70lab", search_path)
        node = hydra_compose("config", [raw_override(override) for override in overrides])
        given = [text.partition("=")[2] for text in overrides if text.lstrip("+").startswith("serving=")]
    except Exception as error:  # Hydra and its parsers raise many types; each is the user's input
        raise explain(error) from error
    finally:
        GlobalHydra.instance().hydra = outer
    return to_config(node, given[-1] if given else None)


def to_config(node: DictConfig, serving: str | None = None) -> ExperimentConfig:
    """A composed node as a typed, checked object; ``serving``: the choice of that group.

    Raises ``UsageError``.
    """
    if serving not in (None, "null") and node.target.name != VLLM:
        raise UsageError(f"serving={serving}: belongs to target={VLLM}; leave it out")
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
    if config.target.name == VLLM:
        check_flags(config.route)
        launch(config)
    else:
        resolve(config.route)  # contradictory flags


def plain(value: Any) -> Any:
    """A configuration value as JSON and YAML can hold it: enums by name, lists and dicts copied.

    Of a whole configuration, without the settings of targets other than its own.
    """
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value):
        values = {f.name: plain(getattr(value, f.name)) for f in fields(value)}
        return own_settings(values) if isinstance(value, ExperimentConfig) else values
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def defaults_beside(values: dict[str, Any]) -> dict[str, Any]:
    """The schema's defaults as ``plain`` gives them, for the target that ``values`` names."""
    target = values.get("target")
    name = target.get("name") if isinstance(target, dict) else None
    return dict(plain(ExperimentConfig(target=TargetConfig(name=str(name or TargetConfig.name)))))


def from_plain(values: dict[str, Any]) -> ExperimentConfig:
    """The inverse of ``plain``: a recorded configuration, checked. Settings it lacks get their default.

    Raises ``UsageError`` for settings that this version does not know or cannot use.
    """
    try:
        node = OmegaConf.merge(schema_node(), OmegaConf.create(escape_texts(values)))
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
