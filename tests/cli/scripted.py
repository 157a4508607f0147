"""The command line over a target that costs nothing: ``python scripted.py key=value …``.

Everything but the engine is the product's own: Hydra, the run folder, the judge, MLflow, the display.
Tokens are uniform draws over 64 ids, keyed by seed, prompt and repeat. ``+model.shape.delay_ms=N``
makes a round take that long; ``+model.shape.drift=true`` makes two runs of one configuration differ.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sm70lab import cli, experiment
from sm70lab.schema import BETS, CounterWindow, ExperimentConfig, Generation, Prompt, Round, TokenScores
from sm70lab.targets.base import OnProgress, Progress

VOCABULARY = 64
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n"


class ScriptedTarget:
    """Draws tokens, three a round."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config

    def load(self) -> None:
        """Nothing to load."""

    def describe(self) -> dict[str, str | int | float]:
        return {"parameters": 0}

    def prompts(self) -> list[Prompt]:
        workload = self.config.workload
        return [
            Prompt(
                i, p.name, p.text or "", list((p.text or "").encode()), p.max_tokens or workload.max_tokens
            )
            for i, p in enumerate(workload.prompts)
        ]

    def generate(self, prompts: list[Prompt], repeat: int, on_progress: OnProgress) -> Iterator[Generation]:
        for prompt in prompts:
            generation = self._one(prompt, repeat, on_progress)
            yield generation
            if generation.finish_reason == "interrupted":
                raise KeyboardInterrupt

    def _one(self, prompt: Prompt, repeat: int, on_progress: OnProgress) -> Generation:
        shape = self.config.model.shape
        drift = time.time_ns() if shape.get("drift") else 0
        draw = random.Random(f"{self.config.seed}/{prompt.index}/{repeat}/{drift}")
        ids: list[int] = []
        rounds: list[Round] = []
        reason = "length"
        try:
            while len(ids) < prompt.max_tokens:
                time.sleep(shape.get("delay_ms", 0) / 1000)
                emitted = min(3, prompt.max_tokens - len(ids))
                rounds.append(Round(len(ids), 3, emitted - 1, emitted, 0.01))
                ids += [draw.randrange(VOCABULARY) for _ in range(emitted)]
                on_progress(
                    Progress(prompt, repeat, len(ids), len(rounds), 2 * len(rounds), 0.01 * len(rounds))
                )
        except KeyboardInterrupt:
            reason = "interrupted"
        text = "".join(LETTERS[i] for i in ids)
        return Generation(
            prompt, repeat, self.config.seed, ids, text, reason, rounds, 0.01, 0.01 * len(rounds)
        )

    def score(self, generation: Generation) -> TokenScores:
        import numpy as np

        ids = np.array(generation.token_ids)
        n = len(ids)
        flat = np.full(n, -np.log(VOCABULARY))
        return TokenScores(
            logprob=flat,
            raw_logprob=flat,
            entropy=-flat,
            variance=np.zeros(n),
            rank=ids,
            in_support=np.ones(n, bool),
            cut_gap=np.zeros(n),
            cut_logit=np.zeros(n),
            cut_rule=np.full(n, ""),
            argmax=np.zeros(n, int),
            top2_margin=np.zeros(n),
            cdf_low=ids / VOCABULARY,
            cdf_high=(ids + 1) / VOCABULARY,
            collision=np.full(n, 1 / VOCABULARY),
            collision_variance=np.zeros(n),
            covariance=np.zeros(n),
            log_bets=np.zeros((n, len(BETS))),
            noise_gap=np.full(n, np.nan),
            noise_winner_logit=np.full(n, np.nan),
            noise_winner_mass=np.full(n, np.nan),
        )

    def rounding(self, generation: Generation) -> None:
        return None

    def explain(self, generation: Generation, index: int) -> None:
        return None

    def counters(self) -> list[CounterWindow]:
        return []

    def close(self) -> None:
        """Nothing to let go of."""


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    experiment.TARGETS["engine"] = ("scripted", "ScriptedTarget")
    sys.exit(cli.main(sys.argv[1:]))
