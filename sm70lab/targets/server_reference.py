"""A server's prefill as the reference: through ``prompt_logprobs``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sm70lab.config_checks_target import SERVED
from sm70lab.engine import listed
from sm70lab.engine.loading import find
from sm70lab.engine.scoring import drawn_from
from sm70lab.errors import UsageError
from sm70lab.schema import (
    Alternative,
    ExperimentConfig,
    Explanation,
    Generation,
    Sampling,
    TargetConfig,
    TokenScores,
)
from sm70lab.targets.base import JudgedBy
from sm70lab.targets.engine_reference import ALTERNATIVES, CONTEXT_TOKENS
from sm70lab.targets.openai_client import Client, ServerFacts
from sm70lab.targets.openai_client import facts as ask
from sm70lab.targets.prompt_logprobs import AnswerError, PromptLogprobs, Told
from sm70lab.targets.remote_run import NO_IDS, RunDtype, own_noise


class ServerReference:
    """The server that ran, or a second one. Raises ``AnswerError`` where it cannot judge."""

    def __init__(self, config: ExperimentConfig, facts: ServerFacts, client: Client, dtype: RunDtype) -> None:
        target, self._config, self._facts, self._dtype = config.target, config, facts, dtype
        self._second: Client | None = None
        self._name = "the server's own prefill"
        self._stop_ids, self._vocabulary = frozenset(config.sampling.stop_ids), None
        told: frozenset[int] | None = None
        if config.model.name != SERVED:
            arch = find(config.model).arch
            told = self._stop_ids = self._stop_ids | frozenset(arch.eos_token_ids)
            self._vocabulary = arch.vocab_size
        if (why := listed.why_not(config.sampling, told)) is not None:
            raise AnswerError(why)
        if target.reference_url is not None:
            self._name = f"a second server at {target.reference_url}"
            self._second = client = Client(_second(config))
            facts = _ask(client)
        longest = facts.told.get("model", {}).get("max_model_len")
        self._rows = PromptLogprobs(client, facts.model, longest if isinstance(longest, int) else None)
        try:
            self._rows.probe(listed.wanted(config.sampling, self._vocabulary))
            if (why := _never_enough(config.sampling, self._rows.count, self._vocabulary)) is not None:
                raise AnswerError(why)
        except AnswerError:
            self.close()
            raise
        self._told: dict[str, Told] = {}
        self._narrow = 0  # tokens whose rows were not enough
        self._why = ""

    def score(self, generation: Generation) -> TokenScores | None:
        prompt_ids, output_ids = list(generation.prompt.token_ids), generation.token_ids
        if not prompt_ids or not output_ids:
            if generation.text or not prompt_ids:
                self._why = self._why or f"{generation.key}: {NO_IDS}"
            return None
        told = self._rows.rows(prompt_ids, output_ids, self._config.target.reference_chunk)
        self._told[generation.key] = told
        if told.why:
            self._why = self._why or f"{generation.key}: {told.why}"
        if not told.rows:
            return None
        noise = own_noise(self._config, self._facts, generation)
        scores = listed.score(
            told.rows,
            prompt_ids,
            output_ids,
            self._config.sampling,
            self._stop_ids,
            self._vocabulary,
            noise,
        )
        self._narrow += int((~scores.known[: len(told.rows)]).sum())
        return scores

    def rounding(self, generation: Generation) -> None:
        """Not measured: both are the server's own arithmetic."""

    def explain(self, generation: Generation, index: int) -> Explanation | None:
        told = self._told.get(generation.key)
        row = told.rows[index] if told is not None and index < len(told.rows) else None
        if told is None or row is None:
            return None
        prompt_ids, output_ids = list(generation.prompt.token_ids), generation.token_ids
        sampling = self._config.sampling
        t = listed.next_token(row, prompt_ids, output_ids[:index], sampling, self._stop_ids, self._vocabulary)
        if t is None:
            return None

        def named(found: tuple[int, float]) -> Alternative:
            return Alternative(found[0], _show(told, found[:1]), found[1])

        noise = own_noise(self._config, self._facts, generation) if sampling.temperature > 0 else None
        likeliest = zip(t.ids[0].tolist(), t.log_kept[0].exp().tolist(), strict=True)
        return Explanation(
            before=_show(told, output_ids[max(0, index - CONTEXT_TOKENS) : index]),
            token=_show(told, output_ids[index : index + 1]),
            after=_show(told, output_ids[index + 1 : index + 1 + CONTEXT_TOKENS]),
            alternatives=[named(found) for found in likeliest if found[0] >= 0][:ALTERNATIVES],
            drawn=named(drawn_from(t, noise, index)) if noise is not None else None,
        )

    def judged_by(self) -> JudgedBy:
        line = self._name + self._dtype.words
        if self._narrow:
            count = self._rows.count
            line += (
                f"; {self._narrow:,} tokens not scored: the server tells {count} candidates a position, and "
                "these supports are wider (vLLM: --max-logprobs; or a smaller sampling.top_k)"
            )
        return JudgedBy(f"{line}; {self._why}" if self._why else line, self._dtype.value)

    def close(self) -> None:
        if self._second is not None:
            self._second.close()


def _never_enough(sampling: Sampling, count: int, vocabulary: int | None) -> str | None:
    """Why so many candidates a position can never hold the support; None where they may."""
    s = sampling
    if s.temperature == 0 or s.top_p < 1 or s.min_p > 0 or (vocabulary is not None and count >= vocabulary):
        return None
    if 0 < s.top_k <= count:
        return None
    kept = f"sampling.top_k={s.top_k}" if s.top_k else "sampling without top-k, top-p and min-p"
    return f"{kept} keeps more tokens than the {count} a position that it tells"


def _second(config: ExperimentConfig) -> TargetConfig:
    """How to reach the second server: not with the first one's key or headers."""
    target = config.target
    return replace(
        target,
        base_url=target.reference_url,
        served_model=target.reference_model,
        api_key_env=target.reference_api_key_env,
        headers={},
        metrics_url=None,
    )


def _ask(client: Client) -> ServerFacts:
    """What the second server tells of itself. Raises ``UsageError``."""
    try:
        return ask(client)
    except UsageError as error:
        message = str(error).replace("target.base_url", "target.reference_url")
        raise UsageError(message.replace("target.served_model", "target.reference_model")) from error


def _show(told: Told, ids: Sequence[int]) -> str:
    return "".join(told.texts.get(token, "\ufffd") for token in ids)
