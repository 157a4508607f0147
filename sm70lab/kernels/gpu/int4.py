"""Products of one to nine rows with a 4-bit weight matrix in groups of 128 (AWQ, Lin et al. 2024).

A weight is (q − z)·s: q its 4 bits, z and s the zero and the scale of its group of 128 inputs. A
checkpoint packs eight outputs into a word, [K, N/8]. ``from_awq`` repacks a matrix so that the 128 inputs of
16 outputs are a kilobyte in a row, in the order in which the threads of a warp multiply it: see ``mma`` for a
thread's words. Both kernels read this order. Order of the sums and row counts are as in ``linear``. Whole
checkpoints of this kind are not loaded yet.
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

from sm70lab.kernels.gpu.capability import has_tensor_core_dots
from sm70lab.kernels.gpu.cases import CompileCase
from sm70lab.kernels.gpu.launch import launch_options, let_next_kernel_start, wait_for_kernels_before
from sm70lab.kernels.gpu.linear import MAX_ROWS, PLAIN, RESIDUAL, SWIGLU, eighths, multiply_add, store_product
from sm70lab.kernels.gpu.mma import check_layout, four_products, four_sums, high_half, low_half, unit

GROUP = 128
ALIGNED = 16  # bytes: loads of four words, which ``mma`` counts on
BLOCK = 16  # outputs of a block: the rows of a tensor-core product
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a checkpoint's word holds output 8c + AWQ_ORDER[i]


class Int4Weight(NamedTuple):
    """A matrix of [N, K] in blocks of 16 outputs and groups of 128 inputs."""

    words: torch.Tensor  # int32 [N/16, K/128, 2, 32, 4]: inputs' half, thread, its four words
    pairs: torch.Tensor  # int32 [N/16, K/128, 8, 2]: of outputs g and g + 8, float16 scale low, zero high

    @property
    def outputs(self) -> int:
        """N."""
        return BLOCK * len(self.words)


# ---------------------------------------------------------------- reference


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """The eight nibbles of each word, lowest first: int32 [...] → int32 [..., 8]."""
    shifts = torch.arange(0, 32, 4, device=words.device)
    values: torch.Tensor = (words[..., None].long() >> shifts) & 15
    return values.int()


def _place(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and input, within a block and a group, of each nibble of ``words``: [2, 32, 4, 8] each."""
    sizes = (2, 8, 4, 2, 2, 2, 2, 2)  # half, then as in ``mma``: g, q, c, h, e, p, r
    axes = (torch.arange(n, device=device) for n in sizes)
    half, g, q, c, h, e, p, r = torch.meshgrid(*axes, indexing="ij")
    outputs, inputs = g + 8 * r, 64 * half + 32 * c + 8 * q + 4 * h + 2 * p + e
    return outputs.reshape(2, 32, 4, 8), inputs.reshape(2, 32, 4, 8)


def packed(q: torch.Tensor) -> torch.Tensor:
    """Values 0..15 [N, K] as ``Int4Weight.words``."""
    blocks = q.unflatten(1, (-1, GROUP)).unflatten(0, (-1, BLOCK)).transpose(1, 2)  # [N/16, K/128, 16, 128]
    by_nibble = blocks[:, :, *_place(q.device)].long()
    words = (by_nibble << torch.arange(0, 32, 4, device=q.device)).sum(-1)
    signed: torch.Tensor = torch.where(words >= 2**31, words - 2**32, words)
    return signed.int()


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """The reverse of ``packed``."""
    blocks = torch.empty(*words.shape[:2], BLOCK, GROUP, dtype=torch.int32, device=words.device)
    blocks[:, :, *_place(words.device)] = nibbles(words)
    values: torch.Tensor = blocks.transpose(1, 2).flatten(0, 1).flatten(1)
    return values


def packed_pairs(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Scales and zeros, whole numbers, [N, K/128] as ``Int4Weight.pairs``."""
    pairs: torch.Tensor = torch.stack((scales.half(), zeros.half()), dim=-1).view(torch.int32)[..., 0]
    by_block: torch.Tensor = pairs.unflatten(0, (-1, 2, 8)).permute(0, 3, 2, 1)
    return by_block.contiguous()


def _outputs_in_order(words: torch.Tensor) -> torch.Tensor:
    """A checkpoint's [R, N/8] words as [R, N] values in the order of the outputs."""
    order = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    values: torch.Tensor = nibbles(words)[..., order]
    return values.flatten(-2)


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> Int4Weight:
    """Repack a checkpoint's matrix: qweight int32 [K, N/8], qzeros int32 [K/128, N/8], scales [K/128, N].

    Raises ``ValueError`` for groups of another size, for scales that are not float16, and where 16 does not
    divide N.
    """
    inputs, (groups, outputs) = qweight.shape[0], scales.shape
    if inputs != groups * GROUP:
        raise ValueError(f"{inputs} inputs in {groups} groups: only groups of {GROUP} are supported")
    if outputs % BLOCK:
        raise ValueError(f"{outputs} outputs: only multiples of {BLOCK} are supported")
    if scales.dtype != torch.float16:
        raise ValueError(f"scales in {scales.dtype}: AWQ has float16, and a wider type could overflow it")
    pairs = packed_pairs(scales.t().contiguous(), _outputs_in_order(qzeros).t().contiguous())
    return Int4Weight(packed(_outputs_in_order(qweight).t()), pairs)


def dequantised(weight: Int4Weight) -> torch.Tensor:
    """(q − z)·s as float32 [N, K]."""
    q = unpacked(weight.words).float().unflatten(-1, (-1, GROUP))  # [N, K/128, 128]
    pairs = weight.pairs.permute(0, 3, 2, 1).flatten(0, 2).contiguous()  # [N, K/128]
    scales, zeros = pairs.view(torch.float16).unflatten(-1, (-1, 2)).float()[..., None, :].unbind(-1)
    values: torch.Tensor = (q - zeros) * scales
    return values.flatten(-2)


def linear_reference(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """x·Wᵀ in float32: x [T, K] → [T, N]."""
    return F.linear(x.float(), dequantised(weight))


# ---------------------------------------------------------------- both kernels


@triton.jit
def _blocks(n, BLOCKS: tl.constexpr, STORED: tl.constexpr):
    """A program's blocks: the STORED ones, and with SwiGLU as many of up, which follows gate.

    Blocks beyond n repeat the last: no mask in the loop.
    """
    blocks = ()
    for b in tl.static_range(BLOCKS):
        own = tl.minimum(tl.program_id(0) * STORED + b % STORED, n // 16 - 1)
        blocks = blocks + (own + b // STORED * (n // 16),)
    return blocks


# ---------------------------------------------------------------- tensor cores


@triton.jit
def _read(words, word_at, pairs, pair_at, group, BLOCKS: tl.constexpr):
    """Of each block: two tiles of words, its scales and zeros."""
    tiles = ()
    for b in tl.static_range(BLOCKS):
        for half in tl.static_range(2):
            pointers = words + word_at[b] + (group * 256 + half * 128)
            tiles = tiles + (tl.load(pointers, eviction_policy="evict_first"),)
        tiles = tiles + (tl.load(pairs + pair_at[b] + group * 16),)
    return tiles


@triton.jit
def _read_rows(inputs, group, row, rows, k, ROW_TILES: tl.constexpr):
    """Of each eight rows: a group's inputs in four tiles."""
    tiles = ()
    for eight in tl.static_range(ROW_TILES):
        for c in tl.static_range(4):
            pointers = inputs + (eight * 8 * (k // 2) + group * 64 + c * 16)
            tiles = tiles + (tl.load(pointers, mask=(eight * 8 + row < rows)[:, None], other=0),)
    return tiles


@triton.jit
def _for_both_rows(x, THREADS: tl.constexpr):
    """[THREADS, 2] of outputs g and g + 8 → [THREADS, 4], as ``mma``'s sums are ordered."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], [THREADS, 2, 2]), [THREADS, 4])


@triton.jit
def _add_group(
    tiles, x, acc, BLOCKS: tl.constexpr, ROW_TILES: tl.constexpr, WARPS: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """acc + s·(Σ q·x − z·Σ x) of one group a warp, in units of ``mma.unit``."""
    units = unit(tl.arange(0, 4))[None, :]
    sums = ()
    for eight in tl.static_range(ROW_TILES):
        zero = tl.zeros((32 * WARPS, 4), tl.float32)
        x_sum = four_sums(x[4 * eight], x[4 * eight + 1], zero, WARPS, ASSEMBLY)
        x_sum = four_sums(x[4 * eight + 2], x[4 * eight + 3], x_sum, WARPS, ASSEMBLY) * units
        for b in tl.static_range(BLOCKS):
            total = four_products(tiles[3 * b], x[4 * eight], x[4 * eight + 1], zero, WARPS, ASSEMBLY)
            total = four_products(
                tiles[3 * b + 1], x[4 * eight + 2], x[4 * eight + 3], total, WARPS, ASSEMBLY
            )
            s = _for_both_rows(low_half(tiles[3 * b + 2], ASSEMBLY), 32 * WARPS)
            z = _for_both_rows(high_half(tiles[3 * b + 2], ASSEMBLY), 32 * WARPS)
            sums = sums + (tl.fma(s, tl.fma(-z, x_sum, total), acc[eight * BLOCKS + b]),)
    return sums


@triton.jit
def _of_all_warps(acc, WARPS: tl.constexpr):
    """Sums of one block: [32·WARPS, 4] → [32, 4], out of ``mma.unit``."""
    return tl.sum(tl.reshape(acc, [WARPS, 32, 4]), axis=0) * (1.0 / unit(tl.arange(0, 4)))[None, :]


@triton.jit(do_not_specialize=["rows"])  # one compiled kernel for every T in as many eights
def _int4_mma(
    x,
    words,
    pairs,
    out,
    residual,
    rows,
    n,
    k,
    ROW_TILES: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,
    UNROLL: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """W·xᵀ of BLOCKS blocks: each of WARPS warps takes one of as many groups at a time. x as int32 [T, K/2].

    A warp holds AHEAD groups that are on their way from memory.
    """
    THREADS: tl.constexpr = 32 * WARPS
    STORED: tl.constexpr = BLOCKS // 2 if EPILOGUE == 2 else BLOCKS
    part = tl.program_id(1)
    thread = tl.arange(0, THREADS)
    row = thread % 32 // 4
    four = tl.arange(0, 4)
    groups = k // 128 // SPLIT
    first = part * groups + thread // 32
    word_at = ()
    pair_at = ()
    blocks = _blocks(n, BLOCKS, STORED)
    for b in tl.static_range(BLOCKS):
        place = (blocks[b] * (k // 128) + first)[:, None]
        word_at = word_at + (place.to(tl.int64) * 256 + (thread % 32 * 4)[:, None] + four[None, :],)
        pair_at = pair_at + (place * 16 + row[:, None] * 2 + tl.arange(0, 2)[None, :],)
    inputs = x + (row * (k // 2) + first * 64 + thread % 4 * 4)[:, None] + four[None, :]
    acc = ()
    for _ in tl.static_range(BLOCKS * ROW_TILES):
        acc = acc + (tl.zeros((THREADS, 4), dtype=tl.float32),)
    tiles = ()
    for ahead in tl.static_range(AHEAD):  # nothing writes weights: they need not wait
        coming = tl.minimum(ahead * WARPS, groups - WARPS)
        tiles = tiles + _read(words, word_at, pairs, pair_at, coming, BLOCKS)
    wait_for_kernels_before(PDL)
    tile = _read_rows(inputs, 0, row, rows, k, ROW_TILES)
    for i in tl.range(0, groups, WARPS, loop_unroll_factor=UNROLL):
        next_tile = _read_rows(inputs, tl.minimum(i + WARPS, groups - WARPS), row, rows, k, ROW_TILES)
        coming = tl.minimum(i + AHEAD * WARPS, groups - WARPS)
        newest = _read(words, word_at, pairs, pair_at, coming, BLOCKS)
        acc = _add_group(tiles, tile, acc, BLOCKS, ROW_TILES, WARPS, ASSEMBLY)
        tile = next_tile
        rest = ()
        for j in tl.static_range(3 * BLOCKS, 3 * BLOCKS * AHEAD):
            rest = rest + (tiles[j],)
        tiles = rest + newest
    let_next_kernel_start(PDL)
    lane = tl.arange(0, 32)
    for eight in tl.static_range(ROW_TILES):
        for b in tl.static_range(STORED):
            y = _of_all_warps(acc[eight * BLOCKS + b], WARPS)
            up = _of_all_warps(acc[eight * BLOCKS + b + BLOCKS - STORED], WARPS)
            to = (8 * eight + lane % 4 * 2)[:, None] + (four % 2)[None, :]
            col = ((tl.program_id(0) * STORED + b) * 16 + lane // 4)[:, None] + (four // 2 * 8)[None, :]
            mask = (to < rows) & (col < n)
            store_product(y, up, out, residual, (part * rows + to) * n + col, col, mask, EPILOGUE)


# ---------------------------------------------------------------- plain multiply and add


@triton.jit
def _weights(word, scale, zero):
    """(q − z)·s of a word's nibbles, exact: of outputs g and of g + 8, four inputs each, in order.

    A nibble in the low bits of float32 2²³ is 2²³ + q, and ``zero`` is 2²³ + z: z a whole number.
    """
    low = ()
    high = ()
    for j in tl.static_range(4):  # input 2·p + e is nibble 4·e + 2·p + r
        bits = word >> (16 * (j % 2) + 8 * (j // 2))
        q = ((bits & 15) | 0x4B000000).to(tl.float32, bitcast=True)
        low = low + (((q - zero[0]) * scale[0])[:, None],)
        q = (((bits >> 4) & 15) | 0x4B000000).to(tl.float32, bitcast=True)
        high = high + (((q - zero[1]) * scale[1])[:, None],)
    return low, high


@triton.jit
def _int4_fma(
    x,
    words,
    pairs,
    out,
    residual,
    n,
    k,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    SPLIT: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PDL: tl.constexpr,
):
    """As ``_int4_mma``, each thread multiplying its own words: x float16 [T, K]."""
    THREADS: tl.constexpr = 32 * WARPS
    STORED: tl.constexpr = BLOCKS // 2 if EPILOGUE == 2 else BLOCKS
    part = tl.program_id(1)
    thread = tl.arange(0, THREADS)
    span = k // 32 // SPLIT  # quarters of groups
    let_next_kernel_start(PDL)
    wait_for_kernels_before(PDL)
    blocks = _blocks(n, BLOCKS, STORED)
    acc = ()
    for _ in tl.static_range(2 * BLOCKS * ROWS):
        acc = acc + (tl.zeros((THREADS, 1), dtype=tl.float32),)
    # One warp takes one quarter of a group, 32 inputs, at a time: 1, 2 or 4 warps divide a part of K.
    for i in range(0, span, WARPS):
        quarter = part * span + i + thread // 32
        weights = ()
        for b in tl.static_range(BLOCKS):
            place = blocks[b] * (k // 128) + quarter // 4
            pair = tl.load(pairs + (place * 16 + thread % 32 // 4 * 2)[:, None] + tl.arange(0, 2)[None, :])
            scale = tl.split(low_half(pair, False))
            zero = tl.split(high_half(pair, False) + 8388608.0)
            at = place.to(tl.int64) * 256 + quarter % 4 // 2 * 128 + thread % 32 * 4 + quarter % 2 * 2
            first, second = tl.split(tl.load(words + at[:, None] + tl.arange(0, 2)[None, :]))
            a_low, a_high = _weights(first, scale, zero)
            b_low, b_high = _weights(second, scale, zero)
            weights = weights + (a_low + b_low, a_high + b_high)
        inputs = x + (quarter * 32 + thread % 4 * 8)[:, None] + tl.arange(0, 8)[None, :]
        sums = ()
        for t in tl.static_range(ROWS):
            tile = eighths(tl.load(inputs + t * k), THREADS, 1)
            for b in tl.static_range(2 * BLOCKS):
                sums = sums + (multiply_add(tile, weights[b], acc[2 * BLOCKS * t + b]),)
        acc = sums
    for t in tl.static_range(ROWS):
        for b in tl.static_range(STORED):
            y = _of_threads(acc, 2 * (BLOCKS * t + b), WARPS)
            up = _of_threads(acc, 2 * (BLOCKS * t + b + BLOCKS - STORED), WARPS)
            block = (tl.program_id(0) * STORED + b) * 16
            col = block + tl.arange(0, 8)[:, None] + tl.arange(0, 2)[None, :] * 8
            store_product(y, up, out, residual, (part * ROWS + t) * n + col, col, col < n, EPILOGUE)


@triton.jit
def _of_threads(acc, at: tl.constexpr, WARPS: tl.constexpr):
    """Sums of one block and row: outputs g and g + 8, [8, 2]."""
    both = tl.reshape(tl.join(acc[at], acc[at + 1]), [WARPS, 8, 4, 2])  # of [32·WARPS, 1, 2]
    return tl.sum(tl.sum(both, axis=2), axis=0)


# ---------------------------------------------------------------- tiles and launches


@dataclass(frozen=True)
class Tile:
    """How a product is cut: ``dot`` chooses the kernel; ``ahead`` and ``unroll`` are of it alone.

    Of ``dot``, ``warps`` is the most groups side by side: fewer where they don't divide a part of K. Of the
    other, 1, 2 or 4.
    """

    dot: bool
    blocks: int  # of 16 outputs
    warps: int
    ahead: int = 1
    unroll: int = 1
    split: int = 1
    registers: int | None = None  # of a thread, where ptxas stops at so few that it spills

    def side_by_side(self, k: int) -> int:
        """Groups that a program of ``dot`` takes at a time."""
        return math.gcd(self.warps, k // GROUP // self.split)


# Dots: measured on one H200 at the 27B shape, five rows. The others fit an sm_70 without spills.
DOT = Tile(True, 2, 4, ahead=2, unroll=2)
DOT_NARROW = Tile(True, 1, 2, ahead=3, unroll=2, split=4)
DOT_SWIGLU = Tile(True, 2, 2, registers=96)
FMA = Tile(False, 1, 4)
FMA_SWIGLU = Tile(False, 2, 4)

CHECKED: set[str] = set()  # compiled kernels whose layouts are the assembly's


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
) -> None:
    """One product with a given tile; ``out`` [T, n], or [split, T, n].

    Raises ``ValueError`` for what does not fit together: the kernels would read or write beyond it.
    """
    (rows, k), n = x.shape, out.shape[-1]
    blocks = (2 * n if epilogue == SWIGLU else n) // BLOCK
    wanted = {
        "words": (weight.words, (blocks, k // GROUP, 2, 32, 4)),
        "pairs": (weight.pairs, (blocks, k // GROUP, 8, 2)),
        "out": (out, (tile.split, rows, n) if out.dim() > 2 or tile.split > 1 else (rows, n)),
        "residual": (residual, (rows, n)),
    }
    if not 1 <= rows <= MAX_ROWS or k % (GROUP * tile.split) or n % BLOCK:
        raise ValueError(
            f"{n} outputs of rows {tuple(x.shape)}: 1 to {MAX_ROWS} rows of a multiple of "
            f"{GROUP * tile.split} values, and a multiple of {BLOCK} outputs"
        )
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and (tuple(tensor.shape) != shape or not tensor.is_contiguous()):
            raise ValueError(f"{name} {tuple(tensor.shape)}, strides {tensor.stride()}: contiguous {shape}")
    if x.dtype != torch.float16 or not x.is_contiguous() or x.data_ptr() % ALIGNED:
        raise ValueError(
            f"contiguous float16 rows at a multiple of {ALIGNED} bytes, not {x.dtype} {x.stride()}"
        )
    if weight.words.data_ptr() % ALIGNED:
        raise ValueError(f"words at a multiple of {ALIGNED} bytes")
    options: dict[str, Any] = {"num_stages": 1} | launch_options(x.device)
    stored = tile.blocks // 2 if epilogue == SWIGLU else tile.blocks
    grid = (triton.cdiv(n // BLOCK, stored), tile.split)
    rest = (*weight, out, out if residual is None else residual)
    if tile.dot:
        warps, assembly = tile.side_by_side(k), x.device.type == "cuda"
        sizes = (triton.cdiv(rows, 8), tile.blocks, warps, tile.split, tile.ahead, tile.unroll, epilogue)
        options |= {"num_warps": warps, "maxnreg": tile.registers if rows <= 8 else None}
        compiled = _int4_mma[grid](x.view(torch.int32), *rest, rows, n, k, *sizes, assembly, **options)
        if assembly and compiled.hash not in CHECKED:
            check_layout(compiled.asm["ttgir"], warps)
            CHECKED.add(compiled.hash)
    else:
        sizes = (rows, tile.blocks, tile.warps, tile.split, epilogue)
        _int4_fma[grid](x, *rest, n, k, *sizes, num_warps=tile.warps, **options)


def linear(
    x: torch.Tensor, weight: Int4Weight, out: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x·Wᵀ (+ residual) into ``out`` [T, N]; x [T, K] float16."""
    tile = choose(out.shape[-1], x.shape[1], x.device)
    epilogue = PLAIN if residual is None else RESIDUAL
    launch(x, weight, out, residual, epilogue, tile)
    return out


def parts_of(n: int, k: int, device: torch.device) -> int:
    """How many parts ``linear_parts`` makes of a weight of [n, k]."""
    return choose(n, k, device, parts=True).split


def linear_parts(x: torch.Tensor, weight: Int4Weight, out: torch.Tensor) -> torch.Tensor:
    """x·Wᵀ in equal parts of K, to be added in order: ``out`` float32 [``parts_of``(…), T, N]."""
    tile = choose(out.shape[-1], x.shape[1], x.device, parts=True)
    if len(out) != tile.split:
        raise ValueError(f"{len(out)} parts of a product that is made in {tile.split}")
    launch(x, weight, out, None, PLAIN, tile)
    return out


def swiglu(x: torch.Tensor, gate_up: Int4Weight, out: torch.Tensor) -> torch.Tensor:
    """silu(x·gateᵀ) ⊙ x·upᵀ into ``out`` [T, inner]; gate and up stacked in ``gate_up``."""
    tile = choose(out.shape[-1], x.shape[1], x.device, swiglu=True)
    launch(x, gate_up, out, None, SWIGLU, tile)
    return out


def compile_cases() -> Iterator[CompileCase]:
    """Every tile of the plain kernel with every number of rows. A V100 launches no dots."""
    signature = {"x": "*fp16", "words": "*i32", "pairs": "*i32", "residual": "*fp16", "n": "i32", "k": "i32"}
    for tile, epilogues in ((FMA, (PLAIN, RESIDUAL)), (FMA_SWIGLU, (SWIGLU,))):
        for rows in range(1, MAX_ROWS + 1):
            for epilogue in epilogues:
                for out in ("*fp16", "*fp32") if epilogue == PLAIN else ("*fp16",):
                    constexprs = {
                        "ROWS": rows, "BLOCKS": tile.blocks, "WARPS": tile.warps,
                        "SPLIT": tile.split, "EPILOGUE": epilogue, "PDL": False,
                    }  # fmt: skip
                    label = f"int4{('', ' + residual', ' swiglu')[epilogue]}, {rows} rows → {out[1:]}"
                    yield CompileCase(
                        _int4_fma, signature | {"out": out}, constexprs, tile.warps, 1, label, ("n", "k")
                    )
