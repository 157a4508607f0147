"""The pictures of a run folder, over output tokens: acceptance, speed, audit evidence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm70lab.schema import Verdict
from sm70lab.tracking import drawing
from sm70lab.tracking.atomic import write_with

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 900  # pixels of a page; saved sharper
SHARPNESS = 1.5


def write_figures(folder: Path, verdict: Verdict) -> None:
    """Write ``acceptance.png``, ``speed.png`` and ``audit.png``: those that the evidence has numbers for."""
    from matplotlib import rc_context

    evidence = {e.kind: e for e in verdict.evidence}
    windows: list[dict[str, Any]] = evidence["acceptance"].details.get("windows", [])
    curve: list[dict[str, Any]] = evidence["audit"].details.get("curve", [])
    with rc_context(drawing.FONT):
        if panels := drawing.acceptance_panels(windows):
            figure = drawing.acceptance(panels, WIDTH, 2)
            names = [f"draft {i + 1}" for i in range(max(len(panel) for panel in panels.values()))]
            _save(folder / "acceptance.png", drawing.with_legend(figure, names))
        if windows:
            names = list(drawing.by_generation(windows))
            _save(folder / "speed.png", drawing.with_legend(drawing.speed(windows, WIDTH), names))
        if curve:
            limit = evidence["audit"].details["limit_log10_e"]
            _save(folder / "audit.png", drawing.evidence([curve], limit, WIDTH))


def _save(path: Path, figure: Figure) -> None:
    dpi = drawing.PIXELS_AN_INCH * SHARPNESS
    write_with(path, lambda temporary: figure.savefig(str(temporary), format="png", dpi=dpi))
