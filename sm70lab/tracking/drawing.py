"""Pictures of runs as matplotlib figures: ``figures`` saves them as PNG, ``report`` as inline SVG.

Figures are drawn without pyplot, so nothing global is left behind and no display is needed. Sizes are
in CSS pixels (a figure's inch holds 72), so a picture shown at its own width has text of its own size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm70lab.judge.acceptance import pool
from sm70lab.judge.statistics import pass_rate
from sm70lab.schema import Round

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PIXELS_AN_INCH = 72
# Told apart by people with any common colour blindness (after Okabe and Ito 2008, darkened for white
# paper), and by their markers: the order is fixed, so a draft position has one colour everywhere.
COLOURS = ("#0072b2", "#c44e00", "#00805e", "#a03c82", "#8a6d00", "#3a86c8", "#5a5a5a", "#7a2e2e")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, MUTED, GRID, FAULT = "#1b1f24", "#5c6670", "#d5dae0", "#c8102e"
FONT: dict[Any, Any] = {  # matplotlib types its keys as some hundred literals
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.labelsize": 12,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "text.parse_math": False,  # a name may hold a dollar sign
}
CONFIDENCE = 0.95
MAX_PANELS = 8
ONE_WINDOW = 500  # tokens
MAX_LEGEND = 16


@dataclass(frozen=True)
class Rate:
    """One pooled window of one draft position, with its exact interval (Clopper and Pearson 1934)."""

    token: int
    value: float
    low: float
    high: float


def colour(index: int) -> str:
    """The colour of series ``index``."""
    return COLOURS[index % len(COLOURS)]


def pooled_rates(rounds: Sequence[Round], window_tokens: int) -> list[list[Rate]]:
    """Per draft position, the rate of each window of output tokens over all given rounds."""
    groups: dict[int, list[Round]] = {}
    for r in rounds:
        groups.setdefault(r.position // window_tokens, []).append(r)
    found: list[list[Rate]] = []
    for index, group in sorted(groups.items()):
        pooled = pool(group)
        for position, (accepted, tested) in enumerate(zip(pooled.accepted, pooled.tested, strict=True)):
            while len(found) <= position:
                found.append([])
            if tested:
                share = pass_rate(accepted, tested)
                found[position].append(Rate(index * window_tokens, accepted / tested, share.low, share.high))
    return found


def acceptance_panels(windows: Sequence[dict[str, Any]]) -> dict[str, list[list[Rate]]]:
    """Per output, the recorded rates of its windows, position by position; no intervals."""
    panels: dict[str, list[list[Rate]]] = {}
    for window in windows:
        panel = panels.setdefault(window["generation"], [])
        for position, rate in enumerate(window["rates"]):
            while len(panel) <= position:
                panel.append([])
            if rate is not None and not math.isnan(rate):
                panel[position].append(Rate(window["token"], rate, rate, rate))
    return {name: panel for name, panel in panels.items() if any(panel)}


def acceptance(panels: dict[str, list[list[Rate]]], width: int, columns: int) -> Figure:
    """Cumulative acceptance rate per draft position over output tokens, one panel a name."""
    names = list(panels)[:MAX_PANELS]
    columns = min(columns, len(names))
    rows = -(-len(names) // columns)
    figure = new_figure(width, 60 + 190 * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in list(grid.flat)[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(grid.flat, names, strict=False):
        style(axes)
        axes.set_title(_fit(name, width // columns), loc="left", color=INK)
        for position, rates in enumerate(panels[name]):
            tokens = [r.token for r in rates]
            axes.fill_between(
                tokens,
                [r.low for r in rates],
                [r.high for r in rates],
                color=colour(position),
                alpha=0.16,
                lw=0,
            )
            _line(axes, tokens, [r.value for r in rates], position)
        axes.set_ylim(-0.03, 1.05)
        axes.tick_params(labelbottom=True)
    _token_axis(grid[0, 0], [r.token for name in names for rates in panels[name] for r in rates])
    figure.supxlabel("output tokens", color=MUTED, fontsize=12)
    figure.supylabel("share of rounds accepting", color=MUTED, fontsize=12)
    return figure


def speed(windows: Sequence[dict[str, Any]], width: int) -> Figure:
    """tok/s, rounds/s and text novelty over output tokens: a loop raises the first and not the second."""
    wanted = (("tokens_per_second", "tok/s"), ("rounds_per_second", "rounds/s"), ("novelty", "novelty"))
    shown = [(key, label) for key, label in wanted if any(w.get(key) is not None for w in windows)]
    figure = new_figure(width, 60 + 120 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)
    for axes, (key, label) in zip(panels.flat, shown, strict=True):
        style(axes)
        axes.set_ylabel(label, color=MUTED)
        for index, group in enumerate(by_generation(windows).values()):
            have = [w for w in group if w.get(key) is not None]
            _line(axes, [w["token"] for w in have], [w[key] for w in have], index)
        top = axes.get_ylim()[1]
        axes.set_ylim(0, 1.05 if key == "novelty" else top * 1.08)
    panels[-1, 0].set_xlabel("output tokens", color=MUTED)
    _token_axis(panels[-1, 0], [w["token"] for w in windows])
    figure.align_ylabels()
    return figure


def novelty_speed(windows: Sequence[dict[str, Any]], width: int) -> Figure:
    """Quality against speed inside a run: one point a window, a cross for each output's 95 % intervals."""
    figure = new_figure(width, min(width, 330))
    axes = figure.subplots()
    style(axes)
    groups = by_generation(w for w in windows if w.get("novelty") is not None and w.get("tokens_per_second"))
    for index, group in enumerate(groups.values()):
        speeds, novelties = [w["tokens_per_second"] for w in group], [w["novelty"] for w in group]
        axes.plot(
            speeds, novelties, MARKERS[index % len(MARKERS)], color=colour(index), alpha=0.35, ms=5, mew=0
        )
        (x, dx), (y, dy) = mean_interval(speeds), mean_interval(novelties)
        axes.errorbar(
            [x], [y], [[min(dy, y)], [min(dy, max(0.0, 1 - y))]], [[min(dx, x)], [dx]],
            fmt=MARKERS[index % len(MARKERS)], color=colour(index), ms=9, lw=2, capsize=4,
        )  # fmt: skip
    axes.set_xlabel("tok/s", color=MUTED)
    axes.set_ylabel("novelty (share of new 8-grams)", color=MUTED)
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlim(left=0)
    return figure


def evidence(
    runs: Sequence[Sequence[dict[str, Any]]],
    limit: float | None,
    width: int,
    series: Sequence[int] = (),
) -> Figure:
    """The audit's running evidence, one line a run, over all its outputs in a row; faults marked.

    ``runs`` holds each run's ``curve`` (see ``judge.audit``): it runs on from one output into the next.
    ``limit`` is the log10 at which the audit decides. A run without a fault is a thin line. ``series``
    gives each run's place in a legend: where it tells several apart, a line has its colour and marker.
    """
    figure = new_figure(width, 300)
    axes = figure.subplots()
    style(axes)
    axes.axhline(0, color=MUTED, lw=0.8)
    if limit is not None:
        axes.axhline(limit, color=FAULT, ls="--", lw=1.2)
    several = len(set(series)) > 1
    for curve, index in zip(runs, series or [0] * len(runs), strict=True):
        tokens, values, faults, edges = _joined(curve)
        loud = bool(faults) or (limit is not None and max(values, default=0.0) >= limit)
        (line,) = axes.plot(tokens, values, color=FAULT if loud else COLOURS[0], lw=2 if loud else 1.2)
        if several:
            # Marked here and there, each series at other tokens: flat lines lie on one another.
            line.set(color=colour(index), marker=MARKERS[index % len(MARKERS)], markersize=6)
            line.set(markeredgewidth=0, markevery=(0.02 * (1 + index % len(MARKERS)), 0.2))
        if len(runs) == 1:
            for edge in edges:
                axes.axvline(edge, color=MUTED, lw=1, ls=":")
        if faults and tokens:
            import numpy as np

            rug = axes.get_xaxis_transform()  # along the lower edge, whatever the evidence
            axes.plot(faults, [0.02] * len(faults), "|", color=FAULT, ms=9, mew=0.8, ls="none", transform=rug)
            first = float(np.interp(faults[0], tokens, values))
            axes.plot([faults[0]], [first], "X", color=FAULT, ms=10, mec="white", mew=1, zorder=5)
    low, high = axes.get_ylim()
    axes.set_ylim(low, max(high, (limit or 0.0) * 1.25))
    axes.set_xlabel(
        "output tokens" + (", outputs in a row" if any(len(c) > 1 for c in runs) else ""), color=MUTED
    )
    axes.set_ylabel("log₁₀ evidence of a fault", color=MUTED)
    return figure


def _joined(curve: Sequence[dict[str, Any]]) -> tuple[list[int], list[float], list[int], list[int]]:
    """Tokens, evidence and faults of all outputs in a row, and where each output but the first begins."""
    tokens: list[int] = []
    values: list[float] = []
    faults: list[int] = []
    edges: list[int] = []
    begin = 0
    for part in curve:
        if begin:
            edges.append(begin)
        for token, value in zip(part["token"], part["log10_e"], strict=False):
            if value is not None:
                tokens.append(begin + token)
                values.append(value)
        faults += [begin + fault for fault in part.get("faults") or []]
        begin += (part["token"][-1] if part["token"] else -1) + 1
    return tokens, values, faults, edges


def with_legend(figure: Figure, names: Sequence[str]) -> Figure:
    """The figure with its series named above it; many names would cover the picture and are left out."""
    from matplotlib.lines import Line2D

    if len(names) <= MAX_LEGEND:
        handles = [
            Line2D([], [], color=colour(i), marker=MARKERS[i % len(MARKERS)], label=name.lstrip("_"))
            for i, name in enumerate(names)
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    return figure


def by_generation(windows: Any) -> dict[str, list[dict[str, Any]]]:
    """Windows by the output they belong to, in order."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for window in windows:
        groups.setdefault(window["generation"], []).append(window)
    return groups


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and the half width of its 95 % t interval; 0 where one value tells nothing of its spread."""
    import numpy as np
    from scipy import stats

    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, 0.0
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1)) * error


def new_figure(width: int, height: int) -> Figure:
    """An empty figure of so many CSS pixels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / PIXELS_AN_INCH, height / PIXELS_AN_INCH), layout="constrained")


def style(axes: Axes) -> None:
    """Muted frame and ticks, a light grid, thousands with a comma."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(MUTED)
    axes.tick_params(colors=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def _token_axis(axes: Axes, tokens: Sequence[int]) -> None:
    """From 0 to the last window, or as far as one window where there is but one."""
    end = max([*tokens, ONE_WINDOW])
    axes.set_xlim(-0.02 * end, 1.03 * end)


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], index: int) -> None:
    axes.plot(x, y, color=colour(index), marker=MARKERS[index % len(MARKERS)], ms=4.5, mew=0, lw=1.7)


def _fit(name: str, width: int) -> str:
    """A title no longer than its panel: about seven pixels a character."""
    most = max(12, width // 8)
    return name if len(name) <= most else f"{name[: most - 1]}…"
