"""The C++ kernels against their PyTorch twins, and one row's bits whatever stands beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sm70lab.kernels import attention, gated_delta, native, native_build, norm
from sm70lab.kernels.causal_conv1d import causal_conv1d
from tests.engine.assertions import assert_close

# A machine without a compiler has no kernels; with one, whatever else is wrong is a failure.
REASON = native.available() or ""
pytestmark = pytest.mark.skipif(REASON.startswith("no C++ compiler"), reason=REASON)

LIMITS = {torch.float32: 2e-6, torch.float64: 2e-14}
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=str)
QUICK = (*native_build.FLAGS, "-O0")  # where only the building is tested


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    native.set_threads(1)


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def view(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The same as columns of a wider matrix, whose other columns are NaN."""
    wide = torch.full((*shape[:-1], shape[-1] + 21), torch.nan, dtype=dtype)
    wide[..., 5:-16] = rand(*shape, dtype=dtype, seed=seed)
    return wide[..., 5:-16]


@DTYPES
@pytest.mark.parametrize(("n", "k"), [(48, 320), (37, 48), (3, 5), (70, 131)])
def test_products_equal_pytorch_and_do_not_depend_on_the_rows(dtype: torch.dtype, n: int, k: int) -> None:
    weight, bias, scale = rand(n, k, dtype=dtype), rand(n, dtype=dtype), rand(n, dtype=dtype).abs()
    int8 = (rand(n, k, dtype=dtype) * 40).clamp(-127, 127).to(torch.int8)
    gate_up, down = rand(2 * n, k, dtype=dtype, seed=1), rand(k, n, dtype=dtype, seed=2)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 20):
        x, wide = view(rows, k, dtype=dtype, seed=3), view(rows, k, dtype=dtype, seed=4)
        residual = view(rows, n, dtype=dtype, seed=5)

        def run(span: slice, x=x, wide=wide, residual=residual) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
            return [
                native.linear(x[span], weight),
                native.linear(x[span], weight, bias, residual[span]),
                native.swiglu(x[span], gate_up, down),
                native.swiglu(x[span], gate_up, down, wide[span]),
                native.int8_linear(x[span], int8, scale),
            ]

        found = run(slice(None))
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        mixed = F.linear(F.silu(gate) * up, down)
        wanted = [
            F.linear(x, weight),
            residual + F.linear(x, weight, bias),
            mixed,
            wide + mixed,
            F.linear(x, int8.to(dtype)) * scale,
        ]
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other, LIMITS[dtype])
        for r in range(rows):
            for one, other in zip(found, run(slice(r, r + 1)), strict=True):
                assert torch.equal(one[r : r + 1], other)


@DTYPES
@pytest.mark.parametrize("size", [64, 8, 100])
def test_norms(dtype: torch.dtype, size: int) -> None:
    weight = rand(size, dtype=dtype)
    x, gate = view(2, 5, size, dtype=dtype), view(2, 5, 3 * size, dtype=dtype, seed=1)
    found = native.rms_norm(x, weight, 1e-6)
    assert_close(found, norm.rms_norm(x, weight, 1e-6), LIMITS[dtype])
    o = rand(2, 5, 3, size, dtype=dtype)
    gated = native.gated_rms_norm(o, gate, weight, 1e-6)
    assert_close(gated, norm.gated_rms_norm(o, gate.reshape(o.shape), weight, 1e-6), LIMITS[dtype])
    for b in range(2):
        for t in range(5):
            assert torch.equal(found[b, t], native.rms_norm(x[b, t], weight, 1e-6))
            alone = native.gated_rms_norm(o[b, t : t + 1], gate[b, t : t + 1], weight, 1e-6)
            assert torch.equal(gated[b, t], alone[0])


def test_exponential_of_large_and_small_numbers() -> None:
    """silu and sigmoid at both ends of float32, through the gate of the norm."""
    gate = torch.tensor(
        [-1e30, -200.0, -104.0, -88.5, -87.0, -20.0, -1e-30, 0.0, 1e-3, 5.0, 88.6, 200.0, 1e30]
    )
    ones = torch.ones(1, len(gate))
    found = native.gated_rms_norm(ones, gate[None], ones[0], 0.0)[0]
    torch.testing.assert_close(found, F.silu(gate.double()).float(), rtol=5e-7, atol=1e-36)


@DTYPES
@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key", "value"), [(2, 4, 64, 64), (2, 2, 7, 21), (1, 3, 8, 40)]
)
def test_gated_deltanet(dtype: torch.dtype, key_heads: int, value_heads: int, key: int, value: int) -> None:
    batch, width = 2, 4
    size = 2 * key_heads * key + value_heads * value
    conv_weight, rate = rand(width, size, dtype=dtype), -rand(value_heads, dtype=dtype).exp()
    dt_bias = rand(value_heads, dtype=dtype, seed=1)
    state = view(batch, value_heads * key * value, dtype=dtype, seed=2).unflatten(
        1, (value_heads, key, value)
    )
    for tokens in (1, 2, 5, 9):
        conv_rows = rand(batch, width - 1 + tokens, size, dtype=dtype, seed=3)
        a, b = (30 * view(batch, tokens, value_heads, dtype=dtype, seed=s) for s in (4, 5))
        shape = (key_heads, value_heads, key, value)
        rows = native.gdn_rows(conv_rows, conv_weight, a, b, rate, dt_bias, *shape)

        qkv = causal_conv1d(conv_rows, conv_weight)
        qk, v = qkv.tensor_split([2 * key_heads * key], dim=-1)
        qk = gated_delta.l2_normalise(qk.reshape(batch, tokens, 2 * key_heads, key))
        q, k = qk.repeat_interleave(value_heads // key_heads, dim=2).chunk(2, dim=2)
        g, beta = gated_delta.gating(a, b, rate, dt_bias)
        wanted = (q * key**-0.5, k, v.reshape(batch, tokens, value_heads, value), g, beta)
        for one, other in zip(rows, wanted, strict=True):
            assert_close(one, other, LIMITS[dtype])

        found = native.gated_delta_recurrent(*rows, state)
        for one, other in zip(found, gated_delta.gated_delta_recurrent(*rows, state), strict=True):
            assert_close(one, other, LIMITS[dtype])
        assert torch.equal(native.gated_delta_outputs(*rows, state), found[0])
        assert torch.equal(native.gated_delta_fold(*rows[1:], state), found[1][:, -1])

        for i in range(batch):  # one sequence and one token at a time
            one_state = state[i : i + 1]
            for t in range(tokens):
                here = (slice(i, i + 1), slice(t, t + 1))
                window = conv_rows[i : i + 1, t : t + width]
                step = native.gdn_rows(window, conv_weight, a[here], b[here], rate, dt_bias, *shape)
                for one, other in zip(step, rows, strict=True):
                    assert torch.equal(one, other[here])
                o, states = native.gated_delta_recurrent(*step, one_state)
                assert torch.equal(o, found[0][here]) and torch.equal(states, found[1][here])
                one_state = states[:, 0]
            partial = native.gated_delta_fold(*(x[:, : tokens // 2] for x in rows[1:]), state)
            before = state if tokens < 2 else found[1][:, tokens // 2 - 1]
            assert torch.equal(partial, before)


def attend(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, start: list[int], tokens: int, at: int = 0
):  # type: ignore[no-untyped-def]
    """Arguments for T rows from ``start`` + ``at`` on; a row's numbers depend on its position alone."""
    batch, capacity, rotary = len(start), max(start) + 16, dim // 2
    width = heads * 2 * dim + 2 * kv_heads * dim
    span = slice(at, at + tokens)
    q_gate, k, v = view(batch, 16, width, dtype=dtype)[:, span].split(
        [heads * 2 * dim, kv_heads * dim, kv_heads * dim], dim=-1
    )
    positions = torch.tensor(start)[:, None] + torch.arange(16)
    cos, sin = attention.rotary_table(positions, attention.inverse_frequencies(rotary, 10000.0))
    norms = (rand(dim, dtype=dtype, seed=1), rand(dim, dtype=dtype, seed=2))
    caches = [rand(batch + 1, kv_heads, capacity, dim, dtype=dtype, seed=s) for s in (3, 4)]
    slots = torch.arange(batch, 0, -1)
    for cache in caches:
        cache[0] = torch.nan
        for b, first in enumerate(start):
            cache[slots[b], :, first:] = torch.nan
    newest = torch.tensor(start) + at
    return q_gate, k, v, *norms, 1e-6, cos[:, span].to(dtype), sin[:, span].to(dtype), *caches, slots, newest


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (4, 2, 8), (3, 1, 20), (8, 1, 64)])
@pytest.mark.parametrize("start", [[0], [3, 61], [200, 127]])
def test_attention(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, start: list[int]) -> None:
    one_by_one = list(attend(dtype, heads, kv_heads, dim, start, 9))
    alone = []
    for t in range(9):
        here = attend(dtype, heads, kv_heads, dim, start, 1, at=t)
        alone.append(native.gated_attention(*here[:8], *one_by_one[8:10], *here[10:]))
    for tokens in (1, 2, 5, 9):
        arguments = attend(dtype, heads, kv_heads, dim, start, tokens)
        q_gate, k, v, q_norm, k_norm, eps, cos, sin, keys, values, slots, _ = arguments
        clean = (keys.clone(), values.clone())
        found = native.gated_attention(*arguments)

        batch = len(start)
        turn = (cos[:, :, None], sin[:, :, None])
        q, gate = q_gate.reshape(batch, tokens, heads, 2 * dim).chunk(2, dim=-1)
        q = attention.apply_rotary(norm.rms_norm(q, q_norm, eps), *turn)
        k = attention.apply_rotary(norm.rms_norm(k.reshape(batch, tokens, kv_heads, dim), k_norm, eps), *turn)
        for b, first in enumerate(start):
            own = [cache[slots[b] : slots[b] + 1, :, : first + tokens] for cache in clean]
            own[0][:, :, first:] = k[b : b + 1].transpose(1, 2)
            own[1][:, :, first:] = v[b : b + 1].reshape(1, tokens, kv_heads, dim).transpose(1, 2)
            wanted = attention.causal_attention(q[b : b + 1], *own)
            wanted = wanted * torch.sigmoid(gate[b : b + 1].reshape(wanted.shape))
            assert_close(found[b : b + 1], wanted, LIMITS[dtype])
        for cache, wanted in zip((keys, values), clean, strict=True):
            assert torch.equal(cache.isnan(), wanted.isnan())
            assert_close(cache.nan_to_num(), wanted.nan_to_num(), LIMITS[dtype])

        assert torch.equal(found, torch.cat(alone[:tokens], dim=1))
        for b in range(batch):
            own = attend(dtype, heads, kv_heads, dim, start, tokens)
            by_sequence = [x[b : b + 1] if i in (0, 1, 2, 6, 7, 10, 11) else x for i, x in enumerate(own)]
            assert torch.equal(native.gated_attention(*by_sequence), found[b : b + 1])


def test_attention_never_writes_outside_the_cache() -> None:
    *rest, start = attend(torch.float32, 4, 2, 8, [3], 5)
    with pytest.raises(IndexError, match="5 rows at"):
        native.gated_attention(*rest, start + 12)


@DTYPES
def test_top_k(dtype: torch.dtype) -> None:
    for size, k in ((4096, 20), (64, 64), (67, 1), (30, 7)):
        logits = view(3, size, dtype=dtype, seed=size)
        values, ids = native.top_k(logits, k)
        wanted = logits.topk(k)
        assert torch.equal(values, wanted.values) and torch.equal(ids, wanted.indices)
    coarse = rand(3, 500, dtype=dtype).mul(2).round()
    coarse[1, 3:] = -torch.inf
    values, ids = native.top_k(coarse, 40)
    order = coarse.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, order.values[:, :40]) and torch.equal(ids, order.indices[:, :40])
    with pytest.raises(ValueError, match="k = 501"):
        native.top_k(coarse, 501)


@DTYPES
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    x, weight = rand(5, 320, dtype=dtype), rand(1030, 320, dtype=dtype)
    gate_up, down = rand(2 * 770, 320, dtype=dtype), rand(320, 770, dtype=dtype)
    int8 = (weight * 30).clamp(-127, 127).to(torch.int8)
    rows = [rand(2, 5, 4, 64, dtype=dtype, seed=s) / 8 for s in range(3)]
    gates = [-rand(2, 5, 4, dtype=dtype).abs(), rand(2, 5, 4, dtype=dtype).sigmoid()]
    state = rand(2, 4, 64, 64, dtype=dtype)

    def run() -> list[torch.Tensor]:
        return [
            native.linear(x, weight),
            native.swiglu(x, gate_up, down, x),
            native.int8_linear(x, int8, weight[:, 0].contiguous()),
            *native.gated_delta_recurrent(*rows, *gates, state),
            native.gated_attention(*attend(dtype, 4, 2, 64, [900, 1000], 5)),
        ]

    wanted = run()
    for count in (2, 3):
        native.set_threads(count)
        for one, other in zip(run(), wanted, strict=True):
            assert torch.equal(one, other)


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="float16"):
        native.linear(torch.zeros(1, 8, dtype=torch.float16), torch.zeros(4, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="7 channels"):
        native.linear(torch.zeros(1, 7), torch.zeros(4, 8))


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": "/nonexistent"}, "/nonexistent does not run"),
        ({"CXX": "false"}, "false does not run"),
        ({"CXX": "", "PATH": "/nonexistent"}, "no C\\+\\+ compiler"),
        ({"CXX": f"{sys.executable} -X utf8"}, "could not compile native.cpp: "),
    ],
)
def test_why_it_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], reason: str
) -> None:
    for name, value in {**environment, "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    found = native.available.__wrapped__()
    assert found and re.search(reason, found) and "\n" not in found
    monkeypatch.setattr(native, "available", lambda: found)
    with pytest.raises(native.NativeUnavailable, match=re.escape(found)):
        native.load()


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    script = (
        "from sm70lab.kernels import native, native_build\n"
        f"native_build.FLAGS = {QUICK}\n"
        "print(native.available())"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [p.communicate()[0].strip() for p in both] == ["None", "None"]
    assert len(list((tmp_path / "sm70lab").iterdir())) == 1


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder takes its place."""
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(native_build, "FLAGS", QUICK)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert native_build.library().set_threads
