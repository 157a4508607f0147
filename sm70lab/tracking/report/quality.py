"""The picture of a sweep: quality against speed, a cross a route."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm70lab.tracking.drawing import GRID, MARKERS, MUTED, colour, mean_interval, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INTERVAL_RUNS = 3  # fewer speeds tell nothing of their spread


@dataclass(frozen=True)
class Speed:
    """A route's tok/s: geometric mean, and the 95 % t interval of the log speeds.

    With fewer than three runs ``low`` and ``high`` are the range.
    """

    mean: float
    low: float
    high: float
    runs: int

    @property
    def is_interval(self) -> bool:
        return self.runs >= INTERVAL_RUNS


@dataclass(frozen=True)
class Point:
    """One route: its letter, the share of its runs that pass, its speed (None where none counts)."""

    label: str
    rate: float
    rate_low: float
    rate_high: float
    speed: Speed | None


def speed_of(speeds: Sequence[float]) -> Speed:
    """Of one or more speeds, each above 0."""
    log, half = mean_interval([math.log(speed) for speed in speeds])
    mean, low, high = math.exp(log), math.exp(log - half), math.exp(log + half)
    if len(speeds) < INTERVAL_RUNS:
        low, high = min(speeds), max(speeds)
    return Speed(mean, min(low, mean), max(high, mean), len(speeds))  # exp(log x) may miss x by a bit


def quality(points: Sequence[Point], width: int) -> Figure:
    """Share of runs that pass against tok/s; routes without a speed stand in a strip at the left.

    At least one point has a speed.
    """
    figure = new_figure(width, min(width, 360))
    axes = figure.subplots()
    style(axes)
    speeds = [p.speed for p in points if p.speed is not None]
    low, high = min(speed.low for speed in speeds), max(speed.high for speed in speeds)
    span = max(high - low, 0.1 * high)
    silent = [p for p in points if p.speed is None]
    strip = 0.3 * span if silent else 0.0
    left, right = low - 0.12 * span - strip, high + 0.15 * span
    axes.set_xlim(left, right)
    if silent:
        axes.axvspan(left, left + strip, color=GRID, alpha=0.5, lw=0)
        over = axes.get_xaxis_transform()
        middle = left + strip / 2
        axes.text(
            middle, 0.97, "no speed counts", color=MUTED, fontsize=11, ha="center", va="top", transform=over
        )
    places = {p.label: left + strip * (i + 1) / (len(silent) + 1) for i, p in enumerate(silent)}
    for index, p in enumerate(points):
        places.setdefault(p.label, p.speed.mean if p.speed else left)
        errors = [[p.speed.mean - p.speed.low], [p.speed.high - p.speed.mean]] if p.speed else None
        axes.errorbar(
            [places[p.label]], [p.rate], [[p.rate - p.rate_low], [p.rate_high - p.rate]], errors,
            fmt=MARKERS[index % len(MARKERS)], color=colour(index), lw=1.8, ms=8, capsize=3,
            mfc=colour(index) if p.speed else "none",
        )  # fmt: skip
    axes.set_ylim(-0.05, 1.17)
    _place_letters(axes, points, places, width)
    axes.set_xticks([tick for tick in axes.get_xticks() if left + strip <= tick <= right])
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlabel("tok/s of passing runs", color=MUTED)
    axes.set_ylabel("runs that pass", color=MUTED)
    return figure


def _place_letters(axes: Axes, points: Sequence[Point], places: dict[str, float], width: int) -> None:
    """Each route's letter beside its mark, moved up past letters that already stand there."""
    taken: list[tuple[float, float]] = []
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    dx, dy = 19 / width * (right - left), 16 / 300 * (top - bottom)  # room of a letter
    for index, p in enumerate(points):
        x, y = places[p.label] + 0.6 * dx, p.rate + 0.7 * dy
        while any(abs(x - a) < dx and abs(y - b) < 0.95 * dy for a, b in taken):
            y += 0.5 * dy
        taken.append((x, y))
        axes.text(x, y, p.label, color=colour(index), fontweight="bold", ha="center", va="center")
    axes.set_ylim(bottom, max([top, *(y + dy for _, y in taken)]))
