"""Who judges a server's run: the built-in engine, a prefill of the server, or of a second one.

| target.reference | who | needs |
|---|---|---|
| engine | the built-in engine in float32, without drafts | the server's checkpoint on this disk |
| server | a prefill of the server, or of ``reference_url`` | ``prompt_logprobs`` of /v1/completions |
| auto | the engine where the checkpoint is on this disk, else a server that can, else nobody | |
| none | nobody: the verdict rests on shape and acceptance, and says so | |

All of them need the server's token ids, of the prompt and of the output. A server's own prefill has the
run's weights and numerics and takes no drafts; but a kernel that it shares with the run may be damaged
in both. So the verdict's line names who judged.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Protocol

import torch

from sm70lab.config_checks_target import SERVED
from sm70lab.engine import reference
from sm70lab.engine.loading import Source, find
from sm70lab.engine.model import HybridModel
from sm70lab.engine.noise import KeyedNoise
from sm70lab.errors import UsageError
from sm70lab.schema import (
    ExperimentConfig,
    Explanation,
    Generation,
    ModelDtype,
    ReferenceKind,
    Rounding,
    TokenScores,
)
from sm70lab.targets.base import JudgedBy
from sm70lab.targets.engine_reference import ROUNDING_ROWS, Referee
from sm70lab.targets.openai_client import Client, ServerFacts
from sm70lab.targets.prompt_logprobs import AnswerError
from sm70lab.targets.remote_run import NO_IDS, RunDtype, own_noise
from sm70lab.targets.server_reference import ServerReference


class RemoteReferee(Protocol):
    """Scores, and explains, what a server delivered."""

    def score(self, generation: Generation) -> TokenScores | None:
        """Every token under the reference; None where it cannot: ``judged_by`` then says why."""

    def rounding(self, generation: Generation) -> Rounding | None:
        """What the run's arithmetic does to the reference's numbers; None where that is not measured."""

    def explain(self, generation: Generation, index: int) -> Explanation | None:
        """Output token ``index`` beside the reference's own candidates; None where unknown."""

    def judged_by(self) -> JudgedBy:
        """Who judges, or why nobody does."""

    def close(self) -> None:
        """Let go of connections of its own."""


def remote_referee(config: ExperimentConfig, facts: ServerFacts, client: Client) -> RemoteReferee:
    """The reference that ``target.reference`` asks for, of the server that ``client`` reaches.

    Raises ``UsageError`` where it cannot be had, except for ``auto``.
    """
    target, dtype = config.target, RunDtype(config, facts)
    kind, on_disk = target.reference, config.model.name != SERVED
    if not config.audit or kind is ReferenceKind.none:
        return Nobody("audit=false" if not config.audit else "target.reference=none", dtype)
    if kind is ReferenceKind.engine or (kind is ReferenceKind.auto and on_disk and not target.reference_url):
        return EngineReference(config, facts, dtype)
    if kind is ReferenceKind.auto and not target.reference_url:
        return WhoeverCan(config, facts, client, dtype)
    try:
        return ServerReference(config, facts, client, dtype)
    except AnswerError as error:
        asked = target.reference_url or "the server"
        raise UsageError(
            f"target.reference=server: {asked} cannot judge: {error}; use target.reference=none"
        ) from error


class WhoeverCan:
    """The server itself if it can, else nobody. It is asked after the run, which stays undisturbed."""

    def __init__(self, config: ExperimentConfig, facts: ServerFacts, client: Client, dtype: RunDtype) -> None:
        self._asked = config, facts, client, dtype
        self._found: RemoteReferee = Nobody("", dtype)
        self._looked = False

    def score(self, generation: Generation) -> TokenScores | None:
        if not self._looked and generation.token_ids:
            self._looked = True
            try:
                self._found = ServerReference(*self._asked)
            except AnswerError as error:
                why = f"the server cannot judge: {error}"
                on_disk = "its checkpoint is not on this disk (model=/a/folder)"
                self._found = Nobody(f"{why}, and {on_disk}", self._asked[-1])
        return self._found.score(generation)

    def rounding(self, generation: Generation) -> Rounding | None:
        return self._found.rounding(generation)

    def explain(self, generation: Generation, index: int) -> Explanation | None:
        return self._found.explain(generation, index)

    def judged_by(self) -> JudgedBy:
        return self._found.judged_by()

    def close(self) -> None:
        self._found.close()


class Nobody:
    """No reference, and why."""

    def __init__(self, why: str, dtype: RunDtype) -> None:
        self._judged_by = JudgedBy(why, dtype.value)

    def score(self, generation: Generation) -> None:
        """Not."""

    def rounding(self, generation: Generation) -> None:
        """Not."""

    def explain(self, generation: Generation, index: int) -> None:
        """Not."""

    def judged_by(self) -> JudgedBy:
        return self._judged_by

    def close(self) -> None:
        """Nothing to let go of."""


class _Judge(Referee):
    """Knows a served run's noise by what the server says of its draws."""

    def __init__(
        self,
        config: ExperimentConfig,
        source: Source,
        model: HybridModel,
        stop_ids: frozenset[int],
        facts: ServerFacts,
    ) -> None:
        super().__init__(config, source, model, stop_ids)
        self._facts = facts

    def _noise(self, generation: Generation) -> KeyedNoise | None:
        return own_noise(self.config, self._facts, generation)


class EngineReference:
    """The built-in engine over the server's checkpoint, which must be on this disk."""

    def __init__(self, config: ExperimentConfig, facts: ServerFacts, dtype: RunDtype) -> None:
        self._facts, self._dtype = facts, dtype
        self._config = replace(config, model=replace(config.model, dtype=dtype.value))
        self._source: Source = find(config.model)
        self._why = ""

    @cached_property
    def _model(self) -> HybridModel:
        """In float32, or float64 for a run in float64."""
        wide = ModelDtype.float64 if self._dtype.value is ModelDtype.float64 else ModelDtype.float32
        return self._source.build(wide, torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    @cached_property
    def _judge(self) -> _Judge:
        stop_ids = frozenset(self._source.arch.eos_token_ids) | frozenset(self._config.sampling.stop_ids)
        return _Judge(self._config, self._source, self._model, stop_ids, self._facts)

    def score(self, generation: Generation) -> TokenScores | None:
        if not generation.token_ids:
            return None
        if (why := self._not_ours(generation)) is not None:
            self._why = self._why or f"{generation.key}: {why}"
            return None
        return self._judge.score(generation)

    def _not_ours(self, generation: Generation) -> str | None:
        """Why the checkpoint on this disk cannot be the server's; None where nothing says so.

        A server's chat template may have variables that nobody here knows, so it is the tokenisation
        of the server's own prompt that must be ours.
        """
        ids, text = list(generation.prompt.token_ids), self._source.text
        if not ids:
            return NO_IDS
        size = self._source.arch.vocab_size
        if (largest := max(*ids, *generation.token_ids)) >= size:
            return f"the server's token {largest} is beyond the {size:,} of the checkpoint on this disk"
        ours = text.encode(text.show(ids))
        if ours != ids:
            at = next(
                (i for i, (a, b) in enumerate(zip(ids, ours, strict=False)) if a != b),
                min(len(ids), len(ours)),
            )
            return (
                "the server's prompt is not tokenised as the checkpoint on this disk does it, first at "
                f"token {at}: {ids[at : at + 3]} there, {ours[at : at + 3]} here"
            )
        return None

    def rounding(self, generation: Generation) -> Rounding | None:
        dtype = self._dtype.value
        if dtype not in (ModelDtype.float16, ModelDtype.bfloat16):
            return self._judge.rounding(generation)
        return reference.rounding(
            self._source.build(dtype, self._model.device),
            self._model,
            list(generation.prompt.token_ids),
            generation.token_ids[:ROUNDING_ROWS],
            self._config.sampling,
            self._judge.stop_ids,
        )

    def explain(self, generation: Generation, index: int) -> Explanation:
        return self._judge.explain(generation, index)

    def judged_by(self) -> JudgedBy:
        wide = "float64" if self._dtype.value is ModelDtype.float64 else "float32"
        line = f"built-in engine, {wide}{self._dtype.words}"
        return JudgedBy(f"{line}; {self._why}" if self._why else line, self._dtype.value)

    def close(self) -> None:
        """Nothing to let go of."""
