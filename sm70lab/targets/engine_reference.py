"""The built-in engine's side of the audit: the same weights without drafts, in float32 or better."""

from __future__ import annotations

from functools import cached_property

import torch

from sm70lab.engine import reference, scoring
from sm70lab.engine.loading import Source
from sm70lab.engine.model import HybridModel
from sm70lab.engine.noise import KeyedNoise
from sm70lab.schema import (
    Alternative,
    DraftSampling,
    ExperimentConfig,
    Explanation,
    Generation,
    ModelDtype,
    Rounding,
    TokenScores,
)
from sm70lab.targets.memory import free_bytes

ROUNDING_ROWS = 256  # output tokens on which the arithmetic's own differences are measured
CONTEXT_TOKENS = 24  # shown on either side of a token
ALTERNATIVES = 5


class Referee:
    """Scores, and explains, what a run's route delivered."""

    def __init__(
        self, config: ExperimentConfig, source: Source, model: HybridModel, stop_ids: frozenset[int]
    ) -> None:
        self.config, self.source, self.run, self.stop_ids = config, source, model, stop_ids

    def score(self, generation: Generation) -> TokenScores | None:
        """Every token under the reference; with the run's own noise where its draws use it alone."""
        if not generation.token_ids:
            return None
        noise = self._noise(generation)
        return reference.score(
            self.model, *self._tokens(generation), self.config.sampling, self.stop_ids, noise
        )

    def _noise(self, generation: Generation) -> KeyedNoise | None:
        """Matching and coupled routes draw every token with the position's noise; so does no drafting."""
        route = self.config.route
        matching = route.draft_sampling in (DraftSampling.coupled, DraftSampling.token_matching)
        if route.draft_tokens and not matching:
            return None
        return KeyedNoise(generation.seed, generation.prompt.index, generation.repeat)

    def rounding(self, generation: Generation) -> Rounding | None:
        """What arithmetic in the run's element type does to the reference's numbers over these tokens.

        A float32 run is measured against float64, a 16-bit one against the float32 reference; a float64
        run has nothing to be measured against, and where a float64 copy does not fit nothing is measured.
        """
        dtype = self.config.model.dtype
        if not generation.token_ids or dtype is ModelDtype.float64:
            return None
        prompt_ids, output_ids = self._tokens(generation)
        if dtype is ModelDtype.float32:
            if 8 * sum(t.numel() for t in self.run.buffers()) > free_bytes(self.run.device) / 2:
                return None  # a float64 copy would not fit beside the run
            coarse, fine = self.model, self.source.build(ModelDtype.float64, self.run.device)
        else:
            coarse, fine = self.run, self.model
        output_ids = output_ids[:ROUNDING_ROWS]
        return reference.rounding(coarse, fine, prompt_ids, output_ids, self.config.sampling, self.stop_ids)

    def explain(self, generation: Generation, index: int) -> Explanation:
        """Output token ``index`` in its text, beside the reference's own candidates at that place."""
        prompt_ids, output_ids = self._tokens(generation)
        sampling = self.config.sampling
        row = reference.next_row(self.model, prompt_ids, output_ids[:index], sampling, self.stop_ids)
        show = self.source.text.show

        def named(found: tuple[int, float]) -> Alternative:
            return Alternative(found[0], show([found[0]]), found[1])

        noise = self._noise(generation) if sampling.temperature > 0 else None
        return Explanation(
            before=show(output_ids[max(0, index - CONTEXT_TOKENS) : index]),
            token=show([output_ids[index]]),
            after=show(output_ids[index + 1 : index + 1 + CONTEXT_TOKENS]),
            alternatives=[named(found) for found in scoring.choices(row, sampling, ALTERNATIVES)],
            drawn=named(scoring.drawn(row, sampling, noise, index)) if noise is not None else None,
        )

    def _tokens(self, generation: Generation) -> tuple[list[int], list[int]]:
        return list(generation.prompt.token_ids), generation.token_ids

    @cached_property
    def model(self) -> HybridModel:
        """The run's own model where it is float32 or float64 already, else a float32 copy."""
        if self.run.dtype in (torch.float32, torch.float64):
            return self.run
        return self.source.build(ModelDtype.float32, self.run.device)
