"""The embedded trained checkpoint: logits and greedy tokens equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from engine_runs import Run, Step, load
from oracle import Oracle
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from sm70lab.engine.decoder import Decoder, decode
from sm70lab.engine.loading import EMBEDDED
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.sequence import Request
from sm70lab.schema import DraftSampling, Route, Sampling, StateConfig

TOKENS = 220
PROMPT = (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n  <meta charset="utf-8">\n'
    "  <title>Coffee House</title>\n  <style>\n"
)


@pytest.fixture(scope="module")
def trained() -> Path:
    return EMBEDDED


@pytest.fixture(scope="module")
def target(trained: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(
        trained, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def prompt(trained: Path) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(trained / "tokenizer.json")).encode(PROMPT).ids
    return ids


@pytest.fixture(scope="module")
def greedy(target: Any, prompt: list[int]) -> list[int]:
    """transformers' own greedy tokens, one cached step at a time, past any end token."""
    target.generation_config.eos_token_id = None
    with torch.inference_mode():
        ids = target.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    output: list[int] = ids[0, len(prompt) :].tolist()
    assert len(output) == TOKENS
    return output


ROUTES = {
    "no_mtp": Route(draft_tokens=0),
    "split_replay": Route(draft_tokens=4, draft_sampling=DraftSampling.greedy),
    "full_forward_slots": Route(
        full_forward=True,
        draft_tokens=3,
        draft_sampling=DraftSampling.token_matching,
        state=StateConfig(scheme="slots", block_size=16),
    ),
    "spec_core_003_slots": Route(spec_core_003=True, draft_tokens=5, state=StateConfig(scheme="slots")),
}


@pytest.mark.parametrize("name", ROUTES)
def test_greedy_tokens(trained: Path, prompt: list[int], greedy: list[int], name: str) -> None:
    model = load(trained, torch.float32)
    route = ROUTES[name]
    decoder = Decoder(model, route, len(prompt) + TOKENS + 2 * route.draft_tokens + 2)
    request = Request(prompt, Sampling(temperature=0), KeyedNoise(0, 0, 0))
    output: list[int] = []
    rounds = 0
    for _, step in decode(decoder, request):
        output += step.tokens
        rounds += 1
        if len(output) >= TOKENS:
            break
    differs = [i for i in range(TOKENS) if output[i] != greedy[i]]
    assert not differs, f"first other token at {differs[0]}"
    if route.draft_tokens:
        assert rounds < TOKENS, "no draft was ever accepted: the draft head is not wired up"


def test_logits(trained: Path, target: Any, prompt: list[int], greedy: list[int]) -> None:
    """float32 to 5e-4, and float64 to rounding, over prompt and output."""
    ids = prompt + greedy
    oracle = Oracle(target)
    for dtype, rms, absolute in ((torch.float32, 1e-5, 5e-4), (torch.float64, 1e-11, 1e-9)):
        run = Run(load(trained, dtype), "slots", 1, capacity=len(ids))
        (ours,) = run.step([Step(tuple(ids), len(ids), prefill=True)])
        (theirs,) = oracle.logits([ids], dtype)
        assert_close(ours, theirs, rms, absolute, str(dtype))


def test_config_is_one_that_transformers_knows(trained: Path) -> None:
    config = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen3_5_text"
    assert config["mtp_num_hidden_layers"] == 1
