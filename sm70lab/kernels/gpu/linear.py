"""Products of one to nine rows with a float16 weight matrix, at the speed of reading the weights.

y[T, N] = x[T, K] · W[N, K]ᵀ, each weight read once. Two kernels with one interface:

- ``_linear_dot`` (sm_80 and later) pads the rows to 16 and uses the tensor cores. One compiled
  kernel serves every T, so a row has the bits that it has alone.
- ``_linear_fma`` (every device) multiplies and adds in float32 in one explicit order per row. It is
  compiled per T; the order of operations of a row is the same in each.

Small matrices split K over ``Tile.split`` programs. Each part is stored as float32 and whoever reads
the result adds the parts in order (``norm.add_rms_norm`` does): no atomics, the same bits each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from sm70lab.kernels.gpu.capability import has_tensor_core_dots, shared_memory
from sm70lab.kernels.gpu.cases import CompileCase
from sm70lab.kernels.gpu.launch import launch_options, let_next_kernel_start, wait_for_kernels_before

MAX_ROWS = 9
PADDED_ROWS = 16  # of a tensor-core operand

PLAIN, RESIDUAL, SWIGLU, SCALED = 0, 1, 2, 3  # epilogues

# ---------------------------------------------------------------- reference


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x·Wᵀ (+ residual) in float32: x [T, K], weight [N, K], residual [T, N] → [T, N]."""
    y = F.linear(x.float(), weight.float())
    return y if residual is None else y + residual.float()


def linear_parts_reference(x: torch.Tensor, weight: torch.Tensor, split: int) -> torch.Tensor:
    """x·Wᵀ in ``split`` equal parts of K, float32 [split, T, N]."""
    parts = zip(x.float().chunk(split, 1), weight.float().chunk(split, 1), strict=True)
    return torch.stack([F.linear(*part) for part in parts])


def int8_linear_reference(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(x·codesᵀ)·scale in float32: x [T, K], codes int8 [N, K], scale [N] → [T, N]."""
    return F.linear(x.float(), codes.float()) * scale


def swiglu_reference(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """silu(x·gateᵀ) ⊙ x·upᵀ in float32: gate and up stacked in gate_up [2·inner, K] → [T, inner]."""
    gate, up = F.linear(x.float(), gate_up.float()).chunk(2, dim=-1)
    return F.silu(gate) * up


# ---------------------------------------------------------------- every kernel's end


@triton.jit
def store_product(y, up, out, residual, at, col, mask, EPILOGUE: tl.constexpr):
    """The epilogue and the store. ``up`` is SwiGLU's; of SCALED, ``residual`` holds the columns' scales."""
    if EPILOGUE == 1:
        y += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if EPILOGUE == 2:
        y = y / (1.0 + tl.exp(-y)) * up
    if EPILOGUE == 3:
        y *= tl.load(residual + col, mask=mask, other=0.0)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------- tensor cores


# Four codes c as float16: c + 128 in the low byte of float16 1024 is 1152 + c. A conversion of the
# hardware's takes longer than reading the code.
_HALVES = tl.constexpr(
    "{ .reg .b32 t, low, high; xor.b32 t, $2, 0x80808080;"
    " prmt.b32 low, t, 0x64646464, 0x4140; prmt.b32 high, t, 0x64646464, 0x4342;"
    " sub.rn.f16x2 $0, low, $3; sub.rn.f16x2 $1, high, $3; }"
)


@triton.jit
def _as_float16(w, PAIRED: tl.constexpr):
    """int8 codes as float16, exact. PAIRED: in assembly, which the interpreter lacks."""
    if not PAIRED:
        return w.to(tl.float16)
    bias = tl.full(w.shape, 1152.0, tl.float16)
    return tl.inline_asm_elementwise(_HALVES, "=r,=r,r,r,r", [w, bias], tl.float16, is_pure=True, pack=4)


@triton.jit(do_not_specialize=["rows"])  # one compiled kernel for every T
def _linear_dot(
    x,
    weight,
    out,
    residual,
    rows,
    n,
    k,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    PAIRED: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    span = k // SPLIT
    weights = weight + col.to(tl.int64)[:, None] * k + (part * span + step)[None, :]
    ups = weights + n.to(tl.int64) * k if EPILOGUE == 2 else weights  # up follows gate
    wait_for_kernels_before(PDL)
    inputs = x + row[:, None] * k + (part * span + step)[None, :]
    if WEIGHTS_FIRST:
        acc = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
        acc_up = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    else:
        acc = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        acc_up = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for begin in range(0, span, BLOCK_K):
        left = (begin + step < span)[None, :]
        x_mask = (row < rows)[:, None] if EVEN_K else (row < rows)[:, None] & left
        w_mask = (col < n)[:, None] if EVEN_K else (col < n)[:, None] & left
        tile = tl.load(inputs + begin, mask=x_mask, other=0.0)
        w = tl.load(weights + begin, mask=w_mask, other=0, eviction_policy="evict_first")
        if weight.dtype.element_ty == tl.int8:
            w = _as_float16(w, PAIRED)
        acc = tl.dot(w, tl.trans(tile), acc) if WEIGHTS_FIRST else tl.dot(tile, tl.trans(w), acc)
        if EPILOGUE == 2:
            up = tl.load(ups + begin, mask=w_mask, other=0.0, eviction_policy="evict_first")
            acc_up = (
                tl.dot(up, tl.trans(tile), acc_up) if WEIGHTS_FIRST else tl.dot(tile, tl.trans(up), acc_up)
            )
    # Earlier, the next kernel's programs would settle on this one's multiprocessors unevenly.
    let_next_kernel_start(PDL)
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    at = (part * rows + row)[:, None] * n + col[None, :]
    mask = (row < rows)[:, None] & (col < n)[None, :]
    store_product(acc, acc_up, out, residual, at, col[None, :], mask, EPILOGUE)


# ---------------------------------------------------------------- plain multiply and add


@triton.jit
def eighths(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [ROWS, 8·COLUMNS] as float32: its columns 0, 8, 16, …, its columns 1, 9, …, and so on.

    Eight neighbours are one 16-byte load of one thread, so nothing moves between threads.
    """
    x = tl.reshape(x.to(tl.float32), [ROWS, COLUMNS, 2, 2, 2])
    even, odd = tl.split(x)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    x0, x4 = tl.split(a)
    x2, x6 = tl.split(c)
    x1, x5 = tl.split(b)
    x3, x7 = tl.split(d)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def multiply_add(x, w, acc):
    """acc + Σ x_j·w_j for j = 0..7, in that order, each step one fused multiply-add."""
    for j in tl.static_range(8):
        acc = tl.fma(x[j], w[j], acc)
    return acc


@triton.jit
def _part(pointers, left, EVEN_K: tl.constexpr):
    return tl.load(pointers) if EVEN_K else tl.load(pointers, mask=left, other=0)


@triton.jit
def _linear_fma(
    x,
    weight,
    out,
    residual,
    n,
    k,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PDL: tl.constexpr,
):
    LANES: tl.constexpr = BLOCK_K // 8
    part = tl.program_id(1)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    span = k // SPLIT
    source = tl.minimum(col, n - 1).to(tl.int64)  # columns beyond n repeat the last: no mask in the loop
    weights = weight + source[:, None] * k + (part * span + step)[None, :]
    ups = weights + n.to(tl.int64) * k if EPILOGUE == 2 else weights  # up follows gate
    let_next_kernel_start(PDL)
    wait_for_kernels_before(PDL)
    inputs = x + (part * span + step)[None, :]
    acc = ()
    for _ in tl.static_range(ROWS):
        acc = acc + (tl.zeros((BLOCK_N, LANES), dtype=tl.float32),)
    acc_up = acc
    for begin in range(0, span, BLOCK_K):
        left = (begin + step < span)[None, :]
        w = eighths(_part(weights + begin, left, EVEN_K), BLOCK_N, LANES)
        if EPILOGUE == 2:
            up = eighths(_part(ups + begin, left, EVEN_K), BLOCK_N, LANES)
        sums = ()
        sums_up = ()
        for t in tl.static_range(ROWS):
            tile = eighths(_part(inputs + t * k + begin, left, EVEN_K), 1, LANES)
            sums = sums + (multiply_add(tile, w, acc[t]),)
            if EPILOGUE == 2:
                sums_up = sums_up + (multiply_add(tile, up, acc_up[t]),)
            else:
                sums_up = sums_up + (acc_up[t],)
        acc = sums
        acc_up = sums_up
    for t in tl.static_range(ROWS):
        y, up = tl.sum(acc[t], axis=1), tl.sum(acc_up[t], axis=1)
        store_product(y, up, out, residual, (part * ROWS + t) * n + col, col, col < n, EPILOGUE)


# ---------------------------------------------------------------- tiles


@dataclass(frozen=True)
class Tile:
    """How a product is cut: ``dot`` chooses the kernel, the rest are its sizes."""

    dot: bool
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1  # of the software pipeline: sm_80 and later
    split: int = 1  # parts of K
    weights_first: bool = False  # W·xᵀ, which Hopper's tensor cores take from shared memory, or x·Wᵀ

    def shared_bytes(self, swiglu: bool) -> int:
        """Shared memory that the pipeline of ``_linear_dot`` takes."""
        return (self.block_n * (2 if swiglu else 1) + PADDED_ROWS) * self.block_k * 2 * self.num_stages


SMALL = 4_000_000  # elements of a matrix that takes longer to launch than to read

# Measured on one H200 at the 9B shape (benchmarks/kernels_gpu.py), from the tiles tried there; the small
# ones and the middle one in whole rounds of 0.8B and 27B (benchmarks/decode_gpu.py).
DOT_SWIGLU = Tile(True, 32, 128, 2, 3)
DOT_HEAD = Tile(True, 64, 128, 4, 3, weights_first=True)  # the vocabulary
DOT_WIDE = Tile(True, 64, 128, 4, 4, weights_first=True)  # input projections
DOT_NARROW = Tile(True, 64, 256, 4, 3, split=2, weights_first=True)  # hidden × hidden
DOT_DEEP = Tile(True, 64, 128, 4, 6, split=2, weights_first=True)  # hidden × inner
DOT_MIDDLE = Tile(True, 64, 128, 4, 5, split=2, weights_first=True)  # two on a multiprocessor: 27B's hidden
DOT_INT8 = Tile(True, 64, 256, 4, 4)
DOT_SMALL = Tile(True, 16, 64, 2, 4)
DOT_SMALL_PARTS = Tile(True, 16, 64, 2, 4, split=4)
FMA_ONE = Tile(False, 1, 2048, 8)  # one row, no promise to match more rows
FMA_ROWS = Tile(False, 4, 512, 2)  # any number of rows: the order in a row is the tile's
FMA_SWIGLU = Tile(False, 2, 512, 2)


def choose(
    n: int,
    k: int,
    rows: int,
    like: torch.Tensor,
    exact: bool,
    swiglu: bool = False,
    parts: bool = False,
    int8: bool = False,
) -> Tile:
    """The tile for y[rows, n] = x[rows, k]·Wᵀ (W has 2n rows for SwiGLU). Its one table.

    ``like``: a tensor of the operands' device and dtype; float32 never takes the tensor cores.

    ``exact``: the same for every number of rows, so that each has the bits that it has alone.
    ``parts``: the reader adds the parts of K, so there may be several.
    """
    dots = has_tensor_core_dots(like.device) and like.dtype == torch.float16
    # A cut block of K idles most of its lanes, and a small matrix has too few columns.
    one = rows == 1 and not exact and k % FMA_ONE.block_k == 0 and n * k >= SMALL
    if not dots or (one and not int8):
        if one:
            return FMA_ONE
        return FMA_SWIGLU if swiglu else FMA_ROWS
    if n * k < SMALL or k % 128:
        tile = DOT_SMALL if k < 1024 else DOT_SMALL_PARTS  # then a part fills its pipeline
    elif int8:
        tile = DOT_INT8
    elif swiglu:
        tile = DOT_SWIGLU
    elif n > 65_536:
        tile = DOT_HEAD
    elif n > 8_192:
        tile = DOT_WIDE
    elif n > 4_096 and parts:
        tile = DOT_MIDDLE
    else:
        tile = DOT_NARROW if k < 8_192 else DOT_DEEP
    if not parts or k % (tile.split * tile.block_k):
        tile = replace(tile, split=1)
    while tile.shared_bytes(swiglu) > shared_memory(like.device):
        tile = replace(tile, num_stages=tile.num_stages - 1)
    return tile


# ---------------------------------------------------------------- launches


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    epilogue: int,
    tile: Tile,
) -> None:
    """One product with a given tile; the functions below choose it. ``out`` [T, n], or [split, T, n]."""
    rows, k = x.shape
    n = out.shape[-1]
    wanted = (2 * n if epilogue == SWIGLU else n, k)
    if not 1 <= rows <= MAX_ROWS or k % (8 * tile.split) or tuple(weight.shape) != wanted:
        raise ValueError(
            f"rows {tuple(x.shape)} with a weight {tuple(weight.shape)}: 1 to {MAX_ROWS} rows of a multiple "
            f"of {8 * tile.split} values, and a weight {wanted}"
        )
    if out.numel() != tile.split * rows * n or out.shape[-2] != rows:
        raise ValueError(f"out {tuple(out.shape)}: {tile.split} × {rows} rows of {n}")
    if epilogue == RESIDUAL and (residual is None or residual.shape != (rows, n)):
        raise ValueError(f"a residual of {(rows, n)}")
    if tile.dot and x.dtype != torch.float16:
        raise ValueError(f"tensor cores take float16 rows, not {x.dtype}")
    if not (x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()):
        raise ValueError("a product takes contiguous rows, weights and outputs")
    even = k % (tile.split * tile.block_k) == 0
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    options |= launch_options(x.device)
    grid = (triton.cdiv(n, tile.block_n), tile.split)
    tensors = (x, weight, out, out if residual is None else residual)
    sizes = (tile.block_n, tile.block_k, tile.split, even, epilogue)
    if tile.dot:
        order = (tile.weights_first, x.device.type == "cuda")
        _linear_dot[grid](*tensors, rows, n, k, PADDED_ROWS, *sizes, *order, **options)
    else:
        _linear_fma[grid](*tensors, n, k, rows, *sizes, **options)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    exact: bool = True,
) -> torch.Tensor:
    """x·Wᵀ (+ residual) into ``out`` [T, N]; x [T, K], weight [N, K], all float16 or float32.

    Raises ``ValueError`` for more than nine rows and for shapes that don't fit.
    """
    n, k = weight.shape
    tile = choose(n, k, len(x), x, exact)
    epilogue = PLAIN if residual is None else RESIDUAL
    launch(x, weight, out, residual, epilogue, tile)
    return out


def int8_linear(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, exact: bool = True
) -> torch.Tensor:
    """(x·codesᵀ)·scale into ``out`` [T, N]: codes int8 [N, K], scale float32 [N]."""
    n, k = codes.shape
    tile = choose(n, k, len(x), x, exact, int8=True)
    launch(x, codes, out, scale, SCALED, tile)
    return out


def parts_of(n: int, k: int, rows: int, like: torch.Tensor, exact: bool = True) -> int:
    """How many parts ``linear_parts`` makes of a weight of [n, k]."""
    return choose(n, k, rows, like, exact, parts=True).split


def linear_parts(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, exact: bool = True
) -> torch.Tensor:
    """x·Wᵀ in equal parts of K, to be added in order: ``out`` float32 [``parts_of``(…), T, N]."""
    n, k = weight.shape
    tile = choose(n, k, len(x), x, exact, parts=True)
    if len(out) != tile.split:
        raise ValueError(f"{len(out)} parts of a product that is made in {tile.split}")
    launch(x, weight, out, None, PLAIN, tile)
    return out


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor, exact: bool = True) -> torch.Tensor:
    """silu(x·gateᵀ) ⊙ x·upᵀ into ``out`` [T, inner]; gate and up stacked in gate_up [2·inner, K]."""
    inner, k = gate_up.shape[0] // 2, gate_up.shape[1]
    tile = choose(inner, k, len(x), x, exact, swiglu=True)
    launch(x, gate_up, out, None, SWIGLU, tile)
    return out


# ---------------------------------------------------------------- what sm_70 launches


DTYPES = (("*fp16", "*fp16"), ("*fp16", "*fp32"), ("*fp32", "*fp32"))  # of operands and output


def compile_cases() -> Iterator[CompileCase]:
    """Every tile of the plain kernel, with every number of rows and epilogue. A V100 launches no dots."""
    signature = {"n": "i32", "k": "i32"}
    for tile, epilogues in (
        (FMA_ONE, (PLAIN, RESIDUAL, SWIGLU, SCALED)),
        (FMA_ROWS, (PLAIN, RESIDUAL, SCALED)),
        (FMA_SWIGLU, (SWIGLU,)),
    ):
        for rows in range(1, 2 if tile is FMA_ONE else MAX_ROWS + 1):
            for epilogue in epilogues:
                for even in (True,) if tile is FMA_ONE else (True, False):
                    for given, out in DTYPES:
                        if given != out and epilogue not in (PLAIN, SCALED):
                            continue
                        if epilogue == SCALED and out != "*fp32":  # draft logits
                            continue
                        constexprs = {
                            "ROWS": rows, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
                            "SPLIT": tile.split, "EVEN_K": even, "EPILOGUE": epilogue, "PDL": False,
                        }  # fmt: skip
                        name = ("", " + residual", " swiglu", " int8")[epilogue]
                        label = (
                            f"linear{name}, {rows} rows, {tile.block_n}×{tile.block_k}"
                            f"{'' if even else ' uneven'} {given[1:]} → {out[1:]}"
                        )
                        types = dict.fromkeys(("x", "weight", "residual"), given) | signature | {"out": out}
                        if epilogue == SCALED:
                            types |= {"weight": "*i8", "residual": "*fp32"}
                        yield CompileCase(
                            _linear_fma, types, constexprs, tile.num_warps, 1, label, ("n", "k")
                        )
