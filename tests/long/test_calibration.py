"""Over 200 lossless runs of the embedded model the audit's p-values are uniform, and none is condemned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from sm70lab.config import compose
from sm70lab.judge import audit
from sm70lab.judge.tolerance import tolerance_for
from sm70lab.schema import Evidence, Status
from sm70lab.targets.engine import EngineTarget

RUNS = 200
TOKENS = 200  # of each of the workload's two outputs

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def evidence() -> list[Evidence]:
    """One run a seed, drafts drawn and rejected with q (so that no token is keyed by its position)."""
    settings = ["route=whole_round", "route.draft_sampling=probabilistic", f"workload.max_tokens={TOKENS}"]
    target = EngineTarget(compose([*settings, "target.device=cpu"]))
    target.load()
    found, prompts = [], target.prompts()
    for seed in range(RUNS):
        target.config = replace(target.config, seed=seed)
        generations = list(target.generate(prompts, 0, lambda progress: None))
        if not found:
            tolerance = tolerance_for(target.config.model.dtype, target.rounding(generations[0]))
        scores = [target.score(generation) for generation in generations]
        gate = target.config.gate
        found.append(audit.evidence(generations, scores, gate, greedy=False, tolerance=tolerance))
    return found


def test_p_values_are_uniform(evidence: list[Evidence]) -> None:
    p = np.array([e.metrics["p_value"] for e in evidence])
    assert stats.kstest(p, "uniform").pvalue > 0.001
    assert (p < 0.01).sum() <= stats.binom.ppf(0.999, RUNS, 0.01)


def test_no_run_is_condemned(evidence: list[Evidence]) -> None:
    assert sum(e.metrics["violations"] for e in evidence) == 0
    assert sum(e.status is Status.bad for e in evidence) <= stats.binom.ppf(0.999, RUNS, 0.001)
    wealth = np.array([e.metrics["log10_e"] for e in evidence])
    assert (wealth >= 2).sum() <= stats.binom.ppf(0.999, RUNS, 0.01)  # Ville's inequality
