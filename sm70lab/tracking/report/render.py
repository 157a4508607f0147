"""From a run or a sweep to ``report.html`` and ``summary.md``.

The page is one file without scripts, fonts or addresses: its policy forbids the browser to load or run
anything. Every value is escaped by Jinja; control characters, which HTML cannot hold, become visible.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sm70lab import __version__
from sm70lab.tracking import result as results
from sm70lab.tracking.atomic import write_text
from sm70lab.tracking.report import parts, run_page, sweep_page
from sm70lab.tracking.report.records import Record
from sm70lab.tracking.variant import Settings

REPORT, SUMMARY = "report.html", "summary.md"
FOLDER = Path(__file__).with_name("templates")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
# marks that reorder the text around them would let an output rewrite the page's own words
REORDERING = re.compile(r"[\u202a-\u202e\u2066-\u2069\u200e\u200f]")
MARKDOWN = re.compile(r"([\\`*{}\[\]<>|#])")  # an underscore inside a name has no effect


def run_report(
    record: Record,
    base: tuple[str, Settings],
    default: dict[str, Any],
    page: Path,
    summary: Path,
) -> None:
    """Write the page of one run (see ``run_page.build``), and a summary where the run folder has none."""
    write_text(page, _render("run.html", run_page.build(record, base, default)))
    if summary.parent != record.folder.path or not summary.exists():
        write_text(summary, run_summary(record))


def sweep_report(name: str, records: list[Record], page: Path, summary: Path) -> None:
    """Write the page of an experiment's runs, and its summary."""
    content = sweep_page.build(name, records)
    write_text(page, _render("sweep.html", content))
    write_text(summary, sweep_summary(content))


def run_summary(record: Record) -> str:
    """``summary.md`` of a run; of one without a result, what is known."""
    try:
        if record.result:
            return results.summary(record.result)
    except (KeyError, TypeError):  # a result of another version
        pass
    return f"# {_cell(record.name)}\n\n**{record.state}**: {_cell(record.note)}\n"


def sweep_summary(content: dict[str, Any]) -> str:
    """``summary.md`` of a sweep: the headline, the routes, the hazards, every run."""
    counts = ", ".join(f"{count} {label}" for label, count in content["counts"].items())
    lines = [f"# {_cell(content['title'])}", "", f"**{content['label']}**: {_cell(content['headline'])}", ""]
    lines += [f"Runs without a hazard: {counts or 'none'}. Hazard runs: {content['hazard_runs']}."]
    for setting in content["settings"]:
        lines += ["", f"## Routes{': ' + _cell(setting.name) if setting.name else ''}", ""]
        lines += ["| route | pass | 95 % | tok/s | rates |", "|---|---|---|---|---|"]
        for v in setting.variants:
            interval, rates = f"{v.rate.low:.0%} to {v.rate.high:.0%}", " ".join(f"{r:.3f}" for r in v.rates)
            passed = f"{v.rate.passed} of {v.rate.judged}"
            lines.append(f"| {_cell(v.label)} | {passed} | {interval} | {speed_words(v)} | {rates} |")
    if content["heat"]:
        lines += ["", "## Hazards: runs at fault of runs judged", ""]
        lines += [f"| hazard | {' | '.join(_cell(route) for route in content['heat']['routes'])} |"]
        lines += ["|---" * (len(content["heat"]["routes"]) + 1) + "|"]
        for hazard, cells in content["heat"]["rows"]:
            shown = " | ".join("" if c is None else f"{c.text} {c.outcome}" for c in cells)
            lines.append(f"| {hazard} | {shown} |")
    lines += ["", "## Runs", "", "| run | verdict | hazard | why |", "|---|---|---|---|"]
    lines += [
        f"| {_cell(r.name)} | {parts.label(r)} | {r.hazard or ''} | {_cell(reason(r))} |"
        for r in content["records"]
    ]
    return "\n".join(lines) + "\n"


def speed_words(variant: sweep_page.Variant) -> str:
    """A route's speed with its interval, or why there is none."""
    speed = variant.speed
    if speed is None:
        return "no valid speed"
    words = f"{speed.mean:.1f}"
    if speed.runs > 1:
        words += f" ({speed.low:.1f} to {speed.high:.1f}{'' if speed.is_interval else ', range of two'})"
    return words if variant.sound else f"{words} (not ranked: not every run passes)"


def reason(record: Record) -> str:
    """Why a run ended as it did."""
    return str(record.result["verdict"]["reason"]) if record.verdict else record.note


def visible(value: Any) -> Any:
    """Text with its control characters made visible; what the templates themselves wrote stays."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return "" if value is None else value
    value = CONTROL.sub(lambda found: chr(0x2400 + ord(found[0])) if found[0] != "\x7f" else "\u2421", value)
    value = REORDERING.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", value)
    return value.encode("utf-8", "replace").decode("utf-8")


def _render(template: str, content: dict[str, Any]) -> str:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        version=__version__,
        css=Markup((FOLDER / "report.css").read_text(encoding="utf-8")),
        reason=reason,
        speed_words=speed_words,
    )
    return environment.get_template(template).render(content)


def _cell(text: Any) -> str:
    """Text inside Markdown, on one line and without effect."""
    return MARKDOWN.sub(r"\\\1", " ".join(str(text).split()))
