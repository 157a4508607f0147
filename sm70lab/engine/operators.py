"""Opaque operators: what the compiler must not look into, with explicit inputs and returned values.

Each is registered with ``torch.library`` and runs the same plain functions as the reference.
``Library.define`` costs a third of a ``custom_op`` a call, which counts at eight layers a step. The
one operator that reads and leaves something beside its inputs and results is
``gdn_core_in_context``: see ``forward_context``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sm70lab.engine import forward_context, gdn, kv_cache
from sm70lab.engine.gdn import CoreWeights, GDNShape, How, Place
from sm70lab.engine.schemes import scheme_named
from sm70lab.engine.state import LayerState
from sm70lab.kernels import moe
from sm70lab.kernels.arithmetic import Arithmetic

# Arguments in the order of ``CoreWeights``, ``Place`` and ``_flat``.
_WEIGHTS = "Tensor conv_weight, Tensor neg_decay_rate, Tensor dt_bias"
_PLACE = (
    "Tensor[] state, Tensor slots, Tensor conv_accepted, Tensor ssm_accepted, str scheme, int prefill_room"
)
_HOW = "int[] shape, float eps, str arithmetic, bool packed"
SCHEMAS = {
    "gdn_input_projection": f"(Tensor x, Tensor in_proj, {_HOW}) -> Tensor[]",
    "gdn_core": f"(Tensor mixed_qkv, Tensor b, Tensor a, {_WEIGHTS}, {_PLACE}, {_HOW}) -> Tensor[]",
    "gdn_core_in_context": f"(Tensor mixed_qkv, Tensor b, Tensor a, {_WEIGHTS}, int layer, {_HOW}) -> Tensor",
    "gdn_output_projection": f"(Tensor o, Tensor z, Tensor norm_weight, Tensor out_proj, {_HOW}) -> Tensor",
    "gdn_input_core": f"(Tensor x, Tensor in_proj, {_WEIGHTS}, {_PLACE}, {_HOW}) -> Tensor[]",
    "gdn_layer": (
        f"(Tensor x, Tensor in_proj, {_WEIGHTS}, Tensor norm_weight, Tensor out_proj, {_PLACE}, {_HOW})"
        " -> Tensor[]"
    ),
    "gated_attention": (
        "(Tensor q_gate, Tensor k, Tensor v, Tensor q_norm, Tensor k_norm, Tensor cos, Tensor sin, "
        "Tensor(a!) keys, Tensor(b!) values, Tensor slots, Tensor start, float eps, str arithmetic) -> Tensor"
    ),
    "sparse_moe": (
        "(Tensor x, Tensor router, Tensor gate_up, Tensor down, Tensor shared_gate, Tensor shared_gate_up, "
        "Tensor shared_down, int top_k, bool normalise, str arithmetic) -> Tensor"
    ),
}


def gdn_input_projection(x: torch.Tensor, in_proj: torch.Tensor, how: How) -> LayerState:
    """``gdn.input_projection`` behind one operator: four tensors of their own, not views of one product."""
    out: LayerState = torch.ops.sm70lab.gdn_input_projection(x, in_proj, *_flat(how))
    return out


def gdn_core(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, weights: CoreWeights, place: Place, how: How
) -> LayerState:
    """``gdn.core`` behind one operator."""
    out: LayerState = torch.ops.sm70lab.gdn_core(mixed_qkv, b, a, *weights, *place, *_flat(how))
    return out


def gdn_core_in_context(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, weights: CoreWeights, layer: int, how: How
) -> torch.Tensor:
    """``forward_context.core`` behind one operator. Returns o alone; the new state stays in the context."""
    out: torch.Tensor = torch.ops.sm70lab.gdn_core_in_context(mixed_qkv, b, a, *weights, layer, *_flat(how))
    return out


def gdn_output_projection(
    o: torch.Tensor, z: torch.Tensor, norm_weight: torch.Tensor, out_proj: torch.Tensor, how: How
) -> torch.Tensor:
    """``gdn.output_projection`` behind one operator."""
    out: torch.Tensor = torch.ops.sm70lab.gdn_output_projection(o, z, norm_weight, out_proj, *_flat(how))
    return out


def gdn_input_core(
    x: torch.Tensor, in_proj: torch.Tensor, weights: CoreWeights, place: Place, how: How
) -> LayerState:
    """Input projection and core behind one operator. Returns [o, z, *new pool rows]."""
    out: LayerState = torch.ops.sm70lab.gdn_input_core(x, in_proj, *weights, *place, *_flat(how))
    return out


def gdn_layer(
    x: torch.Tensor,
    in_proj: torch.Tensor,
    weights: CoreWeights,
    norm_weight: torch.Tensor,
    out_proj: torch.Tensor,
    place: Place,
    how: How,
) -> LayerState:
    """All three stages behind one operator. Returns [y, *new pool rows]."""
    out: LayerState = torch.ops.sm70lab.gdn_layer(
        x, in_proj, *weights, norm_weight, out_proj, *place, *_flat(how)
    )
    return out


def gated_attention(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    start: torch.Tensor,
    eps: float,
    arithmetic: Arithmetic,
) -> torch.Tensor:
    """``kv_cache.gated_attention`` behind one operator that declares what it writes."""
    inputs = (q_gate, k, v, q_norm, k_norm, cos, sin, keys, values, slots, start)
    out: torch.Tensor = torch.ops.sm70lab.gated_attention(*inputs, eps, arithmetic.value)
    return out


def sparse_moe(
    x: torch.Tensor, weights: moe.MoEWeights, top_k: int, normalise: bool, arithmetic: Arithmetic
) -> torch.Tensor:
    """``moe.sparse_moe`` behind one operator: which experts run depends on data, so no graph can hold it."""
    out: torch.Tensor = torch.ops.sm70lab.sparse_moe(x, *weights, top_k, normalise, arithmetic.value)
    return out


def _flat(how: How) -> tuple[list[int], float, str, bool]:
    s = how.shape
    return (
        [s.key_heads, s.value_heads, s.key_dim, s.value_dim],
        s.eps,
        how.arithmetic.value,
        how.packed,
    )


def _how(sizes: list[int], eps: float, arithmetic: str, packed: bool) -> How:
    key_heads, value_heads, key_dim, value_dim = sizes
    return How(GDNShape(key_heads, value_heads, key_dim, value_dim, eps), Arithmetic(arithmetic), packed)


def _owned(outputs: Sequence[torch.Tensor]) -> LayerState:
    """Contiguous copies of what shares its storage: an operator may not return parts of anything."""
    return [
        _with_plain_strides(t)
        if t.is_contiguous() and t.nbytes == t.untyped_storage().nbytes()
        else t.clone(memory_format=torch.contiguous_format)
        for t in outputs
    ]


def _with_plain_strides(t: torch.Tensor) -> torch.Tensor:
    """A transposed dimension of size one keeps an odd stride, for which a graph would be compiled anew."""
    plain = t.stride(0) * len(t) == t.numel() and t.stride(1) * t.shape[1] == t.stride(0)
    return t if plain else t.view(-1).view(t.shape)


# What runs. The dispatcher passes every argument by position, in the order of the schemas above.


def _gdn_input_projection(x: torch.Tensor, in_proj: torch.Tensor, *how: Any) -> LayerState:
    return _owned(gdn.input_projection(x, in_proj, _how(*how)))


def _gdn_core(mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, *rest: Any) -> LayerState:
    return _owned(gdn.core(mixed_qkv, b, a, CoreWeights(*rest[:3]), Place(*rest[3:9]), _how(*rest[9:])))


def _gdn_core_in_context(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, *rest: Any
) -> torch.Tensor:
    (o,) = _owned([forward_context.core(mixed_qkv, b, a, CoreWeights(*rest[:3]), rest[3], _how(*rest[4:]))])
    return o


def _gdn_output_projection(
    o: torch.Tensor, z: torch.Tensor, norm_weight: torch.Tensor, out_proj: torch.Tensor, *how: Any
) -> torch.Tensor:
    return gdn.output_projection(o, z, norm_weight, out_proj, _how(*how))


def _gdn_input_core(x: torch.Tensor, in_proj: torch.Tensor, *rest: Any) -> LayerState:
    how = _how(*rest[9:])
    mixed_qkv, z, b, a = gdn.input_projection(x, in_proj, how)
    o, *state = gdn.core(mixed_qkv, b, a, CoreWeights(*rest[:3]), Place(*rest[3:9]), how)
    return _owned([o, z, *state])


def _gdn_layer(x: torch.Tensor, in_proj: torch.Tensor, *rest: Any) -> LayerState:
    how, (norm_weight, out_proj) = _how(*rest[11:]), rest[3:5]
    mixed_qkv, z, b, a = gdn.input_projection(x, in_proj, how)
    o, *state = gdn.core(mixed_qkv, b, a, CoreWeights(*rest[:3]), Place(*rest[5:11]), how)
    return _owned([gdn.output_projection(o, z, norm_weight, out_proj, how), *state])


def _gated_attention(*inputs: Any) -> torch.Tensor:
    arguments = [*inputs[:-1], Arithmetic(inputs[-1])]
    return kv_cache.gated_attention(*arguments)


def _sparse_moe(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    *weights, top_k, normalise, arithmetic = rest
    return moe.sparse_moe(x, moe.MoEWeights(*weights), top_k, normalise, Arithmetic(arithmetic))


# What the compiler must know of the results.


def _new_rows(conv_weight: torch.Tensor, place: Place, rows: torch.Tensor) -> LayerState:
    """Pool rows of a round with ``rows`` [B, T, ...]: what the scheme holds of T-row rounds."""
    conv, kept = place.state[:2]
    batch, tokens = len(rows), place.prefill_room or rows.shape[1]
    whole = kept.new_empty(batch, *kept.shape[-3:])
    wide = torch.promote_types(rows.dtype, torch.float32)
    held = scheme_named(place.scheme).hold(whole, tokens, wide)
    conv_rows = conv.new_empty(batch, len(conv_weight) - 1 + tokens, conv.shape[-1])
    return [conv_rows, *(pool.new_empty(pool.shape) for pool in held)]


def _core_output(rows: torch.Tensor, weights: CoreWeights, how: How) -> torch.Tensor:
    shape = (*rows.shape[:2], how.shape.value_heads, how.shape.value_dim)
    return rows.new_empty(shape, dtype=weights.neg_decay_rate.dtype)


def _shapes_of_input_projection(x: torch.Tensor, in_proj: torch.Tensor, *how: Any) -> LayerState:
    s = _how(*how).shape
    sizes = (s.conv_dim, s.value_heads * s.value_dim, s.value_heads, s.value_heads)
    return [x.new_empty(*x.shape[:2], size) for size in sizes]


def _shapes_of_core(mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, *rest: Any) -> LayerState:
    weights, place, how = CoreWeights(*rest[:3]), Place(*rest[3:9]), _how(*rest[9:])
    return [
        _core_output(mixed_qkv, weights, how),
        *_new_rows(weights.conv_weight, place, mixed_qkv),
    ]


def _shape_of_core_in_context(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, *rest: Any
) -> torch.Tensor:
    return _core_output(mixed_qkv, CoreWeights(*rest[:3]), _how(*rest[4:]))


def _shape_of_output_projection(
    o: torch.Tensor, z: torch.Tensor, norm_weight: torch.Tensor, out_proj: torch.Tensor, *how: Any
) -> torch.Tensor:
    return z.new_empty(*z.shape[:2], len(out_proj))


def _shapes_of_input_core(x: torch.Tensor, in_proj: torch.Tensor, *rest: Any) -> LayerState:
    weights, place, how = CoreWeights(*rest[:3]), Place(*rest[3:9]), _how(*rest[9:])
    z = x.new_empty(*x.shape[:2], how.shape.value_heads * how.shape.value_dim)
    return [_core_output(x, weights, how), z, *_new_rows(weights.conv_weight, place, x)]


def _shapes_of_layer(x: torch.Tensor, in_proj: torch.Tensor, *rest: Any) -> LayerState:
    return [x.new_empty(x.shape), *_new_rows(rest[0], Place(*rest[5:11]), x)]


def _shape_of_attention(q_gate: torch.Tensor, *_: Any) -> torch.Tensor:
    return q_gate.new_empty(*q_gate.shape[:2], q_gate.shape[2] // 2)


def _shape_of_moe(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


# route.graph=piecewise: graphs hold what lies between these operators, never the operators.
_OUTSIDE_GRAPHS = tuple(tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None)
_library = torch.library.Library("sm70lab", "DEF")
for _name, _run, _fake in (
    ("gdn_input_projection", _gdn_input_projection, _shapes_of_input_projection),
    ("gdn_core", _gdn_core, _shapes_of_core),
    ("gdn_core_in_context", _gdn_core_in_context, _shape_of_core_in_context),
    ("gdn_output_projection", _gdn_output_projection, _shape_of_output_projection),
    ("gdn_input_core", _gdn_input_core, _shapes_of_input_core),
    ("gdn_layer", _gdn_layer, _shapes_of_layer),
    ("gated_attention", _gated_attention, _shape_of_attention),
    ("sparse_moe", _sparse_moe, _shape_of_moe),
):
    _library.define(_name + SCHEMAS[_name], tags=_OUTSIDE_GRAPHS)
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sm70lab::{_name}", _fake, lib=_library)
