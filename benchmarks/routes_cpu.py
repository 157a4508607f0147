"""Every route on the embedded model, on this CPU, next to transformers' greedy decode in the same run.

    python -m benchmarks.routes_cpu [--tokens 1000] [--repeats 3] [--threads 1] [--out FILE.json]

Routes are interleaved over the repeats, so that a busy neighbour hits all of them alike; the
median over repeats is printed. Speeds are of one machine at one time: compare ratios within a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from sm70lab.config import compose
from sm70lab.engine.loading import EMBEDDED
from sm70lab.schema import ExperimentConfig
from sm70lab.targets.engine import EngineTarget
from sm70lab.tracking.environment import cpu_name

ROUTES = {
    "no_mtp": ["route=no_mtp"],
    "split, replay": ["route=split"],
    "split, slots": ["route=split", "route.state.scheme=slots"],
    "full_forward": ["route=full_forward"],
    "spec_core_003": ["route=spec_core_003"],
    "spec_core_003, token_matching": ["route=spec_core_003", "route.draft_sampling=token_matching"],
}


@dataclass
class Row:
    """Measurements of one route over the repeats."""

    tokens_per_second: list[float] = field(default_factory=list)
    rounds_per_second: list[float] = field(default_factory=list)
    acceptance_length: float = 1.0


def measure(config: ExperimentConfig, row: Row) -> None:
    """Decode the workload once and append its pooled speeds."""
    target = EngineTarget(config)
    target.load()
    generations = list(target.generate(target.prompts(), 0, lambda progress: None))
    seconds = sum(g.decode_seconds for g in generations)
    tokens = sum(len(g.token_ids) - 1 for g in generations)  # the first token is the prefill's
    rounds = sum(len(g.rounds) for g in generations)
    row.tokens_per_second.append(tokens / seconds)
    row.rounds_per_second.append(rounds / seconds)
    row.acceptance_length = tokens / rounds


def transformers_greedy(tokens: int, row: Row) -> None:
    """transformers' own greedy decode with cache on the same checkpoint, float32."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(EMBEDDED)
    ids = tokenizer(compose([]).workload.prompts[1].text, return_tensors="pt").input_ids
    with torch.inference_mode():
        started = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        row.tokens_per_second.append(tokens / (time.perf_counter() - started))
    row.rounds_per_second.append(row.tokens_per_second[-1])


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1000, help="output tokens a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = {name: Row() for name in (*ROUTES, "transformers, greedy")}
    for _ in range(options.repeats):
        for name, overrides in ROUTES.items():
            common = [
                f"workload.max_tokens={options.tokens}",
                f"target.threads={options.threads}",
                "target.device=cpu",
            ]
            measure(compose([*overrides, *common]), rows[name])
        transformers_greedy(options.tokens, rows["transformers, greedy"])
    show(rows, options)


def show(rows: dict[str, Row], options: argparse.Namespace) -> None:
    """Print the table and write the JSON."""
    base = statistics.median(rows["no_mtp"].tokens_per_second)
    title = f"{cpu_name()}, {options.threads} thread(s), torch {torch.__version__}, float32"
    table = Table("route", "tok/s", "min–max", "rounds/s", "tokens a round", "× no_mtp", title=title)
    for name, row in rows.items():
        speed = statistics.median(row.tokens_per_second)
        table.add_row(
            name,
            f"{speed:.1f}",
            f"{min(row.tokens_per_second):.0f}–{max(row.tokens_per_second):.0f}",
            f"{statistics.median(row.rounds_per_second):.1f}",
            f"{row.acceptance_length:.2f}",
            f"{speed / base:.2f}",
        )
    Console(width=100).print(table)
    if options.out:
        facts = {"title": title, "tokens": options.tokens, "routes": {n: vars(r) for n, r in rows.items()}}
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
