"""Root-mean-square norms between the products of a round, fused with what stands next to them.

All arithmetic is float32; a value is rounded to the model's dtype where it is stored. One program
a row, so a row's bits do not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from sm70lab.kernels.gpu.cases import CompileCase
from sm70lab.kernels.gpu.launch import launch_options, let_next_kernel_start, wait_for_kernels_before
from sm70lab.kernels.norm import rms_norm as rms_norm_reference

# ---------------------------------------------------------------- reference


def add_rms_norm_reference(
    residual: torch.Tensor, parts: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + Σ parts in the model's dtype [T, H], and its norm.

    residual [T, H]; parts [S, T, H] float32, summed in order; weight [H] float32: the whole factor.
    """
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    x = (residual.float() + total).to(residual.dtype)
    return x, rms_norm_reference(x, weight, eps)


def embed_rms_norm_reference(
    tokens: torch.Tensor, embedding: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the embedding [T, H], and their norm."""
    x = embedding[tokens]
    return x, rms_norm_reference(x, weight, eps)


def draft_input_reference(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    embedding_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The draft head's input [T, 2H]: norm of the tokens' embeddings beside the norm of ``hidden``."""
    pair = (
        rms_norm_reference(embedding[tokens], embedding_weight, eps),
        rms_norm_reference(hidden, hidden_weight, eps),
    )
    return torch.cat(pair, dim=-1)


# ---------------------------------------------------------------- kernels


@triton.jit
def _normed(x, weight, size, eps):
    """x / √(mean(x²) + eps) · weight of one row in float32; columns beyond ``size`` are zero."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps) * weight


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm(
    residual,
    parts,
    weight,
    x_out,
    normed_out,
    rows,
    size,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < size
    let_next_kernel_start(PDL)
    factor = tl.load(weight + column, mask=mask, other=0.0)
    wait_for_kernels_before(PDL)
    x = tl.load(residual + row * size + column, mask=mask, other=0.0)
    if PARTS > 0:
        total = tl.load(parts + row * size + column, mask=mask, other=0.0)
        for part in tl.static_range(1, PARTS):
            total += tl.load(parts + (part * rows + row) * size + column, mask=mask, other=0.0)
        x = (x.to(tl.float32) + total).to(x_out.dtype.element_ty)
        tl.store(x_out + row * size + column, x, mask=mask)
    y = _normed(x.to(tl.float32), factor, size, eps)
    tl.store(normed_out + row * size + column, y.to(normed_out.dtype.element_ty), mask=mask)


@triton.jit
def _embed_rms_norm(
    tokens,
    embedding,
    weight,
    x_out,
    normed_out,
    size,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < size
    let_next_kernel_start(PDL)
    factor = tl.load(weight + column, mask=mask, other=0.0)
    wait_for_kernels_before(PDL)
    token = tl.load(tokens + row).to(tl.int64)
    x = tl.load(embedding + token * size + column, mask=mask, other=0.0)
    tl.store(x_out + row * size + column, x, mask=mask)
    y = _normed(x.to(tl.float32), factor, size, eps)
    tl.store(normed_out + row * size + column, y.to(normed_out.dtype.element_ty), mask=mask)


@triton.jit
def _draft_input(
    tokens,
    embedding,
    hidden,
    embedding_weight,
    hidden_weight,
    out,
    size,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < size
    of_embedding = tl.program_id(1) == 0
    let_next_kernel_start(PDL)
    weight = embedding_weight if of_embedding else hidden_weight
    factor = tl.load(weight + column, mask=mask, other=0.0)
    wait_for_kernels_before(PDL)
    token = tl.load(tokens + row).to(tl.int64)
    source = embedding + token * size if of_embedding else hidden + row * size
    x = tl.load(source + column, mask=mask, other=0.0)
    y = _normed(x.to(tl.float32), factor, size, eps)
    target = out + row * 2 * size + (0 if of_embedding else size)
    tl.store(target + column, y.to(out.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------- launches


def _layout(size: int) -> tuple[int, int]:
    """BLOCK and num_warps for rows of ``size``: 16 values a thread at most."""
    block = triton.next_power_of_2(size)
    return block, min(max(block // 512, 1), 16)


def _options(x: torch.Tensor) -> dict[str, Any]:
    block, warps = _layout(x.shape[-1])
    return {"BLOCK": block, "num_warps": warps, **launch_options(x.device)}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
    """The norm of x [T, H], written to ``out``; weight [H] float32."""
    rows, size = x.shape
    _add_rms_norm[(rows,)](x, x, weight, x, out, rows, size, eps, PARTS=0, **_options(x))
    return out


def add_rms_norm(
    residual: torch.Tensor,
    parts: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    x_out: torch.Tensor,
    normed_out: torch.Tensor,
) -> None:
    """As ``add_rms_norm_reference``, into x_out and normed_out [T, H]; x_out may be ``residual``."""
    rows, size = residual.shape
    arguments = (residual, parts, weight, x_out, normed_out, rows, size, eps)
    _add_rms_norm[(rows,)](*arguments, PARTS=len(parts), **_options(residual))


def embed_rms_norm(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    x_out: torch.Tensor,
    normed_out: torch.Tensor,
) -> None:
    """As ``embed_rms_norm_reference``; tokens [T] int64."""
    rows, size = x_out.shape
    _embed_rms_norm[(rows,)](tokens, embedding, weight, x_out, normed_out, size, eps, **_options(x_out))


def draft_input(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    embedding_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """As ``draft_input_reference``, into ``out`` [T, 2H]."""
    rows, size = hidden.shape
    arguments = (tokens, embedding, hidden, embedding_weight, hidden_weight, out, size, eps)
    _draft_input[(rows, 2)](*arguments, **_options(hidden))
    return out


SIZES = (256, 1024, 2048, 2560, 4096, 5120)  # hidden sizes of this family and of the embedded model
MAX_PARTS = 8


def compile_cases() -> Iterator[CompileCase]:
    """Every layout, and every number of parts, that the functions above can launch."""
    tensors = {
        "residual": "*fp16",
        "parts": "*fp32",
        "weight": "*fp32",
        "x_out": "*fp16",
        "normed_out": "*fp16",
        "tokens": "*i64",
        "embedding": "*fp16",
        "hidden": "*fp16",
        "embedding_weight": "*fp32",
        "hidden_weight": "*fp32",
        "out": "*fp16",
        "rows": "i32",
        "size": "i32",
        "eps": "fp32",
    }
    for block, warps in sorted({_layout(size) for size in SIZES}):
        plain = {"BLOCK": block, "PDL": False}
        for kernel, more in (
            *((_add_rms_norm, {"PARTS": parts}) for parts in (0, 1, 2, 4, MAX_PARTS)),
            (_embed_rms_norm, {}),
            (_draft_input, {}),
        ):
            constexprs = plain | more
            signature = {name: tensors[name] for name in kernel.arg_names if name not in constexprs}
            label = f"norm{kernel.__name__} " + " ".join(f"{n}={v}" for n, v in constexprs.items())
            yield CompileCase(kernel, signature, constexprs, warps, 1, label, ("size",))
