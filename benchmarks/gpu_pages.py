"""The pages of the GPU benchmarks, from the JSON that they wrote.

    python -m benchmarks.gpu_pages --decode FILE.json --embedded FILE.json [--docs docs]
    python -m benchmarks.gpu_pages --kernels FILE.json --attention FILE.json

Writes the tables between the marks of ``decode-gpu.md`` and ``kernels.md``; the words around them stay.
``--decode`` takes several files: a later one's shapes replace those of an earlier.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGIN = "<!-- printed by: python -m benchmarks.gpu_pages --{option} -->"
END = "<!-- end -->"
DETAILED = (  # shape, weights, route: whose operations are shown
    ("9b", "fp16", "no drafts"),
    ("9b", "fp16", "MTP4, full head"),
    ("27b", "int4", "MTP4, full head"),
    ("27b", "int4", "MTP4, shortlist head"),
)


def card(device: str, versions: dict[str, str], ceilings: dict[str, float]) -> str:
    """What was measured on, and what it can do."""
    rates = ", ".join(f"{name} {rate:.2f} TB/s" for name, rate in ceilings.items())
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{device}, {software}. Ceilings of the run: {rates}."


def decode_tables(*runs: dict[str, Any]) -> Iterator[str]:
    """Every route, then the operations of a few. A shape's lines are the last run's that has it."""
    last = {line["shape"]: run for run in runs for line in run["lines"]}
    for run in runs:
        shapes = [shape for shape in last if last[shape] is run]
        words = f"{', '.join(shapes)}: " if len(runs) > 1 else ""
        software = {"torch": run["torch"], "Triton": run["triton"]}
        yield words + card(run["device"], software, run["ceilings_tb_s"])
        yield ""
    lines = [line for shape, run in last.items() for line in run["lines"] if line["shape"] == shape]
    yield (
        "| shape | weights | route | numerics | tok/s | ms a round | GB a round | of the floor "
        "| of the copy's | between kernels | host ms | kernels | logits off exact |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    for line in lines:
        ms, between = line["round_ms"], max(0.0, 1 - line["kernel_ms"] / line["round_ms"])
        off = line["logits_deviation"]
        yield (
            f"| {line['shape']} | {line['weights']} | {line['route']} | {line['numerics']} "
            f"| {line['tokens_per_second']:.1f} | {ms:.3f} | {line['round_bytes'] / 1e9:.2f} "
            f"| {line['share_of_floor']:.2f} | {line['copy_floor_ms'] / ms:.2f} | {between:.1%} "
            f"| {line['host_ms']:.2f} | {line['kernels']} | {'' if off is None else f'{off:.1e}'} |"
        )
    for line in lines:
        where = (line["shape"], line["weights"], line["route"])
        if where in DETAILED and line["numerics"] == "exact":
            yield ""
            yield f"**{', '.join(where)}**, {line['round_ms']:.3f} ms a round:"
            yield ""
            yield from operations(line, last[line["shape"]]["ceilings_tb_s"]["one-row product"])


def operations(line: dict[str, Any], ceiling: float) -> Iterator[str]:
    """Where a round's time goes: each operation with what it adds to the time that is covered."""
    yield "| operation | calls | µs a call | µs a round | share | TB/s of weights | of the ceiling |"
    yield "|---|---|---|---|---|---|---|"
    for o in line["operations"]:
        us = o["microseconds"]
        if us < 0.002 * line["round_ms"] * 1e3:
            continue
        rate = o["weight_bytes"] / us / 1e6
        speed = f"{rate:.2f} | {rate / ceiling:.2f}" if rate else " | "
        yield (
            f"| {o['operation']} | {o['calls']} | {us / o['calls']:.1f} | {us:.0f} "
            f"| {us / line['round_ms'] / 1e3:.1%} | {speed} |"
        )


def kernel_table(run: dict[str, Any]) -> Iterator[str]:
    """Every kernel beside its best peer."""
    yield card(run["device"], run["versions"], run["ceilings"])
    yield ""
    yield "| operation | shape | rows | µs | TB/s | share of the floor | peer | µs | peer / own |"
    yield "|---|---|---|---|---|---|---|---|---|"
    ceiling = max(run["ceilings"].values())
    for line in run["lines"]:
        own, peer = line["microseconds"], line["peer_microseconds"]
        rate = line["bytes"] / own / 1e6
        beside = f"{line['peer']} | {peer:.1f} | {peer / own:.2f}" if line["peer"] else " | | "
        yield (
            f"| {line['operation']} | {line['shape']} | {line['rows']} | {own:.1f} | {rate:.2f} "
            f"| {rate / ceiling:.2f} | {beside} |"
        )


def attention_tables(run: dict[str, Any]) -> Iterator[str]:
    """Attention beside PyTorch's, then what follows the head."""
    yield f"{run['device']}, {run['shape']}:"
    yield ""
    yield "| context | rows | µs | TB/s of keys and values | plain kernel, µs | torch attention alone, µs |"
    yield "|---|---|---|---|---|---|"
    for line in run["attention"]:
        rate = line["bytes"] / line["us"] / 1e6
        yield (
            f"| {line['context']:,} | {line['rows']} | {line['us']:.1f} | {rate:.2f} | {line['fma_us']:.1f} "
            f"| {line['sdpa_us']:.1f} |"
        )
    yield ""
    first = run["sampling"][0]
    yield f"From logits over {first['bytes'] // first['rows'] // 4:,} ids to committed tokens:"
    yield ""
    yield "| rows | µs | TB/s of logits | torch.topk alone, µs |"
    yield "|---|---|---|---|"
    for line in run["sampling"]:
        rate = line["bytes"] / line["us"] / 1e6
        yield f"| {line['rows']} | {line['us']:.1f} | {rate:.2f} | {line['topk_us']:.1f} |"


def embedded_table(run: dict[str, Any]) -> Iterator[str]:
    """The embedded model's runs, part by part."""
    parts = list(run["runs"][0]["seconds"])
    yield f"{run['device']}:"
    yield ""
    titles = " | ".join(f"{part}, s" for part in parts)
    yield f"| seed | verdict | tokens | tok/s | {titles} | after load, s |"
    yield "|---|---|---|---|" + "---|" * (len(parts) + 1)
    for row in run["runs"]:
        seconds = " | ".join(f"{row['seconds'][part]:.2f}" for part in parts)
        yield (
            f"| {row['seed']} | {row['verdict']} | {row['tokens']:,} | {row['tokens_per_second']:,.0f} "
            f"| {seconds} | {row['after_load']:.2f} |"
        )


def write(page: Path, option: str, lines: Iterator[str]) -> None:
    """Put the lines between an option's marks. Raises ``ValueError`` for a page without them."""
    text = page.read_text(encoding="utf-8")
    begin = BEGIN.format(option=option)
    body = "\n".join([begin, "", *lines, "", END])
    changed, count = re.subn(re.escape(begin) + ".*?" + re.escape(END), lambda _: body, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{page}: {count} places for a table, and one is wanted")
    page.write_text(changed, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--decode", type=Path, nargs="+", default=[], help="what benchmarks.decode_gpu wrote")
    parser.add_argument(
        "--embedded", type=Path, nargs=1, default=[], help="what benchmarks.embedded_gpu wrote"
    )
    parser.add_argument("--kernels", type=Path, nargs=1, default=[], help="what benchmarks.kernels_gpu wrote")
    parser.add_argument(
        "--attention", type=Path, nargs=1, default=[], help="what benchmarks.attention_gpu wrote"
    )
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args()
    for option, page, tables in (
        ("decode", "decode-gpu.md", decode_tables),
        ("embedded", "decode-gpu.md", embedded_table),
        ("kernels", "kernels.md", kernel_table),
        ("attention", "kernels.md", attention_tables),
    ):
        if given := getattr(options, option):
            runs = [json.loads(path.read_text(encoding="utf-8")) for path in given]
            write(options.docs / page, option, tables(*runs))


if __name__ == "__main__":
    main()
