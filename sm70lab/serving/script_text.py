"""Sound text of any length, made up: what a healthy model could have written, for scripted answers.

The same key gives the same text. It holds nothing that the gates call degenerate.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from sm70lab.serving.script import Good

_STARTS: tuple[str, ...] = (*"bcdfghlmnprstvw", "br", "cl", "dr", "fl", "gr", "pl", "sh", "st", "th", "tr")
_MIDDLES: tuple[str, ...] = (*"aeiou", "ai", "ea", "ie", "oa", "ou")
_ENDS: tuple[str, ...] = (
    *"nrlstdm",
    "ck",
    "nd",
    "rt",
    "st",
    "ve",
    "ke",
    "le",
    "ng",
    "sh",
    "per",
    "ten",
    "ling",
    "mer",
    "ton",
)
_TAGS = ("p", "li", "h2", "h3", "blockquote", "figcaption", "td", "dd", "button", "label")
_PROPERTIES: dict[str, Callable[[random.Random], str]] = {
    "margin": lambda r: f"{r.randint(0, 48)}px {r.randint(0, 48)}px",
    "padding": lambda r: f"{r.randint(0, 30) / 10}rem",
    "color": lambda r: f"#{r.randrange(1 << 24):06x}",
    "background": lambda r: f"hsl({r.randrange(360)} {r.randrange(20, 90)}% {r.randrange(10, 90)}%)",
    "border-radius": lambda r: f"{r.randint(1, 24)}px",
    "font-weight": lambda r: r.choice(("400", "500", "600", "bold")),
    "line-height": lambda r: f"{r.randint(110, 190) / 100}",
    "display": lambda r: r.choice(("grid", "flex", "block", "inline-block")),
    "max-width": lambda r: f"{r.randint(18, 96)}ch",
    "transition": lambda r: f"opacity {r.randint(80, 900)}ms ease-in",
}


def sound(good: Good, characters: int, key: str) -> str:
    """Text of at least ``characters`` characters that ends where a page or a sentence does."""
    draw = random.Random(key)
    return _page(draw, characters) if good is Good.html else _prose(draw, characters)


def _word(draw: random.Random) -> str:
    syllables = draw.choice((1, 1, 2, 2, 3))
    return "".join(draw.choice(_STARTS) + draw.choice(_MIDDLES) for _ in range(syllables)) + (
        draw.choice(_ENDS)
    )


def _sentence(draw: random.Random) -> str:
    words = [_word(draw) for _ in range(draw.randint(5, 16))]
    words[0] = words[0].capitalize()
    if len(words) > 8:
        words[draw.randint(2, 5)] += ","
    return " ".join(words) + draw.choice((".", ".", ".", "?", "!"))


def _prose(draw: random.Random, characters: int) -> str:
    parts: list[str] = []
    size = 0
    while size < characters:
        parts.append(" ".join(_sentence(draw) for _ in range(draw.randint(2, 6))))
        size += len(parts[-1]) + 2
    return "\n\n".join(parts) + "\n"


def _page(draw: random.Random, characters: int) -> str:
    title = _sentence(draw).rstrip(".?!")
    head = f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
    parts = [head, "<style>\n", *(_rule(draw) for _ in range(6)), "</style>\n</head>\n<body>\n"]
    tail = f'<script>\nconst {_word(draw)} = "{_word(draw)}";\n</script>\n</body>\n</html>\n'
    size = sum(map(len, parts)) + len(tail)
    while size < characters:
        parts.append(_rule_or_element(draw))
        size += len(parts[-1])
    return "".join([*parts, tail])


def _rule(draw: random.Random) -> str:
    names = draw.sample(list(_PROPERTIES), draw.randint(2, 5))
    body = "".join(f"  {name}: {_PROPERTIES[name](draw)};\n" for name in names)
    return f".{_word(draw)}-{_word(draw)} {{\n{body}}}\n"


def _rule_or_element(draw: random.Random) -> str:
    if draw.random() < 0.15:
        return f"<style>\n{_rule(draw)}</style>\n"
    tag = draw.choice(_TAGS)
    text = " ".join(_sentence(draw) for _ in range(draw.randint(1, 2)))
    return f'<{tag} class="{_word(draw)}">{text}</{tag}>\n'
