"""Every route on the embedded model, on this CPU, next to other engines in the same run.

    python -m benchmarks.routes_cpu [--tokens 1000] [--repeats 3] [--threads 1] [--out FILE.json]
    python -m benchmarks.routes_cpu --compile --llama-server DIR/build/bin/llama-server

Routes are interleaved over the repeats, so that a busy neighbour hits all of them alike; the
median over repeats is printed. ``--compile`` adds each route compiled, with the seconds of the first
compilation and of one with a warm inductor cache, each in a process of its own. transformers
decodes greedily with its cache; llama.cpp too (``recipes/peers`` builds its server), plain and with
its own MTP drafts. Speeds are of one machine at one time: compare ratios within a run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import peers_cpu
from sm70lab.config import compose
from sm70lab.targets.engine import EngineTarget
from sm70lab.tracking.environment import cpu_name

BASE = "no_mtp"
PEERS = ("transformers, greedy", "llama.cpp, greedy", "llama.cpp with MTP, greedy")
ROUTES = {
    BASE: ["route=no_mtp"],
    "split": ["route=split"],
    "context_core": ["route=context_core"],
    "input_projection": ["route=input_projection"],
    "output_projection": ["route=output_projection"],
    "input_core": ["route=input_core"],
    "full_forward": ["route=full_forward"],
    "spec_core_003": ["route=spec_core_003"],
    "whole_round": ["route=whole_round"],
}
VARIANTS = {
    "whole_round, no drafts": ["route=whole_round", "route.draft_tokens=0"],
    "whole_round, slots": ["route=whole_round", "route.state.scheme=slots"],
    "whole_round, snapshot": ["route=whole_round", "route.state.scheme=snapshot"],
    "whole_round, fold": ["route=whole_round", "route.state.scheme=fold"],
    "whole_round, probabilistic": ["route=whole_round", "route.draft_sampling=probabilistic"],
    "whole_round, shortlist": ["route=whole_round", "route.draft_head=shortlist"],
    "whole_round, int8 head": ["route=whole_round", "route.draft_head=int8"],
    "whole_round, greedy": ["route=whole_round", "sampling=greedy"],
    "split, plain kernels": ["route=split", "target.kernels=plain"],
    "no_mtp, plain kernels": ["route=no_mtp", "target.kernels=plain"],
}


@dataclass
class Row:
    """Measurements of one route over the repeats."""

    tokens_per_second: list[float] = field(default_factory=list)
    rounds_per_second: list[float] = field(default_factory=list)
    acceptance_length: float = 1.0
    cold_compile_seconds: float | None = None
    warm_compile_seconds: float | None = None


def measure(overrides: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Decode the workload once: pooled speeds, acceptance length and compile seconds."""
    common = [
        f"workload.max_tokens={options.tokens}",
        f"target.threads={options.threads}",
        "target.device=cpu",
    ]
    target = EngineTarget(compose([*overrides, *common]))
    target.load()
    generations = list(target.generate(target.prompts(), 0, lambda progress: None))
    seconds = sum(g.decode_seconds for g in generations)
    tokens = sum(len(g.token_ids) - 1 for g in generations)  # the first token is the prefill's
    rounds = sum(len(g.rounds) for g in generations)
    return {
        "tokens_per_second": tokens / seconds,
        "rounds_per_second": rounds / seconds,
        "acceptance_length": tokens / rounds,
        "compile_seconds": float(target.describe()["compile_seconds"]),
    }


def add(row: Row, found: dict[str, float]) -> None:
    """Append one measurement."""
    row.tokens_per_second.append(found["tokens_per_second"])
    row.rounds_per_second.append(found["rounds_per_second"])
    row.acceptance_length = found["acceptance_length"]


def measure_compiled(overrides: list[str], options: argparse.Namespace) -> Row:
    """Twice in a fresh process: with an empty inductor cache, and with the first one's."""
    row = Row()
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, "-m", "benchmarks.routes_cpu", "--one", *overrides, "route.compile=true"]
        command += ["--tokens", str(options.tokens), "--threads", str(options.threads)]
        for turn in ("cold", "warm"):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            add(row, found)
            setattr(row, f"{turn}_compile_seconds", found["compile_seconds"])
    return row


def main() -> None:
    """Run the benchmark from the command line."""
    options = _options()
    if options.one:
        print(json.dumps(measure(options.one, options)))
        return
    torch.set_num_threads(options.threads)
    plans = ROUTES | VARIANTS
    rows = {name: Row() for name in (*plans, *PEERS)}
    for _ in range(options.repeats):
        for name, overrides in plans.items():
            add(rows[name], measure(overrides, options))
        add(rows[PEERS[0]], peers_cpu.transformers_greedy(options.tokens, options.threads))
        if options.llama_server:
            runs = peers_cpu.llama_cpp(options.llama_server, options.tokens, options.threads)
            for name, found in zip(PEERS[1:], runs, strict=True):
                add(rows[name], found)
    if options.compile:
        for name, overrides in ROUTES.items():
            if name == "whole_round":  # recorded: there is nothing to compile
                continue
            rows[f"{name}, compiled"] = measure_compiled(overrides, options)
    show({name: row for name, row in rows.items() if row.tokens_per_second}, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1000, help="output tokens a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="measure every route compiled, too")
    parser.add_argument("--llama-server", type=Path, help="path of llama.cpp's llama-server")
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)  # a child's settings
    return parser.parse_args()


def show(rows: dict[str, Row], options: argparse.Namespace) -> None:
    """Print the table and write the JSON."""
    base = statistics.median(rows[BASE].tokens_per_second)
    peer = statistics.median(rows[PEERS[0]].tokens_per_second)
    title = f"{cpu_name()}, {options.threads} thread(s), torch {torch.__version__}, float32"
    table = Table("route", title=title)
    headings = ("tok/s", "min–max", "rounds/s", "tokens a round", "× no_mtp", "× transformers", "compile s")
    for heading in (*headings, "warm s"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        speed = statistics.median(row.tokens_per_second)
        slower = " slower" if speed < base and name not in PEERS else ""
        table.add_row(
            name,
            f"{speed:.1f}",
            f"{min(row.tokens_per_second):.0f}–{max(row.tokens_per_second):.0f}",
            f"{statistics.median(row.rounds_per_second):.1f}",
            f"{row.acceptance_length:.2f}",
            f"{speed / base:.2f}{slower}",
            f"{speed / peer:.2f}",
            *("" if s is None else f"{s:.1f}" for s in (row.cold_compile_seconds, row.warm_compile_seconds)),
        )
    Console(width=120).print(table)
    if options.out:
        facts = {"title": title, "tokens": options.tokens, "routes": {n: vars(r) for n, r in rows.items()}}
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
