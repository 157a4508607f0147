"""Acceptance length of every way to sample drafts, on the embedded model's default workload.

    python -m benchmarks.acceptance [--seeds 3] [--out FILE.json]

Tokens a round, pooled over the seeds. ``coupled`` gives the no-draft run's own tokens at any
temperature; the table says what that costs beside ``probabilistic``. Not a timing: a busy machine
changes nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sm70lab.config import compose
from sm70lab.schema import DraftSampling, Proposal
from sm70lab.targets.engine import EngineTarget

FIRST_SEED = 20260620


def measure(sampling: DraftSampling, proposal: Proposal, seeds: int) -> dict[str, int]:
    """Tokens and rounds of the whole workload over the seeds."""
    tokens = rounds = 0
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        settings = [f"route.draft_sampling={sampling.value}", f"route.proposal={proposal.value}"]
        target = EngineTarget(compose(["route=whole_round", f"seed={seed}", *settings]))
        target.load()
        for generation in target.generate(target.prompts(), 0, lambda progress: None):
            tokens += len(generation.token_ids) - 1  # the first token is the prefill's
            rounds += len(generation.rounds)
    return {"tokens": tokens, "rounds": rounds}


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args()
    found: dict[str, dict[str, int]] = {}
    table = Table("draft_sampling", "proposal", "tokens", "rounds", "tokens a round", "beside probabilistic")
    for proposal in Proposal:
        base = 0.0
        for sampling in (DraftSampling.probabilistic, DraftSampling.coupled, DraftSampling.token_matching):
            one = measure(sampling, proposal, options.seeds)
            found[f"{sampling.value}, {proposal.value}"] = one
            length = one["tokens"] / one["rounds"]
            base = base or length
            cells = (sampling.value, proposal.value, f"{one['tokens']:,}", f"{one['rounds']:,}")
            table.add_row(*cells, f"{length:.3f}", f"{length / base - 1:+.1%}")
    Console(width=100).print(table)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
