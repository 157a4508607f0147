"""Muon for matrices (batched by shape) and AdamW for the rest.

Muon: Jordan et al. 2024, with the update scaled by 0.2 sqrt(max(rows, columns)) so that one
learning rate serves both optimisers (Liu et al., "Muon is Scalable for LLM Training", 2025).
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrices; update [N, R, C]."""
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay; matrices only."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, members in by_shape.items():
                moments = []
                for parameter in members:
                    state = self.state[parameter]
                    if not state:
                        state["moment"] = torch.zeros_like(parameter)
                    moments.append(state["moment"])
                grads = [parameter.grad for parameter in members]
                torch._foreach_lerp_(moments, grads, 1 - group["momentum"])
                nesterov = torch._foreach_lerp(grads, moments, group["momentum"])
                update = orthogonalise(torch.stack(nesterov))
                scale = 0.2 * max(shape) ** 0.5
                torch._foreach_mul_(members, 1 - group["lr"] * group["decay"])
                change = (update.float() * (scale * group["lr"])).unbind(0)
                torch._foreach_sub_(members, list(change))


def build(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Both optimisers over all parameters of `model`."""
    matrices, embeddings, others = [], [], []
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            embeddings.append(parameter)
        elif parameter.dim() == 2:
            matrices.append(parameter)
        else:
            others.append(parameter)
    groups = [
        {"params": embeddings, "weight_decay": 0.01},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)
    return [Muon(matrices, lr), adam]
