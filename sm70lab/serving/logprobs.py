"""Log-probabilities of tokens: of the model's own logits, before penalties, temperature and cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sm70lab.engine.text import Text

LEAST = -9999.0  # stands for −∞, which JSON lacks; vLLM's number
ALL = -1  # of a count: the whole vocabulary


@dataclass(frozen=True)
class Entry:
    """One token at one place."""

    token: int
    logprob: float
    rank: int  # 1 is the likeliest


@dataclass(frozen=True)
class Row:
    """The token at one place, and the likeliest ones there, falling."""

    own: Entry
    likeliest: tuple[Entry, ...]


def rows(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[Row]:
    """For R tokens under logits [R, V]: each with the ``count`` likeliest (``ALL``: every one)."""
    with torch.inference_mode():
        log_p = logits.double().log_softmax(-1)
        ids = torch.tensor(tokens, device=log_p.device)[:, None]
        own = log_p.gather(-1, ids)
        ranks = ((log_p > own).sum(-1) + 1).tolist()
        vocabulary = log_p.shape[-1]
        values, best = log_p.topk(vocabulary if count == ALL else min(count, vocabulary), dim=-1)
        columns = zip(tokens, own[:, 0].tolist(), ranks, best.tolist(), values.tolist(), strict=True)
        return [
            Row(
                Entry(token, max(value, LEAST), rank),
                tuple(
                    Entry(other, max(v, LEAST), place)
                    for place, (other, v) in enumerate(zip(others, vs, strict=True), 1)
                ),
            )
            for token, value, rank, others, vs in columns
        ]


class Labels:
    """How tokens are written in an answer."""

    def __init__(self, text: Text, as_ids: bool) -> None:
        self._text, self._as_ids = text, as_ids
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = f"token_id:{token}" if self._as_ids else self._text.show([token])
        return self._known[token]
