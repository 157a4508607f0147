"""The embedded model over the collapse horizon: minutes, not seconds. ``pytest -m long``."""

from __future__ import annotations

import hashlib
from functools import cache

import pytest
import torch

from sm70lab.config import compose
from sm70lab.schema import Generation
from sm70lab.targets.engine import EngineTarget

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
TOKENS = 6000


@cache
def generate(*overrides: str) -> Generation:
    """One generation of the web workload's CSS prompt."""
    config = compose(["tracking=off", "sampling.temperature=0", f"workload.max_tokens={TOKENS}", *overrides])
    config.workload.prompts = config.workload.prompts[1:]
    target = EngineTarget(config)
    target.load()
    (generation,) = target.generate(target.prompts(), 0, lambda progress: None)
    return generation


def digest(generation: Generation) -> str:
    return hashlib.sha256(str(generation.token_ids).encode()).hexdigest()


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize("route", ["spec_core_003"])
def test_greedy_drafts_give_the_no_draft_tokens(k: int, route: str) -> None:
    torch.set_num_threads(1)
    wanted = generate("route=no_mtp")
    found = generate(f"route={route}", f"route.draft_tokens={k}")
    same = next(
        (i for i, (a, b) in enumerate(zip(found.token_ids, wanted.token_ids, strict=False)) if a != b), None
    )
    assert same is None, f"first difference at output token {same}"
    assert digest(found) == digest(wanted)
    assert len(wanted.token_ids) == TOKENS or wanted.finish_reason == "stop"
