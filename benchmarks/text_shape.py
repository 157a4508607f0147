"""How long each text-shape gate takes, by the size of the text.

    python -m benchmarks.text_shape [--repeats 3] [--out FILE.json]

Judges one generation per text and prints the best time of the repeats, in seconds of the wall clock and of
the processor. Texts: source code of this checkout over and over with each line's words shuffled (so that
it does not loop), and the shapes that cost a repetition search most.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

import sm70lab
from sm70lab.config import compose
from sm70lab.judge.verdict import shape_evidence
from sm70lab.schema import Generation, Prompt
from sm70lab.tracking.environment import cpu_name

SIZES = (10_000, 100_000, 1_000_000)  # characters
GATES = ("fixed_quality", "strict")


def code(size: int) -> str:
    """Lines of source code, each with its words in a new order."""
    source = Path(sm70lab.__file__).parent
    lines = "\n".join(path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))).split("\n")
    order = random.Random(1)
    pieces: list[str] = []
    length = 0
    while length < size:
        words = order.choice(lines).split(" ")
        order.shuffle(words)
        pieces.append(" ".join(words) + "\n")
        length += len(pieces[-1])
    return "".join(pieces)[:size]


def numbers(size: int) -> str:
    order = random.Random(2)
    return "".join(f"{order.randrange(1000)}, " for _ in range(size // 3))[:size]


TEXTS: dict[str, Callable[[int], str]] = {
    "code": code,
    "numbers": numbers,
    "one character": lambda size: "5" * size,
    "line breaks": lambda size: "\n" * size,
    "short lines": lambda size: "x\n" * (size // 2),
    "a counter": lambda size: "".join(f"item {i}\n" for i in range(size // 6))[:size],
    "a block of 92 lines": lambda size: (code(4000) * (size // 4000 + 1))[:size],
}


def measure(text: str, gate: str, repeats: int) -> tuple[float, float]:
    """Best seconds of the wall clock and of the processor."""
    prompt = Prompt(0, "text", "", [0], len(text))
    generation = Generation(prompt, 0, 1, [ord(c) for c in text[::3]], text, "length", [], 0.0, 1.0)
    settings = compose([f"gate={gate}"]).gate
    wall, processor = [], []
    for _ in range(repeats):
        at, used = time.perf_counter(), time.process_time()
        shape_evidence([generation], settings)
        wall.append(time.perf_counter() - at)
        processor.append(time.process_time() - used)
    return min(wall), min(processor)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    arguments = parser.parse_args()
    table = Table(
        "text", "characters", *(f"{gate}, {clock}" for gate in GATES for clock in ("wall s", "CPU s"))
    )
    rows = []
    for name, build in TEXTS.items():
        for size in SIZES:
            text = build(size)
            times = {gate: measure(text, gate, arguments.repeats) for gate in GATES}
            table.add_row(name, f"{size:,}", *(f"{t:.3f}" for gate in GATES for t in times[gate]))
            rows.append({"text": name, "characters": size}
                        | {f"{gate}_{clock}_s": t for gate in GATES
                           for clock, t in zip(("wall", "cpu"), times[gate], strict=True)})  # fmt: skip
    console = Console(width=110)
    console.print(table)
    console.print(f"{cpu_name()}; best of {arguments.repeats}")
    if arguments.out:
        record = {"cpu": cpu_name(), "repeats": arguments.repeats, "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
