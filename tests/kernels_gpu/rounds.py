"""Rounds on the GPU's kernels, and what stands in for the slow ones in Triton's interpreter."""

from __future__ import annotations

import os
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch

from sm70lab.engine import captured
from sm70lab.engine.captured import WholeRound
from sm70lab.engine.decoder import Decoder, decode
from sm70lab.engine.loading import find
from sm70lab.engine.model import HybridModel
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.sequence import Request
from sm70lab.kernels.gpu import attention, gdn, linear
from sm70lab.kernels.gpu.products import Int8Weight, Weight
from sm70lab.schema import (
    DraftSampling,
    KernelSet,
    ModelDtype,
    ModelSpec,
    Numerics,
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
ROUNDS = 2


@cache
def model() -> HybridModel:
    """A small hybrid in float32, with the attention kernels' smallest heads."""
    spec = ModelSpec(name="random", shape=SHAPE)
    return find(spec).build(ModelDtype.float32, DEVICE, KernelSet.plain)


def route(k: int, drafts: DraftSampling = DraftSampling.coupled, **more: Any) -> Route:
    """A route of k drafts that a whole round can run."""
    settings = {"numerics": Numerics.exact, "state": StateConfig("replay")} | more
    return Route(draft_tokens=k, draft_sampling=drafts, **settings)


def steps(way: Route, asked: Sampling, whole: bool) -> list[list[int]]:
    """The tokens of a prefill and some rounds, in whole rounds of kernels or in the plain decoder's."""
    plain = Decoder(model(), way, capacity=96)
    if whole:
        plain.captured = WholeRound(model(), way, plain.store, plain.kv, plain.mtp_kv, plain.head)
        plain.captured.hidden.fill_(torch.nan)  # as after a sequence whose logits were
    request = Request(tiny.prompt(13), asked, KeyedNoise(5, 0, 0))
    return [step.tokens for _, step in islice(decode(plain, request), 1 + ROUNDS)]


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
    given, (*_, out) = arguments[:12], arguments[12:]
    result = attention.gated_attention_reference(*given)
    return out.copy_(result) if len(arguments) > 13 else result.to(given[0].dtype)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of a round in the interpreter are kernels that other files test; here their twins run."""
    if INTERPRETED:
        monkeypatch.setattr(captured, "product", reference_product)
        monkeypatch.setattr(captured, "product_parts", reference_parts)
        monkeypatch.setattr(captured, "swiglu", reference_swiglu)
        monkeypatch.setattr(gdn, "gdn_round", reference_gdn)
        monkeypatch.setattr(attention, "gated_attention", reference_attention)
