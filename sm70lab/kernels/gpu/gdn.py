"""A Gated DeltaNet layer between its two projections, for one verify round of one to nine rows.

``gdn_round`` runs three kernels over the pools of ``engine.state.StateStore`` under the replay scheme:

1. ``_rows``: convolution, SiLU, L2 norm of q and k, gating. One program a row and head.
2. ``_recurrence``: reads the state once, folds the accepted rows of the last round into it, writes
   it once, and goes on over the new rows in registers. One program has all keys and ``BLOCK_V``
   values of one value head. What the last round left does not wait for this round's projection.
3. ``_finish``: the gated norm of the outputs, and the new rows into the pools. The others can't do
   that: some of their programs still read the old rows when others have done theirs.

All arithmetic is float32. A row runs the same operations in the same order wherever it stands in a
round, whether it is a new row or replayed, so its bits do not depend on T.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from sm70lab.kernels.causal_conv1d import causal_conv1d
from sm70lab.kernels.gated_delta import gated_delta_recurrent, gated_delta_states, gating, l2_normalise
from sm70lab.kernels.gpu.cases import CompileCase
from sm70lab.kernels.gpu.launch import launch_options, let_next_kernel_start, wait_for_kernels_before

CONV_WIDTH = 4
MAX_ROWS = 9


@dataclass(frozen=True)
class Heads:
    """Head counts and sizes of one layer; sizes are powers of two."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def projected(self) -> int:
        """Columns of the fused input projection: q | k | v | z | b | a."""
        return self.conv_dim + self.value_heads * (self.value_dim + 2)


class GDNWeights(NamedTuple):
    """Weights of a layer that these kernels read."""

    conv: torch.Tensor  # [4, C], the model's dtype
    neg_decay_rate: torch.Tensor  # [Hv] float32: −exp(A_log)
    dt_bias: torch.Tensor  # [Hv] float32
    norm: torch.Tensor  # [V] float32


class GDNPools(NamedTuple):
    """A layer's pools, N slots with room for R rows each (``engine.schemes.Replay``)."""

    conv_rows: torch.Tensor  # [N, 3 + R, C], the model's dtype
    state: torch.Tensor  # [N, Hv, K, V], float32 or the route's state dtype
    k: torch.Tensor  # [N, R, Hv, K] float32
    v: torch.Tensor  # [N, R, Hv, V] float32
    g: torch.Tensor  # [N, R, Hv] float32
    beta: torch.Tensor  # [N, R, Hv] float32


class Place(NamedTuple):
    """Which slots a batch of B sequences uses and how many rows of the last round count, [B] int64."""

    slots: torch.Tensor
    conv_accepted: torch.Tensor
    ssm_accepted: torch.Tensor


# ---------------------------------------------------------------- reference


def gdn_round_reference(
    projected: torch.Tensor,
    weights: GDNWeights,
    pools: GDNPools,
    place: Place,
    heads: Heads,
    eps: float,
) -> torch.Tensor:
    """The round in plain PyTorch, one sequence after another; writes the pools.

    projected [B, T, q | k | v | z | b | a]. Returns the gated norm's output [B, T, Hv·V] in its dtype.
    """
    rows = projected.shape[1]
    values = heads.value_heads * heads.value_dim
    mixed, z, b, a = projected.split([heads.conv_dim, values, heads.value_heads, heads.value_heads], dim=-1)
    outputs = []
    for i, slot in enumerate(place.slots.tolist()):
        window = pools.conv_rows[slot, int(place.conv_accepted[i]) :][: CONV_WIDTH - 1]
        conv_rows = torch.cat((window, mixed[i]))[None]
        qkv = causal_conv1d(conv_rows.float(), weights.conv.float())
        qk, v = qkv.tensor_split([2 * heads.key_heads * heads.key_dim], dim=-1)
        qk = l2_normalise(qk.reshape(1, rows, 2 * heads.key_heads, heads.key_dim))
        q, k = qk.repeat_interleave(heads.value_heads // heads.key_heads, dim=2).chunk(2, dim=2)
        v = v.reshape(1, rows, heads.value_heads, heads.value_dim)
        g, beta = gating(a[i : i + 1], b[i : i + 1], weights.neg_decay_rate, weights.dt_bias)

        kept = int(place.ssm_accepted[i])
        state = pools.state[slot : slot + 1].float()
        if kept:
            k_old, v_old, g_old, beta_old = (pool[slot : slot + 1, :kept] for pool in pools[2:])
            state = gated_delta_states(k_old, v_old, g_old, beta_old, state)[-1]
        pools.state[slot] = state[0]
        o, _ = gated_delta_recurrent(
            q * heads.key_dim**-0.5, k, v, g, beta, pools.state[slot : slot + 1].float()
        )
        pools.conv_rows[slot, : CONV_WIDTH - 1 + rows] = conv_rows[0]
        for pool, new in zip(pools[2:], (k, v, g, beta), strict=True):
            pool[slot, :rows] = new[0]
        normed = F.rms_norm(o[0], weights.norm.shape, weights.norm, eps)
        gate = F.silu(z[i].float()).view(rows, heads.value_heads, heads.value_dim)
        outputs.append((normed * gate).flatten(1))
    return torch.stack(outputs).to(projected.dtype)


# ---------------------------------------------------------------- kernels


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log(1 + eˣ), with the small eˣ kept: log(u)·e/(u − 1) for u = 1 + e (Kahan's log1p)."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    exact = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def _conv(pool, new, window, row, at, weight, CONV: tl.constexpr, PROJECTED: tl.constexpr, PDL: tl.constexpr):
    """silu(Σ_j w_j·x_j) of new row ``row`` in columns ``at``, in the order of j.

    x_j is row ``row`` + j of the window's three rows (``pool``) and the new ones (``new``). The first
    row's program copies the window, which ``_finish`` writes over, to ``window``.
    """
    w0 = tl.load(weight + at).to(tl.float32)
    w1 = tl.load(weight + CONV + at).to(tl.float32)
    w2 = tl.load(weight + 2 * CONV + at).to(tl.float32)
    w3 = tl.load(weight + 3 * CONV + at).to(tl.float32)
    old0 = tl.load(pool + row * CONV + at, mask=row < 3, other=0.0)
    old1 = tl.load(pool + (row + 1) * CONV + at, mask=row < 2, other=0.0)
    old2 = tl.load(pool + (row + 2) * CONV + at, mask=row < 1, other=0.0)
    wait_for_kernels_before(PDL)
    new += row * PROJECTED
    x0 = tl.where(row < 3, old0, tl.load(new - 3 * PROJECTED + at, mask=row >= 3, other=0.0))
    x1 = tl.where(row < 2, old1, tl.load(new - 2 * PROJECTED + at, mask=row >= 2, other=0.0))
    x2 = tl.where(row < 1, old2, tl.load(new - PROJECTED + at, mask=row >= 1, other=0.0))
    x3 = tl.load(new + at)
    tl.store(window + at, old0, mask=row == 0)
    tl.store(window + CONV + at, old1, mask=row == 0)
    tl.store(window + 2 * CONV + at, old2, mask=row == 0)
    total = tl.fma(x1.to(tl.float32), w1, x0.to(tl.float32) * w0)
    return _silu(tl.fma(x3.to(tl.float32), w3, tl.fma(x2.to(tl.float32), w2, total)))


@triton.jit
def _l2_normalised(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit(do_not_specialize=["rows", "room"])  # one compiled kernel for every T
def _rows(
    projected,
    conv_weight,
    neg_decay_rate,
    dt_bias,
    conv_pool,
    slots,
    conv_accepted,
    q_out,
    k_out,
    qk_out,
    v_out,
    g_out,
    beta_out,
    window_out,
    rows,
    room,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SETTLED: tl.constexpr,
    PDL: tl.constexpr,
):
    CONV: tl.constexpr = 2 * KEY_HEADS * K + VALUE_HEADS * V
    PROJECTED: tl.constexpr = CONV + VALUE_HEADS * (V + 2)
    SCALE: tl.constexpr = K**-0.5
    head = tl.program_id(0)  # a key head's q and k, then a value head's v
    row = tl.program_id(1)
    i = tl.program_id(2)
    let_next_kernel_start(PDL)
    wait_for_kernels_before(PDL and not SETTLED)
    slot = tl.load(slots + i)
    pool = conv_pool + (slot * (3 + room) + tl.load(conv_accepted + i)) * CONV
    new = projected + (i * rows).to(tl.int64) * PROJECTED
    window = window_out + i * 3 * CONV
    to = i * rows + row
    if head < KEY_HEADS:
        key_at = head * K + tl.arange(0, K)
        q = _conv(pool, new, window, row, key_at, conv_weight, CONV, PROJECTED, PDL)
        k = _conv(pool, new, window, row, KEY_HEADS * K + key_at, conv_weight, CONV, PROJECTED, PDL)
        q = _l2_normalised(q) * SCALE
        k = _l2_normalised(k)
        tl.store(q_out + to * KEY_HEADS * K + key_at, q)
        tl.store(k_out + to * KEY_HEADS * K + key_at, k)
        tl.store(qk_out + to * KEY_HEADS + head, tl.sum(q * k, axis=0))
    else:
        head -= KEY_HEADS
        value_at = head * V + tl.arange(0, V)
        rate = tl.load(neg_decay_rate + head)
        bias = tl.load(dt_bias + head)
        v = _conv(pool, new, window, row, 2 * KEY_HEADS * K + value_at, conv_weight, CONV, PROJECTED, PDL)
        tl.store(v_out + to * VALUE_HEADS * V + value_at, v)
        gates = new + row * PROJECTED + CONV + VALUE_HEADS * V + head
        b = tl.load(gates).to(tl.float32)
        a = tl.load(gates + VALUE_HEADS).to(tl.float32)
        tl.store(g_out + to * VALUE_HEADS + head, rate * _softplus(a + bias))
        tl.store(beta_out + to * VALUE_HEADS + head, 1.0 / (1.0 + tl.exp(-b)))


@triton.jit
def _updated(s, p, k, v, decay, beta):
    """exp(g)·S + k⊗d and d = β·(v − exp(g)·p), for p = Sᵀk and S [K, BLOCK_V]."""
    d = (v - p * decay) * beta
    return tl.fma(k[:, None], d[None, :], s * decay), d


@triton.jit
def _sums(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _recurrence(
    q_new,
    k_new,
    qk_new,
    v_new,
    g_new,
    beta_new,
    state_pool,
    k_pool,
    v_pool,
    g_pool,
    beta_pool,
    slots,
    ssm_accepted,
    o_out,
    ROWS: tl.constexpr,
    ROOM: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SETTLED: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.program_id(2)
    let_next_kernel_start(PDL)
    wait_for_kernels_before(PDL and not SETTLED)
    slot = tl.load(slots + i)
    kept = tl.load(ssm_accepted + i)
    key = tl.arange(0, K)
    value = block * BLOCK_V + tl.arange(0, BLOCK_V)

    # What the last round left: the state, and the rows of which the accepted ones go into it.
    at = state_pool + (slot * VALUE_HEADS + head) * K * V + key[:, None] * V + value[None, :]
    s = tl.load(at).to(tl.float32)
    for t in tl.static_range(ROOM):
        row = (slot * ROOM + t) * VALUE_HEADS + head
        counts = t < kept  # a row that does not count has k = 0 and exp(g) = 1: it leaves S as it is
        k = tl.load(k_pool + row * K + key, mask=counts, other=0.0)
        v = tl.load(v_pool + row * V + value, mask=counts, other=0.0)
        decay = tl.exp(tl.load(g_pool + row, mask=counts, other=0.0))
        beta = tl.load(beta_pool + row, mask=counts, other=0.0)
        s, _ = _updated(s, tl.sum(s * k[:, None], axis=0), k, v, decay, beta)
    kept_state = s.to(state_pool.dtype.element_ty)
    tl.store(at, kept_state)
    s = kept_state.to(tl.float32)

    wait_for_kernels_before(PDL)
    # Every row is loaded before the first store: the compiler may not move a load over one.
    q = ()
    k = ()
    qk = ()
    v = ()
    g = ()
    beta = ()
    for t in tl.static_range(ROWS):
        row = (i * ROWS + t) * VALUE_HEADS + head
        key_row = (i * ROWS + t) * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)
        q = q + (tl.load(q_new + key_row * K + key),)
        k = k + (tl.load(k_new + key_row * K + key),)
        qk = qk + (tl.load(qk_new + key_row),)
        v = v + (tl.load(v_new + row * V + value),)
        g = g + (tl.load(g_new + row),)
        beta = beta + (tl.load(beta_new + row),)
    for t in tl.static_range(ROWS):
        # o = (exp(g)·S + k⊗d)ᵀq from the state before the update, so that both sums run at once.
        decay = tl.exp(g[t])
        p, u = tl.reduce((s * k[t][:, None], s * q[t][:, None]), 0, _sums)
        s, d = _updated(s, p, k[t], v[t], decay, beta[t])
        to = o_out + ((i * ROWS + t) * VALUE_HEADS + head) * V + value
        tl.store(to, tl.fma(d, tl.zeros_like(d) + qk[t], u * decay))


@triton.jit
def _copy_row(given, window, new, row, at, mask, CONV: tl.constexpr):
    """Columns ``at`` of one new row into the pool, and by the first row's program of the window too."""
    x = tl.load(given + at, mask=mask)
    first = mask & (row == 0)
    w0 = tl.load(window + at, mask=first)
    w1 = tl.load(window + CONV + at, mask=first)
    w2 = tl.load(window + 2 * CONV + at, mask=first)
    tl.store(new + (3 + row) * CONV + at, x, mask=mask)
    tl.store(new + at, w0, mask=first)
    tl.store(new + CONV + at, w1, mask=first)
    tl.store(new + 2 * CONV + at, w2, mask=first)


@triton.jit(do_not_specialize=["rows", "room"])
def _finish(
    projected,
    o,
    k_new,
    v_new,
    g_new,
    beta_new,
    window,
    norm_weight,
    conv_pool,
    k_pool,
    v_pool,
    g_pool,
    beta_pool,
    slots,
    out,
    rows,
    room,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SETTLED: tl.constexpr,
    PDL: tl.constexpr,
):
    CONV: tl.constexpr = 2 * KEY_HEADS * K + VALUE_HEADS * V
    PROJECTED: tl.constexpr = CONV + VALUE_HEADS * (V + 2)
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    head = tl.program_id(0)
    row = tl.program_id(1)
    i = tl.program_id(2)
    let_next_kernel_start(PDL)
    wait_for_kernels_before(PDL and not SETTLED)
    slot = tl.load(slots + i)
    new = conv_pool + slot * (3 + room) * CONV
    key = tl.arange(0, K)
    value = tl.arange(0, V)
    weight = tl.load(norm_weight + value)
    given = projected + (i * rows + row).to(tl.int64) * PROJECTED
    source = (i * rows + row) * VALUE_HEADS + head
    target = (slot * room + row) * VALUE_HEADS + head
    wait_for_kernels_before(PDL)
    x = tl.load(o + source * V + value)
    z = tl.load(given + CONV + head * V + value).to(tl.float32)
    k = tl.load(k_new + ((i * rows + row) * KEY_HEADS + head // GROUP) * K + key)
    v = tl.load(v_new + source * V + value)
    g = tl.load(g_new + source)
    beta = tl.load(beta_new + source)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / V + eps)
    y = x * scale * weight * _silu(z)
    tl.store(out + source * V + value, y.to(out.dtype.element_ty))
    tl.store(k_pool + target * K + key, k)
    tl.store(v_pool + target * V + value, v)
    tl.store(g_pool + target, g)
    tl.store(beta_pool + target, beta)
    window += i * 3 * CONV
    q_at = head // GROUP * K + key
    leads = head % GROUP == 0  # one head of a group copies its q and k
    _copy_row(given, window, new, row, q_at, leads, CONV)
    _copy_row(given, window, new, row, KEY_HEADS * K + q_at, leads, CONV)
    _copy_row(given, window, new, row, 2 * KEY_HEADS * K + head * V + value, True, CONV)


# ---------------------------------------------------------------- launches


class Tile(NamedTuple):
    """How ``_recurrence`` is cut: values a program, warps a program."""

    block_v: int
    num_warps: int


def tile(heads: Heads) -> Tile:
    """32 values of the state a thread: small programs, so that one sequence reaches every multiprocessor."""
    return Tile(min(8, heads.value_dim), 1)


class Scratch(NamedTuple):
    """What the kernels of a round hand on; float32 but for the window."""

    q: torch.Tensor  # [B, T, Hk, K], scaled by K^−½
    k: torch.Tensor  # [B, T, Hk, K]
    qk: torch.Tensor  # [B, T, Hk]: q·k
    v: torch.Tensor  # [B, T, Hv, V]
    g: torch.Tensor  # [B, T, Hv]
    beta: torch.Tensor  # [B, T, Hv]
    window: torch.Tensor  # [B, 3, C], the model's dtype
    o: torch.Tensor  # [B, T, Hv, V]


def scratch(batch: int, rows: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> Scratch:
    """Room for one layer's round; the layers of a round can share it."""
    keys, values = (heads.key_heads, heads.key_dim), (heads.value_heads, heads.value_dim)

    def wide(*shape: int) -> torch.Tensor:
        return torch.empty((batch, rows, *shape), device=device)

    window = torch.empty(batch, CONV_WIDTH - 1, heads.conv_dim, dtype=dtype, device=device)
    per_head = heads.value_heads
    gates = wide(per_head), wide(per_head)
    return Scratch(
        wide(*keys), wide(*keys), wide(heads.key_heads), wide(*values), *gates, window, wide(*values)
    )


def recurrence(
    pools: GDNPools,
    place: Place,
    heads: Heads,
    room: Scratch,
    settled: bool = False,
    cut: Tile | None = None,
) -> torch.Tensor:
    """The second kernel alone: the rows that ``_rows`` left in ``room`` → ``room.o`` [B, T, Hv, V]."""
    batch, rows = room.g.shape[:2]
    shape = (heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim)
    cut = cut or tile(heads)
    _recurrence[(heads.value_dim // cut.block_v, heads.value_heads, batch)](
        *room[:6], *pools[1:], place.slots, place.ssm_accepted, room.o,
        rows, pools.k.shape[1], *shape, cut.block_v, settled,
        num_warps=cut.num_warps, **launch_options(room.g.device),
    )  # fmt: skip
    return room.o


def gdn_round(
    projected: torch.Tensor,
    weights: GDNWeights,
    pools: GDNPools,
    place: Place,
    heads: Heads,
    eps: float,
    room: Scratch,
    out: torch.Tensor,
    settled: bool = False,
    cut: Tile | None = None,
) -> torch.Tensor:
    """The round of ``gdn_round_reference`` for T ≤ R rows; ``out`` [B, T, Hv·V]. Pools are written in place.

    A slot stands once in ``place.slots``. ``settled``: nothing that may still run writes the pools or
    ``place``, so they are read before the kernels ahead have ended. It holds where a graph is one round.
    Raises ``ValueError`` for shapes that the kernels don't take.
    """
    batch, rows, columns = projected.shape
    slot_rows = pools.k.shape[1]
    if not 1 <= rows <= min(slot_rows, MAX_ROWS) or columns != heads.projected:
        raise ValueError(f"projected {tuple(projected.shape)}: T ≤ {slot_rows} rows of {heads.projected}")
    if len(weights.conv) != CONV_WIDTH or not projected.is_contiguous():
        raise ValueError(f"a convolution of {CONV_WIDTH} taps over contiguous rows")
    options = launch_options(projected.device)
    shape = (heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim)
    new = room[:6]
    _rows[(heads.key_heads + heads.value_heads, rows, batch)](
        projected, *weights[:3], pools.conv_rows, *place[:2], *new, room.window,
        rows, slot_rows, *shape, settled, num_warps=1, **options,
    )  # fmt: skip
    recurrence(pools, place, heads, room, settled, cut)
    _finish[(heads.value_heads, rows, batch)](
        projected, room.o, room.k, *new[3:], room.window, weights.norm,
        pools.conv_rows, *pools[2:], place.slots, out,
        rows, slot_rows, eps, *shape, settled, num_warps=1, **options,
    )  # fmt: skip
    return out


# This family's models, the embedded one and the tiny one, and one whose keys and values differ in size.
SHAPES = (
    Heads(16, 32, 128, 128), Heads(16, 48, 128, 128), Heads(4, 4, 64, 64), Heads(2, 4, 8, 8),
    Heads(1, 2, 4, 16),
)  # fmt: skip


def compile_cases() -> Iterator[CompileCase]:
    """Every number of rows at every shape in ``SHAPES``."""
    for heads in SHAPES:
        shape = {
            "KEY_HEADS": heads.key_heads, "VALUE_HEADS": heads.value_heads,
            "K": heads.key_dim, "V": heads.value_dim, "SETTLED": False, "PDL": False,
        }  # fmt: skip
        cut = tile(heads)
        name = f"{heads.key_heads}/{heads.value_heads} heads of {heads.key_dim}×{heads.value_dim}"
        yield _case(_rows, shape, 1, f"gdn rows, {name}")
        for slot_rows in range(1, MAX_ROWS + 1):
            for count in sorted({1, slot_rows}):  # without drafts, and with all of them
                constexprs = shape | {"ROWS": count, "ROOM": slot_rows, "BLOCK_V": cut.block_v}
                label = f"gdn recurrence, {name}, {count} rows after {slot_rows}"
                yield _case(_recurrence, constexprs, cut.num_warps, label)
        narrow = {"state_pool": "*fp16"}  # route.state.dtype
        yield _case(_recurrence, constexprs, cut.num_warps, f"{label}, float16 state", narrow)
        yield _case(_finish, shape, 1, f"gdn finish, {name}")


HALF = ("projected", "conv_weight", "conv_pool", "window", "window_out", "out")
INTEGERS = {"slots": "*i64", "conv_accepted": "*i64", "ssm_accepted": "*i64", "rows": "i32", "room": "i32"}


def _case(
    kernel: Any, constexprs: dict[str, Any], num_warps: int, label: str, more: dict[str, str] | None = None
) -> CompileCase:
    types = dict.fromkeys(HALF, "*fp16") | INTEGERS | {"eps": "fp32"} | (more or {})
    names = [name for name in kernel.arg_names if name not in constexprs]
    signature = {name: types.get(name, "*fp32") for name in names}
    return CompileCase(kernel, signature, constexprs, num_warps, 1, label)
