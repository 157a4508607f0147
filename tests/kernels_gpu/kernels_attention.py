"""The attention kernels against their reference, on a GPU or in the interpreter (``test_interpreted``)."""

from __future__ import annotations

import os

import pytest
import torch

from sm70lab.engine.kv_cache import gated_attention as engine_attention
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.kernels.attention import inverse_frequencies, rotary_table
from sm70lab.kernels.gpu import attention
from tests.engine.assertions import assert_close

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
EPS = 1e-6
LIMITS = {torch.float16: 2e-3, torch.float32: 2e-6}
# Both kernels run on every device that is not too old for them, and in the interpreter.
KINDS = [(torch.float16, True), (torch.float16, False), (torch.float32, False)]


class Case:
    """Random inputs of ``tokens`` rows a sequence behind ``start`` rows of history, all else NaN."""

    def __init__(
        self,
        start: list[int],
        tokens: int,
        dtype: torch.dtype,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 64,
        capacity: int = 0,
        rotary: int = 0,
        dot: bool = False,
    ) -> None:
        g = torch.Generator().manual_seed(len(start) + tokens + sum(start))

        def random(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, generator=g).to(kind).to(DEVICE)

        batch, self.capacity = len(start), capacity or max(start) + tokens + 3
        self.dim, self.dot = dim, dot
        self.sizes = [2 * heads * dim, kv_heads * dim, kv_heads * dim]
        self.projected = random(batch, tokens, sum(self.sizes))  # q, k and v are parts of it
        self.norms = [1 + 0.3 * random(dim, kind=torch.float32) for _ in range(2)]
        positions = torch.tensor(start)[:, None] + torch.arange(tokens)
        table = rotary_table(positions, inverse_frequencies(rotary or dim // 4, 10_000.0))
        self.cos, self.sin = (x.to(dtype).to(DEVICE) for x in table)
        shape = (batch + 1, kv_heads, self.capacity, dim)
        self.cache = [torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
        self.slots = torch.arange(batch, 0, -1, device=DEVICE)  # not in the order of the batch, and not 0
        self.start = torch.tensor(start, device=DEVICE)
        for part in self.cache:
            for slot, first in zip(self.slots.tolist(), start, strict=True):
                part[slot, :, :first] = random(kv_heads, first, dim)
        self.space = attention.workspace(batch, tokens, heads, self.cache[0])
        for memory in self.space:
            memory.fill_(torch.nan)

    def run(self, first: int = 0, count: int | None = None) -> torch.Tensor:
        """The kernels on rows first..first + count − 1, written into the cache."""
        last = self.projected.shape[1] if count is None else first + count
        rows = self.projected[:, first:last].split(self.sizes, dim=-1)
        turns = self.cos[:, first:last], self.sin[:, first:last]
        where = (*self.cache, self.slots, self.start + first if first else self.start)
        tile = attention.dot_tile() if self.dot else attention.fma_tile(self.dim)
        return attention.gated_attention(*rows, *self.norms, *turns, *where, EPS, self.space, tile=tile)

    def reference(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        cache = [part.clone() for part in self.cache]
        rows = self.projected.split(self.sizes, dim=-1)
        where = (*cache, self.slots, self.start)
        return attention.gated_attention_reference(*rows, *self.norms, self.cos, self.sin, *where, EPS), cache


def check(case: Case, limit: float) -> None:
    wanted, cache = case.reference()
    assert_close(case.run(), wanted, limit, "output")
    for part, other, what in zip(case.cache, cache, ("keys", "values"), strict=True):
        assert torch.equal(part.isnan(), other.isnan()), f"{what}: written elsewhere"
        assert_close(part.nan_to_num(), other.nan_to_num(), limit, what)


@pytest.mark.parametrize(("dtype", "dot"), KINDS)
@pytest.mark.parametrize("tokens", [1, 5] if INTERPRETED else range(1, 10))
def test_it_is_the_reference(tokens: int, dtype: torch.dtype, dot: bool) -> None:
    check(Case([0, 61], tokens, dtype, kv_heads=1, heads=2, dot=dot), LIMITS[dtype])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "dot"),
    [
        (16, 2, 64, 32, True),
        (6, 1, 128, 32, True),
        (2, 1, 128, 32, False),
        (1, 1, 256, 64, False),
        (2, 1, 64, 64, True),
    ],
)
def test_heads_and_their_dimensions(heads: int, kv_heads: int, dim: int, rotary: int, dot: bool) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "rotary": rotary}
    check(Case([66], 3, torch.float16, dot=dot, **shape), LIMITS[torch.float16])


@pytest.mark.long
def test_a_long_context_over_both_sizes_of_parts() -> None:
    """Position 8,192 is the first of a longer part; the second sequence crosses it."""
    check(Case([8400, 8190], 3, torch.float16, heads=2, kv_heads=1, dot=True), LIMITS[torch.float16])


def test_the_reference_is_the_engines_attention() -> None:
    case = Case([40, 7], 4, torch.float32)
    cache = [part.clone() for part in case.cache]
    rows = case.projected.split(case.sizes, dim=-1)
    where = (*cache, case.slots, case.start, EPS, Arithmetic.plain)
    wanted = engine_attention(*rows, *case.norms, case.cos, case.sin, *where)
    assert_close(case.reference()[0], wanted, 2e-6)


def test_rows_beyond_the_capacity_are_not_written() -> None:
    case = Case([62], 5, torch.float32, heads=1, kv_heads=1, capacity=64)
    guard = [part.clone() for part in case.cache]
    out = case.run()
    assert torch.isfinite(out).all()
    for part, before in zip(case.cache, guard, strict=True):
        assert not part[1].isnan().any()
        assert torch.equal(part[0].nan_to_num(), before[0].nan_to_num()), "another slot's rows"


@pytest.mark.parametrize("unit", [64, 128])
def test_parts_cover_every_position_once(unit: int) -> None:
    begins = [attention.part_begin(part, unit) for part in range(attention.parts_of(262_144, unit))]
    assert begins[:2] == [0, unit] and begins == sorted(set(begins))
    for capacity in (1, 64, 65, 4096, 4097, 8192, 8193, 12_288, 12_289, 262_144):
        parts = attention.parts_of(capacity, unit)
        assert attention.part_begin(parts - 1, unit) < capacity <= attention.part_begin(parts, unit), capacity


def test_unfit_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 80"):
        Case([3], 1, torch.float32, dim=80).run()


@pytest.mark.skipif(INTERPRETED, reason="NumPy's products depend on their number of rows")
@pytest.mark.parametrize(("dtype", "dot"), KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 4, 256), (24, 4, 256), (16, 2, 256), (4, 2, 64)])
@pytest.mark.parametrize("start", [0, 4093])
def test_a_row_has_the_bits_that_it_has_alone(
    start: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, dot: bool
) -> None:
    tokens = 9
    case = Case([start], tokens, dtype, heads=heads, kv_heads=kv_heads, dim=dim, dot=dot)
    together = case.run()
    cache = [part.clone() for part in case.cache]
    for count in (1, 2, 3, 5):
        for first in range(0, tokens - count + 1, count):
            found = case.run(first, count)
            assert torch.equal(found, together[:, first : first + count]), (count, first)
    for part, before in zip(case.cache, cache, strict=True):
        assert torch.equal(part.nan_to_num(), before.nan_to_num())


@pytest.mark.skipif(INTERPRETED, reason="there are no graphs")
def test_a_graph_follows_the_positions_in_memory() -> None:
    case = Case([10], 3, torch.float16, capacity=400)
    other = Case([300], 3, torch.float16, capacity=400)
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run()
    for name in ("projected", "cos", "sin", "start"):
        getattr(case, name).copy_(getattr(other, name))
    for part, source in zip(case.cache, other.cache, strict=True):
        part.copy_(source)
    case.norms[0].copy_(other.norms[0])
    case.norms[1].copy_(other.norms[1])
    graph.replay()
    assert torch.equal(out, other.run())
