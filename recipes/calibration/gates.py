"""False alarms and misses of the text-shape gates.

    python -m recipes.calibration.gates --files FOLDER/files.parquet [--seeds 12] [--out FILE.json]

Runs ``gate=fixed_quality`` and ``gate=strict`` over the real files that recipes.calibration.collect
gathered, and over synthetic degenerations spliced onto their beginnings (every shape × onset × length,
seeded). Tokens are counted with the embedded model's tokenizer. The first 200 characters of a real
file stand for its prompt; a file that was cut is an output that its budget ended. Intervals are exact
(Clopper and Pearson 1934, 95 %). Thresholds are tuned on the tuning half alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import track
from scipy.stats import binomtest
from tokenizers import Tokenizer

import sm70lab
from recipes.calibration.collect import HELD_OUT, LIMIT, TUNING
from recipes.calibration.degenerate_files import DEGENERATE_FILES
from recipes.calibration.degenerations import IRREGULAR, LOOP, MAKERS, ONSETS, TOKENS, WHOLE, Case, looping
from sm70lab.config import compose
from sm70lab.judge import strict_gate, text_shape
from sm70lab.schema import Gate, Generation, Prompt

PROMPT = 200  # characters of a real file that stand for its prompt
NEAR = 24  # characters by which an onset may be off, or one period
FIELD, OURS = "fixed_quality", "strict"
HALVES = (TUNING, HELD_OUT)
MODEL = Path(sm70lab.__file__).parent / "models" / "web"
Row = dict[str, str]  # kind, name, half, text


@dataclass(frozen=True)
class Judged:
    """One case with what both gates said; ``tokens`` of the degenerate piece, 0 for a real file."""

    half: str
    kind: str
    name: str
    tokens: int
    field: str  # the first metric that failed, empty if none
    ours: str
    line: str
    off: bool | None  # whether the onset is off by more than a period; None without a position


def generation(text: str, prompt: str, finish_reason: str, token_ids: Sequence[int]) -> Generation:
    asked = Prompt(0, "file", prompt, [0], 6000)
    return Generation(asked, 0, 1, list(token_ids), text, finish_reason, [], 0.0, 1.0)


def judge(output: Generation, gates: dict[str, Gate]) -> tuple[str, str, str, list[int]]:
    """What the field's gate and ours find first, our first line, and all places that ours names."""
    metrics = text_shape.measure(output, gates[FIELD].bad_markers)
    field = text_shape.failures(metrics, gates[FIELD])
    ours = strict_gate.findings(output, gates[OURS])
    places = [finding.position for finding in ours if finding.position >= 0]
    first = (ours[0].metric, ours[0].line) if ours else ("", "")
    return field[0].metric if field else "", *first, places


def real_files(rows: Sequence[Row], gates: dict[str, Gate], tokenizer: Tokenizer) -> Iterator[Judged]:
    for row in rows:
        text = row["text"]
        finish = "length" if len(text) == LIMIT else "stop"
        output = generation(text[PROMPT:], text[:PROMPT], finish, tokenizer.encode(text[PROMPT:]).ids)
        field, ours, line, _ = judge(output, gates)
        yield Judged(row["half"], row["kind"], row["name"], 0, field, ours, line, None)


def synthetic(
    rows: Sequence[Row], seeds: int, gates: dict[str, Gate], tokenizer: Tokenizer
) -> Iterator[Judged]:
    """Every shape × onset × length × seed, and every whole output × 12 × seeds, on each half's files."""
    for half in HALVES:
        sound = [row["text"] for row in rows if row["half"] == half]
        for shape, onset, tokens, seed in itertools.product(MAKERS, ONSETS, TOKENS, range(seeds)):
            rng = np.random.default_rng([zlib.crc32(f"{half} {shape}".encode()), onset, tokens, seed])
            long = [text for text in sound if len(text) >= onset]
            text = long[int(rng.integers(len(long)))]
            case = looping(shape, rng, text, onset, tokens, tokenizer)
            yield _judged(case, half, shape, tokens, gates)
        for shape, seed in itertools.product(WHOLE, range(12 * seeds)):
            rng = np.random.default_rng([zlib.crc32(f"{half} {shape}".encode()), seed])
            one, other = (sound[int(i)] for i in rng.integers(0, len(sound), 2))
            yield _judged(WHOLE[shape](rng, one, other, tokenizer), half, shape, LOOP, gates)


def _judged(case: Case, half: str, shape: str, tokens: int, gates: dict[str, Gate]) -> Judged:
    output = generation(case.text, case.prompt, case.finish_reason, case.token_ids)
    field, ours, line, places = judge(output, gates)
    near = max(NEAR, case.period)
    off = min(abs(place - case.onset) for place in places) > near if places else None
    return Judged(half, shape, f"onset {case.onset}", tokens, field, ours, line, off)


def rate(bad: int, of: int) -> str:
    """``3 of 4,190 (0.072 %, 0.015 to 0.209)``."""
    low, high = (100 * x for x in binomtest(bad, of).proportion_ci(method="exact"))
    return f"{bad:,} of {of:,} ({100 * bad / of:.3f} %, {low:.3f} to {high:.3f})"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def alarm_rows(judged: Sequence[Judged]) -> Iterator[Sequence[str]]:
    """A row a kind, then one a half."""
    for kind in sorted({j.kind for j in judged}):
        mine = [j for j in judged if j.kind == kind]
        halves = [[j for j in mine if j.half == half] for half in HALVES]
        ours = [f"{sum(bool(j.ours) for j in part)} of {len(part)}" for part in halves]
        yield kind, *ours, f"{sum(bool(j.field) for j in mine)} of {len(mine)}"


def miss_rows(judged: Sequence[Judged]) -> Iterator[Sequence[str]]:
    """A row a shape: misses by length, then by both gates from 200 tokens on, then onsets that are off."""
    for shape in [*MAKERS, *WHOLE]:
        mine = [j for j in judged if j.kind == shape]
        cells = []
        for tokens in TOKENS:
            part = [j for j in mine if j.tokens == tokens] if shape in MAKERS else []
            cells.append(f"{sum(not j.ours for j in part)} of {len(part)}" if part else "")
        long = [j for j in mine if j.tokens >= LOOP]
        placed = [j.off for j in long if j.ours and j.off is not None]
        off = f"{sum(placed)} of {len(placed)}" if shape in MAKERS else ""
        both = (f"{sum(not said for said in field)} of {len(field)}"
                for field in ([j.ours for j in long], [j.field for j in long]))  # fmt: skip
        yield shape, *cells, *both, off


def summary_rows(files: Sequence[Judged], shapes: Sequence[Judged]) -> Iterator[Sequence[str]]:
    """The rates with their intervals: a row a measure, a column for each half and one for both."""
    regular = [j for j in shapes if j.tokens >= LOOP and j.kind not in IRREGULAR]
    sound = [j for j in files if not _is_degenerate(j)]
    measures: dict[str, tuple[Sequence[Judged], Callable[[Judged], bool]]] = {
        "strict: false alarms": (sound, lambda j: bool(j.ours)),
        "strict: with the degenerate files below": (files, lambda j: bool(j.ours)),
        "fixed_quality: false alarms": (files, lambda j: bool(j.field)),
        f"strict: misses from {LOOP} tokens on": (regular, lambda j: not j.ours),
        f"fixed_quality: misses from {LOOP} tokens on": (regular, lambda j: not j.field),
    }
    for name, (judged, bad) in measures.items():
        parts = [[j for j in judged if j.half == half] for half in HALVES]
        yield name, *(rate(sum(map(bad, part)), len(part)) for part in [*parts, judged])


def report(files: Sequence[Judged], shapes: Sequence[Judged]) -> dict[str, Sequence[str]]:
    """Print everything as Markdown; returns the summary."""
    summary = {row[0]: row[1:] for row in summary_rows(files, shapes)}
    print("\n".join(markdown(["", *HALVES, "both"], [(name, *row) for name, row in summary.items()])))
    print("\n### Real files that a gate fails\n")
    columns = ["kind", *(f"strict, {half}" for half in HALVES), "fixed_quality, both"]
    print("\n".join(markdown(columns, alarm_rows(files))))
    print("\n### Degenerate texts that a gate passes\n")
    ends = [f"strict, ≥ {LOOP}", f"fixed_quality, ≥ {LOOP}", "onset off"]
    print("\n".join(markdown(["shape", *(f"{tokens:,}" for tokens in TOKENS), *ends], miss_rows(shapes))))
    print("\n### False alarms of strict\n")
    for j in files:
        if j.ours and not _is_degenerate(j):
            print(f"- {j.half}, {j.kind}, `{j.name}`: {j.line}")
    print("\n### Degenerate real files\n")
    for j in files:
        if j.ours and _is_degenerate(j):
            print(f"- {j.half}, {j.kind}, `{j.name}`: {j.line}. {_reason(j.name)}")
    return summary


def _is_degenerate(judged: Judged) -> bool:
    return bool(judged.ours and _reason(judged.name))


def _reason(name: str) -> str:
    return next((why for end, why in DEGENERATE_FILES.items() if name.endswith(end)), "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--files", type=Path, required=True, help="files.parquet of recipes.calibration.collect"
    )
    parser.add_argument("--seeds", type=int, default=12, help="cases of each shape, onset and length")
    parser.add_argument("--out", type=Path, help="write every judged case as JSON")
    arguments = parser.parse_args(argv)
    rows: list[Row] = pq.read_table(arguments.files).to_pylist()
    gates = {name: compose([f"gate={name}"]).gate for name in (FIELD, OURS)}
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    watch = Console(stderr=True)
    files = list(track(real_files(rows, gates, tokenizer), "real files", len(rows), console=watch))
    count = 2 * arguments.seeds * (len(MAKERS) * len(ONSETS) * len(TOKENS) + 12 * len(WHOLE))
    cases = synthetic(rows, arguments.seeds, gates, tokenizer)
    shapes = list(track(cases, "degenerations", count, console=watch))
    summary = report(files, shapes)
    if arguments.out:
        cases_out = {"files": [vars(j) for j in files], "shapes": [vars(j) for j in shapes]}
        arguments.out.write_text(
            json.dumps({"summary": summary, **cases_out}, ensure_ascii=False), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
