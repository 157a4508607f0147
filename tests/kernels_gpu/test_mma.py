"""The assembly of the 4-bit products, which no interpreter runs, executed by PTX's definition of ``mma``."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from sm70lab.kernels.gpu import int4, mma
from sm70lab.kernels.gpu.cases import CompileCase

LANES = np.arange(32)
GROUP, QUAD = LANES // 4, LANES % 4
Registers = np.ndarray[Any, np.dtype[Any]]  # one value a lane


class Warp:
    """A warp's registers. ``operands``: $0, $1, … of the text, the outputs first."""

    def __init__(self, operands: list[Registers]) -> None:
        self.operands = operands
        self.named: dict[str, Registers] = {}

    def value(self, name: str) -> Registers:
        if name.startswith("0x"):
            return np.full(32, int(name, 16), dtype=np.int64)
        return self.operands[int(name[1:])] if name.startswith("$") else self.named[name]

    def run(self, text: str) -> None:
        for line in text.strip("{} ").split(";"):
            kind, _, rest = line.strip().partition(" ")
            if kind in ("", ".reg"):
                continue
            if kind.startswith("mma"):
                self._multiply(*re.findall(r"\{([^}]*)\}", rest))
                continue
            to, *given = (name.strip() for name in rest.split(","))
            self.named[to] = {
                "and.b32": lambda a, b: self.value(a) & self.value(b),
                "shr.u32": lambda a, b: self.value(a) >> int(b),
                "mov.b32": self.value,
            }[kind](*given)

    def _multiply(self, to: str, a: str, b: str, c: str) -> None:
        """mma.m16n8k16, float16 with float32 sums: the fragments as the PTX manual has them."""
        left, right, total = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for i, name in enumerate(a.split(",")):
            for e in range(2):
                left[GROUP + 8 * (i % 2), 2 * QUAD + e + 8 * (i // 2)] = _half(self.value(name.strip()), e)
        for i, name in enumerate(b.split(",")):
            for e in range(2):
                right[2 * QUAD + e + 8 * i, GROUP] = _half(self.value(name.strip()), e)
        places = [(GROUP + 8 * (i // 2), 2 * QUAD + i % 2) for i in range(4)]
        for place, name in zip(places, c.split(","), strict=True):
            total[place] = self.value(name.strip())
        total += left @ right
        for place, name in zip(places, to.split(","), strict=True):
            self.operands[int(name.strip()[1:])] = total[place]


def _half(register: Registers, which: int) -> Registers:
    return ((register >> (16 * which)) & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)


def _bits(x: torch.Tensor) -> Registers:
    return x.numpy().astype(np.int64) & 0xFFFFFFFF


def test_the_assembly_multiplies_a_block_of_a_group() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (16, 128), generator=generator)
    x = torch.randn(8, 128, generator=generator).half()
    words = _bits(int4.packed(q)[0, 0])  # [2, 32, 4]
    rows = _bits(x.contiguous().view(torch.int32)).reshape(8, 2, 2, 4, 4)  # row, half, c, q, word
    total = [np.zeros(32)] * 4
    sums = [np.zeros(32)] * 4
    for half in range(2):
        given = [rows[GROUP, half, c, QUAD, i] for c in range(2) for i in range(4)]
        products = Warp([*total, *(words[half, :, i] for i in range(4)), *given, *total])
        products.run(mma._PRODUCTS.value)
        ones = Warp([*sums, *given, *sums])
        ones.run(mma._SUMS.value)
        total, sums = products.operands[:4], ones.operands[:4]
    wanted = (q.double() @ x.double().t()).numpy()
    units = (mma.LOW_UNIT.value, mma.HIGH_UNIT.value)
    for i in range(4):
        np.testing.assert_allclose(total[i] / units[i // 2], wanted[GROUP + 8 * (i // 2), 2 * QUAD + i % 2])
        np.testing.assert_allclose(sums[i], x.double().sum(1).numpy()[2 * QUAD + i % 2])


def compiled(tile: int4.Tile, epilogue: int, arch: int, aligned: bool = True) -> Any:
    """The kernel for a card that is not here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict.fromkeys(("x", "words", "pairs"), "*i32") | {"rows": "i32", "n": "i32", "k": "i32"}
    signature |= {"out": "*fp16", "residual": "*fp16"}
    constexprs = {
        "ROW_TILES": 1, "BLOCKS": tile.blocks, "WARPS": tile.warps, "SPLIT": tile.split, "AHEAD": tile.ahead,
        "UNROLL": tile.unroll, "EPILOGUE": epilogue, "ASSEMBLY": True, "PDL": False,
    }  # fmt: skip
    case = CompileCase(int4._int4_mma, signature, constexprs, tile.warps, 1, "", ("n", "k"))
    attributes = case.attributes() if aligned else {}
    source = ASTSource(case.kernel, case.full_signature(), constexprs, attributes)
    options = {"num_warps": tile.warps, "num_stages": 1}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


TILES = [(int4.DOT, 0, 90), (int4.DOT, 0, 80), (int4.DOT_NARROW, 0, 90), (int4.DOT_SWIGLU, 2, 90)]


@pytest.mark.parametrize(("tile", "epilogue", "arch"), TILES)
def test_a_row_of_every_operand_lies_in_one_thread(tile: int4.Tile, epilogue: int, arch: int) -> None:
    kernel = compiled(tile, epilogue, arch)
    assert kernel.asm["ttgir"].count("mma.sync") >= 8 * tile.blocks // 4
    mma.check_layout(kernel.asm["ttgir"], tile.warps)
    with pytest.raises(RuntimeError, match="lays out the operands"):
        mma.check_layout(kernel.asm["ttgir"], 2 * tile.warps)


def test_another_layout_is_found_out() -> None:
    with pytest.raises(RuntimeError, match=r"they need sizePerThread = \[1, 4\]"):
        mma.check_layout(compiled(int4.DOT_SWIGLU, 2, 90, aligned=False).asm["ttgir"], 2)
    with pytest.raises(RuntimeError, match="as none"):
        mma.check_layout("", 2)
