"""Recorded rounds (``graph=full``) and the tape that plays them."""

from __future__ import annotations

import pytest
import torch

from sm70lab.engine.decoder import Decoder
from sm70lab.engine.sequence import Request
from sm70lab.kernels import native
from sm70lab.schema import DraftHeadKind, DraftSampling, GraphMode, KernelSet, ModelDtype, Route, Sampling
from tests.engine import tiny
from tests.engine.test_batch import request, together

pytestmark = pytest.mark.skipif(native.available() is not None, reason=str(native.available()))


def route(scheme: str, graph: GraphMode, head: DraftHeadKind = DraftHeadKind.full) -> Route:
    made = tiny.route(3, scheme, DraftSampling.probabilistic, graph=graph, draft_head=head)
    made.shortlist_size = 16
    return made


@pytest.mark.parametrize("scheme", tiny.SCHEMES)
@pytest.mark.parametrize("dtype", [ModelDtype.float32, ModelDtype.float64])
@pytest.mark.parametrize("width", [1, 3])
def test_the_same_bits_as_the_eager_round(scheme: str, dtype: ModelDtype, width: int) -> None:
    """Hidden states, logits and states of every round, with steps without drafts between them."""
    m = tiny.model(dtype=dtype, kernels=KernelSet.native)
    decoders = [Decoder(m, route(scheme, graph), 120, width) for graph in (GraphMode.none, GraphMode.full)]
    groups = [[d.admit(request(i, Sampling())) for i in range(width)] for d in decoders]
    for decoder, group in zip(decoders, groups, strict=True):
        for sequence in group:
            while sequence.in_prefill:
                decoder.prefill(sequence)
    for turn in range(12):
        steps = [d.round(g, draft=turn % 4 != 3) for d, g in zip(decoders, groups, strict=True)]
        assert [s.tokens for s in steps[0]] == [s.tokens for s in steps[1]]
        for a, b in zip(*groups, strict=True):
            assert torch.equal(a.hidden, b.hidden)
        with torch.inference_mode():
            found = [d.store.snapshot(range(width)) for d in decoders]
        for (conv, ssm), (conv_too, ssm_too) in zip(*found, strict=True):
            assert torch.equal(conv, conv_too) and torch.equal(ssm, ssm_too)


@pytest.mark.parametrize("head", list(DraftHeadKind))
def test_every_draft_head(head: DraftHeadKind) -> None:
    m = tiny.model(dtype=ModelDtype.float32, kernels=KernelSet.native)
    outputs = [
        together(Decoder(m, route("replay", graph, head), 120, 2), [request(0, Sampling())], [60])
        for graph in (GraphMode.none, GraphMode.full)
    ]
    assert outputs[0] == outputs[1]


def test_batches_of_any_size_with_late_starts_and_early_ends() -> None:
    m = tiny.model(kernels=KernelSet.native)
    requests: list[Request] = [request(i, Sampling()) for i in range(5)]
    budgets = [40, 12, 33, 25, 50]
    outputs = [
        together(Decoder(m, route("slots", graph), 120, 3), requests, budgets)
        for graph in (GraphMode.none, GraphMode.full)
    ]
    assert outputs[0] == outputs[1]


def test_a_tape_reads_its_inputs_when_it_plays() -> None:
    x, weight = torch.randn(2, 24), torch.randn(10, 24)
    pool, slots = torch.zeros(3, 10), torch.tensor([0, 2])
    with native.recording() as tape:
        native.write_rows(pool, slots, native.linear(x, weight))
    x.copy_(torch.randn(2, 24))
    slots.copy_(torch.tensor([1, 0]))
    tape.play()
    torch.testing.assert_close(pool[[1, 0]], x @ weight.t())


def test_a_tape_refuses_what_it_would_have_to_copy() -> None:
    across = torch.randn(24, 4).t()
    with native.recording(), pytest.raises(ValueError, match="as they lie in memory"):
        native.linear(across, torch.randn(10, 24))
    native.linear(across, torch.randn(10, 24))


def test_a_round_beyond_the_cache_is_an_error() -> None:
    m = tiny.model(kernels=KernelSet.native)
    decoder = Decoder(m, route("replay", GraphMode.full), 20)
    with pytest.raises(IndexError, match="key and value cache"):
        together(decoder, [request(4, Sampling())], [60])
