"""The report in a real browser: what a person sees, wide and narrow, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_report import make_runs, report

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of a hostile run's page and of a sweep's with hazards, loops and a hostile run."""
    folder = tmp_path_factory.mktemp("runs")
    hostile = make_runs(folder)["hostile"]
    report(folder, hostile.path.name)
    report(folder, "t")
    return {
        "run": (hostile.path / "report.html").as_uri(),
        "sweep": (folder / "t" / "report.html").as_uri(),
    }


@pytest.mark.parametrize("which", ["run", "sweep"])
@pytest.mark.parametrize("width", [360, 800, 1280])
def test_it_fits_asks_for_nothing_and_complains_of_nothing(
    pages: dict[str, str], open_page: Open, which: str, width: int
) -> None:
    page = open_page(pages[which], width)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    wide = page.evaluate(
        """[...document.querySelectorAll('main *')]
             .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
             .filter(e => !e.closest('.scroll') && !e.closest('svg')).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert wide == []
    assert page.requests == [pages[which]]
    assert page.complaints == []
    shown = page.evaluate(
        "[...document.querySelectorAll('figure svg')].filter(e => e.getBoundingClientRect().width > 0).length"
    )
    assert shown == page.locator("figure").count() > 0  # each picture once: its wide or its narrow form


@pytest.mark.parametrize("which", ["run", "sweep"])
def test_the_verdict_is_what_one_sees_first(pages: dict[str, str], open_page: Open, which: str) -> None:
    page = open_page(pages[which], 360)
    first = page.evaluate(
        """(() => { const w = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
           while (w.nextNode()) { if (w.currentNode.textContent.trim()) {
             const box = w.currentNode.parentElement.getBoundingClientRect();
             return [w.currentNode.textContent.trim(), box.top, box.height]; } } })()"""
    )
    assert first[0] in ("pass", "model degenerate", "route fault", "faults found")
    assert first[1] < 60 and first[2] > 20


def test_dark_and_light_have_their_own_colours(pages: dict[str, str], open_page: Open) -> None:
    def colours(scheme: str) -> dict[str, str]:
        page = open_page(pages["run"], 1280, scheme)
        found: dict[str, str] = page.evaluate(
            """({page: getComputedStyle(document.body).backgroundColor,
                 words: getComputedStyle(document.body).color,
                 label: getComputedStyle(document.querySelector('figure svg text')).fill,
                 line: [...document.querySelectorAll('figure .wide svg path')]
                   .map(e => getComputedStyle(e).stroke)
                   .find(s => s.startsWith('rgb') && s !== 'rgb(0, 0, 0)')})"""
        )
        return found

    light, dark = colours("light"), colours("dark")
    assert light["page"] == "rgb(244, 246, 248)"
    assert dark["page"] == "rgb(14, 17, 22)"
    assert all(light[part] != dark[part] for part in light), (light, dark)


def test_an_output_cannot_act(pages: dict[str, str], open_page: Open) -> None:
    page = open_page(pages["run"])
    page.locator("details summary").first.click()
    shown = page.locator("details pre").first
    assert shown.is_visible()
    assert "<script>document.title='owned'</script>" in shown.inner_text()
    assert page.title() != "owned"
    assert page.locator("script, img").count() == 0
    assert page.locator("footer").is_visible()
    assert page.complaints == []


def test_words_in_pictures_do_not_run_into_each_other(pages: dict[str, str], open_page: Open) -> None:
    for width in (360, 1280):
        page = open_page(pages["sweep"], width)
        clashes = page.evaluate(
            """[...document.querySelectorAll('figure svg')].flatMap(svg => {
                 const frame = svg.getBoundingClientRect();
                 if (!frame.width) return [];
                 const boxes = [...svg.querySelectorAll('text')].filter(t => t.textContent.trim())
                   .map(t => [t.textContent, t.getBoundingClientRect()]);
                 const found = boxes.filter(([, b]) => b.left < frame.left - 1 || b.right > frame.right + 1
                   || b.top < frame.top - 1 || b.bottom > frame.bottom + 1).map(([t]) => 'clipped ' + t);
                 boxes.forEach(([s, a], i) => boxes.slice(i + 1).forEach(([t, b]) => {
                   const w = Math.min(a.right, b.right) - Math.max(a.left, b.left);
                   const h = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
                   if (w > 2 && h > 4) found.push(s + ' | ' + t); }));
                 return found; })"""
        )
        assert clashes == []


def test_the_pages_files_stand_alone(pages: dict[str, str], tmp_path: Path, open_page: Open) -> None:
    alone = tmp_path / "alone.html"
    alone.write_bytes(Path(pages["run"].removeprefix("file://")).read_bytes())
    page = open_page(alone.as_uri())
    assert page.requests == [alone.as_uri()]
    assert page.locator("#verdict").is_visible()
