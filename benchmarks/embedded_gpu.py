"""The embedded model's run on one GPU, 6,000 tokens with the official sampling: where its seconds go.

    python -m benchmarks.embedded_gpu [--tokens 6000] [--seeds 1 2 3] [--out FILE.json]

A whole ``sm70lab`` run per seed, one after another in one process. The first imports and compiles, or reads
its kernels from Triton's cache; every run captures its graph before it decodes. tok/s is of decoding alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sm70lab.cli.display import Silent
from sm70lab.config import compose
from sm70lab.experiment import run_experiment
from sm70lab.schema import Generation, Prompt

PARTS = ("load", "capture and decode", "audit", "judge and record")


class Watch(Silent):
    """When each part of a run began."""

    def __init__(self) -> None:
        super().__init__()
        self.began = {PARTS[0]: time.perf_counter()}

    def plan(self, prompts: list[Prompt], repeats: int) -> None:
        self._begins(PARTS[1])

    def generated(self, generation: Generation) -> None:
        self._begins(PARTS[2])

    def stage(self, line: str) -> None:
        if line == "judging":
            self._begins(PARTS[3])

    def _begins(self, part: str) -> None:
        self.began[part] = time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Seconds of each part, to now."""
        times = [*(self.began[part] for part in PARTS), time.perf_counter()]
        return {part: after - before for part, before, after in zip(PARTS, times, times[1:], strict=False)}


def measure(seed: int, tokens: int, folder: str) -> dict[str, Any]:
    """One run: its verdict, speed and seconds."""
    config = compose(
        [
            "route=whole_round", "target.device=cuda", f"workload.max_tokens={tokens}", f"seed={seed}",
            "tracking=off", f"tracking.runs_dir={folder}",
        ]
    )  # fmt: skip
    watch = Watch()
    result = run_experiment(config, watch).result
    seconds = watch.seconds()
    decoded = result["generations"][0]
    return {
        "seed": seed,
        "verdict": result["verdict"]["kind"],
        "tokens": decoded["tokens"],
        "tokens_per_second": (decoded["tokens"] - 1) / decoded["decode_seconds"],
        "seconds": seconds,
        "after_load": sum(seconds.values()) - seconds[PARTS[0]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, help="also as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(seed, options.tokens, folder) for seed in options.seeds]
    device = torch.cuda.get_device_name()
    table = Table(
        "seed", "verdict", "tokens", "tok/s", *(f"{p}, s" for p in PARTS), "after load, s", title=device
    )
    for row in rows:
        table.add_row(
            str(row["seed"]), row["verdict"], str(row["tokens"]), f"{row['tokens_per_second']:,.0f}",
            *(f"{row['seconds'][part]:.2f}" for part in PARTS), f"{row['after_load']:.2f}",
        )  # fmt: skip
    Console(width=130).print(table)
    if options.out:
        options.out.write_text(json.dumps({"device": device, "runs": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
