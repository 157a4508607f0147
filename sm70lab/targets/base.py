"""What the experiment asks of a target, whatever runs behind it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from sm70lab.schema import (
    CounterWindow,
    Explanation,
    Generation,
    ModelDtype,
    Prompt,
    Rounding,
    TokenScores,
)


@dataclass(frozen=True)
class Progress:
    """A glimpse of a running generation, sent at most a few times a second."""

    prompt: Prompt
    repeat: int
    tokens: int  # delivered so far in this generation
    rounds: int
    accepted: int  # accepted drafts so far
    decode_seconds: float
    characters: int = 0  # of a server that counts no tokens before the end


OnProgress = Callable[[Progress], None]


def request_seed(seed: int, prompt_index: int, repeat: int) -> int:
    """The seed of one request to a server, 0 ≤ result < 2⁶³: ``seed`` itself for the first prompt's first
    repeat, else 63 bits of SHA-256 over all three."""
    if prompt_index == 0 and repeat == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{prompt_index}/{repeat}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Target(Protocol):
    """A thing that generates: built from the configuration, told to load, asked for generations."""

    def load(self) -> None:
        """Load weights or reach the server. Raises ``UsageError`` where that cannot work."""

    def describe(self) -> dict[str, str | int | float]:
        """Facts of what was loaded for the record: parameters, dtype, device."""

    def prompts(self) -> list[Prompt]:
        """The workload's prompts, tokenised."""

    def generate(self, prompts: list[Prompt], repeat: int, on_progress: OnProgress) -> Iterator[Generation]:
        """Generate for each prompt in turn. ``KeyboardInterrupt`` ends the current one: it is
        yielded with ``finish_reason='interrupted'``, and the iterator then raises it again."""

    def score(self, generation: Generation) -> TokenScores | None:
        """Score the generation's own tokens under the no-draft reference; None where impossible."""

    def rounding(self, generation: Generation) -> Rounding | None:
        """What arithmetic in the run's element type does to the reference's numbers; None where unknown."""

    def explain(self, generation: Generation, index: int) -> Explanation | None:
        """Output token ``index`` in its text, beside the reference's own candidates; None where unknown."""

    def counters(self) -> list[CounterWindow]:
        """What a server's counters said during the run, in order of time; empty for the engine."""

    def close(self) -> None:
        """Let go of connections and processes. Called once, whatever happened before."""


@dataclass(frozen=True)
class JudgedBy:
    """Which reference scores a server's run."""

    line: str  # for the verdict: who judged, or why nobody could
    dtype: ModelDtype  # what the run computes in, as the server says or as it is taken to be


@runtime_checkable
class Refereed(Protocol):
    """A target that is not judged by the engine's own weights."""

    def judged_by(self) -> JudgedBy:
        """Who judges; asked when the scoring is done."""


@runtime_checkable
class Counted(Protocol):
    """A target that reads a server's counters."""

    def readings(self) -> dict[str, Any]:
        """What was read, for the record: ``readings`` in order of time, and what was noticed."""


@runtime_checkable
class Managed(Protocol):
    """A target that starts something of its own: it has more to tell, and leaves files behind."""

    def watch(self, say: Callable[[str], None], note: Callable[[str], None]) -> None:
        """Where to tell how loading goes (a line replaces the last), and what is worth keeping in sight."""

    def artifacts(self) -> dict[str, str]:
        """Text files for the run's folder: name → content."""
