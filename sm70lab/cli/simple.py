"""Arguments of the commands beside ``run``: ``key=value`` settings, ``--json``, ``--help``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sm70lab.cli.overrides import check_overrides, expand_model_path
from sm70lab.config import compose, conf_dir
from sm70lab.errors import UsageError
from sm70lab.schema import ExperimentConfig


@dataclass
class SimpleOptions:
    """A command's own settings, as text, and the configuration the other settings compose to."""

    config: ExperimentConfig
    own: dict[str, str] = field(default_factory=dict)


def parse(arguments: Sequence[str], help_text: str, own: Sequence[str] = ()) -> SimpleOptions | None:
    """Take arguments apart; ``own`` names settings of the command itself, such as ``port``.

    Returns None after printing the help. Raises ``UsageError`` for anything unknown.
    """
    if "--help" in arguments or "-h" in arguments:
        print(help_text, end="")
        return None
    overrides, mine = [], {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument == "--json":
            overrides.append("display=json")
        elif argument.startswith("-"):
            raise UsageError(f"{argument}: no such option; this command has --json and --help")
        elif key in own and equals:
            mine[key] = value
        else:
            overrides.append(argument)
    overrides = expand_model_path(overrides, multirun=False)
    check_overrides(overrides, [conf_dir()])
    return SimpleOptions(compose(overrides), mine)
