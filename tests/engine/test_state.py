"""State equals a from-scratch replay of the committed tokens, conv and SSM apart, whatever was rejected."""

from __future__ import annotations

import itertools

import pytest
import torch

from sm70lab.engine.kv_cache import KVCache
from sm70lab.engine.state import StateStore
from tests.engine import tiny
from tests.engine.assertions import assert_close, assert_states

LIMIT = 1e-12  # float64: orders of summation differ between prefill chunks and steps


def store_and_cache(scheme: str, rows: int) -> tuple[StateStore, KVCache]:
    m = tiny.model()
    store = StateStore(m.arch, scheme, torch.float64, m.dtype, tiny.CPU, rows=rows)
    return store, KVCache(m.arch, 1, 200, m.dtype, tiny.CPU)


@pytest.mark.parametrize("scheme", tiny.SCHEMES)
@pytest.mark.parametrize("depths", list(itertools.product([1, 2, 4], repeat=3)))
def test_reject_at_every_depth(scheme: str, depths: tuple[int, ...]) -> None:
    """Rounds of 4 rows whose tail is wrong from row n on: the state forgets the tail."""
    m = tiny.model()
    store, kv = store_and_cache(scheme, rows=4)
    committed = tiny.prompt(13)
    with torch.inference_mode():
        m.run(torch.tensor([committed]), [0], store, kv, prefill=True)
        store.commit([13])
        for depth in depths:
            right = [(11 * len(committed) + i) % 64 for i in range(depth)]
            wrong = [63 - t for t in range(4 - depth)]
            m.run(torch.tensor([right + wrong]), [0], store, kv, prefill=False)
            store.commit([depth])
            committed = committed + right
            assert_states(store.snapshot([0]), tiny.replayed(m, committed), LIMIT, f"after {depths}")
    assert store.position == [len(committed)]


@pytest.mark.parametrize("scheme", tiny.SCHEMES)
@pytest.mark.parametrize(
    ("length", "chunks"), [(20, (7, 13)), (12, (4, 4, 4)), (12, (12,)), (4, (4,)), (1, (1,))]
)
def test_chunked_prefill_gives_the_same_state(scheme: str, length: int, chunks: tuple[int, ...]) -> None:
    m = tiny.model()
    store, kv = store_and_cache(scheme, rows=4)
    ids = tiny.prompt(length)
    done = 0
    with torch.inference_mode():
        for size in chunks:
            hidden = m.run(torch.tensor([ids[done : done + size]]), [0], store, kv, prefill=True)
            store.commit([size])
            done += size
        one_shot_store, one_shot_kv = store_and_cache(scheme, rows=4)
        wanted = m.run(torch.tensor([ids]), [0], one_shot_store, one_shot_kv, prefill=True)
    assert_states(store.snapshot([0]), tiny.replayed(m, ids), LIMIT)
    assert_close(hidden[:, -1], wanted[:, -1], LIMIT)


@pytest.mark.parametrize("scheme", tiny.SCHEMES)
def test_two_sequences_of_one_store_advance_apart(scheme: str) -> None:
    """Two sequences in one batch with unequal accepted counts keep the states of their solo runs."""
    m = tiny.model()
    store = StateStore(m.arch, scheme, torch.float64, m.dtype, tiny.CPU, rows=4, slots=2)
    kv = KVCache(m.arch, 1, 60, m.dtype, tiny.CPU, slots=2)
    rows = torch.tensor([tiny.prompt(10), tiny.prompt(20)[10:]])
    committed = [rows[0].tolist(), rows[1].tolist()]
    with torch.inference_mode():
        m.run(rows, [0, 1], store, kv, prefill=True)
        store.commit([10, 10])
        for counts in ([1, 4], [3, 2], [4, 1]):
            block = torch.tensor([[7, 8, 9, 10], [50, 40, 30, 20]])
            m.run(block, [0, 1], store, kv, prefill=False)
            store.commit(counts)
            for b, n in enumerate(counts):
                committed[b] += block[b, :n].tolist()
        snapshot = store.snapshot([0, 1])
    for b in range(2):
        alone = [(conv[b : b + 1], ssm[b : b + 1]) for conv, ssm in snapshot]
        assert_states(alone, tiny.replayed(m, committed[b]), LIMIT, f"sequence {b}")


@pytest.mark.parametrize("count", [0, 5, -1])
def test_commit_refuses_counts_outside_the_round(count: int) -> None:
    store, kv = store_and_cache("slots", rows=4)
    with torch.inference_mode():
        tiny.model().run(torch.tensor([[1, 2, 3, 4]]), [0], store, kv, prefill=False)
    with pytest.raises(ValueError, match=r"each must be 1\.\.4"):
        store.commit([count])


def test_prefill_is_never_committed_in_part() -> None:
    store, kv = store_and_cache("replay", rows=4)
    with torch.inference_mode():
        tiny.model().run(torch.tensor([[1, 2, 3, 4]]), [0], store, kv, prefill=True)
    with pytest.raises(ValueError, match="all rows of a prefill"):
        store.commit([3])


def test_a_round_must_be_committed_before_the_next() -> None:
    store, _ = store_and_cache("slots", rows=4)
    store.begin([0], 4, prefill=False)
    with pytest.raises(RuntimeError, match="still open"):
        store.begin([0], 4, prefill=False)
    with pytest.raises(ValueError, match=r"rounds of 1\.\.4"):
        store_and_cache("slots", rows=4)[0].begin([0], 5, prefill=False)


def test_float16_state_keeps_its_type_and_its_distance() -> None:
    m = tiny.model()
    with torch.inference_mode():
        for scheme in tiny.SCHEMES:
            store = StateStore(m.arch, scheme, torch.float16, m.dtype, tiny.CPU, rows=2)
            kv = KVCache(m.arch, 1, 60, m.dtype, tiny.CPU)
            ids = tiny.prompt(20)
            for i in range(0, 20, 2):
                m.run(torch.tensor([ids[i : i + 2]]), [0], store, kv, prefill=False)
                store.commit([2])
            assert store.layers[0][1].dtype == torch.float16
            assert_states(store.snapshot([0]), tiny.replayed(m, ids), 2e-3, scheme)
