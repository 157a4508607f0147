"""A prefix out of the cache is the prefix run again: states, tokens, and never a partial block."""

from __future__ import annotations

import pytest
import torch

from sm70lab.engine.decoder import Decoder
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.sequence import Request, Sequence
from sm70lab.schema import Route, StateConfig
from tests.engine import tiny
from tests.engine.assertions import assert_close, assert_states

LIMIT = 1e-11


def route(scheme: str = "replay", chunk: int = 5, blocks: int = 64) -> Route:
    state = StateConfig(scheme=scheme, block_size=8, prefill_chunk=chunk, prefix_blocks=blocks)
    return Route(draft_tokens=3, state=state)


def admit(decoder: Decoder, ids: list[int]) -> Sequence:
    return decoder.admit(Request(ids, tiny.GREEDY, KeyedNoise(0, 0, 0)))


def run(decoder: Decoder, ids: list[int], tokens: int) -> Sequence:
    sequence = admit(decoder, ids)
    while sequence.in_prefill:
        decoder.prefill(sequence)
    while len(sequence.output) < tokens:
        decoder.round([sequence])
    decoder.release(sequence)
    return sequence


@pytest.mark.parametrize("scheme", tiny.SCHEMES)
@pytest.mark.parametrize("length", [7, 8, 9, 13, 16, 17, 24, 40])
def test_a_hit_restores_the_state_at_a_block_edge(scheme: str, length: int) -> None:
    """P(n) with a first chunk of five, then the same prefix again."""
    m, ids = tiny.model(), tiny.prompt(length)
    decoder = Decoder(m, route(scheme), 120)
    first = run(decoder, ids, 30)
    again = admit(decoder, ids)
    assert again.reused == (length - 1) // 8 * 8
    with torch.inference_mode():
        wanted = tiny.replayed(m, ids[: again.reused])
        if again.reused:
            assert_states(decoder.store.snapshot([again.slot]), wanted, LIMIT)
    decoder.release(again)
    assert run(decoder, ids, 30).output[:30] == first.output[:30]


@pytest.mark.parametrize("scheme", tiny.SCHEMES)
def test_edges_crossed_while_decoding_are_cached_as_what_they_cover(scheme: str) -> None:
    """The next turn's prompt goes on from the last turn's output: every edge on the way is a hit."""
    m, ids = tiny.model(), tiny.prompt(13)
    decoder = Decoder(m, route(scheme), 200)
    spoken = run(decoder, ids, 60)
    for length in (3, 4, 11, 12, 20, 43):
        longer = ids + spoken.output[:length]
        hit = admit(decoder, longer)
        assert hit.reused == (len(longer) - 1) // 8 * 8
        with torch.inference_mode():
            found = decoder.store.snapshot([hit.slot])
            assert_states(found, tiny.replayed(m, longer[: hit.reused]), LIMIT, f"after {hit.reused}")
        decoder.release(hit)
        fresh = run(Decoder(m, route(scheme, blocks=0), 200), longer, 24).output[:24]
        assert run(decoder, longer, 24).output[:24] == fresh


def test_another_prompt_with_the_same_last_block_is_no_hit() -> None:
    decoder = Decoder(tiny.model(), route(), 100)
    run(decoder, [1] * 8 + [2] * 9, 4)
    assert admit(decoder, [3] * 8 + [2] * 9).reused == 0


def test_a_chain_is_evicted_from_its_end() -> None:
    decoder = Decoder(tiny.model(), route(blocks=3), 100)
    ids = tiny.prompt(26)
    run(decoder, ids, 2)
    assert len(decoder.prefixes) == 3
    other = admit(decoder, [60] * 10)
    while other.in_prefill:
        decoder.prefill(other)
    decoder.release(other)
    assert len(decoder.prefixes) == 3
    assert admit(decoder, ids).reused == 16


def test_a_prompt_of_more_blocks_than_fit_keeps_its_beginning() -> None:
    decoder = Decoder(tiny.model(), route(blocks=2), 100)
    run(decoder, tiny.prompt(35), 2)
    assert admit(decoder, tiny.prompt(35)).reused == 16


@pytest.mark.parametrize("other", [[], [60] * 5])
def test_a_draft_key_that_belongs_to_another_continuation_is_made_anew(other: list[int]) -> None:
    """The last key of a block comes from the token after it: none yet, or another sequence's."""
    m, ids = tiny.model(), tiny.prompt(21)
    fresh, cached = Decoder(m, route(), 120), Decoder(m, route(), 120)
    run(cached, ids[:16] + other, 1)
    longer = [*ids[:16], *range(7, 16)]
    sequences = [admit(d, longer) for d in (fresh, cached)]
    assert sequences[1].reused == 16
    for decoder, sequence in zip((fresh, cached), sequences, strict=True):
        while sequence.in_prefill:
            decoder.prefill(sequence)
    (keys, values), (keys_too, values_too) = (
        [x[s.slot, :, :24] for x in d.mtp_kv.layers[0]]
        for d, s in zip((fresh, cached), sequences, strict=True)
    )
    assert_close(keys_too, keys, LIMIT)
    assert_close(values_too, values, LIMIT)


def test_draft_keys_come_with_the_prefix() -> None:
    """Drafts after a hit are the drafts without one: the draft head's own cache is part of the block."""
    m, ids = tiny.model(), tiny.prompt(21)
    plain, cached = Decoder(m, route(blocks=0), 120), Decoder(m, route(), 120)
    run(cached, ids, 20)
    sequences = [admit(d, ids) for d in (plain, cached)]
    assert sequences[1].reused == 16
    for decoder, sequence in zip((plain, cached), sequences, strict=True):
        while sequence.in_prefill:
            decoder.prefill(sequence)
    for _ in range(6):
        with torch.inference_mode():
            drafts = [d._draft([s], 3)[0].tokens for d, s in zip((plain, cached), sequences, strict=True)]
        assert torch.equal(*drafts)
        for decoder, sequence in zip((plain, cached), sequences, strict=True):
            decoder.round([sequence])
