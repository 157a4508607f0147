"""Several sequences at once: each has the tokens and the state of its solo run."""

from __future__ import annotations

import pytest
import torch

from sm70lab.engine.decoder import Decoder
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.scheduler import Scheduler
from sm70lab.engine.sequence import Request
from sm70lab.schema import DraftSampling, Sampling
from tests.engine import tiny
from tests.engine.assertions import assert_states

OFFICIAL = Sampling()
LENGTHS = (10, 14, 18, 1, 4, 13)


def request(number: int, sampling: Sampling) -> Request:
    return Request(tiny.prompt(LENGTHS[number]), sampling, KeyedNoise(1, number, 0))


def together(decoder: Decoder, requests: list[Request], budgets: list[int]) -> list[list[int]]:
    """Outputs of requests that share the decoder, each cut at its own budget."""
    scheduler = Scheduler(decoder)
    numbers = [scheduler.add(r) for r in requests]
    outputs: dict[int, list[int]] = {}
    for number, _ in scheduler.turns():
        output = scheduler.running[number].output
        if len(output) >= budgets[number]:
            outputs[number] = output[: budgets[number]]
            scheduler.finish(number)
    return [outputs[number] for number in numbers]


@pytest.mark.parametrize("scheme", tiny.SCHEMES)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("sampling", [tiny.GREEDY, OFFICIAL], ids=["greedy", "sampled"])
def test_unequal_lengths_and_budgets_have_their_solo_tokens(
    scheme: str, width: int, sampling: Sampling
) -> None:
    """Six requests through two or four slots: late starts, early ends, re-used slots, padded rows."""
    m, route = tiny.model(), tiny.route(3, scheme, DraftSampling.coupled)
    requests = [request(i, sampling) for i in range(len(LENGTHS))]
    budgets = [40, 25, 60, 33, 12, 50]
    found = together(Decoder(m, route, 100, width), requests, budgets)
    for r, budget, output in zip(requests, budgets, found, strict=True):
        assert output == together(Decoder(m, route, 100), [r], [budget])[0]


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    m, route = tiny.model(), tiny.route(3, "replay", DraftSampling.probabilistic)
    mixed = [request(0, tiny.GREEDY), request(1, OFFICIAL)]
    greedy, sampled = together(Decoder(m, route, 120, 2), mixed, [60, 60])
    assert greedy == together(Decoder(m, route, 120), [mixed[0]], [60])[0]
    assert sampled != greedy and len(sampled) == 60


@pytest.mark.parametrize("scheme", tiny.SCHEMES)
def test_a_parked_sequence_keeps_its_state(scheme: str) -> None:
    """Five rounds of another sequence, padded to four rows, beside one that does not take part."""
    decoder = Decoder(tiny.model(), tiny.route(3, scheme), 100, 4)
    parked, busy = (decoder.admit(request(i, tiny.GREEDY)) for i in (1, 2))
    for sequence in (parked, busy):
        while sequence.in_prefill:
            decoder.prefill(sequence)
    decoder.round([parked, busy])
    with torch.inference_mode():
        before = [(c.clone(), s.clone()) for c, s in decoder.store.snapshot([parked.slot])]
    for _ in range(5):
        decoder.round([busy])
    with torch.inference_mode():
        after = decoder.store.snapshot([parked.slot])
        for (conv, ssm), (conv_now, ssm_now) in zip(before, after, strict=True):
            assert torch.equal(conv, conv_now) and torch.equal(ssm, ssm_now)
        assert_states(after, tiny.replayed(tiny.model(), parked.tokens[:-1]), 1e-11)


def test_padded_rows_use_the_scratch_slot_alone() -> None:
    """The last live slot is a real one: a sentinel of −1 or 0 would touch a live slot."""
    decoder = Decoder(tiny.model(), tiny.route(3), 60, 3)
    assert decoder.store.padded([1], 3) == [1, 3, 3]
    assert len(decoder.kv.layers[0][0]) == 4
    sequence = decoder.admit(request(0, tiny.GREEDY))
    for keys, _ in decoder.kv.layers:
        assert bool(torch.isnan(keys).all()), "memory must start poisoned"
    while sequence.in_prefill:
        decoder.prefill(sequence)
    for _ in range(4):
        decoder.round([sequence])
    for keys, values in decoder.kv.layers:
        assert bool(torch.isnan(keys[1:3]).all()) and bool(torch.isnan(values[1:3]).all())
    with torch.inference_mode():
        for conv, ssm in decoder.store.snapshot([1, 2]):
            assert not bool(conv.any()) and not bool(ssm.any())


def test_nothing_of_the_scratch_slot_reaches_a_live_row() -> None:
    """NaN in everything that padded rows read: live rows stay finite and keep their solo tokens."""
    m, one = tiny.model(), request(0, tiny.GREEDY)
    decoder = Decoder(m, tiny.route(3), 100, 4)
    with torch.inference_mode():
        for layer in decoder.store.layers:
            for pool in layer:
                pool[decoder.store.scratch] = torch.nan
    assert together(decoder, [one], [40]) == together(Decoder(m, tiny.route(3), 100), [one], [40])


def test_a_step_without_drafts_after_an_accepted_round() -> None:
    """Scripted: three drafts accepted, then a step of one row; the state is a replay's in every scheme."""
    m, ids = tiny.model(), tiny.prompt(9)
    wanted = tiny.decode(tiny.decoder(m, tiny.route(0), ids), 30)
    for scheme in tiny.SCHEMES:
        decoder = Decoder(m, tiny.route(3, scheme), 80)
        sequence = decoder.admit(Request(ids, tiny.GREEDY, KeyedNoise(0, 0, 0)))
        while sequence.in_prefill:
            decoder.prefill(sequence)
        honest = decoder._draft

        def right(sequences, k, honest=honest):  # type: ignore[no-untyped-def]
            (drafts,) = honest(sequences, k)
            for i in range(k):
                drafts.tokens[i] = drafts.q.ids[i, 0] = wanted[len(sequences[0].output) + i]
            return [drafts]

        decoder._draft = right  # type: ignore[method-assign]
        for draft in (True, False, True, False, False, True):
            (step,) = decoder.round([sequence], draft)
            assert len(step.tokens) == (4 if draft else 1)
            with torch.inference_mode():
                found = decoder.store.snapshot([0])
            assert_states(found, tiny.replayed(m, sequence.tokens[:-1]), 1e-11, scheme)
        assert sequence.output == wanted[: len(sequence.output)]


def test_runs_without_a_common_seed_differ() -> None:
    m, route = tiny.model(), tiny.route(3)
    requests = [Request(tiny.prompt(9), OFFICIAL, KeyedNoise(seed, 0, 0)) for seed in range(8)]
    outputs = together(Decoder(m, route, 80, 4), requests, [30] * 8)
    assert len({tuple(output) for output in outputs}) == 8


def test_two_ranks_agree_every_round() -> None:
    """Two decoders with the same request are two ranks: the same accepted tokens in every round."""
    m, route = tiny.model(), tiny.route(3, "replay", DraftSampling.probabilistic)
    ranks = [Decoder(m, route, 100) for _ in range(2)]
    sequences = [rank.admit(request(0, OFFICIAL)) for rank in ranks]
    for rank, sequence in zip(ranks, sequences, strict=True):
        while sequence.in_prefill:
            rank.prefill(sequence)
    for _ in range(25):
        a, b = (rank.round([s])[0].tokens for rank, s in zip(ranks, sequences, strict=True))
        assert a == b
