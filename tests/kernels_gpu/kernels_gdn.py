"""The GDN round's kernels against plain PyTorch: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from sm70lab.engine.schemes import SCHEMES
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.kernels.gated_delta import l2_normalise
from sm70lab.kernels.gpu.gdn import (
    GDNPools,
    GDNWeights,
    Heads,
    Place,
    gdn_round,
    gdn_round_reference,
    scratch,
)
from tests.engine.assertions import assert_close

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SMALL = Heads(1, 2, 4, 16)  # two programs of values a head
SHAPES = (
    [SMALL] if INTERPRETED else [SMALL, Heads(4, 4, 64, 64), Heads(16, 32, 128, 128), Heads(16, 48, 128, 128)]
)
EPS = 1e-6
SLOTS = 3


class Layer:
    """Random weights, pools with room for ``room`` rows, and nine projected rows of two sequences."""

    def __init__(self, heads: Heads, room: int = 9, state_dtype: torch.dtype = torch.float32) -> None:
        self.heads, self.room = heads, room
        g = torch.Generator().manual_seed(room)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g).to(DEVICE)

        hv, k, v = heads.value_heads, heads.key_dim, heads.value_dim
        self.weights = GDNWeights(
            random(4, heads.conv_dim).half(), -random(hv).exp(), random(hv), 1 + 0.1 * random(v)
        )
        self.pools = GDNPools(
            random(SLOTS, 3 + room, heads.conv_dim).half(),
            (0.1 * random(SLOTS, hv, k, v)).to(state_dtype),
            l2_normalise(random(SLOTS, room, hv, k)),
            random(SLOTS, room, hv, v),
            -random(SLOTS, room, hv).exp(),
            random(SLOTS, room, hv).sigmoid(),
        )
        self.projected = random(2, 9, heads.projected).half()

    def copy(self) -> GDNPools:
        return GDNPools(*(pool.clone() for pool in self.pools))

    def run(self, pools: GDNPools, projected: torch.Tensor, place: Place) -> torch.Tensor:
        batch, rows, _ = projected.shape
        out = projected.new_empty(batch, rows, self.heads.value_heads * self.heads.value_dim)
        room = scratch(batch, rows, self.heads, projected.dtype, DEVICE)
        return gdn_round(projected.contiguous(), self.weights, pools, place, self.heads, EPS, room, out)


def place(slots: list[int], accepted: list[int]) -> Place:
    count = torch.tensor(accepted, device=DEVICE)
    return Place(torch.tensor(slots, device=DEVICE), count, count)


@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("rows", range(1, 10))
def test_a_round_is_the_reference(rows: int, heads: Heads) -> None:
    layer = Layer(heads)
    kept = [9 - rows, rows]  # none of the last round in one case, all of it in another
    slots = [2, 0] if rows in (3, 9) or not INTERPRETED else [2]
    kept = kept[: len(slots)]
    pools, wanted = layer.copy(), layer.copy()
    for pool in pools[2:]:
        pool[2, kept[0] :] = torch.nan  # rejected rows may hold anything
    where = place(slots, kept)
    projected = layer.projected[: len(slots), :rows]
    out = layer.run(pools, projected, where)
    reference = gdn_round_reference(projected, layer.weights, wanted, where, heads, EPS)
    assert_close(out, reference, 1e-3, "output")
    for name, pool, other, before in zip(GDNPools._fields, pools, wanted, layer.pools, strict=True):
        written = {"conv_rows": 3 + rows, "state": heads.value_heads}.get(name, rows)
        for slot in slots:
            assert_close(pool[slot, :written], other[slot, :written], 1e-6, name)
            assert (
                torch.equal(pool[slot, written:].nan_to_num(), other[slot, written:].nan_to_num())
                or slot == 2
            )
        assert torch.equal(pool[1], before[1]), f"{name}: another slot was written"


@pytest.mark.parametrize("heads", SHAPES)
def test_a_row_has_the_bits_that_it_has_alone(heads: Heads) -> None:
    layer = Layer(heads)
    where = place([2], [3])
    whole = layer.run(layer.copy(), layer.projected[:1], where)
    for rows in (1, 4) if INTERPRETED else (1, 2, 3, 5):
        part = layer.run(layer.copy(), layer.projected[:1, :rows], where)
        assert torch.equal(part, whole[:, :rows])


@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("state_dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.float16])
def test_rounds_with_rejected_rows_are_one_row_steps(heads: Heads, state_dtype: torch.dtype) -> None:
    """Nine rows verified, some kept, and so on: the state and the outputs of one row after another."""
    layer = Layer(heads, 5, state_dtype)
    pools, steps = layer.copy(), layer.copy()
    before, outputs, position = 2, [], 0
    for kept in (3, 1, 4):
        rows = layer.projected[:1, position : position + kept + 1]  # the last one is rejected
        outputs.append(layer.run(pools, rows, place([0], [before]))[:, :kept])
        before, position = kept, position + kept
    singles, before = [], 2
    for t in range(position):
        singles.append(layer.run(steps, layer.projected[:1, t : t + 1], place([0], [before])))
        before = 1
    if state_dtype is torch.float32:  # a narrower state is rounded once a round
        assert torch.equal(torch.cat(outputs, 1), torch.cat(singles, 1))
    assert_close(torch.cat(outputs, 1), torch.cat(singles, 1), 0.05, "outputs")


def test_the_window_moves_within_its_own_rows() -> None:
    layer = Layer(SMALL)
    for accepted in (0, 1, 5, 9):
        pools = layer.copy()
        layer.run(pools, layer.projected[:1, :2], place([1], [accepted]))
        wanted = torch.cat(
            (layer.pools.conv_rows[1, accepted:][:3], layer.projected[0, :2, : SMALL.conv_dim])
        )
        assert torch.equal(pools.conv_rows[1, :5], wanted)


def test_the_engines_replay_scheme_reads_the_pools() -> None:
    layer, slot = Layer(SMALL), torch.tensor([1], device=DEVICE)
    pools = layer.copy()
    layer.run(pools, layer.projected[:1, :5], place([1], [2]))
    held = list(pools[1:])
    like = SCHEMES["replay"].hold(pools.state, layer.room, torch.float32)
    assert [pool.shape for pool in held] == [pool.shape for pool in like]
    count = torch.tensor([3], device=DEVICE)
    wanted = SCHEMES["replay"].committed(held, slot, count, torch.float32, Arithmetic.plain)
    layer.run(pools, layer.projected[:1, 3:4], place([1], [3]))
    assert_close(pools.state[1], wanted[0], 1e-6)


def test_large_gates_do_not_overflow() -> None:
    layer = Layer(SMALL)
    layer.projected[..., -2 * SMALL.value_heads :] *= 200
    pools, wanted = layer.copy(), layer.copy()
    where = place([1], [1])
    projected = layer.projected[:1, :3]
    out = layer.run(pools, projected, where)
    assert torch.isfinite(out).all()
    assert_close(out, gdn_round_reference(projected, layer.weights, wanted, where, SMALL, EPS), 1e-3)


def test_rounds_that_do_not_fit_are_refused() -> None:
    layer = Layer(SMALL, room=2)
    with pytest.raises(ValueError, match="T ≤ 2 rows"):
        layer.run(layer.copy(), layer.projected[:, :3], place([0, 1], [1, 1]))
