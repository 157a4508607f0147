"""The matrix that turns the draft layer's output into draft logits: whole, fewer rows, or int8.

The target's own head reads V × H weights for every draft, often more than the draft layer itself.
A smaller or coarser head changes the draft distribution q, never the output: the rejection rule is
lossless for any q that the drafts were really drawn from (``engine.rejection``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from sm70lab.errors import UsageError
from sm70lab.kernels import native
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.kernels.linear import linear

FREQUENCY_FILE = "token_frequency.json"
BLOCK_ROWS = 4096  # of an int8 matrix widened at a time: a block, never the whole, is held twice


class DraftHead(Protocol):
    """Draft logits over V' columns, each of which stands for one vocabulary id."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] → logits [N, V'], float32 or better."""

    def ids(self, columns: torch.Tensor) -> torch.Tensor:
        """Vocabulary ids of column numbers (int64, any shape).

        Map before sampling: the noise of a draw is keyed by vocabulary id.
        """


class FullHead:
    """The target's own head [V, H], by reference."""

    def __init__(self, weight: torch.Tensor, arithmetic: Arithmetic) -> None:
        self.weight, self.arithmetic = weight, arithmetic

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight, None, self.arithmetic).to(_wide(hidden.dtype))

    def ids(self, columns: torch.Tensor) -> torch.Tensor:
        return columns


class ShortlistHead(FullHead):
    """The rows of ``shortlist`` [V'] alone: the full head's logits of those ids.

    Every other id has q = 0; the target still draws it, from the residual (frequency-ranked draft
    vocabularies: Zhao et al. 2025, FR-Spec).
    """

    def __init__(self, weight: torch.Tensor, arithmetic: Arithmetic, shortlist: Sequence[int]) -> None:
        self.shortlist = torch.tensor(shortlist, dtype=torch.int64, device=weight.device)
        rows = weight[self.shortlist]
        # Kept in the memory order of the whole matrix, which the model chose for its products.
        super().__init__(rows if weight.is_contiguous() else rows.t().contiguous().t(), arithmetic)

    def ids(self, columns: torch.Tensor) -> torch.Tensor:
        return self.shortlist[columns]


class Int8Head:
    """The whole head in int8 codes [V, H] with one scale a row [V], float32 or better.

    scale = max|row| / 127 and code = round(row / scale): symmetric absmax by row, weights only
    (vector-wise quantisation of Dettmers et al. 2022, with the hidden state left as it is).
    """

    def __init__(self, weight: torch.Tensor, arithmetic: Arithmetic) -> None:
        wide = _wide(weight.dtype)
        self.codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        self.scale = torch.empty(len(weight), dtype=wide, device=weight.device)
        for begin in range(0, len(weight), BLOCK_ROWS):
            block = weight[begin : begin + BLOCK_ROWS].to(wide)
            largest = block.abs().amax(-1)
            scale = torch.where(largest > 0, largest / 127, 1)  # a row of zeros has codes of zero
            self.codes[begin : begin + BLOCK_ROWS] = (block / scale[:, None]).round().to(torch.int8)
            self.scale[begin : begin + BLOCK_ROWS] = scale
        self.arithmetic = arithmetic

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return int8_linear(hidden.to(self.scale.dtype), self.codes, self.scale, self.arithmetic)

    def ids(self, columns: torch.Tensor) -> torch.Tensor:
        return columns


def int8_linear(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, arithmetic: Arithmetic
) -> torch.Tensor:
    """(x·codesᵀ)·scale: x [N, H], codes int8 [V, H], scale [V] in x's dtype → [N, V].

    Fewer bytes are read by the native kernel only: PyTorch widens the codes anew for each product.
    """
    if arithmetic is Arithmetic.native:
        return native.int8_linear(x, codes, scale)
    blocks = [linear(x, block.to(x.dtype), None, arithmetic) for block in codes.split(BLOCK_ROWS)]
    return torch.cat(blocks, dim=-1) * scale


def build(
    kind: str,
    head_weight: torch.Tensor,
    size: int,
    frequent: Sequence[int] | None,
    arithmetic: Arithmetic = Arithmetic.plain,
) -> DraftHead:
    """The draft head of ``route.draft_head`` over the target's head [V, H].

    kind: full, shortlist or int8. size and frequent are the shortlist's: the ``size`` first ids of
    ``frequent`` (most frequent first, see ``read_frequency``). Where that is missing or too short,
    ids follow in their own order: byte-pair encoding hands ids out in the order of its merges, and
    it merges the most frequent pair first. Raises ``UsageError`` for a size that does not fit.
    """
    if kind == "full":
        return FullHead(head_weight, arithmetic)
    if kind == "int8":
        return Int8Head(head_weight, arithmetic)
    if kind != "shortlist":
        raise ValueError(f"{kind}: no such draft head")
    vocabulary = len(head_weight)
    if not 1 <= size <= vocabulary:
        raise UsageError(f"route.shortlist_size={size}: must be 1 to {vocabulary}, this model's vocabulary")
    order = dict.fromkeys([*(frequent or ()), *range(vocabulary)])
    return ShortlistHead(head_weight, arithmetic, list(order)[:size])


def read_frequency(folder: Path, vocab_size: int) -> list[int] | None:
    """Ids by falling frequency from a checkpoint folder's ``token_frequency.json``; None without one.

    The file is one JSON list of ids, most frequent first; it may stop early. Raises ``UsageError``.
    """
    path = folder / FREQUENCY_FILE
    if not path.exists():
        return None
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(ids, list):
        raise UsageError(f"{path}: must be a JSON list of token ids, found {type(ids).__name__}")
    seen: set[int] = set()
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise UsageError(f"{path}: entry {place} is {token!r}; ids of this model are 0..{vocab_size - 1}")
        if token in seen:
            raise UsageError(f"{path}: entry {place} repeats id {token}")
        seen.add(token)
    return ids


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
