"""Resident memory over a long generation: it grows by the KV cache and by the record, nothing else.

    python -m benchmarks.memory [--tokens 100000] [--out FILE.json]

Decodes a very small random hybrid along the default route with two drafts a round and prints, at
every tenth of the way, the resident set, the part of the KV cache that is written by then, and the
record (rounds, ids twice, the text in pieces: what the result is made of). The rest should stay as
it is.
A high temperature makes target and drafts much alike, so that rounds accept as well as reject.
`--model` takes any other model (`web`, a folder) with its own sampling.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
import tracemalloc
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from sm70lab.config import compose
from sm70lab.schema import Generation
from sm70lab.targets.base import Progress
from sm70lab.targets.engine import EngineTarget

MIB = 1 << 20
# One GDN layer and one attention layer.
SHAPE = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SAMPLING = ["sampling.temperature=16", "sampling.top_k=0", "sampling.top_p=1.0"]


def overrides(model: str, tokens: int, threads: int) -> list[str]:
    """Settings of the run; the random model gets the small shape and the flat sampling."""
    common = [f"workload.max_tokens={tokens}", f"target.threads={threads}", "target.device=cpu"]
    small = [f"model.shape.{key}={value}" for key, value in SHAPE.items()] + SAMPLING
    extra = small if model == "random" else []
    return [f"model={model}", "route.draft_tokens=2", "tracking=off", *common, *extra]


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--model", default="random")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args()
    config = compose(overrides(options.model, options.tokens, options.threads))
    config.workload.prompts = config.workload.prompts[:1]
    target = EngineTarget(config)
    target.load()
    arch = target.source.arch
    layers = arch.layer_types.count("full_attention") + arch.mtp_layers
    per_token = layers * 2 * arch.num_kv_heads * arch.head_dim * target.model.dtype.itemsize / MIB
    process, started = psutil.Process(), time.perf_counter()
    rows: list[dict[str, float]] = []
    marks = [options.tokens * i // 100 for i in (*range(10, 100, 10), 99)]

    def on_progress(progress: Progress) -> None:
        if marks and progress.tokens >= marks[0]:
            marks.pop(0)
            seconds, resident = time.perf_counter() - started, process.memory_info().rss / MIB
            rows.append({"tokens": progress.tokens, "seconds": seconds, "resident": resident})

    (generation,) = target.generate(target.prompts(), 0, on_progress)
    record = record_size(target, generation) / len(generation.token_ids) / MIB
    for row in rows:
        row |= {"kv": row["tokens"] * per_token, "record": row["tokens"] * record}
        row["rest"] = row["resident"] - row["kv"] - row["record"]
    show(rows, generation)
    if options.out:
        facts = {"model": options.model, "tokens": options.tokens, "rounds": len(generation.rounds)}
        options.out.write_text(json.dumps({**facts, "mib": rows}, indent=1) + "\n")


def record_size(target: EngineTarget, generation: Generation) -> int:
    """Bytes of the record, as a second copy of it takes them."""
    stream, ids = target.source.text.stream(), generation.token_ids
    packed = pickle.dumps((generation.rounds, ids, list(ids), [stream.push(token) for token in ids]))
    tracemalloc.start()
    copy = pickle.loads(packed)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del copy
    return size


def show(rows: list[dict[str, float]], generation: Generation) -> None:
    """Print the table, and how the rest grew from the first row to the last."""
    table = Table("output tokens", "seconds", "resident MiB", "KV written MiB", "record MiB", "rest MiB")
    for row in rows:
        cells = (f"{row[key]:.1f}" for key in ("resident", "kv", "record", "rest"))
        table.add_row(f"{row['tokens']:,}", f"{row['seconds']:.0f}", *cells)
    console = Console(width=90)
    console.print(table)
    if len(rows) > 1:
        grown = (rows[-1]["rest"] - rows[0]["rest"]) * MIB / (rows[-1]["tokens"] - rows[0]["tokens"])
        length = (len(generation.token_ids) - 1) / len(generation.rounds)
        console.print(f"{length:.2f} tokens a round; the rest grew by {grown:.0f} bytes an output token")


if __name__ == "__main__":
    main()
