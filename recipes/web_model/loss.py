"""Losses over the vocabulary with hand-written gradients.

Autograd would keep several float32 tensors of tokens x vocabulary for each of the five heads;
here each head keeps one gradient in the logits' own type.
"""

from __future__ import annotations

import torch
from torch import Tensor

CROSS, TRUTH, OVERLAP = 0.6, 0.2, 0.5
UNLIKELY_FLOOR = 0.05


class MainLoss(torch.autograd.Function):
    """(mean loss, softmax) of logits [B, T, V] against token ids [B, T].

    Each token has a weight of cross-entropy, -log p, and one of unlikelihood, -log(1 - p)
    (Welleck et al. 2020, arXiv:1908.04319), both [B, T]. The gradient in the logits is
    c (p_all - onehot) with c = ce - ul p / (1 - p), the ratio capped. The softmax, in the logits'
    type and without gradient, is the drafts' soft target.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, truth: Tensor, ce: Tensor, ul: Tensor):  # type: ignore[no-untyped-def]
        index = truth[..., None]
        # Autocast would turn every one of these into float32.
        with torch.autocast(logits.device.type, enabled=False):
            probs = logits.softmax(-1)
        p = probs.gather(-1, index)[..., 0].float()
        rest = (1 - p).clamp_min(UNLIKELY_FLOOR)
        loss = (ce * -p.clamp_min(1e-38).log() - ul * rest.log()).mean()
        ctx.save_for_backward(probs, index, ce - ul * p / rest)
        ctx.mark_non_differentiable(probs)
        return loss, probs

    @staticmethod
    def backward(ctx, grad: Tensor, _):  # type: ignore[no-untyped-def,override]
        probs, index, factor = ctx.saved_tensors
        scale = (factor * (grad / index.numel()))[..., None].to(probs.dtype)
        slope = probs * scale
        slope.scatter_add_(-1, index, -scale)
        return slope, None, None, None


class DraftLoss(torch.autograd.Function):
    """(loss, overlap) of draft logits [B, T, V] against a target distribution p and true ids.

    loss = CROSS * CE(p, q) + TRUTH * NLL(q) + OVERLAP * (1 - sum min(p, q)): the last sum is the
    acceptance rate of speculative sampling. With m = [q < p] the gradient in the logits is
    CROSS (q - p) + TRUTH (q - onehot) - OVERLAP q (m - sum m q).
    """

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, truth: Tensor):  # type: ignore[no-untyped-def]
        with torch.autocast(logits.device.type, enabled=False):
            return DraftLoss._forward(ctx, logits, target, truth[..., None])

    @staticmethod
    def _forward(ctx, logits: Tensor, target: Tensor, index: Tensor):  # type: ignore[no-untyped-def]
        probs = logits.softmax(-1)
        nll = -probs.gather(-1, index)[..., 0].float().clamp_min(1e-38).log()
        total = nll + logits.gather(-1, index)[..., 0].float()
        cross = total - (target * logits).sum(-1, dtype=torch.float32)
        overlap = torch.minimum(target, probs).sum(-1, dtype=torch.float32).mean()
        below = torch.where(probs < target, probs, 0)
        share = below.sum(-1, keepdim=True, dtype=torch.float32).to(probs.dtype)
        slope = probs * (CROSS + TRUTH + OVERLAP * share) - CROSS * target - OVERLAP * below
        slope.scatter_add_(-1, index, torch.full_like(index, -TRUTH, dtype=slope.dtype))
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(overlap)
        loss = CROSS * cross.mean() + TRUTH * nll.mean() + OVERLAP * (1 - overlap)
        return loss, overlap

    @staticmethod
    def backward(ctx, grad: Tensor, _):  # type: ignore[no-untyped-def,override]
        (slope,) = ctx.saved_tensors
        return slope * (grad / (slope.numel() // slope.shape[-1])).to(slope.dtype), None, None
