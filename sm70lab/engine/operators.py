"""Opaque operators: what the compiler must not look into, with explicit inputs and returned values.

Each is registered with ``torch.library`` and runs the same plain function as the reference.
``Library.define`` costs a third of a ``custom_op`` a call, which counts at eight layers a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sm70lab.engine import gdn, kv_cache
from sm70lab.engine.gdn import GDNShape
from sm70lab.engine.kv_cache import LayerKV
from sm70lab.engine.state import LayerState

_library = torch.library.Library("sm70lab", "DEF")
_STATE = "Tensor[] state, Tensor accepted, str scheme, int prefill_room, int[] shape, float eps"
_library.define(
    "gdn_core(Tensor mixed_qkv, Tensor b, Tensor a, Tensor conv_weight, Tensor neg_decay_rate, Tensor dt_bias, "
    f"{_STATE}) -> Tensor[]"
)
_library.define(
    "gdn_layer(Tensor x, Tensor in_proj, Tensor conv_weight, Tensor neg_decay_rate, Tensor dt_bias, "
    f"Tensor norm_weight, Tensor out_proj, {_STATE}) -> Tensor[]"
)
_library.define(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor start) -> Tensor"
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


def _owned(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies of what shares its storage: an operator may not return parts of anything."""
    return [
        t
        if t.is_contiguous() and t.nbytes == t.untyped_storage().nbytes()
        else t.clone(memory_format=torch.contiguous_format)
        for t in outputs
    ]


def _gdn_core(
    mixed_qkv, b, a, conv_weight, neg_decay_rate, dt_bias, state, accepted, scheme, prefill_room, shape, eps
):  # type: ignore[no-untyped-def]
    out = gdn.core(
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
        GDNShape(*shape, eps),
    )
    return _owned(out)


def _gdn_layer(
    x,
    in_proj,
    conv_weight,
    neg_decay_rate,
    dt_bias,
    norm_weight,
    out_proj,
    state,
    accepted,
    scheme,
    prefill_room,
    shape,
    eps,
):  # type: ignore[no-untyped-def]
    sizes = GDNShape(*shape, eps)
    mixed_qkv, z, b, a = gdn.input_projection(x, in_proj, sizes)
    o, *new_state = gdn.core(
        mixed_qkv, b, a, conv_weight, neg_decay_rate, dt_bias, state, accepted, scheme, prefill_room, sizes
    )
    return _owned([gdn.output_projection(o, z, norm_weight, out_proj, eps), *new_state])


def _cached_attention(q, k, v, keys, values, start):  # type: ignore[no-untyped-def]
    return kv_cache.cached_attention(q, k, v, (keys, values), start)


# New states have the shapes of the old ones: rounds keep their row count, prefills leave room for it.


def _fake_gdn_core(
    mixed_qkv, b, a, conv_weight, neg_decay_rate, dt_bias, state, accepted, scheme, prefill_room, shape, eps
):  # type: ignore[no-untyped-def]
    batch, tokens, _ = mixed_qkv.shape
    o = mixed_qkv.new_empty(batch, tokens, shape[1], shape[3], dtype=neg_decay_rate.dtype)
    return [o, *(torch.empty_like(t) for t in state)]


def _fake_gdn_layer(
    x,
    in_proj,
    conv_weight,
    neg_decay_rate,
    dt_bias,
    norm_weight,
    out_proj,
    state,
    accepted,
    scheme,
    prefill_room,
    shape,
    eps,
):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x), *(torch.empty_like(t) for t in state)]


def _fake_cached_attention(q, k, v, keys, values, start):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


for _name, _run, _fake in (
    ("gdn_core", _gdn_core, _fake_gdn_core),
    ("gdn_layer", _gdn_layer, _fake_gdn_layer),
    ("cached_attention", _cached_attention, _fake_cached_attention),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sm70lab::{_name}", _fake, lib=_library)
