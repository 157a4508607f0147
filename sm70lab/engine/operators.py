"""Opaque operators: what the compiler must not look into, with explicit inputs and returned values.

Each is registered with ``torch.library`` and runs the same plain function as the reference.
``Library.define`` costs a third of a ``custom_op`` a call, which counts at eight layers a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sm70lab.engine import gdn, kv_cache
from sm70lab.engine.gdn import GDNShape
from sm70lab.engine.kv_cache import LayerKV
from sm70lab.engine.state import LayerState

_library = torch.library.Library("sm70lab", "DEF")
_STATE = "Tensor[] state, Tensor accepted, str scheme, int prefill_room, int[] shape, float eps"
_library.define(
    "gdn_core(Tensor mixed_qkv, Tensor b, Tensor a, Tensor conv_weight, Tensor neg_decay_rate, "
    f"Tensor dt_bias, {_STATE}) -> Tensor[]"
)
_library.define(
    "gdn_layer(Tensor x, Tensor in_proj, Tensor conv_weight, Tensor neg_decay_rate, Tensor dt_bias, "
    f"Tensor norm_weight, Tensor out_proj, {_STATE}) -> Tensor[]"
)
_library.define(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor start)"
    " -> Tensor"
)


def gdn_core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    conv_weight: torch.Tensor,
    neg_decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    state: LayerState,
    accepted: torch.Tensor,
    scheme: str,
    prefill_room: int,
    shape: GDNShape,
) -> LayerState:
    """``gdn.core`` behind one operator."""
    out: LayerState = torch.ops.sm70lab.gdn_core(
        mixed_qkv,
        b,
        a,
        conv_weight,
        neg_decay_rate,
        dt_bias,
        state,
        accepted,
        scheme,
        prefill_room,
        *_flat(shape),
    )
    return out


def gdn_layer(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    state: LayerState,
    accepted: torch.Tensor,
    scheme: str,
    prefill_room: int,
    shape: GDNShape,
) -> LayerState:
    """All three stages behind one operator; weights as in the operator's schema. Returns [y, *new state]."""
    out: LayerState = torch.ops.sm70lab.gdn_layer(
        x, *weights, state, accepted, scheme, prefill_room, *_flat(shape)
    )
    return out


def cached_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, start: torch.Tensor
) -> torch.Tensor:
    """``kv_cache.cached_attention`` behind one operator that declares what it writes."""
    out: torch.Tensor = torch.ops.sm70lab.cached_attention(q, k, v, kv[0], kv[1], start)
    return out


def _flat(shape: GDNShape) -> tuple[list[int], float]:
    return [shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim], shape.eps


def _shape(sizes: list[int], eps: float) -> GDNShape:
    key_heads, value_heads, key_dim, value_dim = sizes
    return GDNShape(key_heads, value_heads, key_dim, value_dim, eps)


def _owned(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies of what shares its storage: an operator may not return parts of anything."""
    return [
        t
        if t.is_contiguous() and t.nbytes == t.untyped_storage().nbytes()
        else t.clone(memory_format=torch.contiguous_format)
        for t in outputs
    ]


# The dispatcher passes every argument by position, in the order of the schema above.


def _gdn_core(*inputs: Any) -> LayerState:
    stage_inputs = [*inputs[:-2], _shape(*inputs[-2:])]
    return _owned(gdn.core(*stage_inputs))


def _gdn_layer(x: torch.Tensor, in_proj: torch.Tensor, *inputs: Any) -> LayerState:
    conv_weight, neg_decay_rate, dt_bias, norm_weight, out_proj = inputs[:5]
    shape = _shape(*inputs[-2:])
    mixed_qkv, z, b, a = gdn.input_projection(x, in_proj, shape)
    stage_inputs = [mixed_qkv, b, a, conv_weight, neg_decay_rate, dt_bias, *inputs[5:-2], shape]
    o, *new_state = gdn.core(*stage_inputs)
    return _owned([gdn.output_projection(o, z, norm_weight, out_proj, shape.eps), *new_state])


def _cached_attention(*inputs: torch.Tensor) -> torch.Tensor:
    q, k, v, keys, values, start = inputs
    return kv_cache.cached_attention(q, k, v, (keys, values), start)


# What the compiler must know of the results. New states have the shapes of the old ones: rounds
# keep their row count, and prefills leave room for it.


def _shape_of_gdn_core(mixed_qkv: torch.Tensor, *inputs: Any) -> LayerState:
    _, a, _, neg_decay_rate, _, state, *_, (_, value_heads, _, value_dim), _ = inputs
    o = mixed_qkv.new_empty(*a.shape[:2], value_heads, value_dim, dtype=neg_decay_rate.dtype)
    return [o, *(torch.empty_like(t) for t in state)]


def _shape_of_gdn_layer(x: torch.Tensor, *inputs: Any) -> LayerState:
    return [torch.empty_like(x), *(torch.empty_like(t) for t in inputs[6])]


def _shape_of_attention(q: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return q.new_empty(*q.shape[:2], q.shape[2] * q.shape[3])


for _name, _run, _fake in (
    ("gdn_core", _gdn_core, _shape_of_gdn_core),
    ("gdn_layer", _gdn_layer, _shape_of_gdn_layer),
    ("cached_attention", _cached_attention, _shape_of_attention),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sm70lab::{_name}", _fake, lib=_library)
