"""A sparse mixture of SwiGLU experts (Shazeer et al. 2017), plain PyTorch around the products."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.kernels.linear import linear, swiglu
from sm70lab.kernels.rows import by_row


class MoEWeights(NamedTuple):
    """Of E experts with inner size I, and of the shared one."""

    router: torch.Tensor  # [E, hidden]
    gate_up: torch.Tensor  # [E, 2·I, hidden]
    down: torch.Tensor  # [E, hidden, I]
    shared_gate: torch.Tensor  # [1, hidden]
    shared_gate_up: torch.Tensor
    shared_down: torch.Tensor


def sparse_moe(
    x: torch.Tensor, weights: MoEWeights, top_k: int, normalise: bool, arithmetic: Arithmetic
) -> torch.Tensor:
    """The ``top_k`` routed experts of each row beside a shared expert with its own sigmoid gate.

    x [..., hidden] → [..., hidden]; ``normalise`` scales the chosen experts' probabilities to one.
    """
    if not arithmetic.whole and x.numel() > x.shape[-1]:
        one = partial(sparse_moe, weights=weights, top_k=top_k, normalise=normalise, arithmetic=arithmetic)
        return by_row(one, [x], x.ndim - 1)
    w = weights
    rows = x.reshape(-1, x.shape[-1])
    wide = torch.promote_types(x.dtype, torch.float32)
    probs, chosen = linear(rows, w.router, None, arithmetic).to(wide).softmax(-1).topk(top_k, dim=-1)
    if normalise:
        probs = probs / probs.sum(-1, keepdim=True)
    shared = swiglu(rows, w.shared_gate_up, w.shared_down, arithmetic)
    out = torch.sigmoid(linear(rows, w.shared_gate, None, arithmetic)) * shared
    for expert in chosen.unique().tolist():
        row, slot = (chosen == expert).nonzero(as_tuple=True)
        part = swiglu(rows[row], w.gate_up[expert], w.down[expert], arithmetic)
        out.index_add_(0, row, part * probs[row, slot, None].to(x.dtype))
    return out.view_as(x)
