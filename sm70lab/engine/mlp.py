"""Feed-forward layers: SwiGLU (Shazeer 2020), dense or as a sparse mixture of experts."""

from __future__ import annotations

import torch
from torch import nn

from sm70lab.engine import operators
from sm70lab.engine.architecture import Architecture
from sm70lab.engine.checkpoint import Weights
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.kernels.linear import swiglu
from sm70lab.kernels.moe import MoEWeights, sparse_moe


class DenseMLP(nn.Module):
    """One SwiGLU."""

    def __init__(self, weights: Weights, prefix: str, dtype: torch.dtype) -> None:
        super().__init__()
        gate_up = torch.cat([weights.read(f"{prefix}{name}.weight") for name in ("gate_proj", "up_proj")])
        self.gate_up = nn.Buffer(gate_up.to(dtype))
        self.down = nn.Buffer(weights.read(prefix + "down_proj.weight").to(dtype))

    def forward(self, x: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
        return swiglu(x, self.gate_up, self.down, arithmetic)


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

    def forward(self, x: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
        weights = MoEWeights(
            self.router, self.gate_up, self.down, self.shared_gate, self.shared.gate_up, self.shared.down
        )
        run = operators.sparse_moe if torch.compiler.is_compiling() else sparse_moe
        return run(x, weights, self.top_k, self.normalise, arithmetic)


def build_mlp(arch: Architecture, weights: Weights, prefix: str, dtype: torch.dtype, moe: bool) -> nn.Module:
    """The feed-forward layer at ``prefix``."""
    return SparseMoE(arch, weights, prefix, dtype) if moe else DenseMLP(weights, prefix, dtype)
