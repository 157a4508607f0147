"""The tables over all runs of a folder."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.sensitivity.cases import CASES
from benchmarks.sensitivity.generate import path_of
from benchmarks.sensitivity.judged import ALPHA, Judged, default_gate, judge
from sm70lab.judge.tolerance import Tolerance

MARK = "<!-- printed by: python -m benchmarks.sensitivity table -->"


def judge_all(folder: Path, tolerance: Tolerance) -> dict[str, list[Judged]]:
    """Case → its judged runs, in order of seed; cases without files are left out."""
    gate = default_gate()
    found = {}
    for name in CASES:
        paths = sorted(folder.glob(path_of(folder, name, 0).name.replace("-s0", "-s*")))
        paths = [p for p in paths if p.stem.rsplit("-s", 1)[0] == path_of(folder, name, 0).stem[:-3]]
        if paths:
            found[name] = [judge(path, tolerance, gate) for path in paths]
    return found


def auc(changed: list[float], lossless: list[float]) -> float:
    """Area under the ROC curve: the chance that a changed run scores above a lossless one."""
    result = stats.mannwhitneyu(changed, lossless)
    return float(result.statistic / (len(changed) * len(lossless)))


def calibration(runs: dict[str, list[Judged]]) -> list[str]:
    """Are the p-values of lossless runs uniform, and do as few fire as α says?"""
    lines = [
        "| lossless runs | n | KS of their p-values | p < 0.01 | p < 0.05 | tokens certain | alarms | bad |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in runs.items():
        if CASES[name].group != "lossless":
            continue
        p = np.array([one.p_value[6000] for one in found])
        ks = stats.kstest(p, "uniform").pvalue
        rates = " | ".join(_rate(int((p < alpha).sum()), len(p)) for alpha in (0.01, 0.05))
        certain = sum(o.first_outside is not None or o.first_noise is not None for o in found)
        bad = sum(o.audit_bad or o.noise_bad for o in found)
        alarms = sum(o.alarm is not None for o in found)
        lines.append(f"| {name} | {len(p)} | {ks:.2f} | {rates} | {certain} | {alarms} | {bad} |")
    return lines


def sensitivity(runs: dict[str, list[Judged]], proven: dict[str, list[str]]) -> list[str]:
    """Median tokens until the audit is certain, AUC, and which evidence finds the case."""
    lines = [
        "| case | n | noise known: found, median token | not known: found, median token "
        "| bad at the end | AUC 300 | AUC 3,000 | text | acceptance | exactness |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in runs.items():
        if CASES[name].group == "lossless":
            continue
        sound = runs.get("lossless", [])
        n = len(found)
        cells = [_found([o.first(noise) for o in found]) for noise in (True, False)]
        if all(o.first_noise is None for o in found) and "probabilistic" in " ".join(CASES[name].settings):
            cells[0] = "–"
        aucs = [
            f"{auc([o.score(length) for o in found], [o.score(length) for o in sound]):.2f}" if sound else "–"
            for length in (300, 3000)
        ]
        findings = {f for o in found for f in o.acceptance.split(", ") if f}
        warned = sum(bool(o.acceptance) for o in found)
        accept = f"{warned} of {n}" + (f" ({', '.join(sorted(findings))})" if findings else "")
        bad = f"{sum(o.audit_bad for o in found)} of {n}"
        if stopped := sum(o.non_finite for o in found):
            bad += f"; logits not finite in {stopped}"
        shape = f"{sum(o.shape_bad for o in found)} of {n}"
        exact = ", ".join(proven.get(name, ())) or "–"
        lines.append(f"| {name} | {n} | {' | '.join([*cells, bad, *aucs, shape, accept, exact])} |")
    unseen = [f"{name} ({', '.join(checks)})" for name, checks in proven.items() if name not in runs]
    if unseen:
        lines += ["", f"Found by exactness alone, not acting in these workloads: {'; '.join(unseen)}."]
    return lines


def cost(runs: dict[str, list[Judged]]) -> str:
    """What the audit costs beside the decoding."""
    shares = [one.seconds[1] / one.seconds[0] for found in runs.values() for one in found]
    median = f"{statistics.median(shares):.1%}"
    return f"Auditing took {median} of the time of decoding (median of {len(shares)} runs)."


def page(runs: dict[str, list[Judged]], proven: dict[str, list[str]]) -> str:
    """Everything that the command prints."""
    return "\n".join(
        [
            MARK,
            "",
            *calibration(runs),
            "",
            *sensitivity(runs, proven),
            "",
            "Found: a token outside the support, a token that the noise does not give, or bets that have won "
            f"{1 / ALPHA:,.0f} times their stake; the median is over the runs in which it was found. Bad at "
            "the end: the audit's verdict after all tokens, the noise not known.",
            "",
            cost(runs),
            "",
        ]
    )


def _found(tokens: list[int | None]) -> str:
    at = [t for t in tokens if t is not None]
    return f"{len(at)} of {len(tokens)}" + (f", {statistics.median(at):,.0f}" if at else "")


def _rate(k: int, n: int) -> str:
    low, high = stats.binomtest(k, n).proportion_ci(0.95)
    return f"{k} ({low:.1%}–{high:.1%})"
