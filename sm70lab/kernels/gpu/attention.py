"""Gated attention of a round's few rows over the cache, split over positions.

Three launches: ``_prepare`` norms and rotates q and k and writes k and v into the cache;
``_attend_dot`` (float16 on sm_80 and later) or ``_attend_fma`` (every device) runs an online softmax
over one part of the positions for all query heads of one key head; ``_combine`` adds the parts in order
and applies the output gate.

Where a part begins depends on nothing but the position (``part_begin``): not on the number of rows,
the context or the cache's capacity. Blocks and parts beyond a row's own position leave its sums as
they are, to the bit, and no row's order of operations depends on the others. So a verify row has the
bits of the one-row step.

Positions, slots and hence lengths are read on the device: the launches are the same in every round,
and a CUDA graph can hold them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sm70lab.kernels.attention import apply_rotary, causal_attention
from sm70lab.kernels.gpu.capability import has_tensor_core_dots, shared_memory
from sm70lab.kernels.gpu.cases import CompileCase
from sm70lab.kernels.gpu.launch import launch_options, let_next_kernel_start, wait_for_kernels_before
from sm70lab.kernels.gpu.linear import eighths
from sm70lab.kernels.norm import rms_norm

HEAD_DIMS = (64, 128, 256)
SMALLEST_UNIT = 64
DTYPES = {torch.float16: "*fp16", torch.float32: "*fp32"}
PARTS_A_SIZE = 64  # until their size doubles
LEVEL = tl.constexpr(PARTS_A_SIZE)
LEVELS = tl.constexpr(16)  # 64 · 64 · (2^16 − 1) positions: more than any context

# ---------------------------------------------------------------- reference


def gated_attention_reference(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    start: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """What the kernels compute, in float32 PyTorch; arguments as for ``gated_attention``.

    Writes the new rows into ``keys`` and ``values`` and returns float32 [B, T, Hq·D].
    """
    batch, tokens, _ = k.shape
    dim = keys.shape[-1]
    q, gate = q_gate.float().view(batch, tokens, -1, 2 * dim).chunk(2, dim=-1)
    q, k = (
        apply_rotary(rms_norm(x, norm, eps), cos.float()[:, :, None], sin.float()[:, :, None])
        for x, norm in ((q, q_norm), (k.float().reshape(batch, tokens, -1, dim), k_norm))
    )
    outputs = []
    for b, (slot, first) in enumerate(zip(slots.tolist(), start.tolist(), strict=True)):
        end = first + tokens
        keys[slot, :, first:end] = k[b].transpose(0, 1).to(keys.dtype)
        values[slot, :, first:end] = v[b].view(tokens, -1, dim).transpose(0, 1).to(values.dtype)
        rows = keys[slot : slot + 1, :, :end].float(), values[slot : slot + 1, :, :end].float()
        outputs.append(causal_attention(q[b : b + 1], *rows))
    return torch.cat(outputs) * torch.sigmoid(gate.reshape(batch, tokens, -1))


# ---------------------------------------------------------------- the fixed split


def part_begin(part: int, unit: int) -> int:
    """The first position of a part: 64 parts of ``unit`` positions, then 64 of 2·unit, and so on."""
    level = part // PARTS_A_SIZE
    return unit * (PARTS_A_SIZE * ((1 << level) - 1) + (part % PARTS_A_SIZE << level))


def parts_of(capacity: int, unit: int) -> int:
    """How many parts ``capacity`` positions have."""
    level = int(math.log2((capacity - 1) // (unit * PARTS_A_SIZE) + 1))
    return (
        PARTS_A_SIZE * level + (capacity - 1 - part_begin(PARTS_A_SIZE * level, unit)) // (unit << level) + 1
    )


@triton.jit
def _part_span(part, UNIT: tl.constexpr):
    """First position and size of a part."""
    level = part // LEVEL
    doubled = (level * 0 + 1) << level
    size = doubled * UNIT
    return (doubled - 1) * (UNIT * LEVEL) + part % LEVEL * size, size


@triton.jit
def _part_holding(position, UNIT: tl.constexpr):
    """The part that a position lies in."""
    rest = position // (UNIT * LEVEL) + 1
    level = position * 0
    for i in tl.static_range(1, LEVELS):
        level += (rest >= (1 << i)).to(tl.int32)
    first, size = _part_span(level * LEVEL, UNIT)
    return level * LEVEL + (position - first) // size


# ---------------------------------------------------------------- kernels

# Not specialised for 1 or multiples of 16: one compiled kernel serves every number of rows.
COUNTS = ("tokens", "heads", "kv_heads", "group", "capacity", "parts")


@triton.jit
def _norm_and_rotate(x, weight, cos, sin, eps, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """RMS norm of one head, then rotary positions on its first ROTARY channels: float32 [DIM]."""
    lane = tl.arange(0, DIM)
    partner = tl.where(lane < ROTARY // 2, lane + ROTARY // 2, lane - ROTARY // 2)
    partner = tl.where(lane < ROTARY, partner, lane)
    own = tl.load(x + lane).to(tl.float32)
    other = tl.load(x + partner).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(own * own, axis=0) / DIM + eps)
    own = own * scale * tl.load(weight + lane)
    other = other * scale * tl.load(weight + partner)
    turn = tl.load(cos + lane, mask=lane < ROTARY, other=1.0).to(tl.float32)
    cross = tl.load(sin + lane, mask=lane < ROTARY, other=0.0).to(tl.float32)
    return own * turn + other * tl.where(lane < ROTARY // 2, -cross, cross)


@triton.jit(do_not_specialize=COUNTS)
def _prepare(
    q_gate,
    k,
    v,
    q_norm,
    k_norm,
    cos,
    sin,
    queries,
    keys,
    values,
    slots,
    start,
    tokens,
    heads,
    kv_heads,
    capacity,
    q_stride,
    k_stride,
    v_stride,
    scale,
    eps,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one row: a query into ``queries``, a key or a value into the cache."""
    row, head = tl.program_id(0), tl.program_id(1)
    let_next_kernel_start(PDL)
    wait_for_kernels_before(PDL)
    batch, token = row // tokens, row % tokens
    lane = tl.arange(0, DIM)
    group = heads // kv_heads
    position = tl.load(start + batch) + token
    at = ((tl.load(slots + batch) * kv_heads + (head - heads) % kv_heads) * capacity + position) * DIM
    turn, cross = cos + row * ROTARY, sin + row * ROTARY
    if head < heads:
        source = q_gate + row.to(tl.int64) * q_stride + head * 2 * DIM
        q = _norm_and_rotate(source, q_norm, turn, cross, eps, DIM, ROTARY) * scale
        place = ((batch * kv_heads + head // group) * tokens + token) * group + head % group
        tl.store(queries + place.to(tl.int64) * DIM + lane, q.to(queries.dtype.element_ty))
    elif position < capacity:
        if head < heads + kv_heads:
            source = k + row.to(tl.int64) * k_stride + (head - heads) * DIM
            key = _norm_and_rotate(source, k_norm, turn, cross, eps, DIM, ROTARY)
            tl.store(keys + at + lane, key.to(keys.dtype.element_ty))
        else:
            value = tl.load(v + row.to(tl.int64) * v_stride + (head - heads - kv_heads) * DIM + lane)
            tl.store(values + at + lane, value.to(values.dtype.element_ty))


@triton.jit
def _part_bounds(start, pair, tokens, kv_heads, capacity, UNIT: tl.constexpr):
    """This program's part: its number, its first position, its end and the newest position of row 0.

    Long parts come first, so that short ones fill the end of the launch.
    """
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    begin, size = _part_span(part, UNIT)
    first = tl.load(start + pair // kv_heads).to(tl.int32)
    return part, begin, tl.minimum(tl.minimum(begin + size, first + tokens), capacity), first


@triton.jit(do_not_specialize=COUNTS)
def _attend_dot(
    queries,
    keys,
    values,
    slots,
    start,
    sums,
    totals,
    peaks,
    tokens,
    group,
    kv_heads,
    capacity,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """All query heads of one key head over one part: Σ p·v, Σ p and the greatest score, a row each.

    Row r of a tile is query head r % group of token r // group. Queries come scaled by log2(e)/√D.
    Positions and channels, not rows, are the first dimension of the products: it is the one that warps
    share out, and the one that tensor cores want long.
    """
    pair = tl.program_id(1)
    let_next_kernel_start(PDL)
    wait_for_kernels_before(PDL)
    part, begin, stop, first = _part_bounds(start, pair, tokens, kv_heads, capacity, UNIT)
    if begin >= stop:
        return
    own = (tl.load(slots + pair // kv_heads) * kv_heads + pair % kv_heads) * capacity * DIM
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    rows = tokens * group
    newest = first + row // group
    channel = tl.arange(0, DIM)
    step = tl.arange(0, BLOCK)
    q_at = queries + (pair * rows + row).to(tl.int64)[None, :] * DIM + channel[:, None]
    q = tl.load(q_at, mask=(row < rows)[None, :], other=0.0)
    key_at = keys + own + step[:, None] * DIM + channel[None, :]
    value_at = values + own + step[None, :] * DIM + channel[:, None]
    peak = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((DIM, ROWS), dtype=tl.float32)
    for at in range(begin, stop, BLOCK):
        here = at + step < stop
        scores = tl.dot(tl.load(key_at + at * DIM, mask=here[:, None], other=0.0), q)
        seen = here[:, None] & (at + step[:, None] <= newest[None, :])
        scores = tl.where(seen, scores, -float("inf"))
        top = tl.maximum(peak, tl.max(scores, axis=0))
        base = tl.where(top == -float("inf"), 0.0, top)  # a row that sees nothing yet keeps zeros
        keep = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[None, :])
        value = tl.load(value_at + at * DIM, mask=here[None, :], other=0.0)
        total = tl.fma(total, keep, tl.sum(weights, axis=0))
        acc = tl.dot(value, weights.to(value.dtype), acc * keep[None, :])
        peak = top
    out = (pair.to(tl.int64) * tl.num_programs(0) + part) * rows + row
    tl.store(sums + out[None, :] * DIM + channel[:, None], acc, mask=(row < rows)[None, :])
    tl.store(totals + out, total, mask=row < rows)
    tl.store(peaks + out, peak, mask=row < rows)


@triton.jit(do_not_specialize=COUNTS)
def _attend_fma(
    queries,
    keys,
    values,
    slots,
    start,
    sums,
    totals,
    peaks,
    tokens,
    group,
    kv_heads,
    capacity,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SPOTS: tl.constexpr,
    DEPTH: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same with plain multiply-adds. A thread holds eight channels of one of SPOTS positions.

    Each spot has an online softmax of its own over every SPOTS-th position, DEPTH of them at a time,
    so no two warps meet before the end of the part. A row's operations and their order are written
    out.
    """
    LANES: tl.constexpr = DIM // 8
    pair = tl.program_id(1)
    let_next_kernel_start(PDL)
    wait_for_kernels_before(PDL)
    part, begin, stop, first = _part_bounds(start, pair, tokens, kv_heads, capacity, UNIT)
    if begin >= stop:
        return
    own = (tl.load(slots + pair // kv_heads) * kv_heads + pair % kv_heads) * capacity * DIM
    row = tl.program_id(2) * ROWS
    rows = tokens * group
    spot = tl.arange(0, SPOTS)
    channel = tl.arange(0, DIM)
    tile = spot[:, None] * DIM + channel[None, :]
    q_at = queries + (pair * rows).to(tl.int64) * DIM + channel[None, :]
    peaks_now = (tl.full((SPOTS,), -float("inf"), dtype=tl.float32),) * ROWS
    totals_now = (tl.zeros((SPOTS,), dtype=tl.float32),) * ROWS
    acc = (tl.zeros((SPOTS, LANES), dtype=tl.float32),) * (8 * ROWS)
    for at in range(begin, stop, SPOTS * DEPTH):
        key = ()
        value = ()
        for i in tl.static_range(DEPTH):
            here = (at + i * SPOTS + spot < stop)[:, None]
            there = own + (at + i * SPOTS) * DIM + tile
            key = key + eighths(tl.load(keys + there, mask=here, other=0.0), SPOTS, LANES)
            value = value + eighths(tl.load(values + there, mask=here, other=0.0), SPOTS, LANES)
        new_peaks = ()
        new_totals = ()
        new_acc = ()
        for r in tl.static_range(ROWS):
            mine_at = tl.minimum(row + r, rows - 1)  # beyond the last row: that row again, not stored
            q = eighths(tl.load(q_at + mine_at * DIM), 1, LANES)
            newest = tl.minimum(first + mine_at // group, stop - 1)
            scores = ()
            top = peaks_now[r]
            for i in tl.static_range(DEPTH):
                product = tl.zeros((SPOTS, LANES), dtype=tl.float32)
                for j in tl.static_range(8):
                    product = tl.fma(q[j], key[8 * i + j], product)
                seen = at + i * SPOTS + spot <= newest
                score = tl.where(seen, tl.sum(product, axis=1), -float("inf"))
                scores = scores + (score,)
                top = tl.maximum(top, score)
            base = tl.where(top == -float("inf"), 0.0, top)
            keep = tl.exp2(peaks_now[r] - base)
            total = totals_now[r]
            mine = ()
            for j in tl.static_range(8):
                mine = mine + (acc[8 * r + j] * keep[:, None],)
            for i in tl.static_range(DEPTH):
                weight = tl.exp2(scores[i] - base)
                total = tl.fma(total, keep, weight) if i == 0 else total + weight
                wide = tl.broadcast_to(weight[:, None], (SPOTS, LANES))
                longer = ()
                for j in tl.static_range(8):
                    longer = longer + (tl.fma(wide, value[8 * i + j], mine[j]),)
                mine = longer
            new_peaks = new_peaks + (top,)
            new_totals = new_totals + (total,)
            new_acc = new_acc + mine
        peaks_now = new_peaks
        totals_now = new_totals
        acc = new_acc
    lane = tl.arange(0, LANES)
    for r in tl.static_range(ROWS):
        if row + r < rows:
            out = (pair.to(tl.int64) * tl.num_programs(0) + part) * rows + row + r
            peak = tl.max(peaks_now[r], axis=0)
            weight = tl.exp2(peaks_now[r] - tl.where(peak == -float("inf"), 0.0, peak))
            for j in tl.static_range(8):
                sum_j = tl.sum(acc[8 * r + j] * weight[:, None], axis=0)
                tl.store(sums + out * DIM + lane * 8 + j, sum_j)
            tl.store(totals + out, tl.sum(totals_now[r] * weight, axis=0))
            tl.store(peaks + out, peak)


@triton.jit(do_not_specialize=COUNTS)
def _combine(
    q_gate,
    start,
    sums,
    totals,
    peaks,
    out,
    tokens,
    heads,
    kv_heads,
    capacity,
    parts,
    q_stride,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some channels of one head of one row: the parts up to its position, times sigmoid(gate)."""
    row, head = tl.program_id(0), tl.program_id(1)
    let_next_kernel_start(PDL)
    batch, token = row // tokens, row % tokens
    group = heads // kv_heads
    lane = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    step = tl.arange(0, WIDE)
    wait_for_kernels_before(PDL)
    position = tl.minimum(tl.load(start + batch).to(tl.int32) + token, capacity - 1)
    count = _part_holding(position, UNIT) + 1
    rows = tokens * group
    own = ((batch * kv_heads + head // group) * parts).to(tl.int64) * rows + token * group + head % group
    peak = -float("inf")
    for begin in range(0, count, WIDE):
        part = begin + step
        peaks_here = tl.load(peaks + own + part * rows, mask=part < count, other=-float("inf"))
        peak = tl.maximum(peak, tl.max(peaks_here, axis=0))
    total = 0.0
    acc = tl.zeros((CHANNELS,), dtype=tl.float32)
    for begin in range(0, count, WIDE):
        part = begin + step
        there = own + part * rows
        weight = tl.exp2(tl.load(peaks + there, mask=part < count, other=-float("inf")) - peak)
        total += tl.sum(weight * tl.load(totals + there, mask=part < count, other=0.0), axis=0)
        tile = tl.load(sums + there[:, None] * DIM + lane[None, :], mask=(part < count)[:, None], other=0.0)
        acc += tl.sum(weight[:, None] * tile, axis=0)
    gate = tl.load(q_gate + row.to(tl.int64) * q_stride + (head * 2 + 1) * DIM + lane).to(tl.float32)
    y = acc / total / (1.0 + tl.exp(-gate))
    tl.store(out + (row * heads + head).to(tl.int64) * DIM + lane, y.to(out.dtype.element_ty))


# ---------------------------------------------------------------- launches


WIDE = 32  # parts that ``_combine`` reads at a time
CHANNELS = 64  # of one of its programs


@dataclass(frozen=True)
class Tile:
    """How one of the two attention kernels is cut. One serves every number of rows."""

    kernel: Any  # _attend_dot or _attend_fma
    constants: dict[str, int]
    unit: int  # positions of the first parts
    num_stages: int = 1
    num_warps: int = 4


def tile_for(dim: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The kernel and tile for a cache of this kind on this device."""
    if dtype == torch.float16 and has_tensor_core_dots(device):
        shared = shared_memory(device)
        # Keys and values of ``stages`` blocks, and the queries: as much as a block may have.
        for block, stages in ((64, 3), (64, 2), (32, 2)):
            if dim * 2 * (2 * block * stages + 48) <= shared:
                return dot_tile(block, stages)
    return fma_tile(dim)


def dot_tile(block: int = 64, stages: int = 1) -> Tile:
    """A tile of ``_attend_dot``."""
    return Tile(_attend_dot, {"ROWS": 32, "BLOCK": block}, unit=2 * block, num_stages=stages)


def fma_tile(dim: int) -> Tile:
    """The tile of ``_attend_fma``: positions that four warps hold at eight channels a thread."""
    return Tile(_attend_fma, {"ROWS": 4, "SPOTS": 8 * 4 * 32 // dim, "DEPTH": 4}, unit=SMALLEST_UNIT)


class Workspace(NamedTuple):
    """Memory between the three kernels. One round's layers may share it."""

    queries: torch.Tensor  # [B · T · Hq · D], the cache's dtype
    sums: torch.Tensor  # [B · Hkv · parts · T · group · D] float32
    totals: torch.Tensor  # the same without D
    peaks: torch.Tensor


def workspace(batch: int, tokens: int, heads: int, keys: torch.Tensor) -> Workspace:
    """For rounds of up to ``tokens`` rows of ``batch`` sequences over a cache like ``keys``."""
    capacity, dim = keys.shape[2:]
    rows = batch * tokens * heads
    parts = parts_of(capacity, SMALLEST_UNIT)  # the most that any tile has
    wide = [torch.empty(rows * parts * n, dtype=torch.float32, device=keys.device) for n in (dim, 1, 1)]
    return Workspace(torch.empty(rows * dim, dtype=keys.dtype, device=keys.device), *wide)


def gated_attention(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    start: torch.Tensor,
    eps: float,
    space: Workspace,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Norm and rotate q and k, write T new rows into the cache, attend causally over all rows up to them.

    q_gate [B, T, Hq·2D] (q | gate for each head); k, v [B, T, Hkv·D]: may be parts of one fused
    projection; norm weights float32 [D]; cos, sin [B, T, rotary_dim]; keys, values
    [N, Hkv, capacity, D] contiguous, float16 or float32, D one of 64, 128, 256; slots, start [B] int64
    on the device. A row beyond the capacity is not written. ``tile``: by default ``tile_for`` this device.
    Returns ``out`` [B, T, Hq·D] in q_gate's dtype. Raises ``ValueError`` where there is no kernel for a
    shape or type.
    """
    batch, tokens, _ = k.shape
    kv_heads, capacity, dim = keys.shape[1:]
    heads = q_gate.shape[-1] // (2 * dim)
    if dim not in HEAD_DIMS or keys.dtype not in DTYPES or values.dtype != keys.dtype:
        raise ValueError(f"no attention kernel for head_dim {dim} in {keys.dtype} and {values.dtype}")
    if heads % kv_heads or cos.shape[-1] > dim or cos.shape[-1] % 2:
        raise ValueError(
            f"{heads} query heads, {kv_heads} key heads, {cos.shape[-1]} rotary channels of {dim}"
        )
    q_gate, k, v = (x.flatten(0, 1) for x in (q_gate, k, v))
    if any(x.stride(1) != 1 for x in (q_gate, k, v)):
        raise ValueError("the channels of q_gate, k and v must be contiguous")
    cos, sin = cos.contiguous(), sin.contiguous()
    if out is None:
        out = q_gate.new_empty(batch, tokens, heads * dim)
    device = keys.device
    options = launch_options(device)
    tile = tile or tile_for(dim, keys.dtype, device)
    rows, parts = tokens * heads // kv_heads, parts_of(capacity, tile.unit)
    scale = dim**-0.5 * math.log2(math.e)
    _prepare[(batch * tokens, heads + 2 * kv_heads)](
        q_gate, k, v, q_norm, k_norm, cos, sin, space.queries, keys, values, slots, start,
        tokens, heads, kv_heads, capacity, q_gate.stride(0), k.stride(0), v.stride(0), scale, eps,
        DIM=dim, ROTARY=cos.shape[-1], num_warps=1, **options,
    )  # fmt: skip
    tile.kernel[(parts, batch * kv_heads, triton.cdiv(rows, tile.constants["ROWS"]))](
        space.queries, keys, values, slots, start, space.sums, space.totals, space.peaks,
        tokens, heads // kv_heads, kv_heads, capacity,
        DIM=dim, UNIT=tile.unit, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **tile.constants, **options,
    )  # fmt: skip
    _combine[(batch * tokens, heads, dim // CHANNELS)](
        q_gate, start, space.sums, space.totals, space.peaks, out,
        tokens, heads, kv_heads, capacity, parts, q_gate.stride(0),
        DIM=dim, CHANNELS=CHANNELS, WIDE=WIDE, UNIT=tile.unit, num_warps=4, **options,
    )  # fmt: skip
    return out


def compile_cases() -> Iterator[CompileCase]:
    """Every configuration that a device without tensor-core dots launches."""
    integers = dict.fromkeys(("tokens", "heads", "kv_heads", "capacity", "group", "parts"), "i32")
    integers |= dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32")
    tables = {"slots": "*i64", "start": "*i64"} | dict.fromkeys(("sums", "totals", "peaks"), "*fp32")
    wide = dict.fromkeys(("q_norm", "k_norm"), "*fp32") | {"scale": "fp32", "eps": "fp32"}

    def case(kernel: object, kind: str, constants: dict[str, object], warps: int, label: str) -> CompileCase:
        data = ("q_gate", "k", "v", "cos", "sin", "queries", "keys", "values", "out")
        types = integers | tables | wide | dict.fromkeys(data, kind)
        names = [name for name in kernel.arg_names if name not in constants | {"PDL": False}]  # type: ignore[attr-defined]
        signature = {name: types[name] for name in names}
        return CompileCase(kernel, signature, constants | {"PDL": False}, warps, 1, label)

    for kind in DTYPES.values():
        for dim in HEAD_DIMS:
            what = f"{kind[1:]} D={dim}"
            for rotary in (dim // 4, dim // 2, dim):
                constants: dict[str, object] = {"DIM": dim, "ROTARY": rotary}
                yield case(_prepare, kind, constants, 1, f"attention.prepare {what} rotary={rotary}")
            tile = fma_tile(dim)
            constants = {"DIM": dim, "CHANNELS": CHANNELS, "WIDE": WIDE, "UNIT": tile.unit}
            yield case(_combine, kind, constants, 4, f"attention.combine {what}")
            constants = {"DIM": dim, "UNIT": tile.unit, **tile.constants}
            yield case(tile.kernel, kind, constants, tile.num_warps, f"attention.attend_fma {what}")
