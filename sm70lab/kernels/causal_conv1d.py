"""Depthwise causal convolution over time with SiLU, plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def causal_conv1d(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(Σ_j weight[j]·rows[t + j]) for each of the last T rows.

    rows [B, W − 1 + T, C]: the window of the W − 1 inputs before, then the T new ones;
    weight [W, C]. Returns [B, T, C]. The sum runs over j in a fixed order, whatever T is.
    """
    width = weight.shape[0]
    tokens = rows.shape[1] - width + 1
    total = rows[:, :tokens] * weight[0]
    for j in range(1, width):
        total = torch.addcmul(total, rows[:, j : j + tokens], weight[j])
    return F.silu(total)
