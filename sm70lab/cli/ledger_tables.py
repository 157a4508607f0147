"""The ledger and the published matrix as tables that fit 100 columns."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sm70lab.cli.display import STATUS_STYLE
from sm70lab.tracking.ledger import THE_ACCEPTED_ROUTE, Ledger, Row
from sm70lab.tracking.published import Needs, PublishedResult, PublishedRow, Source
from sm70lab.tracking.run_folder import RunFolder

WIDTH = 100
SEEDS_SHOWN = 3
LINE_SHOWN = 200  # characters of an evidence line; --json has all of it
STATE_STYLE = {"accepted": "bold green", "rejected": "bold red", "open": "bold", "superseded": "dim"}
VERDICT_STYLE = {"pass": "green", "route_fault": "red", "model_degenerate": "yellow", "inconclusive": "blue"}
RESULT_STYLE = {
    PublishedResult.passed: "green",
    PublishedResult.failed: "red",
    PublishedResult.mixed: "yellow",
    PublishedResult.none: "dim",
}


def show(book: Ledger, rows: list[Row]) -> None:
    """One block a variant, then what could not be read."""
    console = _console()
    base = f"accepted route of {_short(book)}" if book.accepted else "default settings (nothing is pinned)"
    table = Table(
        box=SIMPLE_HEAD, show_lines=True, title=f"differences from the {base}", title_justify="left"
    )
    table.add_column("variant", no_wrap=True)
    table.add_column("runs", no_wrap=True)
    table.add_column("speed", no_wrap=True)
    table.add_column("what differs, evidence, folder, conclusion", overflow="fold")
    for row in rows:
        table.add_row(_variant(row), _runs(row), _speed(row), _story(row))
    if rows:
        console.print(table)
    else:
        console.print(f"none of {len(book.rows)} variants fits", markup=False)
    for run in book.damaged:
        console.print(
            Text(f"damaged: {run.folder} ({run.note or 'its config.yaml cannot be read'})", style="red")
        )
    if book.unreadable_notes:
        console.print(Text(f"ledger.jsonl: {book.unreadable_notes} lines cannot be read", style="red"))


def show_matrix(book: Ledger, source: Source, pairs: list[tuple[PublishedRow, Row | None]]) -> None:
    """Published results on the left, the same variants as run here on the right."""
    console = _console()
    title = (
        f"PUBLISHED: {source.hardware}, {source.model}; not measured here. HERE: runs under {_relative(book)}"
    )
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("row", no_wrap=True)
    table.add_column("variation", overflow="fold", width=43)
    table.add_column("PUBLISHED result, tok/s, remark", overflow="fold", ratio=2)
    table.add_column("HERE", overflow="fold", ratio=1)
    for row, ours in pairs:
        table.add_row(row.id, Text(row.variation), _published(row), _here(row, ours))
    console.print(table)
    lines = f"lines {pairs[0][0].line} to {pairs[-1][0].line}"
    console.print(f"Published in {source.repository} at {source.commit[:7]}, {lines} of", markup=False)
    console.print(f"{source.file}. Rows that need vllm run on the fork: target=vllm.", markup=False)
    console.print("Run another row here: sm70lab experiment=AA", markup=False)


def _variant(row: Row) -> Text:
    state = row.state_words.replace(" at ", "\nat ").replace(" revision", "\nrevision")
    return Text.assemble(row.variant, "\n", (state, STATE_STYLE[row.state]))


def _runs(row: Row) -> Text:
    text = Text()
    for verdict, count in sorted(row.verdicts.items()):
        text.append(f"{count} {verdict}\n", VERDICT_STYLE.get(verdict, ""))
    seeds = [str(seed) for seed in row.seeds]
    more = len(seeds) - SEEDS_SHOWN
    shown = [*seeds[:SEEDS_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    if seeds:
        text.append("seed" + "s" * (len(seeds) > 1) + " " + "\n  ".join(shown), "dim")
    return text


def _speed(row: Row) -> Text:
    text = Text()
    for number, speed in enumerate(row.speeds):
        text.append("\n" * bool(number) + f"{speed.tokens_per_second:.1f} tok/s")
        if speed.rounds_per_second is not None:
            text.append(f"\n{speed.rounds_per_second:.1f} rounds/s", "dim")
        if len(row.speeds) > 1:
            text.append(f"\n{speed.hardware[:14]}", "dim")
    return text if row.speeds else Text("none valid", style="dim")


def _story(row: Row) -> Text:
    text = Text()
    if row.hazard:
        text.append(f"HAZARD {row.hazard}\n", "bold white on magenta")
    text.append("/".join(row.routes) or "its runs are gone", "bold")
    if row.runs:
        text.append("  " + ("  ".join(row.differs) or THE_ACCEPTED_ROUTE))
    if (worst := row.worst) is not None:
        run, kind, status, line = worst
        shown = line if len(line) <= LINE_SHOWN else f"{line[: LINE_SHOWN - 1]}…"
        text.append(f"\n{kind} ({status}): {shown}", STATUS_STYLE[status])
        text.append(f" [seed {run.seed}]", "dim")
    elif row.newest is not None:
        text.append(f"\n{row.newest.state}: {row.newest.note}", "yellow")
    if row.newest is not None:
        more = f"  and {len(row.runs) - 1} more" if len(row.runs) > 1 else ""
        text.append(f"\n{RunFolder(row.newest.folder.path)}{more}", "dim")
    if row.conclusion:
        text.append(f"\n“{row.conclusion}”", "italic")
    return text


def _published(row: PublishedRow) -> Text:
    text = Text(row.result.value if row.result is not PublishedResult.none else "no long run")
    text.stylize(RESULT_STYLE[row.result])
    if row.tok_s:
        text.append(f", {' and '.join(f'{speed:g}' for speed in row.tok_s)} tok/s")
    if row.hardware:
        text.append(f" on {row.hardware}", "bold")
    text.append(f": {row.remark}", "dim")
    return text


def _here(row: PublishedRow, ours: Row | None) -> Text:
    if ours is None:
        return Text("needs vllm" if row.needs is Needs.vllm else "not run", style="dim")
    text = Text()
    for number, (verdict, count) in enumerate(sorted(ours.verdicts.items())):
        text.append(", " * bool(number) + f"{count} {verdict}", VERDICT_STYLE.get(verdict, ""))
    for speed in ours.speeds:
        text.append(f", {speed.tokens_per_second:.1f} tok/s")
    text.append(f" ({ours.variant} {ours.state_words})", "dim")
    return text


def _console() -> Console:
    """As wide as the terminal, and 100 columns where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def _relative(book: Ledger) -> str:
    return str(RunFolder(book.runs_dir))


def _short(book: Ledger) -> str:
    assert book.accepted is not None
    return str(RunFolder(book.accepted.path))
