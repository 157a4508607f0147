"""Feed-forward layers: SwiGLU (Shazeer 2020), dense or as a sparse mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sm70lab.engine.architecture import Architecture
from sm70lab.engine.checkpoint import Weights


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """(silu(x·gateᵀ) ⊙ x·upᵀ)·downᵀ with gate and up stacked in ``gate_up`` [2·inner, hidden]."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


class DenseMLP(nn.Module):
    """One SwiGLU."""

    def __init__(self, weights: Weights, prefix: str, dtype: torch.dtype) -> None:
        super().__init__()
        gate_up = torch.cat([weights.read(f"{prefix}{name}.weight") for name in ("gate_proj", "up_proj")])
        self.gate_up = nn.Buffer(gate_up.to(dtype))
        self.down = nn.Buffer(weights.read(prefix + "down_proj.weight").to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu(x, self.gate_up, self.down)


class SparseMoE(nn.Module):
    """Top-k routed experts beside a shared expert with its own sigmoid gate."""

    def __init__(self, arch: Architecture, weights: Weights, prefix: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k, self.normalise = arch.experts_per_token, arch.norm_topk_prob
        self.router = nn.Buffer(weights.read(prefix + "gate.weight").to(dtype))
        self.gate_up = nn.Buffer(weights.read(prefix + "experts.gate_up_proj").to(dtype))
        self.down = nn.Buffer(weights.read(prefix + "experts.down_proj").to(dtype))
        self.shared_gate = nn.Buffer(weights.read(prefix + "shared_expert_gate.weight").to(dtype))
        self.shared = DenseMLP(weights, prefix + "shared_expert.", dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        wide = torch.promote_types(x.dtype, torch.float32)
        probs, chosen = F.linear(rows, self.router).to(wide).softmax(-1).topk(self.top_k, dim=-1)
        if self.normalise:
            probs = probs / probs.sum(-1, keepdim=True)
        out: torch.Tensor = torch.sigmoid(F.linear(rows, self.shared_gate)) * self.shared(rows)
        for expert in chosen.unique().tolist():
            row, slot = (chosen == expert).nonzero(as_tuple=True)
            part = swiglu(rows[row], self.gate_up[expert], self.down[expert])
            out.index_add_(0, row, part * probs[row, slot, None].to(x.dtype))
        return out.view_as(x)


def build_mlp(arch: Architecture, weights: Weights, prefix: str, dtype: torch.dtype, moe: bool) -> nn.Module:
    """The feed-forward layer at ``prefix``."""
    return SparseMoE(arch, weights, prefix, dtype) if moe else DenseMLP(weights, prefix, dtype)
