"""The C++ twins of the CPU kernels for few rows (``native.cpp``): built on first use, called by ctypes.

Every function takes float32 or float64 CPU tensors, reads weights, cache and states once for all rows
of a call, and gives each row the same bits whatever stands beside it: a verify row is the one-row
step. The formulas are those of the plain-PyTorch functions of the same names in this package.

Rows (x, gates, q, k, v of a fused projection) may be views with any one distance between rows, as long
as the last dimension is contiguous; anything else is copied. Weights are contiguous and row-major.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")
# No fused multiply-add but those written out: the order of operations is what the source says.
FLAGS = ("-O2", "-march=native", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-w")

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
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}
_TABLE: dict[torch.dtype, SimpleNamespace] = {}  # filled by ``load``; a call is one look-up


class NativeUnavailable(Exception):  # noqa: N818 - a state of the machine
    """No library here, with the reason in one line."""


def load() -> None:
    """Build the library or take it from the cache folder, and load it."""
    reason = available()
    if reason is not None:
        raise NativeUnavailable(reason)


@cache
def available() -> str | None:
    """None when the library is loaded, else the reason why it cannot be."""
    try:
        library = _library()
    except NativeUnavailable as problem:
        return str(problem)
    for dtype in (torch.float32, torch.float64):
        addresses = (ctypes.c_void_p * len(SIGNATURES)).in_dll(library, f"functions_{str(dtype)[6:]}")
        functions = SimpleNamespace(set_threads=library.set_threads)
        for (name, signature), address in zip(SIGNATURES.items(), addresses, strict=True):
            prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *(_TYPES[letter] for letter in signature))
            setattr(functions, name, prototype(address))
        _TABLE[dtype] = functions
    return None


def set_threads(count: int) -> None:
    """Let later calls use up to ``count`` threads. No result depends on it."""
    load()
    _TABLE[torch.float32].set_threads(count)


def _library() -> ctypes.CDLL:
    compiler = _compiler()
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as problem:
        raise NativeUnavailable(f"the C++ compiler {shlex.join(compiler)} does not run: {problem}") from None
    facts = "\n".join((SOURCE.read_text(), version, *compiler, *FLAGS, _cpu()))
    name = f"native-{hashlib.sha256(facts.encode()).hexdigest()[:20]}.so"
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(root) / "sm70lab" / name
    try:
        if path.is_file():
            return ctypes.CDLL(str(path))
    except OSError:
        pass  # damaged: built anew
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            # Renamed when whole, so that two processes may build at once.
            _compile(compiler, Path(folder) / name).replace(path)
        return ctypes.CDLL(str(path))
    except OSError:  # a read-only cache folder, or one mounted noexec
        with tempfile.TemporaryDirectory() as folder:
            try:
                return ctypes.CDLL(str(_compile(compiler, Path(folder) / name)))
            except OSError as problem:
                raise NativeUnavailable(f"the built library does not load: {problem}") from None


def _compiler() -> list[str]:
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise NativeUnavailable("no C++ compiler: neither g++ nor clang++ is on the path, and CXX is not set")


def _compile(compiler: list[str], path: Path) -> Path:
    for openmp in (["-fopenmp"], []):  # without it one thread runs everything
        command = [*compiler, *FLAGS, *openmp, str(SOURCE), "-o", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return path
    lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
    error = next((line for line in lines if "error" in line), lines[0])
    raise NativeUnavailable(f"{shlex.join(compiler)} could not compile {SOURCE.name}: {error.strip()}")


def _cpu() -> str:
    """What -march=native depends on, in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _functions(x: Tensor, *weights: Tensor) -> SimpleNamespace:
    """The functions for x's dtype, which the contiguous ``weights`` must share."""
    if not _TABLE:
        load()
    dtype = x.dtype
    if dtype not in _TABLE:
        raise TypeError(f"native kernels take float32 or float64 tensors, not {dtype}")
    for weight in weights:
        if weight.dtype != dtype or not weight.is_contiguous():
            raise TypeError(f"native kernels take contiguous {dtype} weights, not {weight.dtype}")
    return _TABLE[dtype]


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
                return x.contiguous(), size
    return (x, distance) if strides[-1] == 1 else (x.contiguous(), size)


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
    out = x.new_empty((*x.shape[:-1], n))
    _functions(x, weight).linear(
        x.data_ptr(), stride, x.numel() // k, weight.data_ptr(), 0, 0 if bias is None else bias.data_ptr(),
        addend, addend_stride, out.data_ptr(), n, k,
    )  # fmt: skip
    return out


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """(x·weightᵀ)·scale: x [..., K], weight int8 [N, K], scale [N] in x's dtype → [..., N]."""
    n, k = weight.shape
    x, stride = _rows(x, k)
    out = x.new_empty((*x.shape[:-1], n))
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
    out = x.new_empty((*x.shape[:-1], n))
    _functions(x, gate_up, down).swiglu(
        x.data_ptr(), stride, x.numel() // hidden, gate_up.data_ptr(), down.data_ptr(), addend, addend_stride,
        out.data_ptr(), hidden, inner, n,
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension; x [..., n], weight [n], one dtype."""
    n = weight.shape[0]
    x, stride = _rows(x, n)
    out = x.new_empty(x.shape)
    _functions(x, weight).rms_norm(
        x.data_ptr(), stride, x.numel() // n, weight.data_ptr(), eps, out.data_ptr(), n
    )
    return out


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(o)·silu(gate); o [..., heads, V], gate [..., heads·V] (rows of a view) → like o."""
    *_, heads, n = o.shape
    gate, stride = _rows(gate, heads * n)
    o = o.contiguous()
    out = o.new_empty(o.shape)
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
    conv_rows = conv_rows.contiguous()
    empty = conv_rows.new_empty
    q, k = (empty((batch, tokens, value_heads, key_dim)) for _ in range(2))
    v = empty((batch, tokens, value_heads, value_dim))
    g, beta = (empty((batch, tokens, value_heads)) for _ in range(2))
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
    states = state.new_empty((*k.shape, v.shape[-1]))
    return _delta(q, k, v, g, beta, state, states.data_ptr(), 0), states


def gated_delta_outputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The same o without keeping a state."""
    return _delta(q, k, v, g, beta, state, 0, 0)


def gated_delta_fold(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The same state after the last token alone, [B, H, K, V]; a copy of ``state`` for no tokens."""
    if not k.shape[1]:
        return state.clone()
    last = state.new_empty(state.shape)
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
        state = state.contiguous()
    k, v, g, beta = k.contiguous(), v.contiguous(), g.contiguous(), beta.contiguous()
    functions = _functions(state, k, v, g, beta)
    function, o, query = functions.gated_delta_fold, v, 0
    if q is not None:
        q = q.contiguous()
        function, o, query = functions.gated_delta_outputs, v.new_empty(v.shape), q.data_ptr()
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
    cos, sin = cos.contiguous(), sin.contiguous()
    out = q_gate.new_empty((batch, tokens, width // 2))
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
    values, ids = logits.new_empty((rows, k)), torch.empty((rows, k), dtype=torch.int64)
    _functions(logits).top_k(logits.data_ptr(), stride, rows, size, k, values.data_ptr(), ids.data_ptr())
    return values, ids
