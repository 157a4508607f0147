"""``sm70lab pin``: accept a route, with its evidence, in ``accepted.yaml``."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from sm70lab.cli.simple import is_name, parse
from sm70lab.errors import UsageError
from sm70lab.schema import Display
from sm70lab.tracking import accepted
from sm70lab.tracking.find_runs import resolve_run
from sm70lab.tracking.run_folder import RunFolder

TOKENS = 256
HELP = f"""\
sm70lab pin RUN [into=FILE] [tokens={TOKENS}] [tracking.runs_dir=runs] [-cd DIR] [--json]

Accept the route of a passing, audited run: write its flags, the conditions, the evidence of all runs of
the same variant and code, and fresh greedy outputs (tokens= a prompt, at most) to accepted.yaml, and mark
the variant accepted in the ledger. From inside a checkout the file is conf/accepted.yaml, elsewhere
accepted.yaml in the working folder, which is read first; into=FILE names another.
sm70lab.testing.assert_accepted then tells drift.

Refused: a run that did not pass, has a hazard, was not audited or not finished, was made by other code,
weights or hardware, or whose variant failed on another seed.
"""


def main(arguments: list[str]) -> int:
    """Pin one run."""
    options = parse(arguments, HELP, own=("into", "tokens"), is_word=is_name)
    if options is None:
        return 0
    words = options.given.words
    if len(words) != 1:
        raise UsageError(f"pin: give one run: sm70lab pin RUN ({len(words)} given)")
    text = options.own.get("tokens", str(TOKENS))
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"tokens={text}: must be a whole number, 1 or more")
    runs_dir = Path(options.config.tracking.runs_dir)
    into = accepted.place(options.own.get("into"))
    accepted.check_place(into)
    run = resolve_run(words[0], runs_dir)
    from sm70lab import pinned

    as_json = options.config.display == Display.json
    err = Console(stderr=True, highlight=False)
    with err.status("reading the ledger") as status:
        say = (lambda line: None) if as_json else status.update
        found, row = pinned.pin(run, runs_dir, int(text), into, say)
    evidence = found.values["evidence"]
    if as_json:
        summary = {"run": str(run), "variant": row.variant, "file": str(found.path), "evidence": evidence}
        print(json.dumps({"exit_code": 0, **summary}))
    else:
        rate, speed = evidence["pass_rate"], evidence["speed"]
        print(f"pinned {RunFolder(run.path)} as {row.variant} in {found.path}")
        passed = f"{evidence['passed']} of {evidence['runs']} runs passed"
        between = f"95 %: {rate['low']:.2f} to {rate['high']:.2f}"
        audited = f"{evidence['audited_tokens']:,} tokens audited"
        fast = f"{speed['tokens_per_second']} tok/s on {speed['hardware']}"
        print(f"{passed} ({between}), {audited}, {fast}")
    return 0
