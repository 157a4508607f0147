"""Products of a few rows with a weight matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sm70lab.kernels import native_operators
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.kernels.rows import by_row


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arithmetic: Arithmetic
) -> torch.Tensor:
    """x·Wᵀ + bias; x [..., K], weight [N, K] → [..., N]."""
    if arithmetic is Arithmetic.native:
        return native_operators.linear(x, weight, bias)
    if arithmetic.whole:
        return F.linear(x, weight, bias)
    return by_row(lambda row: F.linear(row, weight, bias), [x], x.ndim - 1)


def swiglu(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, arithmetic: Arithmetic
) -> torch.Tensor:
    """(silu(x·gateᵀ) ⊙ x·upᵀ)·downᵀ, gate and up stacked in ``gate_up`` [2·inner, hidden] (Shazeer 2020)."""
    if arithmetic is Arithmetic.native:
        return native_operators.swiglu(x, gate_up, down)
    if arithmetic is Arithmetic.by_row:
        return by_row(lambda row: swiglu(row, gate_up, down, Arithmetic.plain), [x], x.ndim - 1)
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
