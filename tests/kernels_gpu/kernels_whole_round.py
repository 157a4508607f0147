"""The whole round of kernels against the plain decoder: the same tokens, round by round."""

from __future__ import annotations

import copy
import os
from itertools import islice
from typing import Any

import pytest
import torch

from sm70lab.engine import capturable, captured
from sm70lab.engine.captured import WholeRound
from sm70lab.engine.decoder import Decoder, decode
from sm70lab.engine.loading import find
from sm70lab.engine.model import HybridModel
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.sequence import Request
from sm70lab.errors import NonFiniteError
from sm70lab.kernels.gpu import attention, gdn, linear, sampling
from sm70lab.kernels.gpu.products import Int8Weight, Weight
from sm70lab.schema import (
    DraftHeadKind,
    DraftSampling,
    KernelSet,
    ModelDtype,
    ModelSpec,
    Numerics,
    Proposal,
    Route,
    Sampling,
    StateConfig,
)
from tests.engine import tiny

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SHAPE = tiny.SHAPE | {"head_dim": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
OFFICIAL = Sampling(temperature=1.0, top_k=20, top_p=0.95)
HOT = Sampling(temperature=20.0, top_k=20)  # the noise decides, and coupled drafts share it: most pass
ROUNDS = 3


def reference_product(x: torch.Tensor, weight: Weight, out: torch.Tensor, exact: bool) -> torch.Tensor:
    if isinstance(weight, Int8Weight):
        return out.copy_(linear.int8_linear_reference(x, *weight))
    assert isinstance(weight, torch.Tensor)
    return out.copy_(linear.linear_reference(x, weight))


def reference_parts(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, exact: bool) -> torch.Tensor:
    return out.copy_(linear.linear_parts_reference(x, weight, len(out)))


def reference_swiglu(x: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor, exact: bool) -> torch.Tensor:
    return out.copy_(linear.swiglu_reference(x, gate_up))


def reference_gdn(projected: torch.Tensor, *arguments: Any, settled: bool) -> torch.Tensor:
    *given, _, out = arguments
    return out.copy_(gdn.gdn_round_reference(projected, *given))


def reference_attention(*arguments: Any) -> torch.Tensor:
    *given, _, out = arguments
    return out.copy_(attention.gated_attention_reference(*given))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of a round in the interpreter are kernels that other files test; here their twins run."""
    if INTERPRETED:
        monkeypatch.setattr(captured, "product", reference_product)
        monkeypatch.setattr(captured, "product_parts", reference_parts)
        monkeypatch.setattr(captured, "swiglu", reference_swiglu)
        monkeypatch.setattr(gdn, "gdn_round", reference_gdn)
        monkeypatch.setattr(attention, "gated_attention", reference_attention)


@pytest.fixture(scope="module")
def model() -> HybridModel:
    spec = ModelSpec(name="random", shape=SHAPE)
    return find(spec).build(ModelDtype.float32, DEVICE, KernelSet.plain)


def route(k: int, drafts: DraftSampling = DraftSampling.coupled, **more: object) -> Route:
    return Route(
        draft_tokens=k, draft_sampling=drafts, numerics=Numerics.exact, state=StateConfig("replay"), **more
    )  # type: ignore[arg-type]


def steps(model: HybridModel, way: Route, asked: Sampling, whole: bool) -> list[list[int]]:
    decoder = Decoder(model, way, capacity=96)
    if whole:
        decoder.captured = WholeRound(model, way, decoder.store, decoder.kv, decoder.mtp_kv, decoder.head)
    request = Request(tiny.prompt(13), asked, KeyedNoise(5, 0, 0))
    return [step.tokens for _, step in islice(decode(decoder, request), 1 + ROUNDS)]


@pytest.mark.parametrize(
    ("k", "drafts", "asked", "more"),
    [
        (4, DraftSampling.coupled, HOT, {}),
        (2, DraftSampling.probabilistic, OFFICIAL, {"proposal": Proposal.top_k}),
        (3, DraftSampling.greedy, OFFICIAL, {"draft_head": DraftHeadKind.shortlist, "shortlist_size": 40}),
        (1, DraftSampling.token_matching, OFFICIAL, {"draft_head": DraftHeadKind.int8}),
        (4, DraftSampling.coupled, tiny.GREEDY, {}),
        (3, DraftSampling.probabilistic, HOT, {}),
        (0, DraftSampling.coupled, OFFICIAL, {}),
    ],
)
@pytest.mark.usefixtures("quick")
def test_a_whole_round_delivers_what_the_plain_round_delivers(
    model: HybridModel, k: int, drafts: DraftSampling, asked: Sampling, more: dict[str, object]
) -> None:
    way = route(k, drafts, **more)
    expected = steps(model, way, asked, whole=False)
    assert steps(model, way, asked, whole=True) == expected
    if asked is HOT:
        assert len({len(tokens) for tokens in expected[1:]}) > 1  # rounds that accept, and not all alike


@pytest.mark.usefixtures("quick")
def test_logits_that_are_not_finite_are_told_a_round_late(model: HybridModel) -> None:
    broken = copy.deepcopy(model)
    broken.norm[3] = torch.nan
    decoder = Decoder(broken, route(1), capacity=96)
    decoder.captured = WholeRound(
        broken, decoder.route, decoder.store, decoder.kv, decoder.mtp_kv, decoder.head
    )
    sequence = decoder.admit(Request(tiny.prompt(13), OFFICIAL, KeyedNoise(5, 0, 0)))
    sequence.prefilled, sequence.hidden = 13, torch.zeros(1, 32, device=DEVICE)
    decoder.store.position[0] = 13
    sequence.deliver([1])
    with pytest.raises(NonFiniteError, match="logits are not finite in round 0 after 1 tokens"):
        decoder.round([sequence])


def test_the_limits_said_before_loading_are_those_of_the_kernels() -> None:
    assert capturable.HEAD_DIMS == attention.HEAD_DIMS
    assert capturable.CONV_WIDTH == gdn.CONV_WIDTH
    assert capturable.MAX_TOP_K == sampling.MAX_TOP_K
    assert capturable.MAX_VOCABULARY == sampling.BLOCK * sampling.MAX_BLOCKS
