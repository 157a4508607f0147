"""matplotlib figures as inline SVG whose colours follow the page, each drawn for a wide and a narrow one."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from sm70lab.tracking import drawing
from sm70lab.tracking.report import quality

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE, NARROW = 960, 344  # pixels; the style sheet shows the second below 720
MAX_NARROW = 460  # a picture drawn narrow may grow so far
GLYPHS = ("●", "■", "▲", "◆", "▼", "✚", "✖", "★")  # of drawing.MARKERS, for a legend in text
THEME = {drawing.INK: "ink", drawing.MUTED: "muted", drawing.GRID: "grid", drawing.FAULT: "fault"} | {
    c: f"c{index}" for index, c in enumerate(drawing.COLOURS)
}


@dataclass(frozen=True)
class Key:
    """One entry of a legend: which series, and its name."""

    index: int
    label: str

    @property
    def glyph(self) -> str:
        return GLYPHS[self.index % len(GLYPHS)]

    @property
    def colour(self) -> int:
        return self.index % len(drawing.COLOURS)


@dataclass(frozen=True)
class Picture:
    """A titled figure with what a person must know to read it."""

    name: str
    title: str
    caption: str
    wide: Markup
    narrow: Markup
    legend: list[Key] = field(default_factory=list)


def draw(
    name: str,
    title: str,
    caption: str,
    figure: Callable[[int], Figure],
    legend: Sequence[str] = (),
    width: int = WIDE,
) -> Picture:
    """Draw ``figure`` at both widths. ``name`` is unique on its page: ids in the SVG begin with it."""
    from matplotlib import rc_context

    keys = (
        [Key(index, label) for index, label in enumerate(legend)] if len(legend) <= drawing.MAX_LEGEND else []
    )
    with rc_context({**drawing.FONT, "svg.fonttype": "none", "svg.hashsalt": name}):
        return Picture(
            name,
            title,
            caption,
            _svg(figure(width), f"{name}-w", title),
            _svg(figure(NARROW), f"{name}-n", title),
            keys,
        )


def run_pictures(
    windows: list[dict[str, Any]],
    pooled: list[list[drawing.Rate]],
    curves: list[dict[str, Any]],
    limit: float | None,
    speed_valid: bool,
) -> Iterator[Picture]:
    """The pictures of one run, those that its record has the numbers for."""
    if curves:
        yield evidence_picture([curves], [""], limit)
    panels = drawing.acceptance_panels(windows)
    if len(panels) > 1 and pooled:
        panels = {"all outputs": pooled, **panels}
    elif pooled and panels:
        panels = {next(iter(panels)): pooled}
    if panels:
        yield acceptance_picture(panels)
    names = list(drawing.by_generation(windows))
    mark = "" if speed_valid else " This run's speed does not count: its text or its tokens failed."
    timed = [w for w in windows if w.get("tokens_per_second") is not None]
    if timed:
        yield draw(
            "speed",
            "Speed over output tokens",
            "A loop raises tok/s and leaves rounds/s where it was. Novelty is the share of a window's "
            f"8-grams not seen earlier in the output.{mark}",
            lambda width: drawing.speed(windows, width),
            names,
        )
    if any(w.get("novelty") is not None for w in timed):
        yield draw(
            "novelty",
            "Quality against speed",
            "One faint mark a window, one cross an output (means with their 95 % intervals). Fast and "
            f"repetitive, at the lower right, is a loop.{mark}",
            lambda width: drawing.novelty_speed(windows, width),
            names,
            width=560,
        )


def evidence_picture(runs: list[list[dict[str, Any]]], routes: Sequence[str], limit: float | None) -> Picture:
    """The audit's running evidence, ``routes`` parallel to the runs; at log10 ``limit`` the audit decides."""
    names = list(dict.fromkeys(routes))
    line = f" The dashed line is where the audit decides (chance {10**-limit:.2g})." if limit else ""
    return draw(
        "evidence",
        "Running evidence of the audit",
        "It stays low while tokens are the reference's own draws and rises when they are not. The cross "
        "marks the first token that the reference could not have given, ticks along the edge mark all of "
        "them. At 0 no bet on changed draws has gained anything: then the faults themselves decide, tokens "
        f"outside the support or not the noise's own, whatever the curve.{line}",
        lambda width: drawing.evidence(runs, limit, width, [names.index(route) for route in routes]),
        names if len(names) > 1 else (),
    )


def acceptance_picture(panels: dict[str, list[list[drawing.Rate]]]) -> Picture:
    """Acceptance per draft position over tokens, a panel an output or a route."""
    positions = max(len(panel) for panel in panels.values())
    hidden = len(panels) - drawing.MAX_PANELS
    more = f" {hidden} more panels are not drawn." if hidden > 0 else ""
    return draw(
        "acceptance",
        "Acceptance per draft position",
        "Share of rounds whose first drafts up to this position were all accepted, window by window; "
        f"bands are exact 95 % intervals where rounds are pooled.{more}",
        lambda width: drawing.acceptance(panels, width, 2 if width >= 600 else 1),
        [f"draft {i + 1}" for i in range(positions)],
    )


def quality_picture(points: list[quality.Point], labels: Sequence[str], name: str) -> Picture:
    """Pass rate against speed, a letter a route."""
    return draw(
        name,
        "Quality against speed",
        "Share of runs that pass (exact 95 % interval) against tok/s of the passing runs (geometric mean; "
        "95 % t interval of the log speeds from three runs on, the range of two). A route without a valid "
        "speed is not placed on the speed axis.",
        lambda width: quality.quality(points, width),
        labels,
        width=760,
    )


def _svg(figure: Figure, name: str, title: str) -> Markup:
    """The figure as one ``<svg>``: theme colours as CSS variables, own ids, no fixed size, no metadata."""
    buffer = io.StringIO()
    empty = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", transparent=True, metadata=empty)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)  # the style sheet has the rules
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="([^"]*)"', head)
    assert box is not None  # matplotlib always writes one
    rest = re.sub(r'\bid="', f'id="{name}-', rest)
    rest = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", rest).replace("xlink:href", "href")
    for colour, variable in THEME.items():
        rest = rest.replace(colour, f"var(--{variable})")
    rest = rest.replace("#ffffff", "var(--paper)").replace("#000000", "var(--ink)")
    label = Markup.escape(title)
    most = max(float(box[1].split()[2]), MAX_NARROW)
    head = f'<svg viewBox="{box[1]}" style="max-width: {most:.0f}px" role="img" aria-label="{label}">'
    return Markup(head + rest)
