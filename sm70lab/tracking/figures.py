"""Three pictures of a run, over output tokens: acceptance, speed, audit evidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm70lab.schema import Generation, TokenScores, Verdict
from sm70lab.tracking.atomic import write_with

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (9.0, 4.5)
DPI = 110
Z_LIMIT = 3.29  # two-sided normal quantile of 0.001


def write_figures(
    folder: Path, generations: Sequence[Generation], verdict: Verdict, scores: dict[str, TokenScores]
) -> None:
    """Write ``acceptance.png``, ``speed.png`` and, with scores, ``audit.png``.

    Figures are drawn without pyplot, so nothing global is left behind and no display is needed.
    """
    windows: list[dict[str, Any]] = next(
        (e.details.get("windows", []) for e in verdict.evidence if e.kind == "acceptance"), []
    )
    if any(w["rates"] for w in windows):
        _save(folder / "acceptance.png", _acceptance(windows))
    if windows:
        _save(folder / "speed.png", _speed(windows))
    if scores:
        _save(folder / "audit.png", _audit(generations, scores))


def _acceptance(windows: list[dict[str, Any]]) -> Figure:
    figure, axes = _axes("cumulative acceptance rate")
    for name, group in _by_generation(windows).items():
        for position in range(max(len(w["rates"]) for w in group)):
            tokens = [w["token"] for w in group if len(w["rates"]) > position]
            rates = [w["rates"][position] for w in group if len(w["rates"]) > position]
            axes.plot(tokens, rates, marker=".", label=f"{name}, draft {position + 1}")
    axes.set_ylim(-0.02, 1.02)
    _legend(axes)
    return figure


def _speed(windows: list[dict[str, Any]]) -> Figure:
    figure, axes = _axes("tok/s")
    rounds = axes.twinx()
    rounds.set_ylabel("rounds/s (dashed)")
    for name, group in _by_generation(windows).items():
        tokens = [w["token"] for w in group]
        (line,) = axes.plot(tokens, [w["tokens_per_second"] for w in group], marker=".", label=name)
        rounds.plot(tokens, [w["rounds_per_second"] for w in group], linestyle="--", color=line.get_color())
    axes.set_ylim(bottom=0)
    rounds.set_ylim(bottom=0)
    _legend(axes)
    return figure


def _audit(generations: Sequence[Generation], scores: dict[str, TokenScores]) -> Figure:
    """The running sum of log p + entropy in standard deviations: a lossless run wanders about 0."""
    import numpy as np

    figure, axes = _axes("Σ(log p + entropy), standard deviations")
    for generation in generations:
        if (s := scores.get(generation.key)) is None or not len(s.logprob):
            continue
        inside = np.asarray(s.in_support, dtype=bool)
        surprise = np.cumsum(np.where(inside, s.logprob, 0.0) + np.where(inside, s.entropy, 0.0))
        spread = np.sqrt(np.maximum(np.cumsum(np.where(inside, s.variance, 0.0)), 1e-12))
        position = np.arange(len(surprise))
        (line,) = axes.plot(position, surprise / spread, label=generation.key, linewidth=0.9)
        outside = position[~inside]
        if len(outside):
            axes.plot(outside, np.zeros(len(outside)), "x", color=line.get_color(), label="outside")
    for limit in (-Z_LIMIT, Z_LIMIT):
        axes.axhline(limit, color="0.6", linestyle=":", linewidth=1)
    _legend(axes)
    return figure


def _by_generation(windows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for window in windows:
        groups.setdefault(window["generation"], []).append(window)
    return groups


def _axes(ylabel: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("output tokens")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def _legend(axes: Axes) -> None:
    if len(axes.get_lines()) <= 16:
        axes.legend(fontsize=8)


def _save(path: Path, figure: Figure) -> None:
    write_with(path, lambda temporary: figure.savefig(str(temporary), format="png", dpi=DPI))
