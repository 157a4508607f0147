"""The Gated DeltaNet layer in its three stages: input projection, core, output projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sm70lab.engine.architecture import Architecture
from sm70lab.engine.checkpoint import Weights
from sm70lab.engine.state import SCHEMES, LayerState, conv_window, run_rows
from sm70lab.kernels.causal_conv1d import causal_conv1d
from sm70lab.kernels.gated_delta import gating, l2_normalise
from sm70lab.kernels.norm import gated_rms_norm


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
    prefill: bool,
    key_heads: int,
    key_dim: int,
) -> LayerState:
    """Convolution, gating and the recurrence over T rows.

    mixed_qkv [B, T, C] (q | k | v); a, b [B, T, Hv]; conv_weight [W, C]; state and accepted from
    ``StateStore``. Returns [o [B, T, Hv, V] in float32 or better, conv rows, *SSM tensors].
    """
    batch, tokens, _ = mixed_qkv.shape
    width = conv_weight.shape[0]
    value_heads = a.shape[-1]
    conv_rows = torch.cat((conv_window(state[0], accepted, width), mixed_qkv), dim=1)
    qkv = causal_conv1d(conv_rows, conv_weight).to(neg_decay_rate.dtype)
    qk, v = qkv.tensor_split([2 * key_heads * key_dim], dim=-1)
    qk = l2_normalise(qk.reshape(batch, tokens, 2 * key_heads, key_dim))
    if value_heads != key_heads:  # value head h reads key head h // (Hv / Hk)
        qk = qk.repeat_interleave(value_heads // key_heads, dim=2)
    q, k = qk.chunk(2, dim=2)
    g, beta = gating(a, b, neg_decay_rate, dt_bias)
    rows = (q * key_dim**-0.5, k, v.reshape(batch, tokens, value_heads, -1), g, beta)
    outputs, held = run_rows(scheme, state, accepted, rows, prefill)
    if prefill:
        conv_rows = conv_rows[:, -(width - 1 + SCHEMES[scheme].accepted_after_prefill) :].clone()
    return [outputs, conv_rows, *held]


class GatedDeltaNet(nn.Module):
    """Weights of one GDN layer, the four input projections fused into one matrix (q | k | v | z | b | a)."""

    def __init__(self, arch: Architecture, weights: Weights, prefix: str, dtype: torch.dtype) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.key_heads, self.key_dim = arch.gdn_key_heads, arch.gdn_key_dim
        self.value_heads, self.value_dim = arch.gdn_value_heads, arch.gdn_value_dim
        self.eps = arch.rms_norm_eps
        value = self.value_heads * self.value_dim
        self.sizes = [arch.gdn_conv_dim, value, self.value_heads, self.value_heads]
        if arch.layout == "qwen3_next":
            fused = _from_interleaved(arch, weights.read(prefix + "in_proj_qkvz.weight"), weights.read(prefix + "in_proj_ba.weight"))
        else:
            fused = torch.cat([weights.read(f"{prefix}in_proj_{n}.weight") for n in ("qkv", "z", "b", "a")])
        self.in_proj = nn.Buffer(fused.to(dtype))
        self.conv_weight = nn.Buffer(weights.read(prefix + "conv1d.weight").squeeze(1).t().contiguous().to(dtype))
        self.neg_decay_rate = nn.Buffer(-weights.read(prefix + "A_log").to(wide).exp())
        self.dt_bias = nn.Buffer(weights.read(prefix + "dt_bias").to(wide))
        self.norm_weight = nn.Buffer(weights.read(prefix + "norm.weight").to(wide))
        self.out_proj = nn.Buffer(weights.read(prefix + "out_proj.weight").to(dtype))

    def input_projection(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [B, T, hidden] → mixed_qkv [B, T, C], z [B, T, Hv·V], b, a [B, T, Hv]: views of one product."""
        return F.linear(x, self.in_proj).split(self.sizes, dim=-1)

    def core(self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, state: LayerState, accepted: torch.Tensor, scheme: str, prefill: bool) -> LayerState:
        """The recurrent core; see ``gdn_core``."""
        return gdn_core(
            mixed_qkv, b, a, self.conv_weight, self.neg_decay_rate, self.dt_bias,
            state, accepted, scheme, prefill, self.key_heads, self.key_dim,
        )  # fmt: skip

    def output_projection(self, o: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Gated norm over each value head, then the projection back to [B, T, hidden]."""
        gated = gated_rms_norm(o, z.reshape(o.shape), self.norm_weight, self.eps)
        return F.linear(gated.flatten(-2), self.out_proj)

    def forward(self, x: torch.Tensor, state: LayerState, accepted: torch.Tensor, scheme: str, prefill: bool) -> tuple[torch.Tensor, LayerState]:
        """The whole layer: returns its output [B, T, hidden] and the layer's new state."""
        mixed_qkv, z, b, a = self.input_projection(x)
        o, *state = self.core(mixed_qkv, b, a, state, accepted, scheme, prefill)
        return self.output_projection(o, z), state


def _from_interleaved(arch: Architecture, qkvz: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
    """Qwen3-Next stores rows per key head as [q, k, v·r, z·r] and [b·r, a·r]; return q | k | v | z | b | a."""
    heads, ratio = arch.gdn_key_heads, arch.gdn_value_heads // arch.gdn_key_heads
    sizes = [arch.gdn_key_dim, arch.gdn_key_dim, ratio * arch.gdn_value_dim, ratio * arch.gdn_value_dim]
    parts = qkvz.view(heads, sum(sizes), -1).split(sizes, dim=1)
    parts += ba.view(heads, 2 * ratio, -1).split([ratio, ratio], dim=1)
    return torch.cat([part.reshape(-1, qkvz.shape[-1]) for part in parts])
