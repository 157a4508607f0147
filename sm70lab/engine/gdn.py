"""The three stages of a Gated DeltaNet layer as functions: input projection, core, output projection.

``gdn_layer`` holds the weights and cuts the stages at a route's boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sm70lab.engine.state import LayerState, Rows, conv_window, run_rows
from sm70lab.kernels.causal_conv1d import causal_conv1d
from sm70lab.kernels.gated_delta import gating, l2_normalise
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


def input_projection(x: torch.Tensor, in_proj: torch.Tensor, shape: GDNShape) -> tuple[torch.Tensor, ...]:
    """x [B, T, hidden] → mixed_qkv [B, T, C], z [B, T, Hv·V], b, a [B, T, Hv]: views of one product."""
    sizes = [shape.conv_dim, shape.value_heads * shape.value_dim, shape.value_heads, shape.value_heads]
    mixed_qkv, z, b, a = F.linear(x, in_proj).split(sizes, dim=-1)
    return mixed_qkv, z, b, a


def core(
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
    """Convolution, gating and the recurrence over T rows.

    mixed_qkv [B, T, C] (q | k | v); a, b [B, T, Hv]; conv_weight [W, C]; state, accepted and
    ``prefill_room`` as in ``state.run_rows``. Returns [o [B, T, Hv, V] in float32 or better,
    *the layer's new state].
    """
    batch, tokens, _ = mixed_qkv.shape
    conv_rows = torch.cat((conv_window(state[0], accepted, conv_weight.shape[0]), mixed_qkv), dim=1)
    qkv = causal_conv1d(conv_rows, conv_weight).to(neg_decay_rate.dtype)
    qk, v = qkv.tensor_split([2 * shape.key_heads * shape.key_dim], dim=-1)
    qk = l2_normalise(qk.reshape(batch, tokens, 2 * shape.key_heads, shape.key_dim))
    if shape.value_heads != shape.key_heads:  # value head h reads key head h // (Hv / Hk)
        qk = qk.repeat_interleave(shape.value_heads // shape.key_heads, dim=2)
    q, k = qk.chunk(2, dim=2)
    g, beta = gating(a, b, neg_decay_rate, dt_bias)
    v = v.reshape(batch, tokens, shape.value_heads, shape.value_dim)
    rows = Rows(q * shape.key_dim**-0.5, k, v, g, beta)
    outputs, new_state = run_rows(scheme, state, accepted, conv_rows, rows, prefill_room)
    return [outputs, *new_state]


def output_projection(
    o: torch.Tensor, z: torch.Tensor, norm_weight: torch.Tensor, out_proj: torch.Tensor, eps: float
) -> torch.Tensor:
    """Gated norm over each value head, then the projection back to [B, T, hidden]."""
    return F.linear(gated_rms_norm(o, z.reshape(o.shape), norm_weight, eps).flatten(-2), out_proj)
