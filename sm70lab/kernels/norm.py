"""Root-mean-square norms (Zhang and Sennrich 2019), plain PyTorch, computed in float32 or better."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sm70lab.kernels import native_operators
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.kernels.rows import by_row


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, arithmetic: Arithmetic = Arithmetic.plain
) -> torch.Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension, returned in x's dtype.

    ``weight`` is the whole factor in float32 or float64: 1 + w for this family's layer norms.
    """
    if arithmetic is Arithmetic.native:
        return native_operators.rms_norm(x, weight, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    arithmetic: Arithmetic = Arithmetic.plain,
) -> torch.Tensor:
    """rms_norm(x) · silu(gate), in float32 or better, returned in gate's dtype; x, gate [..., V]."""
    if arithmetic is Arithmetic.native:
        return native_operators.gated_rms_norm(x, gate.flatten(-2), weight, eps)
    if arithmetic is Arithmetic.by_row:
        return by_row(lambda x, gate: gated_rms_norm(x, gate, weight, eps), [x, gate])
    normed = F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps)
    return (normed * F.silu(gate.to(weight.dtype))).to(gate.dtype)
