r"""Prompt texts and stop strings, kept from OmegaConf's ``${…}``: they are the model's input.

A template literal is natural in HTML and no reference to a setting. So these values are escaped
(``\${``) before OmegaConf sees them, in YAML files and in overrides; it takes the escape off again
where the configuration becomes an object.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf._utils import get_omega_conf_dumper, get_yaml_loader

TEXT_KEYS = ("text", "user", "stop_strings")
TEXT_OVERRIDES = ("workload", "workload.prompts", "sampling", "sampling.stop_strings")


def escape(text: str) -> str:
    """``text`` so that OmegaConf reads every ``${`` in it as itself."""
    return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", text)


def unescape(text: str) -> str:
    """The inverse of ``escape``."""
    return re.sub(r"(\\+)\$\{", lambda found: f"{found[1][: len(found[1]) // 2]}${{", text)


def raw_override(override: str) -> str:
    """A command-line override with its prompt texts or stop strings escaped."""
    return escape(override) if _holds_text(override) else override


def shown_override(override: str) -> str:
    """An override as the user wrote it."""
    return unescape(override) if _holds_text(override) else override


def load_yaml(path: Path) -> Any:
    """A YAML file as plain data, by OmegaConf's rules for numbers and without its interpolation."""
    with path.open(encoding="utf-8") as file:
        return yaml.load(file, Loader=get_yaml_loader())


def dump_yaml(value: Any) -> str:
    """Plain data as YAML that ``load_yaml`` and OmegaConf read back."""
    text = yaml.dump(
        value, default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=get_omega_conf_dumper()
    )
    return str(text)


def register_source() -> None:
    """Have Hydra read its YAML files through ``TextSource``."""
    Plugins.instance()  # registers Hydra's own sources, which would not give way to an earlier one
    SourcesRegistry.instance().types[TextSource.scheme()] = TextSource


class TextSource(FileConfigSource):
    """Hydra's folder of YAML files, with prompt texts and stop strings escaped."""

    def load_config(self, config_path: str) -> ConfigResult:
        """See ``ConfigSource``; a file that is no mapping is left to Hydra's own complaint."""
        path = Path(self.path, self._normalize_file_name(config_path))
        value = load_yaml(path) if path.is_file() else None
        if not isinstance(value, dict):
            return super().load_config(config_path)
        with path.open(encoding="utf-8") as file:
            header = ConfigSource._get_header_dict(file.read(512))
        config = OmegaConf.create(escape_texts(value))
        return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", config, header)


def _holds_text(override: str) -> bool:
    return override.partition("=")[0].lstrip("+~") in TEXT_OVERRIDES


def escape_texts(value: Any, inside: bool = False) -> Any:
    """Plain data of a configuration with its prompt texts and stop strings escaped."""
    if isinstance(value, dict):
        return {key: escape_texts(item, key in TEXT_KEYS) for key, item in value.items()}
    if isinstance(value, list):
        return [escape_texts(item, inside) for item in value]
    return escape(value) if inside and isinstance(value, str) else value
