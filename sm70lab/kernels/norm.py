"""Root-mean-square norms (Zhang and Sennrich 2019), plain PyTorch, computed in float32 or better."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension, returned in x's dtype.

    ``weight`` is the whole factor in float32 or float64: 1 + w for this family's layer norms.
    """
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm(x) · silu(gate), in float32 or better, returned in gate's dtype; x, gate [..., V]."""
    normed = F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps)
    return (normed * F.silu(gate.to(weight.dtype))).to(gate.dtype)
