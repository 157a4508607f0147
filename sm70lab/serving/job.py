"""One request on its way through the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sm70lab.engine.sequence import Request
from sm70lab.engine.stopping import Delivery
from sm70lab.serving.logprobs import Row
from sm70lab.serving.repetition import LoopDetector

# Reasons to end beside ``stop`` and ``length``.
ABORT = "abort"  # nobody waits for it any more, or the server shuts down
TIMEOUT = "timeout"  # the server's time limit
REPETITION = "repetition"
NON_FINITE = "non_finite"  # the kept state is damaged
MODEL_NON_FINITE = "model_non_finite"  # so is a run from scratch


@dataclass(frozen=True)
class Delta:
    """What one step added to an answer."""

    text: str
    token_ids: list[int]
    rows: list[Row]  # of ``token_ids``, where log-probabilities were asked for
    total: int  # output tokens so far
    finish_reason: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Failure:
    """The request came to nothing through no fault of its own."""

    message: str


Event = Delta | Failure


@dataclass
class Drafting:
    """A request's drafts: ``histogram[j]`` rounds had j accepted and delivered."""

    histogram: list[int]
    draft_tokens: int = 0

    def observe(self, drafted: int, accepted: int) -> None:
        """Count one round that drafted."""
        self.histogram[accepted] += 1
        self.draft_tokens += drafted

    @property
    def rounds(self) -> int:
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        return sum(j * rounds for j, rounds in enumerate(self.histogram))

    @property
    def per_position(self) -> list[int]:
        """Rounds whose draft at each position was accepted."""
        return [sum(self.histogram[i + 1 :]) for i in range(len(self.histogram) - 1)]


@dataclass
class Times:
    """Moments of ``time.perf_counter()``; 0 where they have not come."""

    arrived: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    finished: float = 0.0


@dataclass(eq=False)
class Job:
    """What the worker runs, and what it tells the one who waits."""

    request: Request
    delivery: Delivery
    seed: int
    emit: Callable[[Event], None]  # called on the worker's thread
    deadline: float  # moment of ``time.perf_counter()``
    drafting: Drafting
    logprobs: int | None = None  # likeliest tokens beside each generated one; None: none asked for
    prompt_logprobs: int | None = None
    loop: LoopDetector | None = None
    times: Times = field(default_factory=Times)
    prompt_rows: list[Row] = field(default_factory=list)  # of the prompt's second token and its successors
    cached: int = 0  # prompt tokens out of the prefix cache
    sent: int = 0  # characters of the text that were emitted
    replay: list[int] = field(default_factory=list)  # delivered before its decoder was lost; to come again
    started: bool = False  # has had its prefill's token, in this decoder
    cancelled: str | None = None  # why it should end; set by other threads

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        return len(self.delivery.token_ids)

    def due(self) -> str | None:
        """Why it should end now, if it should."""
        return self.cancelled or (TIMEOUT if time.perf_counter() > self.deadline else None)
