"""The command line: one file a command. Nothing heavy is imported before the command is known."""

from __future__ import annotations

import difflib
import importlib
import json
import sys
from collections.abc import Sequence

from sm70lab import __version__
from sm70lab.addresses import without_password
from sm70lab.cli.streams import tolerant_streams
from sm70lab.errors import UsageError
from sm70lab.schema import EXIT_USAGE
from sm70lab.targets.kept import keep_server

COMMANDS = ("run", "prove", "ledger", "note", "pin", "compare", "report", "serve", "ui", "sync", "doctor")
INTERRUPTED = 130


def entry() -> None:
    """The console script: exit with the command's code."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code: 0 pass, 1 fault, 2 usage, 3 inconclusive."""
    with tolerant_streams():
        return _main(arguments)


def _main(arguments: Sequence[str]) -> int:
    try:
        with keep_server():
            return _dispatch(list(arguments))
    except UsageError as error:
        print(f"sm70lab: {one_line(error)}", file=sys.stderr)
        if "--json" in arguments or "display=json" in arguments:
            print(json.dumps({"exit_code": EXIT_USAGE, "error": one_line(error)}))
        return EXIT_USAGE
    except KeyboardInterrupt as interrupt:
        return int(getattr(interrupt, "exit_code", INTERRUPTED))


def one_line(error: BaseException) -> str:
    """An error's message without line breaks and without the passwords of addresses in it."""
    return without_password(" ".join(str(error).split())) or type(error).__name__


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["--version"]:
        print(f"sm70lab {__version__}")
        return 0
    command = "run"
    if arguments and not arguments[0].startswith(("-", "+", "~")) and "=" not in arguments[0]:
        command = arguments.pop(0)
        if command not in COMMANDS:
            close = difflib.get_close_matches(command, COMMANDS, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            choices = ", ".join(COMMANDS)
            raise UsageError(f"{command}: no such command; {hint}({choices}, or key=value settings)")
    module = importlib.import_module(f"sm70lab.cli.{command}")
    code: int = module.main(arguments)
    return code
