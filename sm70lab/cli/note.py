"""``sm70lab note``: write down what was concluded of a variant."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sm70lab.cli.simple import parse
from sm70lab.errors import UsageError
from sm70lab.schema import Display
from sm70lab.tracking import ledger, notes

HELP = f"""\
sm70lab note RUN|VARIANT "text" [state={"|".join(notes.STATES)}] [tracking.runs_dir=runs] [-cd DIR] [--json]

Write a conclusion into the ledger. RUN is a run folder, its name, or the beginning of its fingerprint;
VARIANT is an id of sm70lab ledger (v and seven digits, or the beginning). The note goes to the whole
variant: all runs that differ in seed, repeats and name alone. Without state= the state stays.
A rejected variant is not run again by this code, unless with force=true.
"""
# A setting or an option; anything else is a text, whatever signs are in it.
NO_WORD = re.compile(r"(state|display|tracking(\.\w+)?|--config-dir|-cd)=.*|--?[A-Za-z][\w-]*")


def main(arguments: list[str]) -> int:
    """Append one note and say which variant it went to."""
    options = parse(arguments, HELP, own=("state",), is_word=lambda a: not NO_WORD.fullmatch(a))
    if options is None:
        return 0
    words = options.given.words
    if len(words) != 2:
        raise UsageError(
            f'note: give a run or variant and one text: sm70lab note RUN "text" ({len(words)} given)'
        )
    state = options.own.get("state")
    if state is not None and state not in notes.STATES:
        raise UsageError(f"state={state}: must be one of {', '.join(notes.STATES)}")
    notes.tidy(words[1])
    runs_dir = Path(options.config.tracking.runs_dir)
    book = ledger.build(runs_dir)
    row, run = book.find(words[0])
    record = run or row.newest  # a note on a variant concludes from its newest run
    note = notes.append(
        runs_dir,
        notes.Note(
            variant=row.variant,
            run=None if record is None else record.folder.full_name,
            text=words[1],
            state=state,
            code_revision=None if record is None else ledger.code_of(record),
            by="note",
        ),
    )
    row.notes.append(note)
    if options.config.display == Display.json:
        print(json.dumps({"exit_code": 0, "variant": row.variant, "state": row.state, "note": vars(note)}))
    else:
        print(f"noted on {row.line}")
    return 0
