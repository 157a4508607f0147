"""The gated delta rule over a prompt, in chunks of 64 tokens (``kernels.gated_delta.gated_delta_chunk``).

Two kernels, float32 throughout. ``_systems`` makes what a chunk needs of its own keys and queries, all chunks
at once: the inverse of the unit lower triangular system that its updates solve, and the weights of those
updates in its outputs. ``_states`` then goes from chunk to chunk with the state in registers, one program for
all keys and BLOCK_V values of a head. For devices with tensor cores (sm_80 and later), where a product of
float32 is three of tf32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sm70lab.kernels.gated_delta import CHUNK

BLOCK_K = 32
BLOCK_V = 16


@triton.jit
def _product(a, b, acc):
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit(do_not_specialize=["tokens"])
def _systems(
    q,
    k,
    g,
    beta,
    inverse_out,
    weights_out,
    tokens,
    heads,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(I + L)⁻¹ with L = tril(β_t·(k_t·k_s)·γ_t/γ_s, −1), and tril((q_t·k_s)·γ_t/γ_s), for each chunk."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.program_id(2)
    row = tl.arange(0, CHUNK)
    at = (i * tokens + chunk * CHUNK + row).to(tl.int64) * heads + head  # of [B, T, H]
    live = chunk * CHUNK + row < tokens
    log_gamma = tl.cumsum(tl.load(g + at, mask=live, other=0.0), axis=0)
    zero = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    kk = zero
    qk = zero
    for begin in range(0, K, BLOCK_K):
        key = begin + tl.arange(0, BLOCK_K)
        k_rows = tl.load(k + at[:, None] * K + key[None, :], mask=live[:, None], other=0.0)
        q_rows = tl.load(q + at[:, None] * K + key[None, :], mask=live[:, None], other=0.0)
        kk = _product(k_rows, tl.trans(k_rows), kk)
        qk = _product(q_rows, tl.trans(k_rows), qk)
    t = row[:, None]
    s = row[None, :]
    # Above the diagonal the differences are positive and exp may overflow.
    ratio = tl.exp(tl.where(t >= s, log_gamma[:, None] - log_gamma[None, :], 0.0))
    tile = ((i * heads + head) * tl.num_programs(0) + chunk).to(tl.int64) * CHUNK * CHUNK + t * CHUNK + s
    tl.store(weights_out + tile, tl.where(t >= s, qk * ratio, 0.0))
    lower = tl.where(t > s, tl.load(beta + at, mask=live, other=0.0)[:, None] * kk * ratio, 0.0)
    # Blocks on the diagonal double: [[A, 0], [C, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹·C·A⁻¹, D⁻¹]].
    inverse = tl.where(t == s, 1.0, 0.0)
    tl.static_assert(CHUNK == 64)
    for level in range(6):  # 2⁶ = CHUNK
        side = 1 << level
        c = tl.where((t // side % 2 == 1) & (s // side == t // side - 1), lower, 0.0)
        inverse -= _product(_product(inverse, c, zero), inverse, zero)
    tl.store(inverse_out + tile, inverse)


@triton.jit(do_not_specialize=["tokens"])
def _states(
    q,
    k,
    v,
    g,
    beta,
    inverse_in,
    weights_in,
    state_in,
    state_out,
    o,
    tokens,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """d = (I + L)⁻¹·β·(v − γ·k·S);  o = γ·q·S + weights·d;  S ← γ_C·S + (k·γ_C/γ)ᵀ·d."""
    head = tl.program_id(1)
    i = tl.program_id(2)
    row = tl.arange(0, CHUNK)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    held = (i * heads + head).to(tl.int64) * K * V + key[:, None] * V + value[None, :]
    state = ()  # by BLOCK_K keys
    for n in tl.static_range(K // BLOCK_K):
        state = state + (tl.load(state_in + held + n * BLOCK_K * V),)
    chunks = tl.cdiv(tokens, CHUNK)
    for chunk in range(chunks):
        at = (i * tokens + chunk * CHUNK + row).to(tl.int64) * heads + head
        live = chunk * CHUNK + row < tokens
        log_gamma = tl.cumsum(tl.load(g + at, mask=live, other=0.0), axis=0)
        # Not the rows' own sum, which rounds otherwise: the last row has the weight 1.
        whole = tl.sum(tl.where(row == CHUNK - 1, log_gamma, 0.0), axis=0)
        gamma = tl.exp(log_gamma)[:, None]
        remaining = tl.exp(whole - log_gamma)[:, None]
        rows_at = at[:, None] * K + key[None, :]
        zero = tl.zeros((CHUNK, BLOCK_V), dtype=tl.float32)
        seen = zero
        out = zero
        for n in tl.static_range(K // BLOCK_K):
            k_rows = tl.load(k + rows_at + n * BLOCK_K, mask=live[:, None], other=0.0)
            q_rows = tl.load(q + rows_at + n * BLOCK_K, mask=live[:, None], other=0.0)
            seen = _product(k_rows, state[n], seen)
            out = _product(q_rows, state[n], out)
        v_rows = tl.load(v + at[:, None] * V + value[None, :], mask=live[:, None], other=0.0)
        b = tl.load(beta + at, mask=live, other=0.0)[:, None]
        square = ((i * heads + head) * chunks + chunk).to(tl.int64) * CHUNK * CHUNK
        tile = square + row[:, None] * CHUNK + row[None, :]
        d = _product(tl.load(inverse_in + tile), b * (v_rows - gamma * seen), zero)
        out = _product(tl.load(weights_in + tile), d, gamma * out)
        tl.store(o + at[:, None] * V + value[None, :], out, mask=live[:, None])
        state = _updated(state, k + rows_at, live, remaining, d, tl.exp(whole), K, BLOCK_K)
    for n in tl.static_range(K // BLOCK_K):
        tl.store(state_out + held + n * BLOCK_K * V, state[n])


@triton.jit
def _updated(state, k_at, live, remaining, d, decay, K: tl.constexpr, BLOCK_K: tl.constexpr):
    updated = ()
    for n in tl.static_range(K // BLOCK_K):
        k_rows = tl.load(k_at + n * BLOCK_K, mask=live[:, None], other=0.0) * remaining
        updated = updated + (_product(tl.trans(k_rows), d, state[n] * decay),)
    return updated


def fits(*given: torch.Tensor) -> bool:
    """Whether the arguments of ``gated_delta_prefill`` are float32 and of sizes that the blocks divide."""
    key, value = given[-1].shape[-2:]
    return all(x.dtype == torch.float32 for x in given) and key % BLOCK_K == 0 and value % BLOCK_V == 0


def gated_delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``gated_delta_chunk``, all in float32: o [B, T, H, V] and the state after the prompt [B, H, K, V].

    Raises ``ValueError`` for another dtype, or keys and values of a size that the blocks don't divide.
    """
    batch, tokens, heads, key = q.shape
    value = v.shape[-1]
    given = (q, k, v, g, beta, state)
    if not fits(*given):
        raise ValueError(
            f"keys of {key} and values of {value} in {q.dtype}, a state of {state.dtype}: these kernels take "
            f"float32, keys by {BLOCK_K} and values by {BLOCK_V}"
        )
    q, k, v, g, beta, state = (x.contiguous() for x in given)
    chunks = triton.cdiv(tokens, CHUNK)
    inverse, weights = q.new_empty(2, batch, heads, chunks, CHUNK, CHUNK)
    o, final = torch.empty_like(v), torch.empty_like(state)
    options = {"num_warps": 4, "num_stages": 1}
    sizes = (tokens, heads, key)
    _systems[(chunks, heads, batch)](q, k, g, beta, inverse, weights, *sizes, CHUNK, BLOCK_K, **options)
    inputs = (q, k, v, g, beta, inverse, weights, state, final, o, *sizes, value)
    _states[(value // BLOCK_V, heads, batch)](*inputs, CHUNK, BLOCK_K, BLOCK_V, **options)
    return o, final
