"""From logits to committed tokens on the device: truncate, draw, accept, with no host in between.

The rules are those of ``engine.sampling`` (truncation, Gumbel-max), ``engine.noise`` (SplitMix64, keyed
by stream, position and token id) and ``engine.rejection`` (acceptance); those functions are the
reference, and the tests ask for the same tokens. Hashes are the same to the bit. Probabilities are
float32, scores (log w + Gumbel noise) float64, so two tokens tie no more often than on the host.

``_block_top`` finds the greatest logits of each block of the vocabulary, ``_truncate`` puts a row's
blocks together, truncates and draws, ``_accept`` compares the drafts with the target. Among equal
logits the lower id comes first.

Tensors of a launch, B sequences of T rows (R = B·T):
  settings   float32 [B, 4]: temperature, top_k, top_p, min_p. temperature 0: the argmax, for certain
  keys       int64 [B, STREAMS]: each stream's key of a ``KeyedNoise``, in the order of ``Stream``
  position   int64 [B]: the output position of each sequence's first row
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sm70lab.kernels.gpu.cases import CompileCase
from sm70lab.kernels.gpu.launch import launch_options, let_next_kernel_start, wait_for_kernels_before

MAX_TOP_K = 64
MAX_ROWS = 16  # of one sequence: a power of two that holds 9
BLOCK = 4096  # logits a program of ``_block_top`` looks at
MAX_BLOCKS = 64
WARPS = {"_block_top": 4, "_truncate": 8}
ACCEPT_WARPS = {32: 2, MAX_TOP_K: 8}  # by width: its reductions would rather not cross warps

TARGET, DRAFT, ACCEPT, RESIDUAL = (tl.constexpr(stream) for stream in range(1, 5))  # engine.noise.Stream
STREAMS = tl.constexpr(5)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
LOWEST = tl.constexpr(-(1 << 63))  # sorts below every logit
LAST_ID = tl.constexpr((1 << 31) - 1)  # id ^ LAST_ID falls as ids rise
# Not specialised for 1 or multiples of 16: one compiled kernel serves every number of rows.
COUNTS = ("tokens", "blocks", "offset", "stream", "count")

# ---------------------------------------------------------------- noise


@triton.jit
def _mix(z):
    """SplitMix64's finaliser of uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _hash(keys, batch, stream, position):
    """The hash of a stream's draw at a position."""
    key = tl.load(keys + batch * STREAMS + stream).to(tl.uint64, bitcast=True)
    return _mix(key + position.to(tl.int64).to(tl.uint64, bitcast=True) * GOLDEN)


@triton.jit
def _unit(bits):
    """The upper 52 bits as the middle of one of 2^52 cells of (0, 1): float64."""
    return ((bits >> 12).to(tl.int64, bitcast=True).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _scores(weights, ids, hashed):
    """log w + Gumbel noise in float64; −∞ for w = 0."""
    words = (ids + 1).to(tl.uint64, bitcast=True) * GOLDEN + hashed
    wide = weights.to(tl.float64)
    noisy = tl.log(tl.where(wide > 0, wide, 1.0)) - tl.log(-tl.log(_unit(_mix(words))))
    return tl.where(wide > 0, noisy, -float("inf"))


@triton.jit
def _draw(weights, ids, hashed, WIDTH: tl.constexpr):
    """Gumbel-max over one row of candidates: a token id, int64."""
    best = tl.argmax(_scores(weights, ids, hashed), axis=0, tie_break_left=True)
    return tl.sum(tl.where(tl.arange(0, WIDTH) == best, ids, 0), axis=0)


# ---------------------------------------------------------------- candidates


@triton.jit
def _sortable(logits, column, vocabulary):
    """Logits at ``column`` with their ids as int64 that sort as they do; beyond the vocabulary LOWEST."""
    inside = column < vocabulary
    x = tl.load(logits + column, mask=inside, other=-float("inf")).to(tl.float32)
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # −0 becomes 0: they are equal
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(inside, (order.to(tl.int64) << 32) | (column ^ LAST_ID).to(tl.int64), LOWEST), x


@triton.jit(do_not_specialize=COUNTS)
def _block_top(
    logits,
    settings,
    lists,
    finite,
    vocabulary,
    stride,
    tokens,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The greatest logits of one block of one row, each with its id in one sortable int64.

    The greatest of every 32 neighbours is kept; the 32 that lost theirs are read again, from the
    first-level cache, for their next.
    """
    LANES: tl.constexpr = 32
    block, row = tl.program_id(0), tl.program_id(1)
    let_next_kernel_start(PDL)
    begin = block * BLOCK
    group = tl.arange(0, BLOCK // LANES)
    lane = tl.arange(0, LANES)
    slot = tl.arange(0, WIDTH)
    wait_for_kernels_before(PDL)
    own = logits + row.to(tl.int64) * stride
    everyone, x = _sortable(own, begin + group[:, None] * LANES + lane[None, :], vocabulary)
    bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=1)
    place = row * tl.num_programs(0) + block
    tl.store(finite + place, 1 - tl.max(bad, axis=0))
    heads = tl.max(everyone, axis=1)
    best = tl.full((WIDTH,), LOWEST, dtype=tl.int64)
    for i in range(_count(settings, row // tokens)):
        top = tl.max(heads, axis=0)
        best = tl.where(slot == i, top, best)
        loser = (((top & LAST_ID) ^ LAST_ID).to(tl.int32) - begin) // LANES
        loser = tl.minimum(loser, BLOCK // LANES)  # none, when nothing is left
        rest, _ = _sortable(own, begin + loser * LANES + lane, vocabulary)
        heads = tl.where(group == loser, tl.max(tl.where(rest < top, rest, LOWEST), axis=0), heads)
    tl.store(lists + place.to(tl.int64) * WIDTH + slot, best)


@triton.jit
def _count(settings, batch):
    """How many candidates a row of this sequence has at most."""
    greedy = tl.load(settings + batch * 4) == 0
    return tl.where(greedy, 1, tl.load(settings + batch * 4 + 1).to(tl.int32))


@triton.jit(do_not_specialize=COUNTS)
def _truncate(
    lists,
    finite_blocks,
    settings,
    keys,
    position,
    names,
    ids,
    probs,
    drawn,
    finite,
    blocks,
    tokens,
    offset,
    stream,
    ids_stride,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    NAMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: its candidates, falling, with their probabilities, and a token drawn from them."""
    row = tl.program_id(0)
    let_next_kernel_start(PDL)
    batch, token = row // tokens, row % tokens
    slot = tl.arange(0, WIDTH)
    everyone = tl.arange(0, WIDTH * BLOCKS)
    wait_for_kernels_before(PDL)
    flags = tl.load(
        finite_blocks + row * blocks + tl.arange(0, BLOCKS), mask=tl.arange(0, BLOCKS) < blocks, other=1
    )
    tl.store(finite + row, tl.min(flags, axis=0))
    own = lists + row.to(tl.int64) * blocks * WIDTH
    sortable = tl.load(own + everyone, mask=everyone < blocks * WIDTH, other=LOWEST)
    best = tl.full((WIDTH,), LOWEST, dtype=tl.int64)
    for i in range(_count(settings, batch)):
        top = tl.max(sortable, axis=0)
        best = tl.where(slot == i, top, best)
        sortable = tl.where(sortable == top, LOWEST, sortable)
    held = best != LOWEST
    order = (best >> 32).to(tl.int32)
    values = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    column = tl.where(held, (best & LAST_ID) ^ LAST_ID, 0)

    heat = tl.load(settings + batch * 4)
    values = tl.where(
        held, tl.div_rn(values, tl.zeros_like(values) + tl.where(heat == 0, 1.0, heat)), -float("inf")
    )
    mass = tl.exp(values - tl.max(values, axis=0))
    p = mass / tl.sum(mass, axis=0)
    top_p, min_p = tl.load(settings + batch * 4 + 2), tl.load(settings + batch * 4 + 3)
    if (top_p < 1) | (min_p > 0):
        kept = (tl.cumsum(p, axis=0) - p < top_p) & (p >= min_p * tl.max(p, axis=0))
        p = tl.where(kept, p, 0.0)
        p = p / tl.sum(p, axis=0)
    if NAMED:
        column = tl.load(names + column)
    tl.store(ids + row.to(tl.int64) * ids_stride + slot, column)
    tl.store(probs + row.to(tl.int64) * ids_stride + slot, p)
    at = tl.load(position + batch) + offset + token
    tl.store(drawn + row, _draw(p, column, _hash(keys, batch, stream, at), WIDTH))


# ---------------------------------------------------------------- acceptance


@triton.jit
def _first(condition, place, otherwise):
    """The first place where ``condition`` holds, or ``otherwise``."""
    return tl.min(tl.where(condition, place, otherwise), axis=0)


@triton.jit(do_not_specialize=COUNTS)
def _accept(
    p_ids,
    p_probs,
    drawn,
    drafts,
    q_ids,
    q_probs,
    keys,
    position,
    out,
    counts,
    count,
    MATCH: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One sequence: how many tokens its round delivers, and which."""
    batch = tl.program_id(0)
    let_next_kernel_start(PDL)
    row = tl.arange(0, ROWS)
    drafted = row < count
    target = batch * (count + 1)
    wait_for_kernels_before(PDL)
    draft = tl.load(drafts + batch * count + row, mask=drafted, other=0)
    if MATCH:
        own = tl.load(drawn + target + row, mask=row <= count, other=0)
        passed = _first(~(drafted & (own == draft)), row, ROWS)
        last = tl.sum(tl.where(row == passed, own, 0), axis=0)
    else:
        slot = tl.arange(0, WIDTH)
        p_at = (target + row)[:, None] * WIDTH + slot[None, :]
        q_at = (batch * count + row)[:, None] * WIDTH + slot[None, :]
        p_same = tl.load(p_ids + p_at, mask=drafted[:, None], other=0) == draft[:, None]
        q_same = tl.load(q_ids + q_at, mask=drafted[:, None], other=0) == draft[:, None]
        p = tl.load(p_probs + p_at, mask=drafted[:, None] & p_same, other=0.0)
        q = tl.load(q_probs + q_at, mask=drafted[:, None] & q_same, other=0.0)
        begin = tl.load(position + batch)
        uniform = _unit(_mix(_hash(keys, batch, ACCEPT, begin + row)))
        passes = uniform * tl.sum(q, axis=1).to(tl.float64) < tl.sum(p, axis=1).to(tl.float64)
        passed = _first(~(drafted & passes), row, ROWS)
        ids = tl.load(p_ids + (target + passed) * WIDTH + slot)
        weights = tl.load(p_probs + (target + passed) * WIDTH + slot)
        stream = TARGET
        if passed < count:
            stream = RESIDUAL
            other_ids = tl.load(q_ids + (batch * count + passed) * WIDTH + slot)
            other = tl.load(q_probs + (batch * count + passed) * WIDTH + slot)
            same = ids[:, None] == other_ids[None, :]
            residual = tl.maximum(weights - tl.sum(tl.where(same, other[None, :], 0.0), axis=1), 0.0)
            # p = q up to rounding leaves no residual, and p itself is then the right distribution.
            weights = tl.where(tl.max(residual, axis=0) > 0, residual, weights)
        last = _draw(weights, ids, _hash(keys, batch, stream, begin + passed), WIDTH)
    # What follows the delivered tokens repeats the last: never read as output, always a real id.
    tl.store(out + target + row, tl.where(row < passed, draft, last), mask=row <= count)
    tl.store(counts + batch, (passed + 1).to(tl.int64))


# ---------------------------------------------------------------- launches


class Rows(NamedTuple):
    """R truncated distributions and a draw from each; ids and probs may be parts of wider tensors."""

    ids: torch.Tensor  # [R, width] int64, most likely first; id 0 with probability 0 where there is none
    probs: torch.Tensor  # [R, width] float32
    drawn: torch.Tensor  # [R] int64
    finite: torch.Tensor  # [R] int32: 0 where a logit is NaN or +∞, and then the rest means nothing


def width_for(top_k: int) -> int:
    """Candidates kept a row. Raises ``ValueError`` for what the kernels cannot truncate to."""
    if not 1 <= top_k <= MAX_TOP_K:
        raise ValueError(f"top_k {top_k}: the kernels keep 1 to {MAX_TOP_K} candidates")
    return 32 if top_k <= 32 else MAX_TOP_K


def rows(count: int, width: int, device: torch.device) -> Rows:
    """Memory for the results of ``count`` rows."""
    ids = torch.empty(count, width, dtype=torch.int64, device=device)
    probs = torch.empty(count, width, dtype=torch.float32, device=device)
    drawn = torch.empty(count, dtype=torch.int64, device=device)
    return Rows(ids, probs, drawn, torch.empty(count, dtype=torch.int32, device=device))


class Lists(NamedTuple):
    """Memory between ``_block_top`` and ``_truncate``."""

    best: torch.Tensor  # [R, blocks, width] int64
    finite: torch.Tensor  # [R, blocks] int32


def lists(count: int, width: int, vocabulary: int, device: torch.device) -> Lists:
    """For ``count`` rows. Raises ``ValueError`` for a vocabulary beyond 262,144."""
    blocks = triton.cdiv(vocabulary, BLOCK)
    if blocks > MAX_BLOCKS:
        raise ValueError(f"a vocabulary of {vocabulary}: the kernels take up to {BLOCK * MAX_BLOCKS}")
    best = torch.empty(count, blocks, width, dtype=torch.int64, device=device)
    return Lists(best, torch.empty(count, blocks, dtype=torch.int32, device=device))


def truncate_and_draw(
    logits: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    position: torch.Tensor,
    stream: int,
    space: Lists,
    out: Rows,
    offset: int = 0,
    names: torch.Tensor | None = None,
) -> Rows:
    """Truncate each row of logits [R, V] (float16 or float32) and draw a token from it, into ``out``.

    Row r = b·T + t draws with the noise of ``stream`` at output position position[b] + offset + t.
    names [V] int64: the vocabulary ids that the columns stand for (a shortlist head). settings' top_k
    must be at most the width that ``space`` and ``out`` were made for.
    """
    count, vocabulary = logits.shape
    tokens, width, blocks = count // len(settings), out.ids.shape[1], space.best.shape[1]
    if logits.stride(1) != 1 or out.ids.stride(1) != 1 or out.ids.stride() != out.probs.stride():
        raise ValueError("logits and candidates must be contiguous in their last dimension")
    options = launch_options(logits.device)
    _block_top[(blocks, count)](
        logits, settings, space.best, space.finite, vocabulary, logits.stride(0), tokens,
        WIDTH=width, BLOCK=BLOCK, num_warps=WARPS["_block_top"], **options,
    )  # fmt: skip
    _truncate[(count,)](
        space.best, space.finite, settings, keys, position, names, *out,
        blocks, tokens, offset, stream, out.ids.stride(0),
        WIDTH=width, BLOCKS=MAX_BLOCKS, NAMED=names is not None, num_warps=WARPS["_truncate"], **options,
    )  # fmt: skip
    return out


def accept(
    match: bool,
    target: Rows,
    drafts: torch.Tensor,
    q: Rows | None,
    keys: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Which tokens each sequence's round delivers: ``counts`` [B] int64 of them in ``out`` [B, k + 1] int64.

    match: the rule of token_matching and coupled; else rejection, for which ``q`` holds the B·k rows
    that the drafts [B, k] were drawn from (greedy drafts: truncated at temperature 0). target: B·(k + 1)
    rows drawn with ``Stream.target``. A place beyond a sequence's count repeats its last token.
    """
    batch, count = drafts.shape
    if count >= MAX_ROWS:
        raise ValueError(f"{count} drafts: the kernel takes up to {MAX_ROWS - 1}")
    if q is None and not match:
        raise ValueError("rejection needs the distributions that the drafts were drawn from")
    q_ids, q_probs = (target.ids, target.probs) if q is None else (q.ids, q.probs)
    width = target.ids.shape[1]
    _accept[(batch,)](
        target.ids, target.probs, target.drawn, drafts, q_ids, q_probs, keys, position, out, counts, count,
        MATCH=match, ROWS=MAX_ROWS, WIDTH=width, num_warps=ACCEPT_WARPS[width],
        **launch_options(drafts.device),
    )  # fmt: skip


def compile_cases() -> Iterator[CompileCase]:
    """Every configuration that a device without dependent launches uses."""
    integers = ("vocabulary", "stride", "tokens", "blocks", "offset", "stream", "ids_stride", "count")
    types = dict.fromkeys(integers, "i32")
    types |= dict.fromkeys(("lists", "keys", "position", "names", "ids", "drawn", "drafts", "p_ids"), "*i64")
    types |= dict.fromkeys(("q_ids", "out", "counts"), "*i64")
    types |= dict.fromkeys(("settings", "probs", "p_probs", "q_probs"), "*fp32")
    types |= dict.fromkeys(("finite", "finite_blocks"), "*i32")

    def case(kernel: object, label: str, warps: int, **constants: object) -> CompileCase:
        constants["PDL"] = False
        names = [name for name in kernel.arg_names if name not in constants]  # type: ignore[attr-defined]
        return CompileCase(kernel, {name: types[name] for name in names}, constants, warps, 1, label)

    for width in (32, MAX_TOP_K):
        for kind in ("*fp16", "*fp32"):
            types["logits"] = kind
            constants: dict[str, object] = {"WIDTH": width, "BLOCK": BLOCK}
            label = f"sampling.block_top {kind[1:]} width={width}"
            yield case(_block_top, label, WARPS["_block_top"], **constants)
        for named in (False, True):
            constants = {"WIDTH": width, "BLOCKS": MAX_BLOCKS, "NAMED": named} | (
                {} if named else {"names": None}
            )
            yield case(
                _truncate, f"sampling.truncate width={width} named={named}", WARPS["_truncate"], **constants
            )
        for match in (False, True):
            constants = {"MATCH": match, "ROWS": MAX_ROWS, "WIDTH": width}
            yield case(
                _accept, f"sampling.accept width={width} match={match}", ACCEPT_WARPS[width], **constants
            )
