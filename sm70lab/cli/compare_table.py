"""The table of ``sm70lab compare``: readable in ten seconds, one row a route."""

from __future__ import annotations

import math

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sm70lab.judge.comparison import Against, Comparison, Quality, Speed, Speeds
from sm70lab.judge.statistics import PassRate

STYLE = {Quality.worse: "bold red", Quality.undecided: "yellow", Quality.no_regression: "green"}
SPEED_STYLE = {Speed.faster: "green", Speed.slower: "red", Speed.undecided: "", Speed.not_compared: "dim"}
NOTHING = "–"


def show(comparison: Comparison) -> None:
    """Print the table, its notes, and one conclusion a route."""
    console = Console(highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("route", overflow="fold", max_width=28)
    headings = ("passed\n95 %", "p\ncorr.", "tok/s\nrounds/s", "tokens\na round", "speed\n95 %")
    for heading in (*headings, "tokens\nequal", "more\nneeded"):
        table.add_column(heading, justify="right", no_wrap=True)
    speeds = comparison.baseline_speeds
    rate = _rate(comparison.baseline_rate, comparison.unit)
    table.add_row(f"{comparison.baseline}\nbaseline", rate, NOTHING, *_speeds(speeds), *[NOTHING] * 3)
    for route in comparison.routes:
        table.add_row(
            Text(route.label, style=STYLE[route.quality]),
            _rate(route.rate, route.unit),
            f"{route.p_value:.2g}\n{route.p_adjusted:.2g}",
            *_speeds(route.speeds),
            Text(_ratio(route), style=SPEED_STYLE[route.speed]),
            _tokens(route),
            str(route.runs_needed),
        )
    console.print(table)
    for line, style in _lines(comparison):
        console.print(Text(line, style=style), soft_wrap=True)


def _lines(comparison: Comparison) -> list[tuple[str, str]]:
    lines = [
        (f"{route.label}: tokens {route.tokens.words}; {route.test}; {route.runs_needed_words}", "")
        for route in comparison.routes
    ]
    lines += [(f"note: {note}", "dim") for note in comparison.notes]
    lines += [
        (f"note: the baseline is a route_fault: {fault}", "yellow") for fault in comparison.baseline_faults
    ]
    lines += [(f"{route.label}: {route.conclusion}", STYLE[route.quality]) for route in comparison.routes]
    return lines


def _rate(rate: PassRate, unit: str) -> str:
    interval = f"{rate.low:.2f}–{rate.high:.2f}" if rate.judged else NOTHING
    runs = f" run{'s' * (rate.judged != 1)}" if unit == "run" else ""
    return f"{rate.passed} of {rate.judged}{runs}\n{interval}"


def _speeds(speeds: Speeds) -> tuple[str, str]:
    """tok/s over rounds/s, and the acceptance length."""
    length = speeds.acceptance_length
    both = f"{_number(speeds.tokens_per_second)}\n{_number(speeds.rounds_per_second)}"
    return both, NOTHING if math.isnan(length) else f"{length:.2f}"


def _tokens(route: Against) -> str:
    tokens = route.tokens
    return f"{tokens.equal}/{tokens.pairs}" if tokens.comparable else NOTHING


def _number(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:,.1f}"


def _ratio(route: Against) -> str:
    ratio = route.ratio
    if route.speed is Speed.not_compared:
        return NOTHING
    interval = NOTHING if math.isnan(ratio.low) else f"{ratio.low:.2f}–{ratio.high:.2f}"
    return f"{ratio.ratio:.2f}×\n{interval}"
