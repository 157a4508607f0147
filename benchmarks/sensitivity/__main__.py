"""``python -m benchmarks.sensitivity``: see the package's docstring."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import benchmarks.sensitivity as package
from benchmarks.sensitivity.cases import CASES
from benchmarks.sensitivity.exactness import prove_all
from benchmarks.sensitivity.generate import make_all
from benchmarks.sensitivity.table import MARK, judge_all, page
from sm70lab.judge.tolerance import FLOAT32


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=package.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("generate", "table"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(CASES), metavar="CASE")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--lossless", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument("--write", type=Path, help="put the tables into this page, after its mark")
    options = parser.parse_args()
    if options.step == "generate":
        make_all(options.folder, options.only or list(CASES), options.runs, options.lossless, options.jobs)
        return
    runs = judge_all(options.folder, FLOAT32)
    text = page(runs, prove_all(options.folder))
    print(text)
    if options.out:
        found = {name: [asdict(one) for one in judged] for name, judged in runs.items()}
        options.out.write_text(json.dumps(found) + "\n")
    if options.write:
        head = options.write.read_text(encoding="utf-8").split(MARK)[0]
        options.write.write_text(head + text, encoding="utf-8")


if __name__ == "__main__":
    main()
