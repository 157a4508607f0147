"""One request on its way through the decoder."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch

from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.sampling import LogitsRules
from sm70lab.engine.state import LayerSnapshot
from sm70lab.schema import Sampling


@dataclass
class Request:
    """What is asked for."""

    prompt_ids: Many[int]
    sampling: Sampling
    noise: KeyedNoise
    stop_ids: frozenset[int] = frozenset()
    drafts: bool = True  # False: its rounds are steps of one token, whatever the route drafts
    keep_logits: bool = False  # its steps carry the logits of their tokens


@dataclass
class Step:
    """What one round gave one sequence, before end tokens and budget cut it."""

    tokens: list[int]
    drafted: int
    seconds: float = 0.0  # this sequence's share of the wall time: a round's is shared by its batch
    # [len(tokens), V] before penalties and cuts; good until the next step, which may write over them
    logits: torch.Tensor | None = None


@dataclass
class Sequence:
    """A request in a slot. ``output`` grows by each round's tokens."""

    request: Request
    slot: int
    noise: KeyedNoise
    prompt_ids: list[int]
    output: list[int] = field(default_factory=list)
    rounds: int = 0
    prefilled: int = 0  # prompt tokens that are in the caches
    reused: int = 0  # of these, out of the prefix cache
    prefill_seconds: float = 0.0
    # Rows that the target has run and the draft head has not: their hidden states [n, H]. Their
    # successors are the last n output tokens.
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    edge: tuple[int, list[LayerSnapshot], torch.Tensor] | None = None  # a block edge still to be cached

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.rules = LogitsRules(sampling, self.prompt_ids, self.request.stop_ids)

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_ids + self.output

    @property
    def in_prefill(self) -> bool:
        return self.prefilled < len(self.prompt_ids)

    def deliver(self, tokens: list[int]) -> None:
        """Take a round's tokens."""
        self.output += tokens
        self.rules.observe(tokens)
