"""Where a round reads and writes, worked out on the device, so that one graph serves every round.

One sequence of T = k + 1 verify rows. ``Places`` are the numbers that a round starts from; ``advance``
makes the next round's of them when ``sampling.accept`` has said how many tokens were delivered. The
draft head is one round behind: it runs the rows that the last round delivered (*catch up*), then k − 1
times its own newest row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sm70lab.kernels.gpu.cases import CompileCase
from sm70lab.kernels.gpu.launch import launch_options, let_next_kernel_start, wait_for_kernels_before

# Fields of ``Places``, each 16 bytes from the next: kernels take pointers to be so aligned.
START, CATCH_UP, ACCEPTED, ROWS, OUTPUT, DRAFTS = (tl.constexpr(field) for field in range(6))
STRIDE = tl.constexpr(2)
MAX_ROWS = 16  # a power of two that holds 9


class Places(NamedTuple):
    """Numbers of one sequence, each an int64 [1] on the device, views of one tensor."""

    start: torch.Tensor  # cache position of the first verify row
    catch_up: torch.Tensor  # cache position of the first row that the draft head has yet to run
    accepted: torch.Tensor  # rows of the last round that the recurrent state has yet to fold
    rows: torch.Tensor  # rows that the draft head has yet to run, 1..T
    output: torch.Tensor  # tokens delivered so far
    drafts: list[torch.Tensor]  # cache position of the draft head's i-th row of its own, i = 1..k − 1
    table: torch.Tensor  # [5 + k − 1, 2] int64: what they are views of


def places(drafts: int, device: torch.device) -> Places:
    """Room for a sequence with ``drafts`` draft tokens a round, all zero."""
    table = torch.zeros(DRAFTS.value + max(drafts - 1, 0), STRIDE.value, dtype=torch.int64, device=device)
    start, catch_up, accepted, rows, output, *rest = table[:, :1].unbind(0)
    return Places(start, catch_up, accepted, rows, output, rest, table)


def values(start: int, rows: int, accepted: int, output: int, drafts: int) -> list[list[int]]:
    """The table of ``Places`` whose next verify row stands at cache position ``start``."""
    numbers = [start, start - rows, accepted, rows, output, *(start - 1 + i for i in range(1, drafts))]
    return [[number, 0] for number in numbers]


# ---------------------------------------------------------------- reference


def advance_reference(
    table: torch.Tensor, delivered: torch.Tensor, count: int
) -> tuple[list[list[int]], int]:
    """The next round's table, and its first verify token: the last one delivered."""
    start, output = int(table[0, 0]) + count, int(table[4, 0]) + count
    return values(start, count, count, output, len(table) - 4), int(delivered[count - 1])


# ---------------------------------------------------------------- kernels


@triton.jit
def _advance(
    table,
    delivered,
    counts,
    target_finite,
    draft_finite,
    tokens,
    report,
    rows,
    drafts,
    MAX: tl.constexpr,
    PDL: tl.constexpr,
):
    """The next round's places and first token; what the host is told: tokens, their number, all finite."""
    row = tl.arange(0, MAX)
    let_next_kernel_start(PDL)
    wait_for_kernels_before(PDL)
    count = tl.load(counts)
    start = tl.load(table + START * STRIDE) + count
    output = tl.load(table + OUTPUT * STRIDE) + count
    told = tl.load(delivered + row, mask=row < rows, other=0)
    finite = tl.min(tl.load(target_finite + row, mask=row < rows, other=1), axis=0)
    finite = tl.minimum(finite, tl.min(tl.load(draft_finite + row, mask=row < drafts, other=1), axis=0))
    tl.store(table + START * STRIDE, start)
    tl.store(table + CATCH_UP * STRIDE, start - count)
    tl.store(table + ACCEPTED * STRIDE, count)
    tl.store(table + ROWS * STRIDE, count)
    tl.store(table + OUTPUT * STRIDE, output)
    # Draft 1 comes from the caught-up rows; row i of the draft head's own stands i behind the last of them.
    tl.store(table + (DRAFTS + row) * STRIDE, start + row, mask=row < drafts - 1)
    tl.store(tokens, tl.sum(tl.where(row == count - 1, told, 0), axis=0))
    tl.store(report + row, told, mask=row < rows)
    tl.store(report + rows, count)
    tl.store(report + rows + 1, finite.to(tl.int64))


@triton.jit
def _rotary_rows(
    table,
    cos_table,
    sin_table,
    cos,
    sin,
    rows,
    capacity,
    size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of the rotary table for a round: T to verify, T to catch up, one for each later draft."""
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    let_next_kernel_start(PDL)
    field = tl.where(row < rows, START, tl.where(row < 2 * rows, CATCH_UP, DRAFTS + row - 2 * rows))
    step = tl.where(row < 2 * rows, row % rows, 0)
    wait_for_kernels_before(PDL)
    # A padded row may stand beyond the cache; nothing of it is read.
    position = tl.minimum(tl.load(table + field * STRIDE) + step, capacity - 1)
    mask = channel < size
    at = position * size + channel
    tl.store(cos + row * size + channel, tl.load(cos_table + at, mask=mask), mask=mask)
    tl.store(sin + row * size + channel, tl.load(sin_table + at, mask=mask), mask=mask)


@triton.jit
def _pick_row(x, rows, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = x[rows − 1]."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    let_next_kernel_start(PDL)
    wait_for_kernels_before(PDL)
    row = tl.load(rows) - 1
    tl.store(out + column, tl.load(x + row * size + column, mask=mask), mask=mask)


# ---------------------------------------------------------------- launches


def advance(
    place: Places,
    delivered: torch.Tensor,
    counts: torch.Tensor,
    target_finite: torch.Tensor,
    draft_finite: torch.Tensor,
    tokens: torch.Tensor,
    report: torch.Tensor,
) -> None:
    """End a round: delivered [T], counts [1], tokens [T] int64; the finite flags [T] and [k] int32.

    Writes ``place``, tokens[0], and report int64 [T + 2]: the delivered tokens, their count, and 1 where
    all logits were finite.
    """
    rows = len(delivered)
    arguments = (place.table, delivered, counts, target_finite, draft_finite, tokens, report)
    _advance[(1,)](*arguments, rows, rows - 1, MAX=MAX_ROWS, num_warps=1, **launch_options(counts.device))


def rotary_rows(
    place: Places, cos_table: torch.Tensor, sin_table: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Gather a round's rows of the tables [capacity, rotary_dim] into cos and sin.

    They hold T rows to verify and, with drafts, T rows to catch up and k − 1 of one draft each.
    """
    capacity, size = cos_table.shape
    count = len(cos)
    rows = (count + 2) // 3  # count is 2·T + k − 1 = 3·T − 2, and without drafts 1
    _rotary_rows[(count,)](
        place.table, cos_table, sin_table, cos, sin, rows, capacity, size,
        BLOCK=triton.next_power_of_2(size), num_warps=1, **launch_options(cos.device),
    )  # fmt: skip


PICK_BLOCK = 1024


def pick_row(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """x[rows − 1] of x [T, H] into ``out`` [1, H]; rows int64 [1] on the device."""
    size = x.shape[1]
    grid = (triton.cdiv(size, PICK_BLOCK),)
    _pick_row[grid](x, rows, out, size, BLOCK=PICK_BLOCK, num_warps=4, **launch_options(x.device))
    return out


def compile_cases() -> Iterator[CompileCase]:
    """The three kernels, in both element types."""
    integers = dict.fromkeys(("table", "delivered", "counts", "tokens", "report"), "*i64")
    flags = dict.fromkeys(("target_finite", "draft_finite"), "*i32")
    counts = {"rows": "i32", "drafts": "i32"}
    constexprs = {"MAX": MAX_ROWS, "PDL": False}
    yield CompileCase(_advance, integers | flags | counts, constexprs, 1, 1, "round advance")
    for name in ("fp16", "fp32"):
        tensors = dict.fromkeys(("cos_table", "sin_table", "cos", "sin"), f"*{name}")
        signature = tensors | {"table": "*i64", "rows": "i32", "capacity": "i32", "size": "i32"}
        yield CompileCase(
            _rotary_rows, signature, {"BLOCK": 64, "PDL": False}, 1, 1, f"round rotary rows {name}"
        )
        signature = {"x": f"*{name}", "rows": "*i64", "out": f"*{name}", "size": "i32"}
        constexprs = {"BLOCK": PICK_BLOCK, "PDL": False}
        yield CompileCase(_pick_row, signature, constexprs, 4, 1, f"round pick row {name}")
