"""What ``sm70lab prove`` makes of each hazard: which of its checks find it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.sensitivity.cases import CASES
from sm70lab.engine.hazards import HAZARDS, NONE

TOKENS = 400
KEPT = ("route.state.scheme", "route.draft_sampling")  # of a case's settings; prove brings the rest


def prove_all(folder: Path) -> dict[str, list[str]]:
    """Hazard → the checks that find it, in order; kept in ``prove.json`` beside the runs."""
    path = folder / "prove.json"
    found: dict[str, list[str]] = json.loads(path.read_text()) if path.exists() else {}
    for name in HAZARDS:
        if name not in found and name != NONE.name:
            found[name] = _prove(name)
            path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _prove(name: str) -> list[str]:
    settings = [s for s in CASES[name].settings if s.startswith(KEPT)] if name in CASES else []
    command = ["prove", "route=split", *settings, f"hazard={name}", f"tokens={TOKENS}", "--json"]
    done = subprocess.run([sys.executable, "-m", "sm70lab", *command], capture_output=True, text=True)
    report = json.loads(done.stdout)
    if done.returncode not in (0, 1, 3):
        raise RuntimeError(f"sm70lab {' '.join(command)}: {report}")
    return sorted({finding["check"] for finding in report["findings"]})
