"""The three stages of a Gated DeltaNet layer as functions: input projection, core, output projection.

``gdn_layer`` holds the weights and cuts the stages at a route's boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sm70lab.engine.schemes import Rows
from sm70lab.engine.state import LayerState, conv_window, run_rows
from sm70lab.kernels import native
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.kernels.causal_conv1d import causal_conv1d
from sm70lab.kernels.gated_delta import gating, l2_normalise
from sm70lab.kernels.linear import linear
from sm70lab.kernels.norm import gated_rms_norm


@dataclass(frozen=True)
class GDNShape:
    """Head counts and sizes of one GDN layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float  # of the gated norm

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class CoreWeights(NamedTuple):
    """Weights of the core."""

    conv_weight: torch.Tensor  # [W, C]
    neg_decay_rate: torch.Tensor  # [Hv], −exp(A_log) in float32 or better
    dt_bias: torch.Tensor  # [Hv]


class Place(NamedTuple):
    """Where a layer's state is and what of it counts, as in ``state.run_rows``."""

    state: LayerState
    slots: torch.Tensor
    conv_accepted: torch.Tensor
    ssm_accepted: torch.Tensor
    scheme: str
    prefill_room: int

    def one_by_one(self) -> list[Place]:
        """The same for each sequence of the batch alone."""
        where = (self.slots.split(1), self.conv_accepted.split(1), self.ssm_accepted.split(1))
        return [
            Place(self.state, slot, conv, ssm, self.scheme, self.prefill_room)
            for slot, conv, ssm in zip(*where, strict=True)
        ]


class How(NamedTuple):
    """What the stages need beside tensors."""

    shape: GDNShape
    arithmetic: Arithmetic
    packed: bool  # rows come one at a time: ``packed_step``


def input_projection(x: torch.Tensor, in_proj: torch.Tensor, how: How) -> tuple[torch.Tensor, ...]:
    """x [B, T, hidden] → mixed_qkv [B, T, C], z [B, T, Hv·V], b, a [B, T, Hv]: views of one product."""
    shape = how.shape
    sizes = [shape.conv_dim, shape.value_heads * shape.value_dim, shape.value_heads, shape.value_heads]
    mixed_qkv, z, b, a = linear(x, in_proj, None, how.arithmetic).split(sizes, dim=-1)
    return mixed_qkv, z, b, a


def core(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, weights: CoreWeights, place: Place, how: How
) -> LayerState:
    """Convolution, gating and the recurrence over T rows.

    mixed_qkv [B, T, C] (q | k | v); a, b [B, T, Hv]. Returns [o [B, T, Hv, V] in float32 or better,
    *the layer's new pool rows].
    """
    if how.packed:
        return packed_step(mixed_qkv, b, a, weights, place, how)
    window = conv_window(place.state[0], place.slots, place.conv_accepted, len(weights.conv_weight))
    conv_rows = torch.cat((window, mixed_qkv), dim=1)
    rows = ROWS[how.arithmetic](conv_rows, b, a, *weights, how.shape)
    outputs, new_state = run_rows(
        place.scheme,
        place.state,
        place.slots,
        place.ssm_accepted,
        conv_rows,
        rows,
        place.prefill_room,
        how.arithmetic,
    )
    return [outputs, *new_state]


def packed_step(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, weights: CoreWeights, place: Place, how: How
) -> LayerState:
    """``core`` for one row a sequence (T = 1) under the slots scheme, in one pass.

    mixed_qkv stays packed up to the recurrence, there is no loop over time, and the new state is the
    pool row itself: what vLLM's packed decode kernel of the gated delta rule does. Same bits as ``core``.
    """
    if how.arithmetic is Arithmetic.by_row and len(mixed_qkv) > 1:
        batch = zip(mixed_qkv.split(1), b.split(1), a.split(1), place.one_by_one(), strict=True)
        parts = [packed_step(qkv, b_row, a_row, weights, one, how) for qkv, b_row, a_row, one in batch]
        return [torch.cat(part) for part in zip(*parts, strict=True)]
    conv_pool, states = place.state
    shape, wide = how.shape, weights.neg_decay_rate.dtype
    window = conv_window(conv_pool, place.slots, place.conv_accepted, len(weights.conv_weight))
    conv_rows = torch.cat((window, mixed_qkv), dim=1)
    state = states[place.slots, place.ssm_accepted - 1].to(wide)  # [B, Hv, K, V]
    if how.arithmetic is Arithmetic.native:
        rows = _native_rows(conv_rows, b, a, *weights, shape)
        o, new_states = native.gated_delta_recurrent(*rows, state)
        return [o, conv_rows, new_states.to(states.dtype)]
    qkv = causal_conv1d(conv_rows, weights.conv_weight).to(wide)
    qk, v = qkv.tensor_split([2 * shape.key_heads * shape.key_dim], dim=-1)
    qk = l2_normalise(qk.reshape(-1, 2, shape.key_heads, 1, shape.key_dim))
    qk = qk.repeat_interleave(shape.value_heads // shape.key_heads, dim=2)
    q, k = (x.reshape(-1, 1, shape.key_dim) for x in qk.unbind(1))  # [B·Hv, 1, K]
    g, beta = (x.reshape(-1, 1, 1) for x in gating(a, b, weights.neg_decay_rate, weights.dt_bias))
    s = state.reshape(-1, *state.shape[2:]) * g.exp()
    d = torch.baddbmm(v.reshape(-1, 1, shape.value_dim), k, s, alpha=-1) * beta  # β·(v − Sᵀk)
    s = torch.baddbmm(s, k.transpose(1, 2), d)  # S + k⊗d
    o = (q * shape.key_dim**-0.5) @ s
    return [
        o.view(-1, 1, shape.value_heads, shape.value_dim),
        conv_rows,
        s.view(-1, 1, *state.shape[1:]).to(states.dtype),
    ]


def _rows(
    conv_rows: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    conv_weight: torch.Tensor,
    neg_decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    shape: GDNShape,
) -> Rows:
    """What the recurrence takes of each of the T rows."""
    batch, tokens, _ = a.shape
    qkv = causal_conv1d(conv_rows, conv_weight).to(neg_decay_rate.dtype)
    qk, v = qkv.tensor_split([2 * shape.key_heads * shape.key_dim], dim=-1)
    qk = l2_normalise(qk.reshape(batch, tokens, 2 * shape.key_heads, shape.key_dim))
    if shape.value_heads != shape.key_heads:  # value head h reads key head h // (Hv / Hk)
        qk = qk.repeat_interleave(shape.value_heads // shape.key_heads, dim=2)
    q, k = qk.chunk(2, dim=2)
    g, beta = gating(a, b, neg_decay_rate, dt_bias)
    v = v.reshape(batch, tokens, shape.value_heads, shape.value_dim)
    return Rows(q * shape.key_dim**-0.5, k, v, g, beta)


def _native_rows(
    conv_rows: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    conv_weight: torch.Tensor,
    neg_decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    shape: GDNShape,
) -> Rows:
    """The same in one kernel."""
    sizes = (shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim)
    return Rows(*native.gdn_rows(conv_rows, conv_weight, a, b, neg_decay_rate, dt_bias, *sizes))


def _rows_one_by_one(
    conv_rows: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    conv_weight: torch.Tensor,
    neg_decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    shape: GDNShape,
) -> Rows:
    """The same, each row with its own window of the convolution."""
    weights, width = (conv_weight, neg_decay_rate, dt_bias), len(conv_weight)
    parts = []
    for i in range(a.shape[0]):
        one = slice(i, i + 1)
        for t in range(a.shape[1]):
            here = slice(t, t + 1)
            parts.append(_rows(conv_rows[one, t : t + width], b[one, here], a[one, here], *weights, shape))
    joined = (torch.cat(part) for part in zip(*parts, strict=True))
    return Rows(*(x.view(*a.shape[:2], *x.shape[2:]) for x in joined))


ROWS = {
    Arithmetic.plain: _rows,
    Arithmetic.captured: _rows,
    Arithmetic.by_row: _rows_one_by_one,
    Arithmetic.native: _native_rows,
}


def output_projection(
    o: torch.Tensor, z: torch.Tensor, norm_weight: torch.Tensor, out_proj: torch.Tensor, how: How
) -> torch.Tensor:
    """Gated norm over each value head, then the projection back to [B, T, hidden]."""
    gate = z.unflatten(-1, o.shape[2:])
    normed = gated_rms_norm(o, gate, norm_weight, how.shape.eps, how.arithmetic)
    return linear(normed.flatten(-2), out_proj, None, how.arithmetic)
