"""Somebody's server with the OpenAI API as a target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sm70lab.config_checks_target import SERVED, SERVER_HARDWARE
from sm70lab.errors import UsageError
from sm70lab.schema import (
    CounterWindow,
    Endpoint,
    ExperimentConfig,
    Explanation,
    Generation,
    MetricsSource,
    Prompt,
    Rounding,
    TokenScores,
)
from sm70lab.targets.base import JudgedBy, OnProgress, request_seed
from sm70lab.targets.openai_answer import Answer
from sm70lab.targets.openai_client import Client, ServerFacts, facts
from sm70lab.targets.openai_request import LLAMA_CPP, prompt_fields, sampling_fields
from sm70lab.targets.openai_run import Ask, Batch
from sm70lab.targets.prometheus import Own, Watch

if TYPE_CHECKING:  # brings torch, which a server without a checkpoint here does not need
    from sm70lab.engine.text import Text
    from sm70lab.targets.remote_reference import RemoteReferee

CHAT, COMPLETIONS = "/chat/completions", "/completions"


class OpenAITarget:
    """Asks a server for the workload's prompts, ``target.max_num_seqs`` at once."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config
        self.client = Client(config.target)
        self.server: ServerFacts | None = None
        self.watch = Watch()
        self._text: Text | None = None
        self._referee: RemoteReferee | None = None
        self._known: dict[str, Own] = {}
        self._anything = False
        self._gaps: list[str] = []  # outputs whose ids are not whole

    # ------------------------------------------------------------------ set-up

    def load(self) -> None:
        """Reach the server and ask what it is. Raises ``UsageError`` where it cannot be used."""
        if self.config.model.name != SERVED:
            from sm70lab.engine.loading import find

            self._text = find(self.config.model).text
        self.server = facts(self.client)
        self.prompts()
        self._fields(0, 0)
        from sm70lab.targets.remote_reference import remote_referee

        self._referee = remote_referee(self.config, self.server, self.client)

    @property
    def metrics_url(self) -> str | None:
        """Where the counters are; None with ``target.metrics=off``."""
        target = self.config.target
        if target.metrics is MetricsSource.off:
            return None
        return target.metrics_url or f"{self.client.root}/metrics"

    def describe(self) -> dict[str, str | int | float]:
        """What the server says of itself."""
        return {"device": SERVER_HARDWARE, **self._server.flat()}

    @property
    def _server(self) -> ServerFacts:
        if self.server is None:
            raise RuntimeError("load() comes first")
        return self.server

    def prompts(self) -> list[Prompt]:
        """The workload's prompts; token ids where the checkpoint's tokenizer is on this disk."""
        found = []
        for index, spec in enumerate(self.config.workload.prompts):
            text = spec.text if spec.text is not None else spec.user or ""
            if self._text is not None and (spec.user is not None and not self._is_chat(index)):
                text = self._text.chat(spec.user)
            elif spec.user is not None and not self._is_chat(index):
                raise UsageError(
                    f"target.endpoint=completions: prompt {spec.name} is a user message, which needs the "
                    "model's chat template; use endpoint=chat, or model=/a/folder for the template"
                )
            ids = self._text.encode(text) if self._text is not None and not self._is_chat(index) else []
            budget = spec.max_tokens if spec.max_tokens is not None else self.config.workload.max_tokens
            found.append(Prompt(index, spec.name, text, ids, budget, spec.contract))
        return found

    def _is_chat(self, index: int) -> bool:
        endpoint = self.config.target.endpoint
        if endpoint is Endpoint.auto:
            return self.config.workload.prompts[index].user is not None
        return endpoint is Endpoint.chat

    # ------------------------------------------------------------------ generating

    def _fields(self, index: int, repeat: int) -> tuple[dict[str, Any], list[str]]:
        seed = request_seed(self.config.seed, index, repeat)
        found = sampling_fields(self.config.sampling, seed, self._server.family)
        return found.body, found.notes

    def _ask(self, prompt: Prompt, repeat: int) -> Ask:
        chat = self._is_chat(prompt.index)
        fields, notes = self._fields(prompt.index, repeat)
        body: dict[str, Any] = {
            "model": self._server.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": prompt.max_tokens,
            "return_token_ids": True,
            **({"timings_per_token": True} if self._server.family == LLAMA_CPP else {}),  # they count tokens
            **fields,
            **self.config.target.extra_body,
        }
        path = CHAT if chat else COMPLETIONS
        record = {"path": path, "sent": dict(body), "notes": notes}
        body |= prompt_fields(self.config.workload.prompts[prompt.index], chat, prompt.text)
        return Ask(path, body, Answer(prompt, repeat, self.config.seed, record))

    def generate(self, prompts: list[Prompt], repeat: int, on_progress: OnProgress) -> Iterator[Generation]:
        """Ask for the prompts; see ``targets.base.Target``. Raises ``UsageError`` where one is refused."""
        batch = Batch(
            client=self.client,
            asks=[self._ask(prompt, repeat) for prompt in prompts],
            metrics=self.metrics_url,
            model=self._server.model,
            window_tokens=self.config.gate.window_tokens,
            watch=self.watch,
            anything=self._anything,
            on_progress=on_progress,
            earlier=self._known,
        )
        try:
            yield from batch.answers()
        finally:
            self._known, self._anything = batch.own(), batch.anything

    def counters(self) -> list[CounterWindow]:
        """Windows between the readings of the server's counters."""
        return self.watch.windows()

    def readings(self) -> dict[str, Any]:
        """The server's counters before, during and after the run, as they were read."""
        return self.watch.record()

    # ------------------------------------------------------------------ the reference

    @property
    def _judge(self) -> RemoteReferee:
        if self._referee is None:
            raise RuntimeError("load() comes first")
        return self._referee

    def score(self, generation: Generation) -> TokenScores | None:
        """By whom ``target.reference`` names: ``targets.remote_reference``. None where ids are missing."""
        if not generation.request["ids_whole"]:
            # a token behind a gap would be judged by what did not come before it
            why = "the server tells no token ids" if generation.came else "no token came"
            why = generation.note if generation.token_ids else why
            self._gaps.append(f"{generation.key} is not scored: {why}")
            return None
        return self._judge.score(generation)

    def rounding(self, generation: Generation) -> Rounding | None:
        """See ``targets.base.Target``."""
        return self._judge.rounding(generation)

    def explain(self, generation: Generation, index: int) -> Explanation | None:
        """See ``targets.base.Target``."""
        return self._judge.explain(generation, index)

    def judged_by(self) -> JudgedBy:
        """Who judged, or why nobody did."""
        found = self._judge.judged_by()
        return JudgedBy("; ".join(line for line in (found.line, *self._gaps[:1]) if line), found.dtype)

    def close(self) -> None:
        """Close the connections."""
        if self._referee is not None:
            self._referee.close()
        self.client.close()
