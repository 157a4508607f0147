"""The C++ kernels that a compiler's graph may hold: ``torch.library`` operators over ``kernels.native``.

A tracer cannot look into a ctypes call. Outside a trace the kernels are called directly, which costs
less than the dispatcher.
"""

from __future__ import annotations

import torch

from sm70lab.kernels import native


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``native.linear``, as an operator while a graph is traced."""
    if not torch.compiler.is_compiling():
        return native.linear(x, weight, bias)
    out: torch.Tensor = torch.ops.sm70lab.native_linear(x, weight, bias)
    return out


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """``native.swiglu``, as an operator while a graph is traced."""
    if not torch.compiler.is_compiling():
        return native.swiglu(x, gate_up, down)
    out: torch.Tensor = torch.ops.sm70lab.native_swiglu(x, gate_up, down)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``native.rms_norm``, as an operator while a graph is traced."""
    if not torch.compiler.is_compiling():
        return native.rms_norm(x, weight, eps)
    out: torch.Tensor = torch.ops.sm70lab.native_rms_norm(x, weight, eps)
    return out


def gated_rms_norm(o: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``native.gated_rms_norm``, as an operator while a graph is traced."""
    if not torch.compiler.is_compiling():
        return native.gated_rms_norm(o, gate, weight, eps)
    out: torch.Tensor = torch.ops.sm70lab.native_gated_rms_norm(o, gate, weight, eps)
    return out


def _shape_of_product(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _shape_of_swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(down))


def _shape_of_norm(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


_library = torch.library.Library("sm70lab", "FRAGMENT")
for _schema, _run, _fake in (
    ("native_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", native.linear, _shape_of_product),
    ("native_swiglu(Tensor x, Tensor gate_up, Tensor down) -> Tensor", native.swiglu, _shape_of_swiglu),
    ("native_rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", native.rms_norm, _shape_of_norm),
    (
        "native_gated_rms_norm(Tensor o, Tensor gate, Tensor weight, float eps) -> Tensor",
        native.gated_rms_norm,
        _shape_of_norm,
    ),
):
    _library.define(_schema)
    _name = _schema.partition("(")[0]
    _library.impl(_name, _run, "CPU")
    torch.library.register_fake(f"sm70lab::{_name}", _fake, lib=_library)
