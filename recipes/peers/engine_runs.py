"""The built-in engine's side of the comparison: the same prompts, greedy, with and without drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sm70lab.errors import UsageError
from sm70lab.schema import (
    DraftSampling,
    ExperimentConfig,
    Generation,
    ModelDtype,
    ModelSpec,
    Prompt,
    PromptSpec,
    Route,
    Sampling,
    TargetConfig,
    TokenScores,
    Workload,
)
from sm70lab.targets.engine import EngineTarget

Draft = Callable[..., torch.Tensor]


class EngineRuns:
    """One loaded model, decoded along the routes that the comparison needs."""

    def __init__(self, model: Path, texts: dict[str, str], tokens: int, drafts: int, threads: int) -> None:
        config = ExperimentConfig(
            model=ModelSpec(path=str(model), dtype=ModelDtype.float32),
            target=TargetConfig(device="cpu", threads=threads),
            route=Route(name="mtp", draft_tokens=drafts, draft_sampling=DraftSampling.greedy),
            workload=Workload(prompts=[PromptSpec(n, text=t) for n, t in texts.items()], max_tokens=tokens),
            sampling=Sampling(temperature=0, top_k=0, top_p=1),
        )
        self.drafting = EngineTarget(config)
        self.prompts: list[Prompt] = self.drafting.prompts()
        self.longest = max(len(p.token_ids) for p in self.prompts) + tokens
        trained = self.drafting.source.arch.max_position_embeddings
        if self.longest > trained:
            raise UsageError(
                f"--tokens={tokens}: prompt and output come to {self.longest} of {trained} positions"
            )
        self.plain = EngineTarget(dataclasses.replace(config, route=Route(name="no_mtp", draft_tokens=0)))

    def load(self) -> None:
        """Read the weights."""
        self.drafting.load()
        self.plain.load()

    def undrafted(self, prompt: Prompt) -> Generation:
        """Greedy without drafts."""
        return self._one(self.plain, prompt)

    def drafted(self, prompt: Prompt, lead_row: bool = False) -> Generation:
        """Greedy with MTP drafts; ``lead_row`` gives the draft head llama.cpp's extra row."""
        model = self.drafting.model
        original = model.draft
        if lead_row:
            model.draft = with_lead_row(original, prompt.token_ids[0])  # type: ignore[method-assign]
        try:
            return self._one(self.drafting, prompt)
        finally:
            model.draft = original  # type: ignore[method-assign]

    def score(self, generation: Generation, ids: list[int]) -> TokenScores:
        """Log-probabilities and margins of ``ids`` after the generation's prompt, without drafts."""
        scores = self.plain.score(dataclasses.replace(generation, token_ids=ids))
        assert scores is not None
        return scores

    @staticmethod
    def _one(target: EngineTarget, prompt: Prompt) -> Generation:
        generation = next(iter(target.generate([prompt], 0, lambda _: None)))
        if generation.finish_reason == "interrupted":
            raise KeyboardInterrupt
        if generation.finish_reason == "non_finite":
            raise UsageError(f"{prompt.name}: {generation.note}")
        return generation


def with_lead_row(draft: Draft, first_token: int) -> Draft:
    """The draft head with llama.cpp's pairing: the prompt's first token, beside a hidden state of
    zeros, is a row of its own at position 0, and every later row stands one position on.
    """

    def shifted(
        tokens: torch.Tensor, hidden: torch.Tensor, slots: torch.Tensor, start: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        if int(start[0]) > 0:
            return draft(tokens, hidden, slots, start + 1, *rest)
        lead = torch.full_like(tokens[:, :1], first_token)
        tokens = torch.cat([lead, tokens], 1)
        hidden = torch.cat([torch.zeros_like(hidden[:, :1]), hidden], 1)
        return draft(tokens, hidden, slots, start, *rest)[:, 1:]

    return shifted
