"""What must be known of a server's run to judge it: its arithmetic, and the noise of its draws."""

from __future__ import annotations

from pathlib import Path

from sm70lab.config_checks_target import KEYED_DRAWS
from sm70lab.engine.architecture import read_config
from sm70lab.engine.noise import KeyedNoise
from sm70lab.schema import ExperimentConfig, Generation, ModelDtype
from sm70lab.targets.base import request_seed
from sm70lab.targets.openai_client import ServerFacts

NO_IDS = "the server tells no token ids (return_token_ids)"


class RunDtype:
    """What the server computes in.

    Where it does not say, ``model.dtype`` counts. But of a folder that is float32 unless it was set, and
    servers run a checkpoint in the 16-bit type it is stored in: that counts where there is one.
    """

    def __init__(self, config: ExperimentConfig, facts: ServerFacts) -> None:
        told = str(facts.version.get("dtype"))
        known = {dtype.value: dtype for dtype in ModelDtype}
        self.assumed = told not in known
        self.value = known.get(told, config.model.dtype)
        if self.assumed and config.model.path is not None and self.value is ModelDtype.float32:
            raw = read_config(Path(config.model.path))
            stored = str(raw.get("dtype") or raw.get("torch_dtype")).removeprefix("torch.")
            if stored in (ModelDtype.float16.value, ModelDtype.bfloat16.value):
                self.value = ModelDtype(stored)

    @property
    def words(self) -> str:
        """For the verdict's line."""
        return f", the run's arithmetic taken as {self.value.value}" if self.assumed else ""


def own_noise(config: ExperimentConfig, facts: ServerFacts, generation: Generation) -> KeyedNoise | None:
    """The noise that each token was drawn with, where the server says that its draws are such."""
    if facts.version.get("engine") != "sm70lab" or facts.version.get("draws") != KEYED_DRAWS:
        return None
    return KeyedNoise(request_seed(config.seed, generation.prompt.index, generation.repeat), 0, 0)
