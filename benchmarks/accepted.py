"""Is the accepted route as fast as when it was pinned?

    python -m benchmarks.accepted [--accepted FILE] [--repeats 3] [--least 0.8]

Runs the pinned route on the pinned workload and compares the median tok/s with the pinned one. Exit code 1
below ``--least`` of it, 2 on other hardware than the pinned, where a comparison would say nothing.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

from sm70lab.config import from_plain
from sm70lab.errors import UsageError
from sm70lab.experiment import build_target
from sm70lab.tracking import accepted
from sm70lab.tracking.fingerprint import hardware


def main() -> int:
    """Measure, print one line, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accepted", help="another accepted.yaml")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--least", type=float, default=0.8, help="share of the pinned speed")
    options = parser.parse_args()
    try:
        pinned = accepted.find(options.accepted)
    except UsageError as error:
        parser.error(str(error))
    if pinned is None:
        parser.error("nothing is pinned: sm70lab pin RUN")
    config = from_plain({"route": pinned.route, **pinned.values["conditions"]})
    then = pinned.values["evidence"]["speed"]
    here = hardware(config.target)
    if here != then["hardware"]:
        print(f"pinned on {then['hardware']}, this is {here}: not compared", file=sys.stderr)
        return 2
    target = build_target(config)
    target.load()
    speeds = []
    for repeat in range(options.repeats):
        made = list(target.generate(target.prompts(), repeat, lambda progress: None))
        speeds.append(sum(len(g.token_ids) for g in made) / sum(g.decode_seconds for g in made))
    share = median(speeds) / then["tokens_per_second"]
    between = f"{min(speeds):.1f} to {max(speeds):.1f}"
    was = f"{then['tokens_per_second']:.1f} when pinned"
    print(f"{pinned.route['name']} on {here}: {median(speeds):.1f} tok/s ({between}), {was}: {share:.2f}")
    return 0 if share >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
