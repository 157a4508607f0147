"""Products of a few rows against plain PyTorch: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from sm70lab.kernels.gpu import linear
from sm70lab.kernels.gpu.linear import Tile
from tests.engine.assertions import assert_close

LARGE = [(768, 320), (1024, 3584), (4096, 4096), (4096, 12288), (5120, 6144), (12352, 4096)]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TILES = {
    "fma": Tile(False, 8, 64, 1),
    "dot": Tile(True, 16, 64, 2, 3),
    "dot, weights first": Tile(True, 64, 64, 4, 3, weights_first=True),
}
EPILOGUES = (linear.PLAIN, linear.RESIDUAL, linear.SWIGLU, linear.SCALED)


class Case:
    """Nine rows of ``k`` values and a weight for ``n`` outputs."""

    def __init__(self, n: int, k: int, epilogue: int = linear.PLAIN) -> None:
        g = torch.Generator().manual_seed(n + k)
        self.epilogue, self.n = epilogue, n
        self.x = torch.randn(9, k, generator=g).half().to(DEVICE)
        stacked = 2 * n if epilogue == linear.SWIGLU else n
        self.weight = (torch.randn(stacked, k, generator=g) * k**-0.5).half().to(DEVICE)
        self.residual = torch.randn(9, n, generator=g).half().to(DEVICE)
        if epilogue == linear.SCALED:
            self.weight = torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8).to(DEVICE)
            self.scale = (torch.rand(n, generator=g) / 127 * k**-0.5).to(DEVICE)

    def run(self, tile: Tile, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        out = torch.empty(rows, self.n, dtype=dtype, device=DEVICE)
        beside = self.residual[:rows] if self.epilogue == linear.RESIDUAL else None
        beside = self.scale if self.epilogue == linear.SCALED else beside
        linear.launch(self.x[:rows], self.weight, out, beside, self.epilogue, tile)
        return out

    def reference(self, rows: int) -> torch.Tensor:
        if self.epilogue == linear.SWIGLU:
            return linear.swiglu_reference(self.x[:rows], self.weight)
        if self.epilogue == linear.SCALED:
            return linear.int8_linear_reference(self.x[:rows], self.weight, self.scale)
        residual = self.residual[:rows] if self.epilogue == linear.RESIDUAL else None
        return linear.linear_reference(self.x[:rows], self.weight, residual)


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("rows", range(1, 10))
def test_a_product_is_the_reference(rows: int, tile: Tile) -> None:
    case = Case(19, 128)
    assert_close(case.run(tile, rows), case.reference(rows), 1e-5)


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("k", [40, 192])  # a part of a step, and whole steps
def test_epilogues(k: int, epilogue: int, tile: Tile) -> None:
    case = Case(19, k, epilogue)
    assert_close(case.run(tile, 3), case.reference(3), 1e-5)
    assert_close(case.run(tile, 3, torch.float16), case.reference(3), 1e-3)


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("n", "k"), [(19, 64)] if INTERPRETED else [(70, 64), (4096, 4096), (257, 320)])
def test_a_row_has_the_bits_that_it_has_alone(n: int, k: int, epilogue: int, tile: Tile) -> None:
    case = Case(n, k, epilogue)
    whole = case.run(tile, 9)
    for rows in (1, 4) if INTERPRETED else range(1, 9):
        assert torch.equal(case.run(tile, rows), whole[:rows])


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_parts_of_k_add_up_to_the_product(tile: Tile) -> None:
    case = Case(19, 256)
    out = torch.empty(2, 3, 19, device=DEVICE)
    linear.launch(case.x[:3], case.weight, out, None, linear.PLAIN, replace(tile, split=2))
    assert_close(out, linear.linear_parts_reference(case.x[:3], case.weight, 2), 1e-5)


def test_poison_around_the_rows_stays_outside() -> None:
    """Rows beyond T and columns beyond K are never part of a sum."""
    for tile in TILES.values():
        case = Case(20, 40)
        memory = torch.full((12, 40), torch.nan, dtype=torch.float16, device=DEVICE)
        memory[:2] = case.x[:2]
        case.x = memory
        assert torch.isfinite(case.run(tile, 2)).all()


@pytest.mark.parametrize("exact", [True, False])
def test_the_chosen_tile_computes_the_product(exact: bool) -> None:
    for n, k in [(8, 64)] if INTERPRETED else LARGE:
        for rows in (1, 5):
            case = Case(n, k)
            x = case.x[:rows]
            out = linear.linear(x, case.weight, x.new_empty(rows, n), exact=exact)
            assert_close(out, case.reference(rows), 1e-3)
            parts = linear.parts_of(n, k, rows, x, exact)
            split = linear.linear_parts(x, case.weight, torch.empty(parts, rows, n, device=DEVICE), exact)
            assert_close(split.sum(0), case.reference(rows), 1e-5)
            if exact:  # or a single row may be cut otherwise
                alone = linear.linear_parts(x[:1], case.weight, torch.empty_like(split[:, :1]))
                assert torch.equal(alone, split[:, :1])
            pair = Case(n, k, linear.SWIGLU)
            gated = linear.swiglu(pair.x[:rows], pair.weight, x.new_empty(rows, n), exact)
            assert_close(gated, pair.reference(rows), 1e-3)


def test_one_tile_for_every_number_of_rows_where_bits_must_agree() -> None:
    like = torch.empty(0, dtype=torch.float16, device=DEVICE)
    for n, k, swiglu in ((4096, 4096, False), (12288, 4096, True), (248320, 4096, False)):
        tiles = {
            linear.choose(n, k, rows, like, exact=True, swiglu=swiglu, parts=True) for rows in range(1, 10)
        }
        assert len(tiles) == 1


def test_one_fast_row_takes_its_own_tile_only_where_blocks_of_k_are_whole() -> None:
    like = torch.empty(0, dtype=torch.float16, device=DEVICE)
    for n, k, own in ((4096, 4096, True), (4096, 2560, False), (4096, 1024, False), (1024, 2048, False)):
        tile = linear.choose(n, k, 1, like, exact=False)
        assert (tile == linear.FMA_ONE) is own
        assert own or tile == linear.choose(n, k, 1, like, exact=True)


def test_float32_keeps_its_precision() -> None:
    case = Case(19, 128)
    x, weight = case.x[:2].float() / 3, case.weight.float() / 3
    out = linear.linear(x, weight, torch.empty(2, 19, device=DEVICE))
    assert_close(out, linear.linear_reference(x, weight), 1e-6)
    with pytest.raises(ValueError, match="float16 rows"):
        linear.launch(x, weight, out, None, linear.PLAIN, TILES["dot"])


def test_products_that_do_not_fit_are_refused() -> None:
    case = Case(16, 64)
    with pytest.raises(ValueError, match="1 to 9 rows"):
        linear.linear(case.x.repeat(2, 1), case.weight, case.x.new_empty(18, 16))
    with pytest.raises(ValueError, match="contiguous"):
        linear.linear(case.x[:, :32], case.weight[:, :32], case.x.new_empty(9, 16))
    with pytest.raises(ValueError, match="out "):
        linear.linear(case.x[:5], case.weight, case.x.new_empty(2, 16))
    with pytest.raises(ValueError, match="a residual of"):
        linear.linear(case.x[:5], case.weight, case.x.new_empty(5, 16), case.x.new_empty(2, 16))
