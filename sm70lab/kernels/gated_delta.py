"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks"), plain PyTorch.

State S of one value head is [K, V] (keys by values). One token, with decay α = exp(g):

    S ← α·S;   d = β·(v − Sᵀk);   S ← S + k⊗d;   o = Sᵀq

Shapes: B sequences, T tokens, H value heads, key size K, value size V. Queries and keys come
L2-normalised and repeated to the value heads; queries are already scaled by K^−½. Everything
runs in the state's dtype (float32, or float64 for float64 models).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sm70lab.kernels import native
from sm70lab.kernels.arithmetic import Arithmetic

CHUNK = 64


def gating(
    a: torch.Tensor, b: torch.Tensor, neg_decay_rate: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g = −exp(A_log)·softplus(a + dt_bias) and β = sigmoid(b), both [B, T, H].

    ``neg_decay_rate`` is −exp(A_log), computed once at load in float32: in float16 it overflows.
    """
    dtype = neg_decay_rate.dtype
    return neg_decay_rate * F.softplus(a.to(dtype) + dt_bias), torch.sigmoid(b.to(dtype))


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """x / √(Σx² + 1e-6) over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_delta_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token: exactly the formula above, in an order that does not depend on T.

    q, k [B, T, H, K]; v [B, T, H, V]; g, beta [B, T, H]; state [B, H, K, V], not changed.
    Returns o [B, T, H, V] and the state after every token, [B, T, H, K, V].
    """
    states = gated_delta_states(k, v, g, beta, state)
    outputs = q.transpose(0, 1).unsqueeze(-2) @ states  # [T, B, H, 1, V]
    return outputs.squeeze(-2).transpose(0, 1), states.transpose(0, 1)


def gated_delta_states(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The states alone, time first: [T, B, H, K, V]. Arguments as in ``gated_delta_recurrent``."""
    batch, tokens, heads, key = k.shape
    rows, value = batch * heads, v.shape[-1]
    states = state.new_empty(tokens, rows, key, value)
    # Time first and one matrix a head, so that a step is four operations on ready views.
    k_rows = k.transpose(0, 1).reshape(tokens, rows, 1, key)
    v_rows = v.transpose(0, 1).reshape(tokens, rows, 1, value)
    decay = g.exp().transpose(0, 1).reshape(tokens, rows, 1, 1)
    beta_rows = beta.transpose(0, 1).reshape(tokens, rows, 1, 1)
    s = state.reshape(rows, key, value)
    steps = (k_rows, k_rows.transpose(2, 3), v_rows, decay, beta_rows, states)
    for k_t, k_column, v_t, decay_t, beta_t, out in zip(*(x.unbind(0) for x in steps), strict=True):
        s = s * decay_t
        d = torch.baddbmm(v_t, k_t, s, alpha=-1).mul_(beta_t)  # β·(v − Sᵀk)
        s = torch.baddbmm(s, k_column, d, out=out)  # S + k⊗d
    return states.view(tokens, batch, heads, key, value)


def gated_delta_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same result for long inputs: chunks of 64 tokens in matrix products (section 3.3 there).

    Within a chunk, with γ_t = Π_{i≤t} α_i, the updates d of all tokens solve the unit lower
    triangular system (I + tril(β_t·(k_t·k_s)·γ_t/γ_s, −1)) d = β_t·(v_t − γ_t·S₀ᵀk_t).
    Same arguments as ``gated_delta_recurrent``; returns o and the final state [B, H, K, V].
    """
    tokens = q.shape[1]
    pad = -tokens % CHUNK
    # Padding with g = 0, beta = 0 and k = 0 leaves the state as it is.
    q, k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, pad)) for x in (q, k, v))
    g, beta = (F.pad(x.transpose(1, 2), (0, pad)) for x in (g, beta))
    s = state
    outputs = []
    for start in range(0, tokens + pad, CHUNK):
        span = slice(start, start + CHUNK)
        q_c, k_c, v_c, beta_c = q[:, :, span], k[:, :, span], v[:, :, span], beta[:, :, span, None]
        log_gamma = g[:, :, span].cumsum(-1)
        # Above the diagonal the differences are positive and exp may overflow: tril takes all of that away.
        ratio = (log_gamma[..., :, None] - log_gamma[..., None, :]).exp().tril()
        gamma = log_gamma.exp()[..., None]
        system = beta_c * (k_c @ k_c.transpose(-1, -2)) * ratio  # diagonal is taken as one below
        right = beta_c * (v_c - gamma * (k_c @ s))
        d = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        outputs.append(gamma * (q_c @ s) + ((q_c @ k_c.transpose(-1, -2)) * ratio) @ d)
        remaining = (log_gamma[..., -1:] - log_gamma).exp()[..., None]
        s = gamma[..., -1:, :] * s + (k_c * remaining).transpose(-1, -2) @ d
    return torch.cat(outputs, 2)[:, :, :tokens].transpose(1, 2), s


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``gated_delta_chunk``, in Triton where its kernels are for it: on GPUs with tensor cores."""
    if q.is_cuda:
        from sm70lab.kernels.gpu import capability, gdn_prefill  # imports Triton

        if capability.has_tensor_core_dots(q.device) and gdn_prefill.fits(q, k, v, g, beta, state):
            return gdn_prefill.gated_delta_prefill(q, k, v, g, beta, state)
    return gated_delta_chunk(q, k, v, g, beta, state)


# The twin that an arithmetic asks for.


def recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    arithmetic: Arithmetic,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the states after every token: see ``gated_delta_recurrent``."""
    if arithmetic is Arithmetic.native:
        return native.gated_delta_recurrent(q, k, v, g, beta, state)
    if arithmetic.whole:
        return gated_delta_recurrent(q, k, v, g, beta, state)
    per_row = _row_by_row((q, k, v, g, beta), state)
    o, states = (torch.stack([torch.cat(row) for row in zip(*x, strict=True)], 1) for x in per_row)
    return o, states


def outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    arithmetic: Arithmetic,
) -> torch.Tensor:
    """The outputs of ``recurrent`` alone."""
    if arithmetic is Arithmetic.native:
        return native.gated_delta_outputs(q, k, v, g, beta, state)
    return recurrent(q, k, v, g, beta, state, arithmetic)[0]


def fold(
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    arithmetic: Arithmetic,
) -> torch.Tensor:
    """The last of the states of ``recurrent``, bit for bit."""
    if arithmetic is Arithmetic.native:
        return native.gated_delta_fold(k, v, g, beta, state)
    if arithmetic.whole:
        return gated_delta_states(k, v, g, beta, state)[-1]
    return recurrent(k, k, v, g, beta, state, arithmetic)[1][:, -1]


def _row_by_row(
    rows: tuple[torch.Tensor, ...], state: torch.Tensor
) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """For each sequence its outputs [1, H, V] and states [1, H, K, V], one a token."""
    outputs: list[list[torch.Tensor]] = []
    states: list[list[torch.Tensor]] = []
    for b in range(len(state)):
        s = state[b : b + 1]
        outputs.append([])
        states.append([])
        for t in range(rows[0].shape[1]):
            q, k, v, g, beta = (x[b : b + 1, t : t + 1] for x in rows)
            o, after = gated_delta_recurrent(q, k, v, g, beta, s)
            s = after[:, 0]
            outputs[-1].append(o[:, 0])
            states[-1].append(s)
    return outputs, states
