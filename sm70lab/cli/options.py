"""The dashed options of every command: for ``run`` Hydra's own, checked so that a mistake costs a line."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sm70lab.config import conf_dir
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
EVERYWHERE = ("--help", "-h", "--config-dir", "-cd")  # what the commands beside ``run`` have of these
SHOW = ("--help", "--hydra-help", "--cfg", "--info", "--shell-completion")


@dataclass
class Options:
    """Arguments of a command, taken apart."""

    flags: list[str] = field(default_factory=list)  # in their long form
    overrides: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)  # neither options nor settings: runs, routes, texts
    multirun: bool = False
    config_dir: Path | None = None

    @property
    def folders(self) -> list[Path]:
        """The folders of group files, in the order in which they are searched."""
        return [*([self.config_dir] if self.config_dir else []), conf_dir()]

    @property
    def shows_something(self) -> bool:
        """Whether Hydra prints and stops instead of running."""
        return any(flag in SHOW for flag in self.flags)


def no_words(argument: str) -> bool:
    """For a command that takes options and settings alone."""
    return False


def parse(
    arguments: Sequence[str],
    known: Collection[str] = (*PLAIN, *WITH_VALUE),
    flags: Sequence[str] = (),
    is_word: Callable[[str], bool] = no_words,
) -> Options:
    """Take arguments apart: ``known`` names the options, ``flags`` a command's own without a value.

    Raises ``UsageError`` for an unknown option or a bad value.
    """
    options = Options()
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if is_word(argument):
            options.words.append(argument)
        elif argument == "--json":
            options.overrides.append("display=json")
        elif argument in flags:
            options.flags.append(argument)
        elif argument in PLAIN and argument in known:
            options.flags.append(PLAIN[argument])
        elif name in WITH_VALUE and name in known:
            if not equals:
                if not rest:
                    raise UsageError(f"{name}: needs a value{_choices(WITH_VALUE[name])}")
                value = rest.pop(0)
            _with_value(options, WITH_VALUE[name], value)
        elif argument.startswith("-"):
            raise UsageError(f"{argument}: no such option; {_hint(name, [*flags, *known])}")
        else:
            options.overrides.append(argument)
    options.multirun = "--multirun" in options.flags
    if options.multirun and options.shows_something:
        options.flags.remove("--multirun")  # Hydra shows one thing or runs, never both
    return options


def _hint(name: str, known: Sequence[str]) -> str:
    of_run = "--multirun" in known
    names = ["--json", *(["--version"] if of_run else []), *known]
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return "see sm70lab --help" if of_run else f"this command has {', '.join(names)}"


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
