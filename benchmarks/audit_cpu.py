"""What the audit costs beside decoding, on one CPU thread.

    python -m benchmarks.audit_cpu [--repeats 3] [key=value …] [--json]

Decodes the configured workload once for each repeat and audits what came out, in turn, in one process;
the settings are those of sm70lab. Seconds are processor time of the calling thread, of which other work on
the machine takes none away, though it slows caches and memory for both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from sm70lab.config import compose
from sm70lab.schema import Generation
from sm70lab.targets.engine import EngineTarget
from sm70lab.tracking.environment import cpu_name


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Processor time of ``work`` and what it returns."""
    begin = time.thread_time()
    found = work()
    return time.thread_time() - begin, found


def _decode(target: EngineTarget, repeat: int) -> list[Generation]:
    return list(target.generate(target.prompts(), repeat, lambda progress: None))


def _audit(target: EngineTarget, outputs: Sequence[Generation]) -> None:
    for output in outputs:
        target.score(output)


def measure(overrides: Sequence[str], repeats: int) -> dict[str, Any]:
    """Tokens, and the seconds of decoding and of auditing in each repeat."""
    torch.set_num_threads(1)
    target = EngineTarget(compose(["target.device=cpu", *overrides]))
    target.load()
    rows = []
    for repeat in range(repeats):
        decode, outputs = seconds(partial(_decode, target, repeat))
        audit, _ = seconds(partial(_audit, target, outputs))
        tokens = sum(len(output.token_ids) for output in outputs)
        rows.append({"tokens": tokens, "decode_seconds": decode, "audit_seconds": audit})
    return {
        "cpu": cpu_name(),
        "share": median(r["audit_seconds"] / r["decode_seconds"] for r in rows),
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(arguments)
    found = measure(given.overrides, given.repeats)
    if given.json:
        print(json.dumps(found))
        return 0
    for row in found["rows"]:
        ratio = row["audit_seconds"] / row["decode_seconds"]
        print(
            f"{row['tokens']:,} tokens: decoded in {row['decode_seconds']:.2f} s, "
            f"audited in {row['audit_seconds']:.2f} s ({ratio:.1%})"
        )
    print(
        f"the audit takes {found['share']:.1%} of decoding (median of {len(found['rows'])}), {found['cpu']}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
