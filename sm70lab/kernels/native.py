"""The C++ twins of the CPU kernels for few rows (``native.cpp``): built on first use, called by ctypes.

Every function takes float32 or float64 CPU tensors, reads weights, cache and states once for all rows
of a call, and gives each row the same bits whatever stands beside it: a verify row is the one-row
step. The formulas are those of the plain-PyTorch functions of the same names in this package.

Rows (x, gates, q, k, v of a fused projection) may be views with any one distance between rows, as long
as the last dimension is contiguous; anything else is copied. Weights are contiguous and row-major.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sm70lab.kernels.native_build import NativeUnavailable, library

# The functions of the source's two tables, in their order; arguments: p a pointer (0 for none), i an
# int64, d a double.
SIGNATURES = {
    "linear": "piippppipii",
    "int8_linear": "piippppipii",
    "swiglu": "piipppipiii",
    "rms_norm": "piipdpi",
    "gated_rms_norm": "ppiiipdpi",
    "gdn_rows": "pppipipppppppiiiiiii",
    "gated_delta_outputs": "ppppppipppiiiii",
    "gated_delta_fold": "ppppppipppiiiii",
    "gated_attention": "pipipippdppippiipppiiiii",
    "top_k": "piiiipp",
    "embed": "pppii",
    "rotary": "ppppiii",
    "conv_rows": "pipppipiiii",
    "read_rows": "pipppii",
    "write_rows": "pippii",
    "replay": "pppppipppiiii",
    "beside": "pppii",
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}
_TABLE: dict[torch.dtype, SimpleNamespace] = {}  # filled by ``load``; a call is one look-up


def load() -> None:
    """Build the library or take it from the cache folder, and load it."""
    reason = available()
    if reason is not None:
        raise NativeUnavailable(reason)


@cache
def available() -> str | None:
    """None when the library is loaded, else the reason why it cannot be."""
    try:
        built = library()
    except NativeUnavailable as problem:
        return str(problem)
    built.play_tape.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    for dtype in (torch.float32, torch.float64):
        plain, taped = (
            (ctypes.c_void_p * len(SIGNATURES)).in_dll(built, f"{kind}_{str(dtype)[6:]}")
            for kind in ("functions", "taped")
        )
        functions = SimpleNamespace(set_threads=built.set_threads, play=built.play_tape)
        functions.taped = dict(zip(SIGNATURES, taped, strict=True))
        for (name, signature), address in zip(SIGNATURES.items(), plain, strict=True):
            prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *(_TYPES[letter] for letter in signature))
            setattr(functions, name, prototype(address))
        _TABLE[dtype] = functions
    return None


def set_threads(count: int) -> None:
    """Let later calls use up to ``count`` threads. No result depends on it."""
    load()
    _TABLE[torch.float32].set_threads(count)


class Tape:
    """Calls of this module's functions, noted down once and played again as one call.

    A played call reads and writes the memory that it had when it was noted: inputs must stay where they
    are, and the tape keeps what the functions allocated. Whatever happened between the calls in
    Python is not on the tape.
    """

    def __init__(self) -> None:
        self._words: list[int] = []
        self._calls = 0
        self._kept: list[Any] = []
        self._play: Any = None
        self._tape = np.empty(0, dtype=np.int64)

    def note(self, functions: SimpleNamespace, name: str, arguments: tuple[Any, ...]) -> None:
        """Add one call."""
        self._words += [functions.taped[name], len(arguments)]
        for kind, value in zip(SIGNATURES[name], arguments, strict=True):
            self._words.append(struct.unpack("q", struct.pack("d", value))[0] if kind == "d" else int(value))
        self._calls += 1
        self._play = functions.play

    def keep(self, tensor: Tensor) -> Tensor:
        """Hold memory that a noted call uses."""
        self._kept.append(tensor)
        return tensor

    def play(self) -> None:
        """Run every call again. Raises ``IndexError`` where attention would leave its cache."""
        if len(self._tape) != len(self._words):
            self._tape = np.array(self._words, dtype=np.int64)
        if self._play(self._tape.ctypes.data, self._calls):
            raise IndexError("a recorded round leaves its key and value cache")


class _Noting:
    """Stands for the table of functions while a tape runs: calls and notes."""

    def __init__(self, functions: SimpleNamespace, tape: Tape) -> None:
        self._functions, self._tape = functions, tape

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self._tape.note(self._functions, name, arguments)
            return getattr(self._functions, name)(*arguments)

        return call


_tape: Tape | None = None  # the one that notes calls now


@contextmanager
def recording() -> Iterator[Tape]:
    """Note the native calls made inside; each is also run."""
    global _tape
    if _tape is not None:
        raise RuntimeError("native calls are being recorded already")
    _tape = Tape()
    try:
        yield _tape
    finally:
        _tape = None


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    out = like.new_empty(shape, dtype=dtype)
    return out if _tape is None else _tape.keep(out)


def _contiguous(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return x
    if _tape is not None:
        raise ValueError("a recorded call takes its inputs as they lie in memory; this one would be copied")
    return x.contiguous()


def _functions(x: Tensor, *weights: Tensor) -> Any:
    """The functions for x's dtype, which the contiguous ``weights`` must share."""
    if not _TABLE:
        load()
    dtype = x.dtype
    if dtype not in _TABLE:
        raise TypeError(f"native kernels take float32 or float64 tensors, not {dtype}")
    for weight in weights:
        if weight.dtype != dtype or not weight.is_contiguous():
            raise TypeError(f"native kernels take contiguous {dtype} weights, not {weight.dtype}")
    return _TABLE[dtype] if _tape is None else _Noting(_TABLE[dtype], _tape)


def _rows(x: Tensor, size: int) -> tuple[Tensor, int]:
    """x [..., size], copied if it must be, and the distance between its rows."""
    shape = x.shape
    if shape[-1] != size:
        raise ValueError(f"native kernels: a tensor has {shape[-1]} channels, its weight {size}")
    if x.is_contiguous():
        return x, size
    strides = x.stride()
    distance = expected = 0
    for length, stride in zip(shape[-2::-1], strides[-2::-1], strict=True):
        if length != 1:
            distance, expected = distance or stride, (expected or stride) * length
            if stride * length != expected:
                return _contiguous(x), size
    return (x, distance) if strides[-1] == 1 else (_contiguous(x), size)


def _residual(x: Tensor | None, n: int) -> tuple[Tensor | None, int, int]:
    """The tensor to keep alive, its pointer, the distance between its rows."""
    if x is None:
        return None, 0, 0
    x, stride = _rows(x, n)
    return x, x.data_ptr(), stride


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """residual + x·weightᵀ + bias: x [..., K], weight [N, K], bias [N], residual [..., N] → [..., N]."""
    n, k = weight.shape
    x, stride = _rows(x, k)
    _kept, addend, addend_stride = _residual(residual, n)
    out = _empty(x, (*x.shape[:-1], n))
    _functions(x, weight).linear(
        x.data_ptr(), stride, x.numel() // k, weight.data_ptr(), 0, 0 if bias is None else bias.data_ptr(),
        addend, addend_stride, out.data_ptr(), n, k,
    )  # fmt: skip
    return out


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """(x·weightᵀ)·scale: x [..., K], weight int8 [N, K], scale [N] in x's dtype → [..., N]."""
    n, k = weight.shape
    x, stride = _rows(x, k)
    out = _empty(x, (*x.shape[:-1], n))
    _functions(x, scale).int8_linear(
        x.data_ptr(), stride, x.numel() // k, weight.data_ptr(), scale.data_ptr(), 0, 0, 0,
        out.data_ptr(), n, k,
    )  # fmt: skip
    return out


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor | None = None) -> Tensor:
    """residual + (silu(x·gateᵀ) ⊙ x·upᵀ)·downᵀ: x [..., H], gate_up [2·I, H], down [N, I] → [..., N]."""
    n, inner = down.shape
    hidden = gate_up.shape[1]
    x, stride = _rows(x, hidden)
    _kept, addend, addend_stride = _residual(residual, n)
    out = _empty(x, (*x.shape[:-1], n))
    _functions(x, gate_up, down).swiglu(
        x.data_ptr(), stride, x.numel() // hidden, gate_up.data_ptr(), down.data_ptr(), addend, addend_stride,
        out.data_ptr(), hidden, inner, n,
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension; x [..., n], weight [n], one dtype."""
    n = weight.shape[0]
    x, stride = _rows(x, n)
    out = _empty(x, x.shape)
    _functions(x, weight).rms_norm(
        x.data_ptr(), stride, x.numel() // n, weight.data_ptr(), eps, out.data_ptr(), n
    )
    return out


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(o)·silu(gate); o [..., heads, V], gate [..., heads·V] (rows of a view) → like o."""
    *_, heads, n = o.shape
    gate, stride = _rows(gate, heads * n)
    o = _contiguous(o)
    out = _empty(o, o.shape)
    _functions(o, weight).gated_rms_norm(
        o.data_ptr(), gate.data_ptr(), stride, o.numel() // (heads * n), heads, weight.data_ptr(), eps,
        out.data_ptr(), n,
    )  # fmt: skip
    return out


def gdn_rows(
    conv_rows: Tensor, conv_weight: Tensor, a: Tensor, b: Tensor, neg_decay_rate: Tensor, dt_bias: Tensor,
    key_heads: int, value_heads: int, key_dim: int, value_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The inputs of the recurrence: q, k [B, T, Hv, K], v [B, T, Hv, V], g, β [B, T, Hv].

    conv_rows [B, W − 1 + T, C] (C = q | k | v), conv_weight [W, C], a, b [B, T, Hv]: convolution and
    SiLU, q and k L2-normalised and repeated to the value heads, q scaled by K^−½, gating.
    """
    batch, tokens, _ = a.shape
    width, channels = conv_weight.shape
    if conv_rows.shape != (batch, width - 1 + tokens, channels):
        raise ValueError(f"gdn_rows: conv_rows {tuple(conv_rows.shape)} for {tokens} tokens of {channels}")
    a, a_stride = _rows(a, value_heads)
    b, b_stride = _rows(b, value_heads)
    conv_rows = _contiguous(conv_rows)
    q, k = (_empty(conv_rows, (batch, tokens, value_heads, key_dim)) for _ in range(2))
    v = _empty(conv_rows, (batch, tokens, value_heads, value_dim))
    g, beta = (_empty(conv_rows, (batch, tokens, value_heads)) for _ in range(2))
    _functions(conv_rows, conv_weight, neg_decay_rate, dt_bias).gdn_rows(
        conv_rows.data_ptr(), conv_weight.data_ptr(), a.data_ptr(), a_stride, b.data_ptr(), b_stride,
        neg_decay_rate.data_ptr(), dt_bias.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(),
        g.data_ptr(), beta.data_ptr(), batch, tokens, width, key_heads, value_heads, key_dim, value_dim,
    )  # fmt: skip
    return q, k, v, g, beta


def gated_delta_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V] and the state after every token [B, T, H, K, V]; arguments as in ``gated_delta``."""
    states = _empty(state, (*k.shape, v.shape[-1]))
    return _delta(q, k, v, g, beta, state, states.data_ptr(), 0), states


def gated_delta_outputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The same o without keeping a state."""
    return _delta(q, k, v, g, beta, state, 0, 0)


def gated_delta_fold(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The same state after the last token alone, [B, H, K, V]; a copy of ``state`` for no tokens."""
    if not k.shape[1]:
        return state.clone()
    last = _empty(state, state.shape)
    _delta(None, k, v, g, beta, state, 0, last.data_ptr())
    return last


def _delta(
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, states: int, last: int
) -> Tensor:
    """One call of the recurrence; returns o, or v when there is no q."""
    batch, tokens, heads, key = k.shape
    value = v.shape[-1]
    if state.shape != (batch, heads, key, value):
        raise ValueError(f"gated delta: state {tuple(state.shape)} for k {tuple(k.shape)}")
    if not state[0].is_contiguous():  # slots[:, n] keeps its distance between sequences
        state = _contiguous(state)
    k, v, g, beta = _contiguous(k), _contiguous(v), _contiguous(g), _contiguous(beta)
    functions = _functions(state, k, v, g, beta)
    function, o, query = functions.gated_delta_fold, v, 0
    if q is not None:
        q = _contiguous(q)
        function, o, query = functions.gated_delta_outputs, _empty(v, v.shape), q.data_ptr()
    function(
        query, k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(), state.data_ptr(), state.stride(0),
        o.data_ptr(), states, last, batch, tokens, heads, key, value,
    )  # fmt: skip
    return o


def gated_attention(
    q_gate: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor,
    sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor, start: Tensor,
) -> Tensor:  # fmt: skip
    """Write T rows into the cache and attend to all up to each of them: [B, T, Hq·D].

    q_gate [B, T, Hq·2D] ([q | gate] a head), k, v [B, T, Hkv·D]: views of the projection; q_norm, k_norm
    [D]; cos, sin [B, T, R] or [B, T, 1, R]; keys, values [N, Hkv, capacity, D], written at
    [slots[b], :, start[b] + t]; slots, start int64 [B]. q and k are normed and rotated, then
    softmax(q·kᵀ/√D)·v·sigmoid(gate), the softmax online over blocks cut at fixed positions.
    """
    held, kv_heads, capacity, dim = keys.shape
    batch, tokens, width = q_gate.shape
    q_gate, q_stride = _rows(q_gate, width)
    k, k_stride = _rows(k, kv_heads * dim)
    v, v_stride = _rows(v, kv_heads * dim)
    cos, sin = _contiguous(cos), _contiguous(sin)
    out = _empty(q_gate, (batch, tokens, width // 2))
    outside = _functions(q_gate, q_norm, k_norm, cos, sin, keys, values).gated_attention(
        q_gate.data_ptr(), q_stride, k.data_ptr(), k_stride, v.data_ptr(), v_stride, q_norm.data_ptr(),
        k_norm.data_ptr(), eps, cos.data_ptr(), sin.data_ptr(), cos.shape[-1], keys.data_ptr(),
        values.data_ptr(), held, capacity, slots.data_ptr(), start.data_ptr(), out.data_ptr(), batch,
        tokens, width // (2 * dim), kv_heads, dim,
    )  # fmt: skip
    if outside:
        at = f"{tokens} rows at {start.tolist()} of slots {slots.tolist()}"
        raise IndexError(f"{at} leave a cache of {held} slots × {capacity} positions")
    return out


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest of logits [R, V], falling, of equals the lower id: values, ids int64 [R, k].

    Where a row has NaN, its ids are valid but otherwise unspecified.
    """
    rows, size = logits.shape
    if not 1 <= k <= size:
        raise ValueError(f"top_k: k = {k}; it must be 1..{size}")
    logits, stride = _rows(logits, size)
    values, ids = _empty(logits, (rows, k)), _empty(logits, (rows, k), torch.int64)
    _functions(logits).top_k(logits.data_ptr(), stride, rows, size, k, values.data_ptr(), ids.data_ptr())
    return values, ids


# What a recorded round needs beside arithmetic. Tables (slots, accepted, start, ids) are int64 and are
# read when the call runs.


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """ids [B, T], table [V, H] → [B, T, H]."""
    out = _empty(table, (*ids.shape, table.shape[1]))
    _functions(table, table).embed(
        ids.data_ptr(), table.data_ptr(), out.data_ptr(), ids.numel(), table.shape[1]
    )
    return out


def rotary(start: Tensor, frequencies: Tensor, tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, R] of positions start [B] and on, frequencies float32 [R], in ``like``'s dtype."""
    batch, size = len(start), len(frequencies)
    cos, sin = (_empty(like, (batch, tokens, size)) for _ in range(2))
    _functions(like).rotary(
        start.data_ptr(), frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr(), batch, tokens, size
    )
    return cos, sin


def conv_rows(pool: Tensor, slots: Tensor, accepted: Tensor, rows: Tensor, width: int) -> Tensor:
    """The window of W − 1 inputs in pool [N, R, C] at [slots, accepted], then rows [B, T, C] (a view)."""
    batch, tokens, size = rows.shape
    rows, stride = _rows(rows, size)
    out = _empty(rows, (batch, width - 1 + tokens, size))
    _functions(rows, pool).conv_rows(
        pool.data_ptr(), pool.shape[1], slots.data_ptr(), accepted.data_ptr(), rows.data_ptr(), stride,
        out.data_ptr(), batch, tokens, width - 1, size,
    )  # fmt: skip
    return out


def read_rows(pool: Tensor, slots: Tensor, which: Tensor | None) -> Tensor:
    """pool [N, R, ...] at [slots, which − 1]; without ``which`` pool [N, ...] at slots: [B, ...]."""
    room, shape = (1, pool.shape[1:]) if which is None else (pool.shape[1], pool.shape[2:])
    out = _empty(pool, (len(slots), *shape))
    _functions(pool, pool).read_rows(
        pool.data_ptr(), room, slots.data_ptr(), 0 if which is None else which.data_ptr(), out.data_ptr(),
        len(slots), out[0].numel(),
    )  # fmt: skip
    return out


def write_rows(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put rows [B, ...] to the front of pool [N, ...] at ``slots``."""
    rows = _contiguous(rows)
    _functions(rows, pool).write_rows(
        pool.data_ptr(), pool[0].numel(), slots.data_ptr(), rows.data_ptr(), len(rows), rows[0].numel()
    )


def replay(
    state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, slots: Tensor, accepted: Tensor
) -> Tensor:
    """Pools as in the replay scheme: checkpoints with the accepted rows folded in, [B, H, K, V]."""
    _, room, heads, key = k.shape
    out = _empty(state, (len(slots), *state.shape[1:]))
    _functions(state, k, v, g, beta).replay(
        state.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(), room, slots.data_ptr(),
        accepted.data_ptr(), out.data_ptr(), len(slots), heads, key, v.shape[-1],
    )  # fmt: skip
    return out


def beside(a: Tensor, b: Tensor) -> Tensor:
    """torch.cat((a, b), −1)."""
    a, b = _contiguous(a), _contiguous(b)
    n = a.shape[-1]
    out = _empty(a, (*a.shape[:-1], 2 * n))
    _functions(a, b).beside(a.data_ptr(), b.data_ptr(), out.data_ptr(), a.numel() // n, n)
    return out


def copy(a: Tensor, out: Tensor) -> None:
    """out ← a, both contiguous."""
    n = a.shape[-1]
    _functions(a, out).beside(_contiguous(a).data_ptr(), 0, out.data_ptr(), a.numel() // n, n)
