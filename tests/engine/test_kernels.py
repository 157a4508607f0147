"""Each kernel against the formula it stands for, written out naively."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sm70lab.engine.kv_cache import PREFILL_ROWS, gated_attention
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.kernels.attention import apply_rotary, causal_attention, inverse_frequencies, rotary_table
from sm70lab.kernels.causal_conv1d import causal_conv1d
from sm70lab.kernels.gated_delta import gated_delta_chunk, gated_delta_recurrent, gating, l2_normalise
from sm70lab.kernels.norm import gated_rms_norm, rms_norm
from tests.engine.assertions import assert_close


def delta_inputs(tokens: int, dtype: torch.dtype = torch.float64, key_norm: float = 1.0):  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(tokens)
    batch, heads, key, value = 2, 3, 8, 5
    rand = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    q, k = l2_normalise(rand(batch, tokens, heads, key)), l2_normalise(rand(batch, tokens, heads, key))
    rows = (q, k * key_norm, rand(batch, tokens, heads, value), -F.softplus(rand(batch, tokens, heads)))
    return [*(x.to(dtype) for x in rows), torch.sigmoid(rand(batch, tokens, heads)).to(dtype)], rand(
        batch, heads, key, value
    ).to(dtype)


def naive_delta(q, k, v, g, beta, state):  # type: ignore[no-untyped-def]
    """S ← αS; d = β(v − Sᵀk); S ← S + k⊗d; o = Sᵀq, one head and one token at a time."""
    outputs, states = torch.zeros_like(v), []
    s = state.clone()
    for t in range(q.shape[1]):
        for b in range(q.shape[0]):
            for h in range(q.shape[2]):
                decayed = g[b, t, h].exp() * s[b, h]
                d = beta[b, t, h] * (v[b, t, h] - decayed.T @ k[b, t, h])
                s[b, h] = decayed + torch.outer(k[b, t, h], d)
                outputs[b, t, h] = s[b, h].T @ q[b, t, h]
        states.append(s.clone())
    return outputs, torch.stack(states, 1)


@pytest.mark.parametrize("tokens", [1, 2, 5, 9])
def test_recurrent_is_the_formula(tokens: int) -> None:
    rows, state = delta_inputs(tokens)
    before = state.clone()
    outputs, states = gated_delta_recurrent(*rows, state)
    wanted, wanted_states = naive_delta(*rows, state)
    assert_close(outputs, wanted, 1e-13)
    assert_close(states, wanted_states, 1e-13)
    assert torch.equal(state, before)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunk_equals_recurrent(tokens: int, dtype: torch.dtype) -> None:
    rows, state = delta_inputs(tokens, dtype)
    outputs, final = gated_delta_chunk(*rows, state)
    wanted, states = gated_delta_recurrent(*rows, state)
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(outputs, wanted, limit)
    assert_close(final, states[:, -1], limit)


def test_chunks_survive_decay_whose_inverse_overflows() -> None:
    rows, state = delta_inputs(130)
    rows[3] = rows[3] - 30.0  # over a chunk e^1920, far beyond float64
    outputs, final = gated_delta_chunk(*rows, state)
    wanted, states = gated_delta_recurrent(*rows, state)
    assert_close(outputs, wanted, 1e-12)
    assert_close(final, states[:, -1], 1e-12)


def test_recurrent_rows_do_not_depend_on_the_row_count() -> None:
    rows, state = delta_inputs(5, torch.float32)
    _, states = gated_delta_recurrent(*rows, state)
    for t in range(5):
        _, one = gated_delta_recurrent(*(x[:, t : t + 1] for x in rows), state)
        state = one[:, -1]
        assert torch.equal(state, states[:, t])


@pytest.mark.parametrize("key_norm", [1.0, 20.0])
def test_unnormalised_keys_stay_finite_against_float64(key_norm: float) -> None:
    # With |k| = 20 and β near one the state grows a hundredfold a token: float32 must still follow.
    rows, state = delta_inputs(6, key_norm=key_norm)
    outputs, _ = gated_delta_recurrent(*(x.float() for x in rows), state.float())
    wanted, _ = naive_delta(*rows, state)
    assert bool(torch.isfinite(outputs).all())
    assert_close(outputs, wanted, 1e-4)


def test_gating_survives_extreme_float16_inputs() -> None:
    a = torch.tensor([[[60000.0, -60000.0]]], dtype=torch.float16)
    g, beta = gating(a, a, torch.tensor([-16.0, -16.0]), torch.zeros(2))
    assert g.dtype == torch.float32 and bool(torch.isfinite(g).all()) and bool(torch.isfinite(beta).all())
    assert_close(
        gating(a * 0, a * 0, torch.tensor([-2.0, -2.0]), torch.ones(2))[0],
        torch.full((1, 1, 2), -2 * 1.3132617),
        1e-6,
    )


def test_causal_conv_is_conv1d_with_silu() -> None:
    rows, weight = torch.randn(2, 3 + 7, 6), torch.randn(4, 6)
    wanted = F.silu(F.conv1d(rows.transpose(1, 2), weight.t()[:, None], groups=6)).transpose(1, 2)
    assert_close(causal_conv1d(rows, weight), wanted, 1e-6)


def test_norms() -> None:
    x, gate, weight = torch.randn(3, 5), torch.randn(3, 5), torch.randn(5)
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    assert_close(rms_norm(x, weight, 1e-6), wanted, 1e-6)
    assert_close(gated_rms_norm(x, gate, weight, 1e-6), wanted * gate * torch.sigmoid(gate), 1e-6)
    large = torch.full((1, 4), 300.0, dtype=torch.float16)  # x² overflows float16
    assert_close(rms_norm(large, torch.ones(4), 1e-6), torch.ones(1, 4), 1e-3)


@pytest.mark.parametrize("tokens", [1, 4])
def test_attention_is_scaled_dot_product_attention(tokens: int) -> None:
    q, k, v = torch.randn(1, tokens, 6, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    mask = torch.ones(tokens, 11, dtype=torch.bool).tril(11 - tokens)
    wanted = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True)
    assert_close(causal_attention(q, k, v), wanted.transpose(1, 2).reshape(1, tokens, 48), 1e-6)


@pytest.mark.parametrize("tokens", [PREFILL_ROWS - 1, PREFILL_ROWS, PREFILL_ROWS + 1, 3 * PREFILL_ROWS])
def test_a_prefill_in_pieces_attends_as_a_whole(tokens: int) -> None:
    start, dim = 5, 8
    g = torch.Generator().manual_seed(tokens)
    q_gate, k, v = (torch.randn(1, tokens, n * dim, generator=g, dtype=torch.float64) for n in (8, 2, 2))
    # Rows that nothing has written hold anything.
    keys, values = (torch.full((2, 2, 300, dim), torch.nan, dtype=torch.float64) for _ in range(2))
    for cache in (keys, values):
        cache[1, :, :start] = torch.randn(2, start, dim, generator=g, dtype=torch.float64)
    cos, sin = rotary_table(torch.arange(start, start + tokens)[None], inverse_frequencies(4, 100.0))
    ones = torch.ones(dim, dtype=torch.float64)
    place = (torch.tensor([1]), torch.tensor([start]))
    found = gated_attention(q_gate, k, v, ones, ones, cos, sin, keys, values, *place, 1e-6, Arithmetic.plain)
    q, gate = q_gate.view(1, tokens, 4, 2 * dim).chunk(2, dim=-1)
    q = apply_rotary(rms_norm(q, ones, 1e-6), cos[:, :, None], sin[:, :, None])
    written = (keys[1:, :, : start + tokens], values[1:, :, : start + tokens])
    whole = causal_attention(q, *written)
    assert_close(found, whole * torch.sigmoid(gate.reshape(whole.shape)), 1e-12)


def test_rotary_turns_pairs_by_position() -> None:
    frequencies = inverse_frequencies(4, 100.0)
    cos, sin = rotary_table(torch.tensor([[3]]), frequencies)
    x = torch.randn(1, 1, 2, 6)
    turned = apply_rotary(x, cos[:, :, None], sin[:, :, None])
    for pair, angle in ((0, 3.0), (1, 3.0 / 100**0.5)):
        a, b = x[..., pair], x[..., pair + 2]
        rotation = torch.tensor(angle)
        assert_close(turned[..., pair], a * rotation.cos() - b * rotation.sin(), 1e-6)
        assert_close(turned[..., pair + 2], b * rotation.cos() + a * rotation.sin(), 1e-6)
    assert torch.equal(turned[..., 4:], x[..., 4:])
