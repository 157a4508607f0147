"""``accepted.yaml``: the accepted route with its evidence, as ``sm70lab pin`` writes it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import OmegaConfDumper

from sm70lab.config import compose, conf_dir, plain
from sm70lab.errors import UsageError
from sm70lab.raw_text import load_yaml
from sm70lab.tracking.atomic import write_text
from sm70lab.tracking.fingerprint import model_hash
from sm70lab.tracking.variant import Settings, settings_of

ACCEPTED = "accepted.yaml"
HEADER = """\
# The accepted route and its evidence. Written by sm70lab pin; docs/ledger.md says how to renew it.
# It changes no default: sm70lab.testing.assert_accepted compares with it, the ledger differs from it.
"""
KEYS = ("run", "variant", "fingerprint", "route", "conditions", "weights", "evidence", "greedy")


@dataclass(frozen=True)
class Accepted:
    """The content of ``accepted.yaml``."""

    path: Path
    values: dict[str, Any]

    @property
    def route(self) -> Settings:
        """The full flags of the accepted route."""
        return dict(self.values["route"])

    @property
    def settings(self) -> Settings:
        """What the accepted variant's runs have in common: see ``variant.settings_of``."""
        recorded = {"route": self.values["route"], **self.values["conditions"]}
        return settings_of(recorded, self.values["weights"])


def place(given: str | None) -> Path:
    """Where ``pin`` writes: ``given``, else ``conf/accepted.yaml`` from inside a checkout, else here.

    An installed package's own ``conf/`` is never written to.
    """
    if given is not None:
        return Path(given).expanduser().absolute()
    checkout = conf_dir().parent
    inside = Path.cwd().is_relative_to(checkout) and (checkout / "pyproject.toml").is_file()
    return (conf_dir() if inside else Path.cwd()) / ACCEPTED


def check_place(path: Path) -> None:
    """Raise ``UsageError`` where ``save`` could not write ``path``: known before hours of work, not after."""
    if path.is_dir():
        raise UsageError(f"into={path}: is a folder; name a file in it, such as {path / ACCEPTED}")
    if not path.parent.is_dir():
        raise UsageError(f"into={path}: no such folder {path.parent}; make it first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"into={path}: {path.parent} cannot be written ({error.strerror})") from error


def find(given: str | None = None) -> Accepted | None:
    """The pinned route: ``given``, else ``accepted.yaml`` of the working folder, else of ``conf/``.

    None where there is none of these. Raises ``UsageError`` for a damaged file, and where ``given`` is
    not there.
    """
    if given is not None:
        return load(place(given))
    files = [folder / ACCEPTED for folder in (Path.cwd(), conf_dir())]
    return next((load(file) for file in files if file.is_file()), None)


def load(path: Path) -> Accepted:
    """Read one ``accepted.yaml``. Raises ``UsageError`` where it is not there or damaged."""
    try:
        values = load_yaml(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file; write it with sm70lab pin RUN") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: damaged ({' '.join(str(error).split())})") from error
    missing = [key for key in KEYS if key not in values] if isinstance(values, dict) else list(KEYS)
    if missing:
        raise UsageError(f"{path}: damaged (no {missing[0]}); write it again with sm70lab pin RUN")
    found = Accepted(path, values)
    try:
        _ = found.settings
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: damaged ({error}); write it again with sm70lab pin RUN") from error
    return found


def save(path: Path, values: dict[str, Any]) -> Accepted:
    """Write it whole or not at all; lists of token ids go on one line each."""
    write_text(path, HEADER + _dump(values))
    return Accepted(path, values)


def baseline(given: str | None = None) -> tuple[Settings, Accepted | None]:
    """What the ledger's differences are against: the pinned route's settings, or the defaults."""
    found = find(given)
    if found is not None:
        return found.settings, found
    config = compose()
    return settings_of(plain(config), model_hash(config.model, config.target)), None


def _sequence(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    """Block style, but for lists of numbers."""
    numbers = all(isinstance(v, int | float) for v in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=numbers)


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    if "\n" in text:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
    node: yaml.Node = OmegaConfDumper.str_representer(dumper, text)  # quotes what would be read as a number
    return node


def _dump(values: dict[str, Any]) -> str:
    class Dumper(OmegaConfDumper):
        """Reads back through ``load_yaml``."""

    Dumper.add_representer(list, _sequence)
    Dumper.add_representer(str, _string)
    text: str = yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text
