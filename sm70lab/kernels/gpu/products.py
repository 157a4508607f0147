"""One interface to products with a matrix of float16, float32, 8-bit or 4-bit weights."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sm70lab.kernels.gpu import int4, linear
from sm70lab.kernels.gpu.int4 import Int4Weight


class Int8Weight(NamedTuple):
    """A matrix [N, K] with one scale a row."""

    codes: torch.Tensor  # int8 [N, K]
    scale: torch.Tensor  # float32 [N]


LayerWeight = torch.Tensor | Int4Weight
Weight = LayerWeight | Int8Weight  # 8 bits are the draft head's


def outputs(weight: Weight) -> int:
    """Rows of the matrix: N of [N, K]."""
    if isinstance(weight, Int4Weight):
        return weight.outputs
    return len(weight if isinstance(weight, torch.Tensor) else weight.codes)


def weight_bytes(weight: Weight) -> int:
    """What a product reads of it."""
    return weight.nbytes if isinstance(weight, torch.Tensor) else sum(x.nbytes for x in weight)


def parts_of(x: torch.Tensor, weight: LayerWeight, exact: bool) -> int:
    """How many parts ``product_parts`` makes of rows x [T, K]."""
    if isinstance(weight, Int4Weight):
        return int4.parts_of(outputs(weight), x.shape[1], x.device)
    return linear.parts_of(outputs(weight), x.shape[1], len(x), x, exact)


def product(x: torch.Tensor, weight: Weight, out: torch.Tensor, exact: bool) -> torch.Tensor:
    """x·Wᵀ into ``out`` [T, N]: x [T, K]."""
    if isinstance(weight, Int4Weight):
        return int4.linear(x, weight, out)
    if isinstance(weight, Int8Weight):
        return linear.int8_linear(x, *weight, out, exact)
    return linear.linear(x, weight, out, exact=exact)


def product_parts(x: torch.Tensor, weight: LayerWeight, out: torch.Tensor, exact: bool) -> torch.Tensor:
    """x·Wᵀ in parts of K into ``out`` float32 [``parts_of``, T, N], to be added in order."""
    if isinstance(weight, Int4Weight):
        return int4.linear_parts(x, weight, out)
    return linear.linear_parts(x, weight, out, exact)


def swiglu(x: torch.Tensor, gate_up: LayerWeight, out: torch.Tensor, exact: bool) -> torch.Tensor:
    """silu(x·gateᵀ) ⊙ x·upᵀ into ``out`` [T, inner]; gate and up stacked."""
    if isinstance(gate_up, Int4Weight):
        return int4.swiglu(x, gate_up, out)
    return linear.swiglu(x, gate_up, out, exact)
