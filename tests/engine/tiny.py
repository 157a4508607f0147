"""The tiny random hybrid of the tests: 3 GDN and 1 attention layers, vocabulary 64, float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from sm70lab.engine import schemes
from sm70lab.engine.decoder import Decoder
from sm70lab.engine.kv_cache import KVCache
from sm70lab.engine.loading import find
from sm70lab.engine.model import HybridModel
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.sequence import Request, Step
from sm70lab.engine.state import StateStore
from sm70lab.schema import (
    DraftSampling,
    KernelSet,
    ModelDtype,
    ModelSpec,
    Proposal,
    Route,
    Sampling,
    StateConfig,
)

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
GREEDY = Sampling(temperature=0.0)
SCHEMES = list(schemes.SCHEMES)


def prompt(length: int) -> list[int]:
    """P(n) = (7i + 3) mod 61."""
    return [(7 * i + 3) % 61 for i in range(length)]


@cache
def model(
    vocab_size: int = 64,
    seed: int = 0,
    dtype: ModelDtype = ModelDtype.float64,
    kernels: KernelSet = KernelSet.auto,
) -> HybridModel:
    spec = ModelSpec(name="random", shape={**SHAPE, "vocab_size": vocab_size}, seed=seed)
    return find(spec).build(dtype, CPU, kernels)


def route(
    k: int = 3,
    scheme: str = "slots",
    sampling: DraftSampling = DraftSampling.probabilistic,
    block: int = 8,
    **flags: Any,
) -> Route:
    state = StateConfig(scheme=scheme, block_size=block)
    return Route(draft_tokens=k, draft_sampling=sampling, state=state, proposal=Proposal.top_k_top_p, **flags)


class Solo:
    """A decoder with one sequence in it."""

    def __init__(self, decoder: Decoder, request: Request) -> None:
        self.decoder, self.store, self.kv = decoder, decoder.store, decoder.kv
        self.sequence = decoder.admit(request)
        self.output = self.sequence.output

    @property
    def rounds(self) -> int:
        return self.sequence.rounds

    def steps(self) -> Iterator[Step]:
        while True:
            if self.sequence.in_prefill:
                step = self.decoder.prefill(self.sequence)
            else:
                (step,) = self.decoder.round([self.sequence])
            if step is not None:
                yield step


def decoder(
    m: HybridModel,
    r: Route,
    ids: list[int],
    sampling: Sampling = GREEDY,
    capacity: int = 400,
    seed: int = 0,
    repeat: int = 0,
    stop_ids: frozenset[int] = frozenset(),
) -> Solo:
    return Solo(Decoder(m, r, capacity), Request(ids, sampling, KeyedNoise(seed, 0, repeat), stop_ids))


def decode(d: Solo, tokens: int) -> list[int]:
    """At least ``tokens`` output tokens, cut to as many."""
    for _ in d.steps():
        if len(d.output) >= tokens:
            return d.output[:tokens]
    raise AssertionError("unreachable")


def replayed(m: HybridModel, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Conv window and SSM state of each GDN layer after ``ids``, one token at a time from nothing."""
    store = StateStore(m.arch, "slots", torch.float64, m.dtype, CPU)
    kv = KVCache(m.arch, 1, len(ids), m.dtype, CPU)
    with torch.inference_mode():
        for token in ids:
            m.run(torch.tensor([[token]]), [0], store, kv, prefill=False)
            store.commit([1])
        return store.snapshot([0])
