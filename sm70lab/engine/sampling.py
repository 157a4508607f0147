"""From logits to a truncated distribution, and a token drawn from it.

Order: penalties, biases and bans on the logits; temperature; top-k; top-p on what top-k left,
renormalised; min-p. A distribution is kept as candidate ids with their probabilities, most
likely first: 20 numbers a row under the official sampling instead of a vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sm70lab.engine.noise import KeyedNoise, Stream
from sm70lab.errors import UsageError
from sm70lab.kernels import native
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.schema import Sampling

NATIVE_TOP_K = 64  # its time grows with k squared: beyond this torch.topk is faster


@dataclass
class Candidates:
    """R truncated distributions: ids [R, n] int64, probs [R, n] float, falling, zero where cut."""

    ids: torch.Tensor
    probs: torch.Tensor

    def on_host(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """ids and probs as arrays: for a handful of numbers NumPy's calls cost a third of torch's."""
        return self.ids.cpu().numpy(), self.probs.cpu().numpy()


def concatenate(rows: list[Candidates]) -> Candidates:
    """Stack rows of equal width."""
    return Candidates(torch.cat([r.ids for r in rows]), torch.cat([r.probs for r in rows]))


def truncate(
    logits: torch.Tensor,
    sampling: Sampling,
    top_p: bool = True,
    arithmetic: Arithmetic = Arithmetic.plain,
) -> Candidates:
    """The distribution that sampling draws from; logits [R, V] come with penalties applied.

    temperature 0 gives the argmax probability one. ``top_p=False`` leaves out top-p and min-p
    (``proposal=top_k``). Sums run in the logits' dtype, float32 or better.
    """
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return Candidates(best, torch.ones_like(best, dtype=logits.dtype))
    vocabulary = logits.shape[-1]
    width = min(sampling.top_k, vocabulary) if sampling.top_k > 0 else vocabulary
    if sampling.top_k == 0 and (sampling.top_p >= 1 or not top_p) and sampling.min_p == 0:
        ids = torch.arange(vocabulary, device=logits.device).expand(logits.shape)
        return Candidates(ids, (logits / sampling.temperature).softmax(-1))
    if arithmetic is Arithmetic.native and width <= NATIVE_TOP_K:
        values, ids = native.top_k(logits, width)
    else:
        values, ids = logits.topk(width, dim=-1)
    probs = (values / sampling.temperature).softmax(-1)
    if top_p and (sampling.top_p < 1 or sampling.min_p > 0):
        before = probs.cumsum(-1) - probs  # a token stays while the mass before it is short of top-p
        keep = before < sampling.top_p
        if sampling.min_p > 0:
            keep &= probs >= sampling.min_p * probs[:, :1]
        probs = probs * keep
        probs = probs / probs.sum(-1, keepdim=True)
    return Candidates(ids, probs)


def sample(
    candidates: Candidates, noise: KeyedNoise, stream: Stream, positions: Sequence[int]
) -> torch.Tensor:
    """A token from each of the R rows: [R]."""
    if candidates.ids.shape[-1] == 1:
        return candidates.ids[:, 0]
    tokens = draw(*candidates.on_host(), noise, stream, positions)
    return torch.from_numpy(tokens).to(candidates.ids.device)


def draw(
    ids: NDArray[np.int64], weights: NDArray[Any], noise: KeyedNoise, stream: Stream, positions: Sequence[int]
) -> NDArray[np.int64]:
    """Gumbel-max: argmax(log w + g) is a draw from w / Σw (Gumbel 1954). ids, weights [R, n] → tokens [R]."""
    with np.errstate(divide="ignore"):  # log 0 = −∞ never wins
        scores = np.log(weights.astype(np.float64))
    scores += noise.gumbel(stream, positions, ids)
    tokens: NDArray[np.int64] = ids[np.arange(len(ids)), scores.argmax(-1)]
    return tokens


class LogitsRules:
    """Penalties, bias, bans and min_tokens: what changes the logits by the output before each row."""

    def __init__(self, sampling: Sampling, prompt_ids: list[int], stop_ids: frozenset[int]) -> None:
        self.sampling = sampling
        self.stop_ids = sorted(stop_ids)
        self.prompt_ids = sorted(set(prompt_ids))
        self.counts: Counter[int] = Counter()
        self.penalised = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        )

    def observe(self, tokens: list[int]) -> None:
        """Count delivered tokens."""
        if self.penalised:
            self.counts.update(tokens)

    def apply(self, logits: torch.Tensor, position: int, pending: list[int]) -> torch.Tensor:
        """Logits [R, V] whose row r predicts output token ``position + r`` after ``pending[:r]``.

        Repetition counts prompt and output, presence and frequency only output, as servers do.
        Raises ``UsageError`` where nothing is left to draw.
        """
        s = self.sampling
        short = max(0, min(len(logits), s.min_tokens - position)) if self.stop_ids else 0
        if not self.penalised and not s.logit_bias and not s.banned_ids and not short:
            return logits
        logits = logits.clone()
        for r in range(len(logits)) if self.penalised else ():
            counts = self.counts + Counter(pending[:r])
            ids = torch.tensor(sorted(counts), dtype=torch.int64, device=logits.device)
            number = torch.tensor([counts[int(i)] for i in ids], dtype=logits.dtype, device=logits.device)
            seen = torch.tensor(
                sorted(set(self.prompt_ids) | set(counts)), dtype=torch.int64, device=logits.device
            )
            row = logits[r]
            row[seen] = torch.where(
                row[seen] > 0, row[seen] / s.repetition_penalty, row[seen] * s.repetition_penalty
            )
            row[ids] -= s.presence_penalty + s.frequency_penalty * number
        if s.logit_bias:
            logits[:, list(s.logit_bias)] += logits.new_tensor(list(s.logit_bias.values()))
        if s.banned_ids:
            logits[:, s.banned_ids] = -torch.inf
        if short:
            logits[:short, self.stop_ids] = -torch.inf
        if not bool(torch.isfinite(logits.amax(-1)).all()):
            raise UsageError(
                f"sampling: penalties and bans leave no token at output position {position} or in the round "
                f"after it; loosen sampling.banned_ids, min_tokens or the penalties"
            )
        return logits
