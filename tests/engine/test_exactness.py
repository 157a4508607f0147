"""Greedy identity: drafts change the speed, never a token."""

from __future__ import annotations

import pytest
import torch

from sm70lab.schema import DraftSampling, Sampling
from tests.engine import tiny
from tests.engine.assertions import assert_states

OFFICIAL = Sampling(temperature=1.0, top_p=0.95, top_k=20)


@pytest.mark.parametrize("scheme", ["slots", "replay"])
def test_greedy_identity_over_2000_tokens_with_state_blocks_of_8(scheme: str) -> None:
    m, ids = tiny.model(), tiny.prompt(29)
    wanted = tiny.decode(tiny.decoder(m, tiny.route(0), ids, capacity=2100), 2000)
    found = tiny.decode(tiny.decoder(m, tiny.route(3, scheme), ids, capacity=2100), 2000)
    assert found == wanted
    assert len(set(wanted)) > 5, "a constant stream would prove nothing"


@pytest.mark.parametrize("k", range(1, 9))
def test_greedy_identity_for_every_draft_count(k: int) -> None:
    m, ids = tiny.model(), tiny.prompt(13)
    wanted = tiny.decode(tiny.decoder(m, tiny.route(0), ids), 120)
    for scheme in tiny.SCHEMES:
        assert tiny.decode(tiny.decoder(m, tiny.route(k, scheme), ids), 120) == wanted


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 16, 17])
def test_prompts_around_the_row_count_and_the_block_edge(length: int) -> None:
    """A prompt of exactly k + 1 tokens is still a prefill."""
    m, ids = tiny.model(), tiny.prompt(length)
    wanted = tiny.decode(tiny.decoder(m, tiny.route(0, block=816), ids), 60)
    for scheme in tiny.SCHEMES:
        assert tiny.decode(tiny.decoder(m, tiny.route(3, scheme), ids), 60) == wanted


@pytest.mark.parametrize(
    "sampling", [DraftSampling.probabilistic, DraftSampling.greedy, DraftSampling.coupled]
)
def test_state_equals_replay_after_every_round_of_a_sampled_run(sampling: DraftSampling) -> None:
    m, ids = tiny.model(), tiny.prompt(13)
    for scheme in tiny.SCHEMES:
        d = tiny.decoder(m, tiny.route(3, scheme, sampling), ids, OFFICIAL)
        for step, _ in zip(d.steps(), range(12), strict=False):
            assert 1 <= len(step.tokens) <= 4
            with torch.inference_mode():
                assert_states(d.store.snapshot([0]), tiny.replayed(m, ids + d.output[:-1]), 1e-11)


@pytest.mark.parametrize("mode", [DraftSampling.token_matching, DraftSampling.coupled])
def test_keyed_noise_gives_the_no_draft_tokens_at_any_temperature(mode: DraftSampling) -> None:
    m, ids = tiny.model(), tiny.prompt(13)
    wanted = tiny.decode(tiny.decoder(m, tiny.route(0), ids, OFFICIAL), 200)
    for k in (1, 3, 8):
        found = tiny.decode(tiny.decoder(m, tiny.route(k, "replay", mode), ids, OFFICIAL), 200)
        assert found == wanted


def test_a_drafter_that_is_always_wrong_changes_nothing() -> None:
    m, ids = tiny.model(), tiny.prompt(13)
    wanted = tiny.decode(tiny.decoder(m, tiny.route(0), ids), 60)
    for scheme in tiny.SCHEMES:
        d = tiny.decoder(m, tiny.route(3, scheme), ids)
        honest = d.decoder._draft

        def wrong(sequences, k, d=d, honest=honest):  # type: ignore[no-untyped-def]
            (drafts,) = honest(sequences, k)
            done = len(d.output)
            bad = torch.tensor([(wanted[min(done + i, 59)] + 1) % 64 for i in range(3)])
            drafts.tokens, drafts.q.ids = bad, bad[:, None]
            return [drafts]

        d.decoder._draft = wrong  # type: ignore[method-assign]
        assert tiny.decode(d, 55) == wanted[:55]
        assert d.rounds >= 54, "every draft must have been rejected"


def test_the_same_suite_twice_in_one_process_and_seeds_matter() -> None:
    m, ids = tiny.model(), tiny.prompt(13)
    runs = [tiny.decode(tiny.decoder(m, tiny.route(3), ids, OFFICIAL, seed=s), 80) for s in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    repeats = {
        tuple(tiny.decode(tiny.decoder(m, tiny.route(3), ids, OFFICIAL, seed=1, repeat=r), 40))
        for r in range(8)
    }
    assert len(repeats) == 8


def test_rows_never_written_are_never_read() -> None:
    """Memory is poisoned with NaN here: a read beyond the newest row would show in the logits."""
    m, ids = tiny.model(), tiny.prompt(5)
    d = tiny.decoder(m, tiny.route(4), ids, capacity=60)
    assert bool(torch.isnan(d.kv.layers[0][0]).all()), "the cache must start poisoned"
    tiny.decode(d, 40)
    keys, values = d.kv.layers[0]
    assert bool(torch.isnan(keys[:, :, 5 + 40 + 8 :]).all()) and bool(torch.isnan(values[:, :, -1]).all())
