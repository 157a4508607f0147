"""``sm70lab ledger``: every variant ever run, what came of it and what was concluded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sm70lab.cli import ledger_tables
from sm70lab.cli.simple import SimpleOptions, parse
from sm70lab.config import plain
from sm70lab.errors import UsageError
from sm70lab.schema import Display
from sm70lab.tracking import ledger, notes
from sm70lab.tracking.atomic import finite
from sm70lab.tracking.fingerprint import model_hash
from sm70lab.tracking.ledger import Ledger, Row
from sm70lab.tracking.published import Needs, PublishedRow, Source, matrix
from sm70lab.tracking.variant import NOT_A_VARIANT, Settings, settings_of

HELP = f"""\
sm70lab ledger [key=value …] [state={"|".join(notes.STATES)}] [--matrix] [-cd DIR] [--json]

Every variant ever run under tracking.runs_dir: how it differs from the accepted route, its runs, verdicts,
worst evidence, valid speed, folder, conclusion and state. Runs that differ in seed, repeats and name alone
are one variant. Settings choose rows: route=split hazard=none model.dtype=float16.

  sm70lab ledger                        all of it
  sm70lab ledger route.draft_tokens=4   variants with four drafts
  sm70lab ledger experiment=AA          the variant of a preset
  sm70lab ledger --matrix               the published experiment matrix beside the same variants here
  sm70lab ledger --matrix model=/a/folder workload=macos   the same for your checkpoint

  accepted=FILE   differ from another accepted.yaml than that of the working folder or conf/
"""
SHOWN_ONLY = ("tracking", "display")


def main(arguments: list[str]) -> int:
    """Print the ledger, or with ``--matrix`` the published rows beside it."""
    options = parse(arguments, HELP, own=("state", "accepted"), flags=("--matrix",))
    if options is None:
        return 0
    state = options.own.get("state")
    if state is not None and state not in notes.STATES:
        raise UsageError(f"state={state}: must be one of {', '.join(notes.STATES)}")
    given = [o for o in options.given.overrides if o.partition("=")[0].split(".")[0] not in SHOWN_ONLY]
    runs_dir = Path(options.config.tracking.runs_dir)
    book = ledger.build(runs_dir, options.own.get("accepted"))
    if "--matrix" in options.given.flags:
        return _matrix(book, given, options)
    if not book.rows and not book.damaged:
        raise UsageError(f"tracking.runs_dir={runs_dir}: no runs there; run an experiment")
    rows = [row for row in book.rows if state in (None, row.state) and _fits(row, given, options)]
    if options.config.display == Display.json:
        print(json.dumps(finite(_record(book, rows))))
    else:
        ledger_tables.show(book, rows)
    return 0


# --------------------------------------------------------------------------- choosing rows


def _fits(row: Row, given: list[str], options: SimpleOptions) -> bool:
    """Whether a variant has every setting that was given; a group's choice is known by its name."""
    if not given:
        return True
    if not row.settings:  # only its notes are left
        return False
    config = options.config
    wanted = settings_of(plain(config), None)
    for override in given:
        key = override.partition("=")[0]
        if key in NOT_A_VARIANT:
            raise UsageError(f"{override}: makes no variant of its own, so it chooses no row")
        if key == "experiment":
            fits = ledger.variant_of(config, model_hash(config.model, config.target)) == row.variant
        elif key == "route":
            fits = config.route.name in row.routes
        elif config.model.path is not None and key in ("model", "model.path"):
            fits = (
                settings_of(plain(config), model_hash(config.model, config.target))["model"]
                == row.settings["model"]
            )
        else:
            named = isinstance(wanted.get(key), dict) and "name" in wanted[key]
            path = f"{key}.name" if named else key
            fits = _at(row.settings, path) == _at(wanted, path)
        if not fits:
            return False
    return True


def _at(settings: Settings, key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


# --------------------------------------------------------------------------- published beside ours


def _matrix(book: Ledger, given: list[str], options: SimpleOptions) -> int:
    source, published = matrix()
    pairs = [(row, _ours(row, book, given, options)) for row in published]
    if options.config.display == Display.json:
        print(json.dumps(finite(_matrix_record(source, pairs))))
    else:
        ledger_tables.show_matrix(book, source, pairs)
    return 0


def _ours(row: PublishedRow, book: Ledger, given: list[str], options: SimpleOptions) -> Row | None:
    """The variant that the row's preset makes here, if it ever ran."""
    try:
        config = options.compose(f"experiment={row.id}", *given)
    except UsageError:
        if row.needs is Needs.engine:
            raise
        return None  # a server of the fork has nothing to serve with these settings
    return book.row(ledger.variant_of(config, model_hash(config.model, config.target)))


# --------------------------------------------------------------------------- JSON


def _record(book: Ledger, rows: list[Row]) -> dict[str, Any]:
    return {
        "exit_code": 0,
        "runs_dir": str(book.runs_dir),
        "accepted": None if book.accepted is None else str(book.accepted.path),
        "code_revision": book.revision,
        "variants": [_row_record(row) for row in rows],
        "damaged": [{"folder": str(run.folder), "note": run.note} for run in book.damaged],
        "unreadable_notes": book.unreadable_notes,
    }


def _row_record(row: Row) -> dict[str, Any]:
    worst = row.worst
    return {
        "variant": row.variant,
        "routes": row.routes,
        "differs": row.differs,
        "hazard": row.hazard,
        "state": row.state,
        "state_words": row.state_words,
        "blocks_a_new_run": row.blocks,
        "conclusion": row.conclusion or None,
        "notes": [vars(note) for note in row.notes],
        "seeds": row.seeds,
        "verdicts": dict(row.verdicts),
        "worst_evidence": None
        if worst is None
        else {"run": str(worst[0].folder), "kind": worst[1], "status": worst[2], "line": worst[3]},
        "speed": [vars(speed) for speed in row.speeds],
        "runs": [
            {
                "folder": str(run.folder),
                "seed": run.seed,
                "verdict": run.verdict,
                "state": run.state,
                "note": run.note,
                "code_revision": ledger.code_of(run),
            }
            for run in row.runs
        ],
    }


def _matrix_record(source: Source, pairs: list[tuple[PublishedRow, Row | None]]) -> dict[str, Any]:
    return {
        "exit_code": 0,
        "published": {"measured_here": False, **vars(source)},
        "rows": [
            {
                "id": row.id,
                "variation": row.variation,
                "needs": row.needs.value,
                "published": {
                    "result": row.result.value,
                    "tokens_per_second": list(row.tok_s),
                    "remark": row.remark,
                    "hardware": row.hardware or source.hardware,
                    "line": row.line,
                },
                "here": None if ours is None else _row_record(ours),
            }
            for row, ours in pairs
        ],
    }
