"""Resident memory over a long generation: it grows by the KV cache and by the record, nothing else.

    python -m benchmarks.memory [--tokens 100000]

Decodes a small random hybrid along the default route and prints, at every tenth of the way, the
resident set beside the part of the KV cache that has been written by then.
"""

from __future__ import annotations

import argparse

import psutil
from rich.console import Console
from rich.table import Table

from sm70lab.config import compose
from sm70lab.targets.base import Progress
from sm70lab.targets.engine import EngineTarget

MIB = 1 << 20


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--model", default="random")
    options = parser.parse_args()
    shape = ["model.shape.hidden_size=64", "model.shape.vocab_size=512"] if options.model == "random" else []
    config = compose(
        [f"model={options.model}", *shape, f"workload.max_tokens={options.tokens}", "tracking=off"]
    )
    config.workload.prompts = config.workload.prompts[:1]
    target = EngineTarget(config)
    target.load()
    arch = target.source.arch
    layers = arch.layer_types.count("full_attention") + arch.mtp_layers
    per_token = layers * 2 * arch.num_kv_heads * arch.head_dim * target.model.dtype.itemsize / MIB
    process = psutil.Process()
    table = Table("output tokens", "resident MiB", "KV written MiB", "resident − KV MiB")
    marks = [options.tokens * i // 10 for i in range(1, 11)]

    def on_progress(progress: Progress) -> None:
        if marks and progress.tokens >= marks[0]:
            add_row(progress.tokens)
            marks.pop(0)

    def add_row(tokens: int) -> None:
        resident, written = process.memory_info().rss / MIB, tokens * per_token
        table.add_row(f"{tokens:,}", f"{resident:.0f}", f"{written:.0f}", f"{resident - written:.0f}")

    (generation,) = target.generate(target.prompts(), 0, on_progress)
    add_row(len(generation.token_ids))
    Console(width=90).print(table)


if __name__ == "__main__":
    main()
