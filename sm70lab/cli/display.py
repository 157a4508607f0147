"""What a person, a pipe or a program sees of a run."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sm70lab.addresses import without_password
from sm70lab.config_checks_target import OPENAI
from sm70lab.experiment import Outcome
from sm70lab.schema import Display as DisplayMode
from sm70lab.schema import Generation, Prompt, Tracking
from sm70lab.targets.base import Progress
from sm70lab.tracking import result as results
from sm70lab.tracking.latency import latency_line
from sm70lab.tracking.run_folder import RunFolder

PLAIN_SECONDS = 10.0  # between progress lines where there is no terminal
VERDICT_STYLE = {
    "pass": "bold white on green",
    "route_fault": "bold white on red",
    "model_degenerate": "bold black on yellow",
    "inconclusive": "bold white on blue",
}
REPRODUCES_STYLE = {True: "green", False: "bold white on red", None: "yellow"}
STATUS_STYLE = {"ok": "green", "bad": "red", "warn": "yellow", "unknown": "blue"}


class Silent:
    """Shows nothing while running and nothing at the end: the base, and JSON mode itself.

    The one JSON object is printed by the command, since a sweep has many jobs and one object.
    """

    def __init__(self) -> None:
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)
        self.out = Console(highlight=False, soft_wrap=True)

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the terminal as it was."""

    def stage(self, line: str) -> None:
        """See ``experiment.Observer``."""

    def waiting(self, line: str) -> None:
        """See ``experiment.Observer``."""

    def plan(self, prompts: list[Prompt], repeats: int) -> None:
        """See ``experiment.Observer``."""

    def progress(self, progress: Progress) -> None:
        """See ``experiment.Observer``."""

    def generated(self, generation: Generation) -> None:
        """See ``experiment.Observer``."""

    def note(self, line: str) -> None:
        """One line on the error stream, whatever the mode."""
        self.err.print(f"sm70lab: {line}", markup=False)

    def verdict(self, outcome: Outcome) -> None:
        """Show the end."""


class Quiet(Silent):
    """One line at the end."""

    def verdict(self, outcome: Outcome) -> None:
        """Verdict, route, seed, speed, folder."""
        result = outcome.result
        hazard = results.hazard_line(result)
        warning = f"HAZARD {hazard}  " if hazard else ""
        self.out.print(
            f"{warning}{result['verdict']['kind']}  {result['route']} s{result['seed']}  "
            f"{results.speed_line(result)}  {RunFolder(outcome.folder)}",
            markup=False,
        )


class Plain(Silent):
    """No terminal: a line now and then, no control characters."""

    def __init__(self) -> None:
        super().__init__()
        self.started = time.monotonic()
        self.shown = self.started
        self.budget = 0  # tokens the whole run may deliver
        self.delivered = 0  # tokens of ended generations
        self.freed = 0  # budget that ended generations left unused

    def stage(self, line: str) -> None:
        self.err.print(f"{line} …", markup=False)

    def waiting(self, line: str) -> None:
        if time.monotonic() - self.shown >= PLAIN_SECONDS:
            self.shown = time.monotonic()
            self.err.print(f"  {_clock(self.shown - self.started)}  {line}", markup=False)

    def plan(self, prompts: list[Prompt], repeats: int) -> None:
        self.budget = repeats * sum(prompt.max_tokens for prompt in prompts)
        self.started = self.shown = time.monotonic()

    def progress(self, progress: Progress) -> None:
        if time.monotonic() - self.shown >= PLAIN_SECONDS:
            self.shown = time.monotonic()
            self.err.print(self.line(progress), markup=False)

    def generated(self, generation: Generation) -> None:
        tokens = generation.tokens
        self.delivered += tokens
        self.freed += generation.prompt.max_tokens - tokens
        speed = tokens / generation.decode_seconds if generation.decode_seconds > 0 else 0
        ended = f"{tokens} tokens, {generation.finish_reason}, {speed:.1f} tok/s"
        ended += f"; {generation.note}" if generation.note else ""
        self.err.print(f"{generation.key}: {ended}", markup=False)

    def line(self, p: Progress) -> str:
        """Prompt, tokens, tok/s, acceptance, elapsed, time left at most."""
        elapsed = time.monotonic() - self.started
        if p.characters and not p.tokens:
            return f"{p.prompt.name}-r{p.repeat}  {p.characters:,} characters  {_clock(elapsed)} elapsed"
        done = self.delivered + p.tokens
        left = elapsed / done * (self.budget - self.freed - done) if done else 0.0
        speed = p.tokens / p.decode_seconds if p.decode_seconds > 0 else 0.0
        waiting = "" if p.characters else "prefill"  # a server tells no rounds while it generates
        rate = f"{1 + p.accepted / p.rounds:.2f} tokens a round" if p.rounds else waiting
        return (
            f"{p.prompt.name}-r{p.repeat}  {p.tokens}/{p.prompt.max_tokens} tokens  {speed:.1f} tok/s  {rate}"
            f"  {_clock(elapsed)} elapsed, at most {_clock(left)} left"
        )

    def verdict(self, outcome: Outcome) -> None:
        lines = panel_lines(outcome)
        if lines[0][0] == "HAZARD":
            self.out.print("{}: {}".format(*lines.pop(0)), markup=False)
        self.out.print(f"verdict: {outcome.result['verdict']['kind']}", markup=False)
        for name, line, _ in lines:
            self.out.print(f"{name}: {line}", markup=False)


class Rich(Plain):
    """A terminal: one live line, then a panel."""

    def __init__(self) -> None:
        super().__init__()
        # refreshed by hand: a drawing thread would take time from the decoder being timed
        self.live = Live(console=self.err, auto_refresh=False, transient=True)

    def __enter__(self) -> Rich:
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def stage(self, line: str) -> None:
        self.live.update(Text(f"{line} …", style="dim"), refresh=True)

    def waiting(self, line: str) -> None:
        clock = _clock(time.monotonic() - self.started)
        self.live.update(
            Text(f"{clock}  {line}", style="dim", no_wrap=True, overflow="ellipsis"), refresh=True
        )

    def progress(self, progress: Progress) -> None:
        self.live.update(Text(self.line(progress), no_wrap=True, overflow="ellipsis"), refresh=True)

    def verdict(self, outcome: Outcome) -> None:
        self.live.stop()
        self.out.soft_wrap = False
        self.out.print(verdict_panel(outcome))


def make_display(mode: DisplayMode) -> Silent:
    """The display for a mode and for what the error stream is connected to."""
    if mode == DisplayMode.json:
        return Silent()
    if mode == DisplayMode.quiet:
        return Quiet()
    console = Console(stderr=True)
    return Rich() if console.is_terminal and Console().is_terminal else Plain()


def verdict_panel(outcome: Outcome) -> Panel:
    """The verdict in large, its evidence, speed and record below."""
    result = outcome.result
    kind = result["verdict"]["kind"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, line, style in panel_lines(outcome):
        grid.add_row(name, Text(line, style=style))
    title = Text.assemble((f"  {kind.upper().replace('_', ' ')}  ", VERDICT_STYLE[kind]))
    about = f"{result['experiment']}  {result['route']}  seed {result['seed']}"
    return Panel(grid, title=title, subtitle=about, title_align="left", subtitle_align="right")


def panel_lines(outcome: Outcome) -> list[tuple[str, str, str]]:
    """(name, line, style) of everything the panel says under the verdict."""
    result, folder = outcome.result, RunFolder(outcome.folder)
    lines = [("reason", result["verdict"]["reason"], "")]
    if (line := results.hazard_line(result)) is not None:
        lines.insert(0, ("HAZARD", line, "bold white on magenta"))
    lines += [(kind, line, STATUS_STYLE[status]) for kind, status, line in results.evidence_lines(result)]
    lines.append(("speed", results.speed_line(result), "" if result["speed"]["valid"] else "dim"))
    if (line := latency_line(result.get("latency"))) is not None:
        lines.append(("latency", line, ""))
    if (line := results.repeats_line(result)) is not None:
        lines.append(("repeats", line, ""))
    if (line := results.reproduces_line(result)) is not None:
        lines.append(("reproduces", line, REPRODUCES_STYLE[result["reproduces"]["equal"]]))
    if outcome.skipped:
        when = result["finished"][:16].replace("T", " ")
        lines.append(("skipped", f"finished {when} UTC; run it again with force=true", "yellow"))
    if outcome.ledger is not None:
        lines.append(("ledger", outcome.ledger, ""))
    reached, trained = (result["loaded"].get(key, 0) for key in ("positions", "trained_positions"))
    if reached > trained:
        far = f"outputs may reach position {reached:,}; the model was trained to {trained:,}"
        lines.append(("note", far, "yellow"))
    lines.append(("record", str(folder), ""))
    if outcome.pending is not None:
        lines.append(("mlflow", f"pending: {outcome.pending}; send it with: sm70lab sync", "yellow"))
    lines.append(("look", _look(outcome), "dim"))
    return lines


def _look(outcome: Outcome) -> str:
    """The command that shows this record."""
    tracking = outcome.tracking
    if not tracking.mlflow:
        return shlex.join(["sm70lab", "report", str(outcome.folder)])
    words = ["sm70lab", "ui"]
    if tracking.uri is not None:
        words.append(f"tracking.uri={without_password(tracking.uri)}")
    elif Path(tracking.runs_dir).absolute() != Path(Tracking.runs_dir).absolute():
        words.append(f"tracking.runs_dir={tracking.runs_dir}")
    return shlex.join(words)


def print_sweep(outcomes: list[dict[str, Any]]) -> None:
    """One line a job, after a sweep."""
    console = Console(highlight=False, soft_wrap=True)
    for outcome in outcomes:
        what = " ".join(o for o in outcome.get("overrides", []) if not o.startswith("display="))
        if "result" in outcome:
            result = outcome["result"]
            hazard = results.hazard_line(result)
            line = f"{result['verdict']['kind']:<16}  {what}  {results.speed_line(result)}"
            line += f"  HAZARD {hazard}" if hazard else ""
        else:
            line = f"{'not run':<16}  {what}  {outcome['error']}"
        console.print(line, markup=False)
    for url, routes in _one_server(outcomes).items():
        names = ", ".join(sorted(routes))
        line = f"note: {names} asked the same server ({url}); a route is a name there: give each its own"
        console.print(line, markup=False)


def _one_server(outcomes: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Address → routes, of a server that several routes of a sweep have asked."""
    asked: dict[str, set[str]] = {}
    for outcome in outcomes:
        result = outcome.get("result") or {}
        given = [o for o in outcome.get("overrides", []) if o.startswith("target.base_url=")]
        url = given[-1] if given else "target.base_url"
        if result.get("target") == OPENAI:
            asked.setdefault(url, set()).add(result["route"])
    return {url: routes for url, routes in asked.items() if len(routes) > 1}


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
