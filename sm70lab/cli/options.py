"""The dashed options of ``run``: Hydra's own, checked here so that a mistake costs one line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sm70lab.errors import UsageError

PLAIN = {
    "-m": "--multirun",
    "--multirun": "--multirun",
    "-h": "--help",
    "--help": "--help",
    "--hydra-help": "--hydra-help",
    "--resolve": "--resolve",
    "-sc": "--shell-completion",
    "--shell-completion": "--shell-completion",
}
WITH_VALUE = {
    "-c": "--cfg",
    "--cfg": "--cfg",
    "-p": "--package",
    "--package": "--package",
    "-cd": "--config-dir",
    "--config-dir": "--config-dir",
    "-cn": "--config-name",
    "--config-name": "--config-name",
    "-i": "--info",
    "--info": "--info",
}
CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
SHOW = ("--help", "--hydra-help", "--cfg", "--info", "--shell-completion")


@dataclass
class Options:
    """Arguments of ``run``, taken apart."""

    flags: list[str] = field(default_factory=list)  # for Hydra, in their long form
    overrides: list[str] = field(default_factory=list)
    multirun: bool = False
    config_dir: Path | None = None

    @property
    def shows_something(self) -> bool:
        """Whether Hydra prints and stops instead of running."""
        return any(flag in SHOW for flag in self.flags)


def parse(arguments: Sequence[str]) -> Options:
    """Take arguments apart. Raises ``UsageError`` for an unknown option or a bad value."""
    options = Options()
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if argument == "--json":
            options.overrides.append("display=json")
        elif argument in PLAIN:
            options.flags.append(PLAIN[argument])
        elif name in WITH_VALUE:
            if not equals:
                if not rest:
                    raise UsageError(f"{name}: needs a value{_choices(WITH_VALUE[name])}")
                value = rest.pop(0)
            _with_value(options, WITH_VALUE[name], value)
        elif argument.startswith("-"):
            known = ["--json", "--version", *PLAIN, *WITH_VALUE]
            close = difflib.get_close_matches(argument, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "see sm70lab --help"
            raise UsageError(f"{argument}: no such option; {hint}")
        else:
            options.overrides.append(argument)
    options.multirun = "--multirun" in options.flags
    if options.multirun and options.shows_something:
        options.flags.remove("--multirun")  # Hydra shows one thing or runs, never both
    return options


def _with_value(options: Options, flag: str, value: str) -> None:
    if flag in CHOICES and value not in CHOICES[flag]:
        raise UsageError(f"{flag} {value}: choose{_choices(flag)}")
    if flag == "--config-dir":
        options.config_dir = Path(value).expanduser().absolute()
        if not options.config_dir.is_dir():
            raise UsageError(f"--config-dir {value}: no such folder; give one that holds route/ and the like")
        value = str(options.config_dir)
    options.flags += [flag, value]


def _choices(flag: str) -> str:
    return f" ({', '.join(CHOICES[flag])})" if flag in CHOICES else ""
