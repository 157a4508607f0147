"""The engine as a target: several prompts at once, their times, and one that goes wrong among them."""

from __future__ import annotations

import time

import pytest
import torch

from sm70lab.config import compose
from sm70lab.engine.decoder import Decoder
from sm70lab.engine.sequence import Sequence
from sm70lab.schema import ExperimentConfig, Generation, PromptSpec
from sm70lab.targets.engine import EngineTarget


def config(width: int) -> ExperimentConfig:
    settings = ["model=tiny", "route=split", "route.draft_sampling=coupled", "workload.max_tokens=40"]
    made = compose([*settings, f"target.max_num_seqs={width}"])
    made.workload.prompts = [PromptSpec(name, text=text) for name, text in (("a", "1 2 3"), ("b", "4 5"))]
    return made


def generations(width: int) -> dict[str, Generation]:
    target = EngineTarget(config(width))
    target.load()
    return {g.prompt.name: g for g in target.generate(target.prompts(), 0, lambda progress: None)}


def test_a_batch_shares_its_time() -> None:
    """Prefill and decode seconds of all sequences are parts of the wall time."""
    for width in (1, 2):
        started = time.perf_counter()
        found = generations(width)
        wall = time.perf_counter() - started
        assert sum(g.prefill_seconds + g.decode_seconds for g in found.values()) <= wall
        assert all(
            g.decode_seconds == pytest.approx(sum(r.seconds for r in g.rounds)) for g in found.values()
        )


def test_one_sequence_that_is_not_finite_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = generations(1)
    honest = Decoder._finite

    def spoiled(decoder: Decoder, logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
        ours = list(sequence.prompt_ids) == list(alone["b"].prompt.token_ids)
        bad = ours and len(sequence.output) > 8
        return honest(decoder, logits * torch.nan if bad else logits, sequence)

    monkeypatch.setattr(Decoder, "_finite", spoiled)
    found = generations(2)
    assert found["b"].finish_reason == "non_finite" and "after" in found["b"].note
    assert found["b"].token_ids == alone["b"].token_ids[: len(found["b"].token_ids)]
    assert found["a"].finish_reason == "length" and found["a"].token_ids == alone["a"].token_ids
