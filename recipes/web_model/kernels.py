"""The two sequence operators in plain torch: chunked gated delta rule and merged attention.

Gated delta rule: S <- exp(g) S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q (state [K, V]),
computed in chunks of 64 (Yang et al., "Gated Delta Networks", 2024, arXiv:2412.06464) with the
states between chunks found by a two-level scan over affine maps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
GROUP = 8


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower-triangular L [..., n, n], n a power of two.

    Forward doubles the size of inverted diagonal blocks: X <- X - X (M_s * L) X, where M_s picks
    the lower-left quarter of each block of 2 s rows. Backward is dL = -(X^T dX X^T), lower part.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, lower: Tensor) -> Tensor:
        n = lower.shape[-1]
        index = torch.arange(n, device=lower.device)
        inverse = torch.eye(n, device=lower.device, dtype=lower.dtype).expand_as(lower)
        size = 1
        while size < n:
            block = index // size
            same = (block[:, None] // 2 == block[None, :] // 2) & (block[:, None] > block[None, :])
            part = lower * same
            inverse = inverse - (part if size == 1 else inverse @ part @ inverse)
            size *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def scan_states(decay: Tensor, update: Tensor) -> Tensor:
    """States before each chunk: S_0 = 0, S_{n+1} = decay_n S_n + update_n.

    decay [B, H, N, K, K], update [B, H, N, K, V]; returns [B, H, N, K, V]. Two levels: groups of
    `GROUP` chunks are composed side by side, then states pass from group to group.
    """
    count = decay.shape[2]
    pad = -count % GROUP
    if pad:
        decay = F.pad(decay, (0, 0, 0, 0, 0, pad))
        update = F.pad(update, (0, 0, 0, 0, 0, pad))
    decays = decay.unflatten(2, (-1, GROUP)).unbind(3)
    updates = update.unflatten(2, (-1, GROUP)).unbind(3)
    products, sums = [decays[0]], [updates[0]]
    for d, u in zip(decays[1:], updates[1:], strict=True):
        products.append(d @ products[-1])
        sums.append(d @ sums[-1] + u)
    state = torch.zeros_like(update[:, :, 0])
    starts = []
    for whole, total in zip(products[-1].unbind(2), sums[-1].unbind(2), strict=True):
        starts.append(state)
        state = whole @ state + total
    start = torch.stack(starts, 2)
    states = [start] + [p @ start + s for p, s in zip(products[:-1], sums[:-1], strict=True)]
    return torch.stack(states, 3).flatten(2, 3)[:, :, :count]


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """Outputs [B, T, H, V] of the gated delta rule from an empty state.

    q, k [B, T, H, K] (any scale; normalised here), v [B, T, H, V], beta and g [B, T, H] float32.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _gated_delta_rule(q, k, v, beta, g)


def _gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    length = q.shape[1]
    pad = -length % CHUNK

    def chunked(x: Tensor) -> Tensor:
        x = x.float().transpose(1, 2)
        x = F.pad(x, (0, 0, 0, pad) if x.dim() == 4 else (0, pad))
        return x.unflatten(2, (-1, CHUNK))

    q = q.float() * torch.rsqrt(q.float().square().sum(-1, keepdim=True) + 1e-6)
    k = k.float() * torch.rsqrt(k.float().square().sum(-1, keepdim=True) + 1e-6)
    q, k, v, beta, g = (chunked(x) for x in (q * q.shape[-1] ** -0.5, k, v, beta, g))
    total = g.cumsum(-1)
    # exp of the upper part would overflow: mask before, not after.
    keep = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    ratio = (total[..., :, None] - total[..., None, :]).masked_fill(~keep, float("-inf")).exp()
    k_beta = k * beta[..., None]
    inverse = UnitLowerInverse.apply(((k_beta @ k.transpose(-1, -2)) * ratio).tril(-1))
    values = inverse @ (v * beta[..., None])
    k_decay = inverse @ (k_beta * total.exp()[..., None])
    last = total[..., -1:]
    k_end = k * (last - total).exp()[..., None]
    eye = torch.eye(k.shape[-1], device=k.device)
    decay = last.exp()[..., None] * eye - k_end.transpose(-1, -2) @ k_decay
    states = scan_states(decay, k_end.transpose(-1, -2) @ values)
    fresh = values - k_decay @ states
    out = (q * total.exp()[..., None]) @ states + ((q @ k.transpose(-1, -2)) * ratio) @ fresh
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2)


class MergedAttention(torch.autograd.Function):
    """Causal attention over shared keys plus a few extra keys of each query's own chain.

    q, k, v [B, H, T, D]; extra_k, extra_v [B, H, T, E, D]: query t sees keys 0..t and its own E
    extras. On the GPU the shared part is the flash kernel; handing its backward the merged output
    and log-sum-exp makes the gradients exact, since flash recomputes p = exp(s - lse).
    """

    @staticmethod
    def forward(ctx, q, k, v, extra_k, extra_v):  # type: ignore[no-untyped-def]
        scale = q.shape[-1] ** -0.5
        out, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, False, scale=scale
        )
        # Products and sums: a batched product of such tiny matrices is far slower.
        scores = (q[..., None, :] * extra_k).float().sum(-1) * scale
        merged = torch.logaddexp(lse, scores.logsumexp(-1))
        weights = (scores - merged[..., None]).exp()
        out = out.float() * (lse - merged).exp()[..., None]
        out = (out + (weights[..., None] * extra_v).sum(-2)).to(q.dtype)
        ctx.save_for_backward(q, k, v, extra_k, extra_v, out, merged, weights)
        ctx.rest = rest
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def,override]
        q, k, v, extra_k, extra_v, out, merged, weights = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        cum_q, cum_k, max_q, max_k, seed, offset = ctx.rest[:6]
        grad = grad.contiguous()
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            merged,
            cum_q,
            cum_k,
            max_q,
            max_k,
            0.0,
            True,
            seed,
            offset,
            scale=scale,
        )
        inner = (grad[..., None, :] * extra_v).float().sum(-1)
        ds = weights * (inner - (grad * out).float().sum(-1, keepdim=True)) * scale
        ds, weights = ds.to(q.dtype), weights.to(q.dtype)
        dq = dq + (ds[..., None] * extra_k).sum(-2)
        dek = ds[..., None] * q[..., None, :]
        dev = weights[..., None] * grad[..., None, :]
        return dq, dk, dv, dek, dev


def merged_attention(
    q: Tensor, k: Tensor, v: Tensor, extra_k: Tensor | None, extra_v: Tensor | None
) -> Tensor:
    """Attention of `MergedAttention` on any device; no extras: plain causal attention."""
    if extra_k is None or extra_v is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if q.is_cuda and q.dtype != torch.float32:
        with torch.autocast("cuda", enabled=False):
            return MergedAttention.apply(q, k, v, extra_k, extra_v)
    scale = q.shape[-1] ** -0.5
    length = q.shape[2]
    keep = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    shared = (q @ k.transpose(-1, -2) * scale).masked_fill(~keep, float("-inf"))
    own = torch.einsum("bhtd,bhted->bhte", q, extra_k) * scale
    weights = torch.cat([shared, own], -1).softmax(-1)
    out = weights[..., :length] @ v
    return out + torch.einsum("bhte,bhted->bhtd", weights[..., length:], extra_v)
