"""Pretty-printing of minified CSS, so that packages which ship nothing else can be used."""

from __future__ import annotations

import re

PIECE = re.compile(
    r"/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|url\([^)]*\)|[{};]|[^{};\"'/u]+|.", re.S
)


def _declaration(text: str) -> str:
    name, colon, value = text.strip().partition(":")
    if not colon or name.startswith("@"):
        return text.strip()
    value = re.sub(r",(?=\S)", ", ", value.strip()) if "url(" not in value else value.strip()
    return f"{name.strip()}: {value.replace('!important', ' !important').replace('  ', ' ')}"


def _selector(text: str) -> list[str]:
    text = text.strip()
    if text.startswith("@"):
        return [re.sub(r":(?=\S)", ": ", text)]
    text = re.sub(r"\s*([>~])\s*", r" \1 ", text)
    parts = [part.strip() for part in re.split(r",(?![^()]*\))", text)]
    return [part + "," for part in parts[:-1]] + [parts[-1]]


def pretty_css(text: str) -> str:
    """`text` with one selector and one declaration a line, two-blank indentation."""
    lines: list[str] = []
    current = ""
    depth = 0
    for piece in PIECE.findall(text):
        pad = "  " * depth
        if piece.startswith("/*"):
            lines.append(pad + piece)
        elif piece == "{":
            selector = _selector(current)
            lines += [pad + part for part in selector[:-1]] + [f"{pad}{selector[-1]} {{"]
            current, depth = "", depth + 1
        elif piece == ";":
            if current.strip():
                lines.append(f"{pad}{_declaration(current)};")
            current = ""
        elif piece == "}":
            if current.strip():
                lines.append(f"{pad}{_declaration(current)};")
            current, depth = "", max(0, depth - 1)
            lines.append("  " * depth + "}")
        else:
            current += piece
    return "\n".join(lines) + "\n"
