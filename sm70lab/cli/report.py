"""``sm70lab report``: one offline HTML page over a run or a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm70lab.cli.simple import is_name, parse
from sm70lab.config import plain
from sm70lab.errors import UsageError
from sm70lab.schema import Display

if TYPE_CHECKING:
    from sm70lab.tracking.report.records import Record

SETTINGS = ("tracking.", "tracking=", "display=")
HELP = """sm70lab report [RUN|SWEEP] [out=FILE.html] [tracking.runs_dir=runs] [-cd DIR] [--json]

Write one HTML page (offline: no scripts, no network) and a summary.md: verdict first, then its evidence,
pictures, the text around the first fault, the configuration's difference and the machine.
  RUN      a run folder's path, its name or the beginning of one; the page is report.html in it
  SWEEP    an experiment: the name of a folder under runs_dir, or its path; all its runs in one page,
           runs/<experiment>/report.html
  nothing  the newest run
out=FILE.html writes FILE.html and FILE.md instead.
Exit codes: 0 written (whatever the verdict), 2 nothing to report on.
"""


def main(arguments: list[str]) -> int:
    """Write the report; print where it is, or one JSON object."""
    options = parse(arguments, HELP, own=("out",), is_word=is_name)
    if options is None:
        return 0
    named = options.given.words
    for setting in (o for o in options.given.overrides if not o.startswith(SETTINGS)):
        raise UsageError(f"{setting}: changes no report; this command has out= and tracking.runs_dir=")
    if len(named) > 1:
        raise UsageError(f"{' '.join(named)}: one run or one sweep; sm70lab compare takes several")
    runs_dir = Path(options.config.tracking.runs_dir)
    sweep = _sweep(named[0], runs_dir) if named else None
    out = _out(options.own.get("out"))
    if sweep is not None:
        page = _report_sweep(sweep, out)
    else:
        record = _run(named[0] if named else None, runs_dir)
        page = _report_run(record, plain(options.config), out)
    if options.config.display == Display.json:
        print(json.dumps({"exit_code": 0, "report": str(page), "summary": str(_summary(page, out))}))
    else:
        print(page)
    return 0


def _report_sweep(folder: Path, out: Path | None) -> Path:
    from sm70lab.tracking.report.records import read, runs_in
    from sm70lab.tracking.report.render import REPORT, sweep_report

    records = [read(run) for run in runs_in(folder)]
    page = out or folder / REPORT
    sweep_report(folder.name, records, page, _summary(page, out))
    return page


def _report_run(record: Record, default: dict[str, Any], out: Path | None) -> Path:
    from sm70lab.tracking import accepted
    from sm70lab.tracking.report.render import REPORT, run_report
    from sm70lab.tracking.variant import settings_of

    page = out or record.folder.path / REPORT
    pinned = accepted.find()
    if pinned is not None:
        base = (f"the accepted route ({pinned.route['name']})", pinned.settings)
    else:
        base = (f"the default ({default['route']['name']})", settings_of(default, None))
    run_report(record, base, default, page, _summary(page, out))
    return page


def _run(text: str | None, runs_dir: Path) -> Record:
    from sm70lab.tracking.find_runs import resolve_run
    from sm70lab.tracking.report.records import newest, read
    from sm70lab.tracking.run_folder import all_runs

    if text is not None:
        return read(resolve_run(text, runs_dir))
    record = newest(all_runs(runs_dir))
    if record is None:
        raise UsageError(f"tracking.runs_dir={runs_dir}: no run there; run an experiment")
    return record


def _sweep(text: str, runs_dir: Path) -> Path | None:
    """The experiment folder that ``text`` names, or None where it names no folder of runs."""
    from sm70lab.tracking.report.records import runs_in

    for folder in (runs_dir / text, Path(text).expanduser().absolute()):
        if folder.is_dir() and next(runs_in(folder), None) is not None:
            return folder
    return None


def _out(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text).expanduser().absolute()
    if path.is_dir() or path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"out={text}: must name an .html file")
    if not path.parent.is_dir():
        raise UsageError(f"out={text}: no such folder {path.parent}")
    return path


def _summary(page: Path, out: Path | None) -> Path:
    from sm70lab.tracking.report.render import SUMMARY

    return page.with_name(SUMMARY) if out is None else out.with_suffix(".md")
