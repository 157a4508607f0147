"""Rounds played back on a GPU: the proof of the whole round, the steps of other routes, what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from sm70lab.engine import capturable, decoder
from sm70lab.engine.captured import WholeRound
from sm70lab.engine.decoder import Decoder, decode
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.played import CapturedSteps
from sm70lab.engine.routes import resolve
from sm70lab.engine.sequence import Request
from sm70lab.errors import NonFiniteError
from sm70lab.judge.exactness import ProbedDecoder, follow
from sm70lab.kernels.gpu import attention, gdn, round_state, sampling
from sm70lab.schema import GraphMode, Numerics, Route, StateConfig
from tests.engine import tiny
from tests.kernels_gpu.rounds import DEVICE, HOT, INTERPRETED, OFFICIAL, ROUNDS, model, route, stand_in, steps

# PyTorch's products, which stand in for the kernels' in the interpreter, round by row count.
NUMERICS = Numerics.fast if INTERPRETED else Numerics.exact


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


@pytest.mark.parametrize("flags", [{}, {"input_core": True}, {"context_core": True}, {"full_forward": True}])
@pytest.mark.parametrize("scheme", ["slots", "fold"])
def test_captured_steps_deliver_what_the_plain_round_delivers(scheme: str, flags: dict[str, object]) -> None:
    """Static memory, and attention that asks the host for nothing; on a GPU each step is a CUDA graph."""
    way = Route(draft_tokens=2, state=StateConfig(scheme), **flags)  # type: ignore[arg-type]
    expected = steps(way, HOT, whole=False)
    plain = Decoder(model(), way, capacity=96)
    plain.boundary = resolve(replace(way, graph=GraphMode.full), False, captures=True)
    parts = (plain.store, plain.kv, plain.mtp_kv, plain.head)
    plain.recorded = CapturedSteps(model(), *parts, 1, plain.boundary)
    request = Request(tiny.prompt(13), HOT, KeyedNoise(5, 0, 0))
    assert [step.tokens for _, step in islice(decode(plain, request), 1 + ROUNDS)] == expected


def test_logits_that_are_not_finite_are_told_a_round_late() -> None:
    broken = copy.deepcopy(model())
    broken.norm[3] = torch.nan
    plain = Decoder(broken, route(1), capacity=96)
    plain.captured = WholeRound(broken, plain.route, plain.store, plain.kv, plain.mtp_kv, plain.head)
    sequence = plain.admit(Request(tiny.prompt(13), OFFICIAL, KeyedNoise(5, 0, 0)))
    sequence.prefilled, sequence.hidden = 13, torch.zeros(1, 32, device=DEVICE)
    plain.store.position[0] = 13
    sequence.deliver([1])
    with pytest.raises(NonFiniteError, match="logits are not finite in round 0 after 1 tokens"):
        plain.round([sequence])


def test_the_limits_said_before_loading_are_those_of_the_kernels() -> None:
    assert capturable.HEAD_DIMS == attention.HEAD_DIMS
    assert capturable.CONV_WIDTH == gdn.CONV_WIDTH
    assert capturable.MAX_TOP_K == sampling.MAX_TOP_K
    assert capturable.MAX_VOCABULARY == sampling.BLOCK * sampling.MAX_BLOCKS


@pytest.mark.parametrize("broken", [False, True])
def test_the_proof_of_a_captured_round(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """Tokens, drafts and states against one-row rounds of the same kernels; a wrong count is found."""
    monkeypatch.setattr(decoder, "captures", lambda device: True)
    if broken:
        monkeypatch.setattr(round_state, "advance", counting_one_too_many)
    way = route(2, graph=GraphMode.full, numerics=NUMERICS)
    probed = ProbedDecoder(model(), way, 96)
    requests = [
        Request(tiny.prompt(13), HOT, KeyedNoise(5, 0, 0)),
        Request(tiny.prompt(9), tiny.GREEDY, KeyedNoise(6, 0, 0)),
    ]
    run = follow(probed, "captured", requests, [4, 3])
    assert run.faulty is broken, run.findings
    if not broken:
        assert run.states and run.worst_state < 1e-5
        greedy = follow(probed, "scripted", requests[1:], [3], [run.outputs[1]])
        assert not greedy.faulty and greedy.outputs == run.outputs[1:], greedy.findings
        assert greedy.accepted > 0  # drafts came from the script


def counting_one_too_many(place: round_state.Places, *rest: Any, advance: Any = round_state.advance) -> None:
    advance(place, *rest)
    place.accepted.add_(1)
