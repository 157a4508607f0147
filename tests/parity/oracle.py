"""transformers as the oracle: the target model, and a slow MTP head made of its layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class NeverNarrow(TorchFunctionMode):
    """Casts of float64 tensors to float32 are left out.

    transformers casts to float32 inside norms, softmax, gating and the delta rule, which would
    hide every difference under 1e-7 of a float64 model. With this it runs in float64 throughout.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(_widen(a) for a in args)
            kwargs = {name: _widen(a) for name, a in kwargs.items()}
        return func(*args, **kwargs)


def _widen(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def widened(module: torch.nn.Module) -> torch.nn.Module:
    """A float64 copy; rotary frequencies stay float32, as models of every dtype have them."""
    wide = copy.deepcopy(module).double()
    for name, buffer in wide.named_buffers():
        if name.endswith("inv_freq"):
            buffer.data = buffer.data.float()
    return wide


@dataclass
class MTPOracle:
    """The draft head written out row by row from its formulas, with transformers' own inner layer."""

    layer: torch.nn.Module  # a full-attention decoder layer
    rotary: torch.nn.Module
    weights: dict[str, torch.Tensor]  # fc, norm, pre_fc_norm_embedding, pre_fc_norm_hidden
    embedding: torch.Tensor
    eps: float

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        factor = 1 + self.weights[name].double()
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * factor

    def run(self, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """All rows from position 0: token i + 1 with hidden state i, [T, hidden] → [T, hidden]."""
        embedded = self.embedding.double()[torch.tensor(tokens)]
        pair = torch.cat(
            (self._norm(embedded, "pre_fc_norm_embedding"), self._norm(hidden, "pre_fc_norm_hidden")), dim=-1
        )
        x = torch.nn.functional.linear(pair, self.weights["fc"].double())[None]
        rows = x.shape[1]
        mask = torch.zeros(rows, rows, dtype=torch.float64).masked_fill(
            torch.ones(rows, rows, dtype=torch.bool).triu(1), -torch.inf
        )
        with torch.inference_mode(), NeverNarrow():
            positions = torch.arange(rows)[None]
            x = self.layer(
                x, position_embeddings=self.rotary(x, positions), attention_mask=mask[None, None], cache=None
            )
        return self._norm(x[0], "norm")


class Oracle:
    """A transformers model in float32, and its float64 copy."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.models = {torch.float32: model.eval(), torch.float64: widened(model).eval()}

    def run(self, ids: torch.Tensor, dtype: torch.dtype, **options: Any) -> Any:
        """The model's output for ids [B, T]."""
        with torch.inference_mode(), NeverNarrow():
            return self.models[dtype](input_ids=ids, **options)

    def logits(self, sequences: Sequence[Sequence[int]], dtype: torch.dtype) -> list[torch.Tensor]:
        """Logits [T, V] of each sequence, in one causal batch padded on the right."""
        longest = max(len(s) for s in sequences)
        ids = torch.tensor([list(s) + [0] * (longest - len(s)) for s in sequences])
        logits: torch.Tensor = self.run(ids, dtype, use_cache=False).logits
        return [row[: len(s)] for row, s in zip(logits, sequences, strict=True)]

    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """float64 hidden states after the final norm, [T, hidden]."""
        wide = self.models[torch.float64]
        with torch.inference_mode(), NeverNarrow():
            output = wide.base_model(input_ids=torch.tensor([list(ids)]), use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden
