"""Cleaning of HTML and CSS text before training.

Repetition in the data teaches a small model to loop, so most of this file removes it: repeated
lines, repeated blocks, templated rules (icon fonts, grid classes), long digit runs, decorative
rows and inline strings. Every function takes and returns plain text.
"""

from __future__ import annotations

import re
from collections import Counter, deque

from .loops import RepeatLimiter, collapse_periods
from .unminify import pretty_css

TYPOGRAPHY = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "-",
        "\u2026": "...",
        "\u2022": "*",
        "\u00a0": " ",
        "\u00a9": "&copy;",
        "\u00ae": "&reg;",
        "\u2122": "&trade;",
        "\u00d7": "x",
        "\u2192": "->",
        "\u2190": "<-",
        "\u00b7": "-",
        "\u00b6": "",
        "\u00ab": "<<",
        "\u00bb": ">>",
        "\ufeff": "",
        "\u200b": "",
        "\u00e9": "e",
        "\u00e8": "e",
        "\u00fc": "u",
        "\u00f6": "o",
        "\u00e4": "a",
        "\u00f3": "o",
        "\u00e1": "a",
    }
)
DIGITS = re.compile(r"\d{9,}")
DECIMALS = re.compile(r"(\d+\.\d{4})\d+")
HEX_RUN = re.compile(r"\b[0-9a-fA-F]{20,}\b")
CHAR_RUN = re.compile(r"([^\w\s])\1{15,}")
SPACE_RUN = re.compile(r"(?<=\S)[ \t]{5,}")
INLINE_REPEAT = re.compile(r"(\S.{1,40}?)\1{3,}")
WORD_RUN = re.compile(r"(\w)\1{5,}")
DATA_URI = re.compile(r"data:[\w/+.;=-]+(,|;base64)")
SCRIPT = re.compile(r"<script\b.*?</script>\n?", re.S | re.I)
SVG = re.compile(r"<svg\b.*?</svg>\n?", re.S | re.I)
HTML_COMMENT = re.compile(r"<!--.*?-->\n?", re.S)
EMPTY_RULE = re.compile(r"^[^\n{};/]*\{\s*\}\n", re.M)
OLD_VENDOR = re.compile(r"^\s*(-(moz|o|ms|khtml)-[\w-]+\s*:|\*[\w-]+\s*:|filter:\s*(progid|alpha))", re.I)
TEMPLATE_MARK = re.compile(r"\{%|\{\{|<%|<\?php|@include|@mixin|@extend")
SPECIAL = re.compile(r"<\|[a-z_]+\|>|</?think>")
ATTR_VALUE = re.compile(r"=\s*(\"[^\"]*\"|'[^']*')")
HTML_TEXT = re.compile(r">[^<]+<")
WORDS = re.compile(r"[\w#%.$\\-]+")
SPACES = re.compile(r"\s+")

MAX_LINE = 400
WINDOW = 16_000


def ascii_text(text: str) -> str | None:
    """`text` in ASCII, or None where more than 0.5 % of it is written in other letters.

    A 4096-token vocabulary spells other letters byte by byte, and sampling then writes broken
    UTF-8 (U+FFFD); the corpus is therefore ASCII only.
    """
    text = text.translate(TYPOGRAPHY)
    if text.isascii():
        return text
    other = sum(1 for ch in text if ord(ch) > 127)
    if other > len(text) * 0.005:
        return None
    return "".join(ch for ch in text if ord(ch) < 128)


def is_minified(text: str) -> bool:
    """True for machine-packed text: long lines on average, or most bytes in very long lines."""
    lines = text.split("\n")
    if len(text) / max(1, len(lines)) > 160:
        return True
    return sum(len(line) for line in lines if len(line) > MAX_LINE) > 0.3 * len(text)


def _shorten(match: re.Match[str]) -> str:
    """Cut a run of one decorative character to 8-15, by its own length, so that rows vary."""
    return match.group(1) * (8 + len(match.group(0)) % 8)


def normalise(text: str) -> str:
    """Line ends, indentation (two blanks), digit runs, decorative rows and long lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "  ")
    text = SPECIAL.sub("", text)
    text = DECIMALS.sub(r"\1", text)
    text = HEX_RUN.sub(lambda m: m.group(0)[:8], text)
    text = DIGITS.sub(lambda m: m.group(0)[:6], text)
    text = CHAR_RUN.sub(_shorten, text)
    text = WORD_RUN.sub(lambda m: m.group(1) * (3 + len(m.group(0)) % 3), text)
    out: list[str] = []
    blank = 0
    for raw in text.split("\n"):
        line = raw.rstrip()
        if not line:
            blank += 1
            if blank == 1 and out:
                out.append("")
            continue
        if len(line) > MAX_LINE or DATA_URI.search(line):
            continue
        blank = 0
        body = line.lstrip(" ")
        body = SPACE_RUN.sub("  ", body)
        if len(body) > 60:
            body = INLINE_REPEAT.sub(lambda m: m.group(1) * 2, body)
        out.append(" " * min(len(line) - len(line.lstrip(" ")), 24) + body)
    return _halve_indent(out)


def _halve_indent(lines: list[str]) -> str:
    """Four-blank indentation becomes two blanks, so that one style is learned."""
    indents = [len(line) - len(line.lstrip(" ")) for line in lines if line.startswith(" ")]
    fours = sum(1 for n in indents if n % 4 == 0)
    if indents and fours > 0.9 * len(indents):
        lines = [" " * ((len(line) - len(line.lstrip(" "))) // 2) + line.lstrip(" ") for line in lines]
    return "\n".join(lines).strip("\n") + "\n"


def html_skeleton(line: str) -> str:
    """An HTML line without its words and attribute values: tags and attribute names stay."""
    line = line.strip()
    if "<" not in line:
        return WORDS.sub("w", line) if len(line) < 30 else line
    line = ATTR_VALUE.sub("=", line)
    line = HTML_TEXT.sub(">w<", line)
    return re.sub(r"\d+", "0", line)


def css_rules(text: str) -> list[str]:
    """Top-level pieces of a style sheet: a rule or at-rule with the comments before it."""
    rules: list[str] = []
    current: list[str] = []
    depth = 0
    in_comment = False
    for line in text.split("\n"):
        current.append(line)
        code = line
        if in_comment or "/*" in code:
            code = re.sub(r"/\*.*?\*/", "", code)
            if in_comment:
                if "*/" in code:
                    code = code.split("*/", 1)[1]
                    in_comment = False
                else:
                    continue
            if "/*" in code:
                in_comment = True
                code = code.split("/*", 1)[0]
        depth += code.count("{") - code.count("}")
        if depth <= 0 and ("}" in code or code.rstrip().endswith(";")):
            rules.append("\n".join(current))
            current = []
            depth = 0
    if any(line.strip() for line in current):
        rules.append("\n".join(current))
    return rules


def css_skeleton(rule: str) -> str:
    """A rule without its names and values: the order of property names stays."""
    head, brace, body = rule.partition("{")
    head = WORDS.sub("w", re.sub(r"/\*.*?\*/", "", head, flags=re.S))
    body = re.sub(r":[^;{}]*", ":", body)
    return SPACES.sub(" ", head[:80]) + brace + SPACES.sub(" ", body)


def thin_css(text: str) -> str:
    """Keep at most 3 rules of one skeleton in a row and 6 a window, and 2 equal bodies a window."""
    out: list[str] = []
    recent: deque[tuple[int, str, str]] = deque()
    counts: Counter[str] = Counter()
    bodies: Counter[str] = Counter()
    size = 0
    previous, run = "", 0
    for rule in css_rules(text):
        lines = rule.split("\n")
        rule = "\n".join(line for line in lines if not OLD_VENDOR.match(line))
        key = css_skeleton(rule)
        body = SPACES.sub(" ", rule.partition("{")[2]) or rule
        run = run + 1 if key == previous else 1
        previous = key
        while recent and recent[0][0] < size - WINDOW:
            _, old_key, old_body = recent.popleft()
            counts[old_key] -= 1
            bodies[old_body] -= 1
        limit = 6 if len(rule) < 200 else 4
        if run > 3 or counts[key] >= limit or bodies[body] >= 2:
            continue
        counts[key] += 1
        bodies[body] += 1
        recent.append((size, key, body))
        size += len(rule)
        out.append(rule)
    lines = "\n".join(out).split("\n")
    kept = collapse_periods([WORDS.sub("w", line.strip()) for line in lines], keep=3, longest=12)
    return "\n".join(line for line, keep in zip(lines, kept, strict=True) if keep) + "\n"


def thin_html(text: str) -> str:
    """Drop long scripts, drawings and comments, then collapse repeated lines and blocks."""
    text = SCRIPT.sub(lambda m: m.group(0) if len(m.group(0)) < 500 else "", text)
    text = SVG.sub("", text)
    text = HTML_COMMENT.sub(lambda m: m.group(0) if len(m.group(0)) < 300 else "", text)
    lines = text.split("\n")
    kept = collapse_periods([html_skeleton(line) for line in lines])
    lines = [line for line, keep in zip(lines, kept, strict=True) if keep]
    out: list[str] = []
    recent: deque[str] = deque()
    counts: Counter[str] = Counter()
    for line in lines:
        key = line.strip()
        # A full line with text comes back at most 4 times in 400 lines; bare tags may.
        if len(key) > 24:
            if counts[key] >= 4:
                continue
            counts[key] += 1
            recent.append(key)
            if len(recent) > 400:
                counts[recent.popleft()] -= 1
        out.append(line)
    return "\n".join(out)


def css_droppable(line: str) -> bool:
    """A lone declaration can go without harm to the braces around it."""
    line = line.strip()
    return line.endswith(";") and "{" not in line and "}" not in line


def html_droppable(line: str) -> bool:
    """A line can go where it opens as many tags as it closes."""
    opened = len(re.findall(r"<[a-zA-Z][^>]*[^/>]>|<[a-zA-Z]>", line))
    opened -= len(re.findall(r"<(?:br|img|input|meta|link|hr)\b", line))
    return opened == line.count("</")


def clean(text: str, kind: str) -> str | None:
    """Cleaned text of one `html` or `css` file, or None where nothing useful remains."""
    if is_minified(text):
        if kind != "css":
            return None
        text = pretty_css(text)
    ascii_only = ascii_text(text)
    if ascii_only is None:
        return None
    if len(TEMPLATE_MARK.findall(ascii_only)) > 3:
        return None
    text = normalise(ascii_only)
    text = thin_css(text) if kind == "css" else thin_html(text)
    limiter = RepeatLimiter()
    droppable = css_droppable if kind == "css" else html_droppable
    text = "\n".join(line for line in text.split("\n") if limiter.admit(line, droppable(line)))
    if kind == "css":
        text = EMPTY_RULE.sub("", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"
    return text if len(text) >= 600 else None
