"""What the experiment asks of a target, whatever runs behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from sm70lab.schema import Explanation, Generation, Prompt, Rounding, TokenScores


@dataclass(frozen=True)
class Progress:
    """A glimpse of a running generation, sent at most a few times a second."""

    prompt: Prompt
    repeat: int
    tokens: int  # delivered so far in this generation
    rounds: int
    accepted: int  # accepted drafts so far
    decode_seconds: float


OnProgress = Callable[[Progress], None]


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
