"""Products with 4-bit weights against plain PyTorch: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from sm70lab.kernels.gpu import int4, linear
from sm70lab.kernels.gpu.int4 import AWQ_ORDER, GROUP, Int4Weight, Tile
from tests.engine.assertions import assert_close

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TILES = {
    "fma": Tile(False, 2, 4),
    "dot": Tile(True, 2, 2),
    "dot, three ahead": Tile(True, 4, 2, ahead=3, unroll=2),
}
if not INTERPRETED:  # large: more warps side by side, and fewer registers than nine rows get
    TILES |= {"chosen": int4.DOT, "chosen for SwiGLU": int4.DOT_SWIGLU}
    TILES |= {"chosen for parts": replace(int4.DOT_NARROW, split=1)}
EPILOGUES = (linear.PLAIN, linear.RESIDUAL, linear.SWIGLU)


class Checkpoint:
    """A matrix [N, K] as AWQ stores it, made value by value from its definition."""

    def __init__(self, n: int, k: int) -> None:
        g = torch.Generator().manual_seed(n + k)
        self.q = torch.randint(0, 16, (n, k), generator=g)
        self.z = torch.randint(0, 16, (n, k // GROUP), generator=g)
        self.s = (torch.rand(n, k // GROUP, generator=g) * 0.02 + 0.001).half()

    def words(self, values: torch.Tensor) -> torch.Tensor:
        """[R, N] → int32 [R, N/8] in AWQ's order of outputs."""
        rows, n = values.shape
        out = torch.zeros(rows, n // 8, dtype=torch.int64)
        for nibble, output in enumerate(AWQ_ORDER):
            out |= values[:, output::8] << (4 * nibble)
        return torch.where(out >= 2**31, out - 2**32, out).int()

    def weight(self) -> Int4Weight:
        parts = (self.words(self.q.t()), self.words(self.z.t()), self.s.t().contiguous())
        return int4.from_awq(*(part.to(DEVICE) for part in parts))

    def matrix(self) -> torch.Tensor:
        zeros, scales = (x.repeat_interleave(GROUP, 1) for x in (self.z, self.s))
        return ((self.q - zeros).float() * scales.float()).to(DEVICE)


class Case:
    """Nine rows of ``k`` values and a 4-bit weight for ``n`` outputs."""

    def __init__(self, n: int, k: int, epilogue: int = linear.PLAIN) -> None:
        self.epilogue, self.n = epilogue, n
        g = torch.Generator().manual_seed(n + k)
        self.checkpoint = Checkpoint(2 * n if epilogue == linear.SWIGLU else n, k)
        self.weight = self.checkpoint.weight()
        self.x = torch.randn(9, k, generator=g).half().to(DEVICE)
        self.residual = torch.randn(9, n, generator=g).half().to(DEVICE)

    def run(self, tile: Tile, rows: int) -> torch.Tensor:
        out = torch.empty(rows, self.n, device=DEVICE)
        residual = self.residual[:rows] if self.epilogue == linear.RESIDUAL else None
        int4.launch(self.x[:rows], self.weight, out, residual, self.epilogue, tile)
        return out

    def reference(self, rows: int) -> torch.Tensor:
        y = F.linear(self.x[:rows].float(), self.checkpoint.matrix())
        if self.epilogue == linear.SWIGLU:
            gate, up = y.chunk(2, dim=-1)
            return F.silu(gate) * up
        return y + self.residual[:rows].float() if self.epilogue == linear.RESIDUAL else y


def test_a_checkpoint_is_read_value_by_value() -> None:
    checkpoint = Checkpoint(16, 256)
    weight = checkpoint.weight()
    assert torch.equal(int4.dequantised(weight), checkpoint.matrix())
    assert torch.equal(int4.packed(int4.unpacked(weight.words)), weight.words)
    assert_close(
        int4.linear_reference(*_first(weight)), _first(weight)[0].float() @ checkpoint.matrix().t(), 1e-6
    )
    with pytest.raises(ValueError, match="groups of 128"):
        int4.from_awq(torch.zeros(64, 2).int(), torch.zeros(1, 2).int(), torch.zeros(1, 16))
    with pytest.raises(ValueError, match="24 outputs: only multiples of 16"):
        int4.from_awq(torch.zeros(128, 3).int(), torch.zeros(1, 3).int(), torch.zeros(1, 24))
    with pytest.raises(ValueError, match="scales in torch"):
        int4.from_awq(torch.zeros(128, 2).int(), torch.zeros(1, 2).int(), torch.zeros(1, 16))


def _first(weight: Int4Weight) -> tuple[torch.Tensor, Int4Weight]:
    return torch.ones(1, GROUP * weight.words.shape[1], device=DEVICE).half(), weight


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("rows", [1, 5, 9])
def test_a_product_is_the_reference(rows: int, tile: Tile) -> None:
    case = Case(48, 384)
    assert_close(case.run(tile, rows), case.reference(rows), 2e-5)


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues_and_a_row_alone(epilogue: int, tile: Tile) -> None:
    if epilogue == linear.SWIGLU:
        tile = replace(tile, blocks=max(tile.blocks, 2))  # of gate and of up
    case = Case(48 if INTERPRETED else 1072, 256 if INTERPRETED else 2048, epilogue)
    whole = case.run(tile, 9)
    assert_close(whole, case.reference(9), 2e-5)
    for rows in (1, 4) if INTERPRETED else range(1, 9):
        assert torch.equal(case.run(tile, rows), whole[:rows])


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_parts_of_k_add_up_to_the_product(tile: Tile) -> None:
    case = Case(16, 512)
    out = torch.empty(2, 3, 16, device=DEVICE)
    int4.launch(case.x[:3], case.weight, out, None, linear.PLAIN, replace(tile, split=2))
    assert_close(out.sum(0), case.reference(3), 2e-5)


def test_the_chosen_tiles_compute_the_products() -> None:
    for n, k in [(16, 128)] if INTERPRETED else [(1024, 512), (4096, 4096)]:
        case, pair = Case(n, k), Case(n, k, linear.SWIGLU)
        x = case.x[:2]
        assert_close(int4.linear(x, case.weight, x.new_empty(2, n)), case.reference(2), 1e-3)
        parts = torch.empty(int4.parts_of(n, k, DEVICE), 2, n, device=DEVICE)
        assert_close(int4.linear_parts(x, case.weight, parts).sum(0), case.reference(2), 2e-5)
        assert_close(int4.swiglu(pair.x[:2], pair.weight, x.new_empty(2, n)), pair.reference(2), 1e-3)


def test_products_that_do_not_fit_are_refused() -> None:
    """Each would read or write beyond a tensor."""
    case = Case(48, 256, linear.RESIDUAL)
    x, weight, tile = case.x[:5], case.weight, TILES["dot"]
    out, residual = torch.empty(5, 48, device=DEVICE), case.residual[:5]
    apart = torch.empty(256 + 8, device=DEVICE).half()[4:260].view(1, 256)

    def launch(**more: object) -> None:
        given = {"x": x, "weight": weight, "out": out, "residual": residual} | more
        int4.launch(given["x"], given["weight"], given["out"], given["residual"], linear.RESIDUAL, tile)  # type: ignore[arg-type]

    launch()
    for more, word in (
        ({"x": case.x.repeat(2, 1)[:10], "out": torch.empty(10, 48, device=DEVICE)}, "1 to 9 rows"),
        ({"x": x[:, :128].contiguous()}, "words"),
        ({"x": x.float()}, "float16"),
        ({"x": apart, "out": out[:1], "residual": residual[:1]}, "a multiple of 16 bytes"),
        ({"out": torch.empty(2, 48, device=DEVICE)}, "out"),
        ({"out": torch.empty(5, 96, device=DEVICE)[:, ::2]}, "out"),
        ({"out": torch.empty(5, 40, device=DEVICE)}, "a multiple of 16 outputs"),
        ({"weight": weight._replace(pairs=weight.pairs[:1])}, "pairs"),
        ({"weight": weight._replace(words=weight.words[:1])}, "words"),
        ({"residual": residual[:2]}, "residual"),
    ):
        with pytest.raises(ValueError, match=word):
            launch(**more)
    with pytest.raises(ValueError, match="3 parts of a product that is made in"):
        int4.linear_parts(x, weight, torch.empty(3, 5, 48, device=DEVICE))
