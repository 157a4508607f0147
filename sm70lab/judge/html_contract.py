"""The structural check of a page: what must be opened, closed and whole."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sm70lab.schema import Prompt

ELEMENTS = ("html", "style", "script", "body")
_DOCTYPE = re.compile(r"<!doctype\s+html", re.IGNORECASE)
_OPENED = {name: re.compile(rf"<{name}(?=[\s/>])", re.IGNORECASE) for name in ELEMENTS}
_CLOSED = {name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in ELEMENTS}
_PAGE_START = re.compile(r"<!doctype\s+html|<html(?=[\s>])", re.IGNORECASE)
_CHAT_TURN = "<|im_start|>"  # ChatML: what follows the last one is the answer's own beginning

_TAGS = (
    "html|head|body|title|meta|link|style|script|main|header|footer|nav|section|article|aside|div|span|p|a|"
    "ul|ol|li|dl|dt|dd|h[1-6]|img|svg|path|button|input|label|select|option|textarea|form|table|thead|tbody|"
    "tr|td|th|pre|code|strong|em|iframe|canvas|video|audio"
)
# A tag whose "<" was lost, at the start of a line: `div class="x">`, `/div>`, `li>text</li>`,
# `!DOCTYPE html>`. An attribute needs its quote and a bare `name>` nothing or a tag after it, so
# that `p => p.x` (JavaScript) and `ul>li {` (CSS) are not taken for one.
_LOST_BRACKET = re.compile(
    r"^[ \t]*(?=[!/a-z])(?:"
    r"!doctype\s+html[^<>\n]*>"
    rf"|(?:{_TAGS})(?:[ \t]+[\w:@.-]+=(?:\"[^\"\n]*\"|'[^'\n]*'))+[ \t]*/?>"
    rf"|/?(?:{_TAGS})>(?=[ \t]*$|[^<>{{}}\n]*<)"
    r")",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class Contract:
    """What the check found: faults, and the demands that an unfinished text cannot meet."""

    missing: tuple[str, ...]
    not_applicable: tuple[str, ...]


def page_prefix(prompt: Prompt) -> str:
    """The part of the page that the prompt already wrote; empty where it wrote none.

    A raw prompt that begins a page, or a ChatML answer begun with one, is part of the page. A page
    quoted in a user's message is not.
    """
    answer = prompt.text.rfind(_CHAT_TURN)
    if answer >= 0:
        start = _PAGE_START.search(prompt.text, answer)
        return prompt.text[start.start() :] if start else ""
    text = prompt.text.lstrip()
    return text if _PAGE_START.match(text) else ""


def check(text: str, cut: bool, prefix: str = "") -> Contract:
    """Check the page ``prefix + text``.

    Demands: doctype; html, style, script and body opened and closed; an even number of code fences;
    no tag line without its ``<``. ``cut`` says that the text did not end by itself (budget or
    interruption): then nothing can be asked of what would have come after the cut, so an element
    not closed or not reached and a fence left open are not applicable. The page's beginning
    (doctype, html) and the tag lines are still checked.
    """
    page = prefix + text
    beginning = [] if _DOCTYPE.search(page) else ["doctype"]
    ending: list[str] = []
    for name in ELEMENTS:
        if not _OPENED[name].search(page):
            (beginning if name == "html" else ending).append(f"<{name}>")
        if not _CLOSED[name].search(page):
            ending.append(f"</{name}>")
    if page.count("```") % 2:
        ending.append("closing code fence")
    lost = [f"'<' of {match.group().strip()!r}" for match in _LOST_BRACKET.finditer(page)]
    if cut:
        return Contract(tuple(beginning + lost), tuple(ending))
    return Contract(tuple(beginning + ending + lost), ())
