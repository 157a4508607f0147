"""Products of one to nine rows with a 4-bit weight matrix in groups of 128 (AWQ, Lin et al. 2024).

A weight is (q − z)·s: q its 4 bits, z and s the zero and the scale of its group of 128 inputs. A
checkpoint packs eight outputs into a word, [K, N/8]; a product streams inputs, so ``from_awq`` packs
eight inputs into a word, [N, K/8], once at load. Of a group's 32 half words, nibble p of half j is its
input 32·p + j: the same nibble of both halves of a word are two neighbours, as tensor cores take them.
Both kernels multiply a group's q − z, which are exact, and apply its scale to the sum. Order and row
counts are as in ``linear``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from sm70lab.kernels.gpu.capability import has_dependent_launch, has_tensor_core_dots
from sm70lab.kernels.gpu.cases import CompileCase
from sm70lab.kernels.gpu.launch import let_next_kernel_start, wait_for_kernels_before
from sm70lab.kernels.gpu.linear import MAX_ROWS, PADDED_ROWS, PLAIN, RESIDUAL, SWIGLU, eighths

GROUP = 128
FEW_ROWS = 8  # the least columns of a tensor-core product
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a checkpoint's word holds output 8c + AWQ_ORDER[i]


class Int4Weight(NamedTuple):
    """A matrix of [N, K], eight inputs a word: nibble p of a group's half word j is its input 32·p + j."""

    words: torch.Tensor  # int32 [N, K/8]
    groups: torch.Tensor  # int32 [K/128, N]: float16 scale in the low half, float16 zero in the high half


# ---------------------------------------------------------------- reference


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """The eight nibbles of each word, lowest first: int32 [...] → int32 [..., 8]."""
    shifts = torch.arange(0, 32, 4, device=words.device)
    values: torch.Tensor = (words[..., None].long() >> shifts) & 15
    return values.int()


def packed(q: torch.Tensor) -> torch.Tensor:
    """Values 0..15 [N, K] as words [N, K/8]."""
    shifts = torch.arange(0, 32, 4, device=q.device)
    by_nibble = q.unflatten(-1, (-1, 4, 16, 2)).permute(0, 1, 3, 4, 2).flatten(-2)  # [N, K/128, 16, 8]
    words = (by_nibble.long() << shifts).sum(-1)
    signed: torch.Tensor = torch.where(words >= 2**31, words - 2**32, words)
    return signed.int().flatten(-2)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """The reverse of ``packed``."""
    by_nibble = nibbles(words.unflatten(-1, (-1, 16))).unflatten(-1, (2, 4))  # [N, K/128, 16, 2, 4]
    values: torch.Tensor = by_nibble.permute(0, 1, 4, 2, 3)
    return values.flatten(1)


def _outputs_in_order(words: torch.Tensor) -> torch.Tensor:
    """A checkpoint's [R, N/8] words as [R, N] values in the order of the outputs."""
    order = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    values: torch.Tensor = nibbles(words)[..., order]
    return values.flatten(-2)


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> Int4Weight:
    """Repack a checkpoint's matrix: qweight int32 [K, N/8], qzeros int32 [K/128, N/8], scales [K/128, N].

    Raises ``ValueError`` for groups of another size.
    """
    inputs, groups = qweight.shape[0], scales.shape[0]
    if inputs != groups * GROUP:
        raise ValueError(f"{inputs} inputs in {groups} groups: only groups of {GROUP} are supported")
    pair = torch.stack((scales.half(), _outputs_in_order(qzeros).half()), dim=-1)
    words = packed(_outputs_in_order(qweight).t().contiguous())
    return Int4Weight(words, pair.contiguous().view(torch.int32).squeeze(-1))


def dequantised(weight: Int4Weight) -> torch.Tensor:
    """(q − z)·s as float32 [N, K]."""
    q = unpacked(weight.words).float().unflatten(-1, (-1, GROUP))  # [N, K/128, 128]
    pair = weight.groups.contiguous().view(torch.float16).unflatten(-1, (-1, 2)).float()
    scales, zeros = (x.t()[..., None] for x in pair.unbind(-1))
    values: torch.Tensor = (q - zeros) * scales
    return values.flatten(-2)


def linear_reference(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """x·Wᵀ in float32: x [T, K] → [T, N]."""
    return F.linear(x.float(), dequantised(weight))


# ---------------------------------------------------------------- tensor cores


@triton.jit
def _words(pointers, mask):
    words = tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")
    return words.to(tl.uint32, bitcast=True)


@triton.jit
def _scale(group):
    return (group & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _zero(group):
    return (group >> 16).to(tl.int16).to(tl.float16, bitcast=True)


# Two half words at once: (a & b) | c is one lop3, table 0xEA. The upper nibble of a byte is left where
# it stands, for 1024 + 16·q, and divided.
_LOW = "lop3.b32 t, {of}, 0x000F000F, 0x64006400, 0xEA; sub.rn.f16x2 $0, t, $2;"
_HIGH = "lop3.b32 t, {of}, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 $0, t, $3, $2;"
_NIBBLES = tl.constexpr(
    tuple(
        f"{{ .reg .b32 t; {first}{text.format(of=of)} }}"
        for first, of in (("", "$1"), ("shr.u32 t, $1, 8; ", "t"))
        for text in (_LOW, _HIGH)
    )
)


@triton.jit
def _weights(halves, zero, NUMBER: tl.constexpr, PAIRED: tl.constexpr):
    """q − z of nibble NUMBER of half words [..., 32], exact in float16; zero [..., 1] float16.

    A nibble in the low bits of float16 1024 is 1024 + q. PAIRED: in assembly, which the interpreter lacks.
    """
    if not PAIRED:
        bits = ((halves >> (4 * NUMBER)) & 15) | 0x6400
        return bits.to(tl.float16, bitcast=True) - (zero + 1024.0)
    text: tl.constexpr = _NIBBLES[NUMBER]
    if NUMBER % 2 == 0:
        minus = tl.broadcast_to(zero + 1024.0, halves.shape)
        return tl.inline_asm_elementwise(text, "=r,r,r", [halves, minus], tl.float16, is_pure=True, pack=2)
    plus = tl.broadcast_to(-64.0 - zero, halves.shape)
    sixteenth = tl.full(halves.shape, 0.0625, tl.float16)
    return tl.inline_asm_elementwise(
        text, "=r,r,r,r", [halves, plus, sixteenth], tl.float16, is_pure=True, pack=2
    )


@triton.jit(do_not_specialize=["rows"])  # one compiled kernel for every T that is padded alike
def _int4_dot(
    x,
    halves,
    pairs,
    out,
    residual,
    rows,
    n,
    stacked,
    k,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICES: tl.constexpr,
    SPLIT: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PAIRED: tl.constexpr,
    PDL: tl.constexpr,
):
    """W·xᵀ: each of SLICES warps takes one of as many groups at a time, [SLICES, BLOCK_N, ROWS] sums."""
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = (col < n)[None, :]
    step = tl.arange(0, 32)[None, None, :]
    groups = k // 128 // SPLIT
    length = k // 128 * 32  # half words of an output
    first = part * groups + tl.arange(0, SLICES)
    half = halves + col.to(tl.int64)[None, :, None] * length + (first * 32)[:, None, None] + step
    up_half = half + n.to(tl.int64) * length  # up follows gate
    group_at = pairs + first[:, None] * stacked + col[None, :]
    inputs = x + row[None, :, None] * k + (first * 128)[:, None, None] + step
    given = (row < rows)[None, :, None]
    wait_for_kernels_before(PDL)
    acc = tl.zeros((SLICES, BLOCK_N, ROWS), dtype=tl.float32)
    acc_up = acc
    # The scales are read a turn early: they are the only loads that the pipeline does not hold.
    scale = tl.load(group_at, mask=live, other=0)
    if EPILOGUE == 2:
        scale_up = tl.load(group_at + n, mask=live, other=0)
    for i in range(0, groups, SLICES):
        following = group_at + tl.minimum(i + SLICES, groups - SLICES) * stacked
        next_scale = tl.load(following, mask=live, other=0)
        packed = tl.load(half + i * 32, mask=live[:, :, None], other=0, eviction_policy="evict_first")
        zero = _zero(tl.load(group_at + i * stacked, mask=live, other=0))[:, :, None]
        total = tl.zeros((SLICES, BLOCK_N, ROWS), dtype=tl.float32)
        if EPILOGUE == 2:
            packed_up = tl.load(
                up_half + i * 32, mask=live[:, :, None], other=0, eviction_policy="evict_first"
            )
            zero_up = _zero(tl.load(group_at + i * stacked + n, mask=live, other=0))[:, :, None]
            next_scale_up = tl.load(following + n, mask=live, other=0)
            total_up = total
        for p in tl.static_range(4):
            tile = tl.trans(tl.load(inputs + i * 128 + p * 32, mask=given, other=0.0), 0, 2, 1)
            total = tl.dot(_weights(packed, zero, p, PAIRED), tile, total)
            if EPILOGUE == 2:
                total_up = tl.dot(_weights(packed_up, zero_up, p, PAIRED), tile, total_up)
        acc = tl.fma(total, tl.zeros_like(acc) + _scale(scale)[:, :, None], acc)
        scale = next_scale
        if EPILOGUE == 2:
            acc_up = tl.fma(total_up, tl.zeros_like(acc) + _scale(scale_up)[:, :, None], acc_up)
            scale_up = next_scale_up
    let_next_kernel_start(PDL)
    y = tl.sum(acc, axis=0)
    if EPILOGUE == 2:
        y = y / (1.0 + tl.exp(-y)) * tl.sum(acc_up, axis=0)
    at = (part * rows + row)[None, :] * n + col[:, None]
    mask = (row < rows)[None, :] & (col < n)[:, None]
    if EPILOGUE == 1:
        y += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------- plain multiply and add


@triton.jit
def _four(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [ROWS, 4·COLUMNS]: its columns 0, 4, 8, …, its columns 1, 5, … and so on: one load of a thread."""
    even, odd = tl.split(tl.reshape(x, [ROWS, COLUMNS, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _products(x, words, zero, total, number):
    """total + Σ_j x_j·(q_j − z) over the ``number``-th nibbles of the eight halves of four words, in order.

    A nibble in the low bits of float32 2²³ is 2²³ + q, and ``zero`` is 2²³ + z.
    """
    for j in tl.static_range(8):
        bits = ((words[j // 2] >> (4 * number + 16 * (j % 2))) & 15) | 0x4B000000
        total = tl.fma(x[j], bits.to(tl.float32, bitcast=True) - zero, total)
    return total


@triton.jit
def _scaled(pairs, mask):
    """Scale and 2²³ + zero of groups."""
    pair = tl.load(pairs, mask=mask, other=0)
    return _scale(pair), _zero(pair).to(tl.float32) + 8388608.0


@triton.jit
def _int4_fma(
    x,
    words,
    pairs,
    out,
    residual,
    n,
    stacked,
    k,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    SPLIT: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A lane takes four words, a quarter of a group, of each of BLOCK_N outputs at a time."""
    part = tl.program_id(1)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    span = k // 32 // SPLIT  # quarters of groups
    let_next_kernel_start(PDL)
    wait_for_kernels_before(PDL)
    acc = ()
    for _ in tl.static_range(ROWS):
        acc = acc + (tl.zeros((BLOCK_N, LANES), dtype=tl.float32),)
    acc_up = acc
    for begin in range(0, span, LANES):
        lane = begin + tl.arange(0, LANES)
        word = begin * 4 + tl.arange(0, 4 * LANES)
        left = (word < span * 4)[None, :]
        word_mask = (col < n)[:, None] & left
        mask = (col < n)[:, None] & (lane < span)[None, :]
        lane += part * span
        word += part * span * 4
        group = (lane // 4)[None, :] * stacked + col[:, None]
        word_at = words + col.to(tl.int64)[:, None] * (k // 8) + word[None, :]
        scale, zero = _scaled(pairs + group, mask)
        w = _four(_words(word_at, word_mask), BLOCK_N, LANES)
        if EPILOGUE == 2:
            scale_up, zero_up = _scaled(pairs + group + n, mask)
            up = _four(_words(word_at + n.to(tl.int64) * (k // 8), word_mask), BLOCK_N, LANES)
        totals = ()
        for _ in tl.static_range(ROWS):
            totals = totals + (tl.zeros((BLOCK_N, LANES), dtype=tl.float32),)
        totals_up = totals
        half = begin * 8 + tl.arange(0, 8 * LANES)
        given = (half < span * 8)[None, :]
        half += part * span * 8
        inputs = x + (half // 32 * 128 + half % 32)[None, :]
        for i in range(4):  # a loop in the kernel too: unrolled, nine rows take all registers
            sums = ()
            sums_up = ()
            for t in tl.static_range(ROWS):
                tile = eighths(tl.load(inputs + t * k + i * 32, mask=given, other=0.0), 1, LANES)
                sums = sums + (_products(tile, w, zero, totals[t], i),)
                if EPILOGUE == 2:
                    sums_up = sums_up + (_products(tile, up, zero_up, totals_up[t], i),)
                else:
                    sums_up = sums_up + (totals_up[t],)
            totals = sums
            totals_up = sums_up
        sums = ()
        sums_up = ()
        for t in tl.static_range(ROWS):
            sums = sums + (tl.fma(totals[t], scale, acc[t]),)
            if EPILOGUE == 2:
                sums_up = sums_up + (tl.fma(totals_up[t], scale_up, acc_up[t]),)
            else:
                sums_up = sums_up + (acc_up[t],)
        acc = sums
        acc_up = sums_up
    for t in tl.static_range(ROWS):
        y = tl.sum(acc[t], axis=1)
        if EPILOGUE == 2:
            y = y / (1.0 + tl.exp(-y)) * tl.sum(acc_up[t], axis=1)
        at = (part * ROWS + t) * n + col
        if EPILOGUE == 1:
            y += tl.load(residual + at, mask=col < n, other=0.0).to(tl.float32)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=col < n)


# ---------------------------------------------------------------- tiles and launches


@dataclass(frozen=True)
class Tile:
    """How a product is cut: ``dot`` chooses the kernel; ``lanes`` are of the other one.

    Of ``dot``, ``num_warps`` is the most slices of K side by side: fewer where they don't divide it.
    """

    dot: bool
    block_n: int
    num_warps: int
    num_stages: int = 1
    lanes: int = 0
    split: int = 1

    def slices(self, k: int) -> int:
        """Groups that a program of ``dot`` takes at a time: a power of two that divides its part of K."""
        return math.gcd(self.num_warps, k // GROUP // self.split)


# Measured on one H200 at the 27B shape, five rows.
DOT = Tile(True, 64, 2, 3)
DOT_NARROW = Tile(True, 64, 2, 3, split=4)
DOT_SWIGLU = Tile(True, 32, 2, 3)
FMA = Tile(False, 4, 2, lanes=64)
FMA_SWIGLU = Tile(False, 2, 2, lanes=64)


def choose(n: int, k: int, device: torch.device, swiglu: bool = False, parts: bool = False) -> Tile:
    """The tile for a weight of [n, k] ([2n, k] for SwiGLU): the same for every number of rows."""
    if not has_tensor_core_dots(device):
        return FMA_SWIGLU if swiglu else FMA
    if parts and n <= 8_192 and k % (GROUP * DOT_NARROW.split) == 0:
        return DOT_NARROW
    return DOT_SWIGLU if swiglu else DOT


def launch(
    x: torch.Tensor,
    weight: Int4Weight,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    epilogue: int,
    tile: Tile,
    pdl: bool,
) -> None:
    """One product with a given tile; ``out`` [T, n], or [split, T, n]."""
    rows, k = x.shape
    n = out.shape[-1]
    stacked = 2 * n if epilogue == SWIGLU else n
    if (
        not 1 <= rows <= MAX_ROWS
        or tuple(weight.words.shape) != (stacked, k // 8)
        or k % (GROUP * tile.split)
    ):
        raise ValueError(
            f"rows {tuple(x.shape)} with words {tuple(weight.words.shape)}: 1 to {MAX_ROWS} rows of a "
            f"multiple of {GROUP * tile.split} values, and words {(stacked, k // 8)}"
        )
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    options |= {"launch_pdl": True} if pdl else {}
    words, groups = weight
    rest = (groups, out, out if residual is None else residual)
    grid = (triton.cdiv(n, tile.block_n), tile.split)
    if tile.dot:
        padded = FEW_ROWS if rows <= FEW_ROWS else PADDED_ROWS
        slices = options["num_warps"] = tile.slices(k)
        paired = x.device.type == "cuda"
        sizes = (padded, tile.block_n, slices, tile.split, epilogue, paired, pdl)
        _int4_dot[grid](x, words.view(torch.int16), *rest, rows, n, stacked, k, *sizes, **options)
    else:
        sizes = (rows, tile.block_n, tile.lanes, tile.split, epilogue, pdl)
        _int4_fma[grid](x, words, *rest, n, stacked, k, *sizes, **options)


def linear(
    x: torch.Tensor, weight: Int4Weight, out: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x·Wᵀ (+ residual) into ``out`` [T, N]; x [T, K] float16."""
    tile = choose(out.shape[-1], x.shape[1], x.device)
    epilogue = PLAIN if residual is None else RESIDUAL
    launch(x, weight, out, residual, epilogue, tile, has_dependent_launch(x.device))
    return out


def parts_of(n: int, k: int, device: torch.device) -> int:
    """How many parts ``linear_parts`` makes of a weight of [n, k]."""
    return choose(n, k, device, parts=True).split


def linear_parts(x: torch.Tensor, weight: Int4Weight, out: torch.Tensor) -> torch.Tensor:
    """x·Wᵀ in equal parts of K, to be added in order: ``out`` float32 [``parts_of``(…), T, N]."""
    tile = choose(out.shape[-1], x.shape[1], x.device, parts=True)
    if len(out) != tile.split:
        raise ValueError(f"{len(out)} parts of a product that is made in {tile.split}")
    launch(x, weight, out, None, PLAIN, tile, has_dependent_launch(x.device))
    return out


def swiglu(x: torch.Tensor, gate_up: Int4Weight, out: torch.Tensor) -> torch.Tensor:
    """silu(x·gateᵀ) ⊙ x·upᵀ into ``out`` [T, inner]; gate and up stacked in ``gate_up``."""
    tile = choose(out.shape[-1], x.shape[1], x.device, swiglu=True)
    launch(x, gate_up, out, None, SWIGLU, tile, has_dependent_launch(x.device))
    return out


def compile_cases() -> Iterator[CompileCase]:
    """Every tile of the plain kernel with every number of rows. A V100 launches no dots."""
    names = {"x": "*fp16", "words": "*i32", "pairs": "*i32", "residual": "*fp16"}
    signature = names | {"n": "i32", "stacked": "i32", "k": "i32"}
    for tile, epilogues in ((FMA, (PLAIN, RESIDUAL)), (FMA_SWIGLU, (SWIGLU,))):
        for rows in range(1, MAX_ROWS + 1):
            for epilogue in epilogues:
                for out in ("*fp16", "*fp32") if epilogue == PLAIN else ("*fp16",):
                    constexprs = {
                        "ROWS": rows, "BLOCK_N": tile.block_n, "LANES": tile.lanes,
                        "SPLIT": tile.split, "EPILOGUE": epilogue, "PDL": False,
                    }  # fmt: skip
                    label = f"int4{('', ' + residual', ' swiglu')[epilogue]}, {rows} rows → {out[1:]}"
                    yield CompileCase(
                        _int4_fma, signature | {"out": out}, constexprs, tile.num_warps, 1, label,
                        ("n", "stacked", "k"),
                    )  # fmt: skip
