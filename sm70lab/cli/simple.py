"""Arguments of the commands beside ``run``: ``key=value`` settings and a few options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sm70lab.cli.options import EVERYWHERE, Options, no_words
from sm70lab.cli.options import parse as parse_options
from sm70lab.cli.overrides import check_overrides, expand_model_path
from sm70lab.config import compose
from sm70lab.schema import ExperimentConfig


@dataclass
class SimpleOptions:
    """A command's own settings, as text, and the configuration the other settings compose to."""

    config: ExperimentConfig
    own: dict[str, str]
    given: Options  # words and flags of the command, and the settings behind ``config``

    def compose(self, *overrides: str) -> ExperimentConfig:
        """A configuration of other settings, with the same folder searched first."""
        return compose(overrides, self.given.config_dir)


def is_name(argument: str) -> bool:
    """Whether an argument names a run or a route rather than a setting or an option."""
    deletes = argument.startswith("~") and "/" not in argument
    return "=" not in argument and not argument.startswith(("-", "+")) and not deletes


def parse(
    arguments: Sequence[str],
    help_text: str,
    own: Sequence[str] = (),
    flags: Sequence[str] = (),
    is_word: Callable[[str], bool] = no_words,
    check: Callable[[Sequence[str]], None] | None = None,
) -> SimpleOptions | None:
    """Take arguments apart; ``own`` names settings of the command itself, such as ``port``.

    ``flags`` names its options without a value, ``is_word`` what stands by itself; ``check`` sees the other
    settings before they are composed. Returns None after printing the help. Raises ``UsageError`` for
    anything unknown.
    """
    if "--help" in arguments or "-h" in arguments:
        print(help_text, end="")
        return None
    options = parse_options(arguments, EVERYWHERE, flags, is_word)
    mine, overrides = {}, []
    for argument in options.overrides:
        key, equals, value = argument.partition("=")
        if key in own and equals:
            mine[key] = value
        else:
            overrides.append(argument)
    if check is not None:
        check(overrides)
    options.overrides = expand_model_path(overrides, multirun=False)
    check_overrides(options.overrides, options.folders)
    return SimpleOptions(compose(options.overrides, options.config_dir), mine, options)
