"""Synthetic degenerations: every shape behind sound text, at any onset and of any length in tokens.

Each maker returns a piece of degenerate text of at least so many characters and its period, 0 if it has
none; the piece is cut to a number of tokens and spliced onto the beginning of a real file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

Rng = np.random.Generator
LOOP = 200  # tokens from which on a shape must not be missed
TOKENS = (50, 100, 200, 400, 1000, 3000)
LINE = 200  # characters of a line of a block
CHARACTERS = 20  # of a piece for each token asked for: no token of the makers is longer
ONSETS = (0, 300, 1500, 6000, 12_000, 20_000)  # characters of sound text before it

UNITS = (
    "!",
    "5",
    "0",
    "\\",
    "-",
    "=",
    "?",
    "。",
    "的",
    "哈",
    "é",
    "😀",
    " the",
    " word",
    "px3",
    "UTF-",
    "<div>",
    " 0",
    "display: ",
    "rgba(",
    "</div>",
    " No",
    "、",
    "ん",
    "&nbsp;",
    ". ",
    "255, ",
    "body{}",
)
CSS = (
    "top: 0;",
    "left: 50%;",
    "height: 25px;",
    "min-height: 25px;",
    "transform: translateY(-50%);",
    "color: #fff;",
    "padding: 0;",
    "display: 0;",
    "outline: none;",
    "-webkit-app-region: no-drag;",
    "content: 0;",
    "}",
    ".b{}",
    "background: rgba(255, 255, 255, 0.05);",
    "font-weight: 3;",
)
PHRASES = (
    " showMenu: false,",
    " and then the system will",
    "我们需要考虑这个问题，",
    "的系统的系统",
    "システムのシステム、",
    ' class="item"',
    " I need to check this again. Let me check.",
    "color:#fff;margin:0;",
    "return None\n    ",
    " Wait, let me think about this.",
    '<span class="icon"></span>',
    "<td></td>",
    " 그리고 나서",
)
COUNTED = (
    '<div class="card item" id="c{0}">Item</div>\n',
    "  --color-{0}: var(--base);\n",
    "### Step {0}: check the result\n",
    "    field_{0}: int = {0}\n",
    '"key{0}": "value{0}",\n',
    "第{0}步：检查系统。\n",
    "Figure {0} shows the result. ",
    "case {0}: return value_{0};\n",
    ".item:nth-child({0}) {{ top: {1}px; }}\n",
    "{0}. The system works as expected.\n",
    '<li><a href="#s{0}">Section {0}</a></li>',
    "INSERT INTO t VALUES ({0}, 'name', {1});\n",
)
SCRIPTS = (
    (0x61, 26),
    (0x430, 32),
    (0x3B1, 24),
    (0x5D0, 27),
    (0x627, 28),
    (0x905, 53),
    (0xE01, 46),
    (0xAC00, 2000),
    (0x4E00, 3000),
    (0x30A1, 80),
    (0x10D0, 33),
    (0x561, 38),
    (0xB85, 40),
    (0x995, 30),
)
BLANKS = (" ", "\n", "\t", "\u3000", " \n", "\n\n ", "\u00a0", "\r\n")


@dataclass(frozen=True)
class Case:
    """One output with something wrong in it from character ``onset`` on; ``period`` 0 where there is none."""

    text: str
    token_ids: list[int]
    onset: int = 0
    period: int = 0
    prompt: str = "Write something."
    finish_reason: str = "length"


def one_token(rng: Rng, lines: Sequence[str], length: int) -> tuple[str, int]:
    unit = str(rng.choice(UNITS))
    return unit * (1 + length // len(unit)), len(unit)


def chained_runs(rng: Rng, lines: Sequence[str], length: int) -> tuple[str, int]:
    units = [str(unit) for unit in rng.permutation(UNITS)[: rng.integers(2, 5)]]
    return "".join(unit * (1 + length // len(unit)) for unit in units), 0


def phrase(rng: Rng, lines: Sequence[str], length: int) -> tuple[str, int]:
    unit = str(rng.choice(PHRASES))
    return unit * (1 + length // len(unit)), len(unit)


def two_lines(rng: Rng, lines: Sequence[str], length: int) -> tuple[str, int]:
    indent = " " * int(rng.integers(0, 9))
    unit = "".join(f"{indent}{line}\n" for line in rng.permutation(CSS)[: rng.integers(1, 4)])
    return unit * (1 + length // len(unit)), len(unit)


def block(rng: Rng, lines: Sequence[str], length: int) -> tuple[str, int]:
    """A block of 4 to 92 lines of a real file, over and over."""
    size = int(rng.integers(4, 93))
    first = int(rng.integers(0, max(1, len(lines) - size)))
    unit = "\n".join(lines[first : first + size]) + "\n"
    return unit * max(32, 1 + length // len(unit)), len(unit)


def counter(rng: Rng, lines: Sequence[str], length: int) -> tuple[str, int]:
    form, step, scale = str(rng.choice(COUNTED)), int(rng.integers(1, 4)), int(rng.integers(2, 30))
    first = int(rng.integers(0, 300))
    pieces = [form.format(i, scale * i) for i in range(first, first + step * (2 + length // 8), step)]
    return "".join(pieces), len(pieces[-1])


def script_salad(rng: Rng, lines: Sequence[str], length: int) -> tuple[str, int]:
    """Tokens of one to three letters, each of a random script, seldom a blank or a mark between."""
    pieces = []
    for _ in range(length // 2):
        first, count = SCRIPTS[int(rng.integers(len(SCRIPTS)))]
        pieces.append("".join(chr(first + int(i)) for i in rng.integers(0, count, rng.integers(1, 4))))
        pieces.append(str(rng.choice(["", "", "", " ", ",", "\n"])))
    return "".join(pieces), 0


def blanks(rng: Rng, lines: Sequence[str], length: int) -> tuple[str, int]:
    if rng.random() < 0.3:  # no period at all
        return "".join(rng.choice(list(" \n\t"), length)), 0
    unit = str(rng.choice(BLANKS))
    return unit * length, len(unit)


def replacement(rng: Rng, lines: Sequence[str], length: int) -> tuple[str, int]:
    share = rng.random() if rng.random() < 0.5 else 0.0  # of letters between
    marks = rng.random(length) >= 0.7 * share
    letters = rng.choice(list("abcdefghijkl 文の"), length)
    return "".join("\ufffd" if mark else str(letter) for mark, letter in zip(marks, letters, strict=True)), 0


def exclamation(rng: Rng, lines: Sequence[str], length: int) -> tuple[str, int]:
    return "!" * length, 1


def slips(rng: Rng, lines: Sequence[str], length: int) -> tuple[str, int]:
    """Two lines in turn, and one in fifteen lines differs by a character."""
    unit, period = two_lines(rng, lines, 1)
    copies = unit.splitlines(keepends=True) * (2 + length // 4)
    for at in np.flatnonzero(rng.random(len(copies)) < 1 / 15):
        line = copies[at]
        place = int(rng.integers(0, len(line)))
        copies[at] = line[:place] + "x" + line[place + 1 :]
    return "".join(copies), period


def random_turn(rng: Rng, lines: Sequence[str], length: int) -> tuple[str, int]:
    """Three lines in no order."""
    chosen = [f"  {line}\n" for line in rng.permutation(CSS)[:3]]
    return "".join(chosen[i] for i in rng.integers(0, 3, 2 + length)), 0


Maker = Callable[[Rng, Sequence[str], int], tuple[str, int]]
MAKERS: dict[str, Maker] = {
    "one token for ever": one_token,
    "chained runs": chained_runs,
    "a phrase for ever": phrase,
    "one to three lines in turn": two_lines,
    "a block of 4 to 92 lines": block,
    "only a counter changes": counter,
    "a salad of scripts": script_salad,
    "a flood of blanks": blanks,
    "a flood of U+FFFD": replacement,
    "good text, then !": exclamation,
    "lines in turn with slips": slips,
    "three lines in no order": random_turn,
}


# Loops without a period: no case asks for them, and a gate needs more of their text.
IRREGULAR = ("lines in turn with slips", "three lines in no order")


def looping(shape: str, rng: Rng, sound: str, onset: int, tokens: int, tokenizer: Tokenizer) -> Case:
    """``sound[:onset]``, then ``tokens`` tokens of the shape.

    From 200 tokens on a piece with a period is made long enough to be called a loop: 4.6 periods, or
    3.2 and 450 tokens.
    """
    prefix = sound[:onset]
    lines = [line[:LINE] for line in sound.split("\n") if line.strip()]
    piece, period = MAKERS[shape](rng, lines, CHARACTERS * tokens)
    if period and tokens >= LOOP:
        unit = len(tokenizer.encode(piece[:period]).ids)
        tokens = max(tokens, int(min(4.6 * unit, max(3.2 * unit, 450))) + 1)
    length = 4 * tokens
    while len((encoded := tokenizer.encode(piece[:length])).ids) <= tokens and length < len(piece):
        length *= 2
    piece = piece[: encoded.offsets[tokens - 1][1]]
    ids = tokenizer.encode(prefix).ids + encoded.ids[:tokens]
    return Case(prefix + piece, ids, onset, period)


def early_stop(rng: Rng, sound: str, other: str, tokenizer: Tokenizer) -> Case:
    ids = tokenizer.encode(other).ids[: int(rng.integers(0, 64))]
    return Case(tokenizer.decode(ids), ids, finish_reason="stop")


def echo(rng: Rng, sound: str, other: str, tokenizer: Tokenizer) -> Case:
    """The question again: before an answer a long one, or one that comes twice; else with little besides."""
    prompt = " ".join(other.split())[: int(rng.integers(50, 400))]
    behind = [sound[: len(prompt) // 2], f"{prompt}\n{sound}"] + [sound] * (len(prompt) >= 200)
    text = str(rng.choice(["", "\n", " "])) + prompt + "\n" + str(rng.choice(behind))
    return Case(
        text,
        tokenizer.encode(text).ids,
        prompt=f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
    )


def endless_thinking(rng: Rng, sound: str, other: str, tokenizer: Tokenizer) -> Case:
    text = "<think>\n" + sound
    while len(ids := tokenizer.encode(text).ids) <= 4000:
        text += other
    return Case(text, ids)


def loop_in_reasoning(rng: Rng, sound: str, other: str, tokenizer: Tokenizer) -> Case:
    """The reasoning loops, ends all the same, and is followed by sound content."""
    phrase_ = str(rng.choice(PHRASES))
    start = f"<think>\n{other[:2000]}"
    text = start + phrase_ * (1 + 1200 // len(phrase_)) + "</think>\n" + sound
    return Case(text, tokenizer.encode(text).ids, len(start), len(phrase_))


def loop_in_content(rng: Rng, sound: str, other: str, tokenizer: Tokenizer) -> Case:
    line = str(rng.choice(CSS)) + "\n"
    start = f"<think>\n{other[:2000]}</think>\n{sound[:2000]}\n"
    text = start + line * (1 + 1200 // len(line))
    return Case(text, tokenizer.encode(text).ids, len(start), len(line))


WHOLE: dict[str, Callable[[Rng, str, str, Tokenizer], Case]] = {
    "an early stop": early_stop,
    "the prompt echoed": echo,
    "thinking that never ends": endless_thinking,
    "a loop that ends the reasoning, sound content": loop_in_reasoning,
    "sound reasoning, a loop in the content": loop_in_content,
}
