"""The audit of a served run: the faults of the in-process run, at the same tokens, whoever judges."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import Nobody

from sm70lab.config import check, compose
from sm70lab.engine import reference
from sm70lab.engine.noise import KeyedNoise
from sm70lab.errors import UsageError
from sm70lab.experiment import run_experiment
from sm70lab.judge.tolerance import tolerance_for
from sm70lab.judge.verdict import RouteFacts, judge
from sm70lab.schema import (
    Evidence,
    ExperimentConfig,
    Generation,
    ModelSpec,
    ReferenceKind,
    Sampling,
    TokenScores,
    Verdict,
    VerdictKind,
)
from sm70lab.targets.base import JudgedBy, request_seed
from sm70lab.targets.engine import EngineTarget
from sm70lab.targets.openai import OpenAITarget
from sm70lab.targets.remote_reference import EngineReference

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
from served import ServeProcess

PAGE = "workload.prompts=[{name: page, text: '<!DOCTYPE html>\\n<html lang=\"en\">\\n<head>\\n'}]"
TOKENS = 100
LENGTH = 150  # of the sound server: prompt and output
OWN = "reference: the server's own prefill"
Config = Callable[..., ExperimentConfig]


@pytest.fixture(scope="module")
def damaged() -> Iterator[ServeProcess]:
    """A server with a fault."""
    process = ServeProcess("route=split", "hazard=accepted_plus_one")
    yield process
    process.stop()


@pytest.fixture(scope="module")
def sound() -> Iterator[ServeProcess]:
    """No fault, and no more room than the runs here need."""
    process = ServeProcess("route=split", f"max_model_len={LENGTH}", "max_logprobs=30")
    yield process
    process.stop()


@pytest.fixture(scope="module")
def config() -> Config:
    """Makes the configuration of a short run against a server."""
    base = compose(
        ["target=openai", "target.base_url=http://x", PAGE, f"workload.max_tokens={TOKENS}", "seed=5"]
    )

    def make(server: ServeProcess, sampling: Sampling | None = None, **target: Any) -> ExperimentConfig:
        made = deepcopy(base)
        made.target = replace(made.target, base_url=server.url, **target)
        made.sampling = sampling or made.sampling
        return made

    return make


@pytest.fixture(scope="module")
def engine() -> EngineTarget:
    """The in-process reference."""
    target = EngineTarget(compose(["route=no_mtp", PAGE, f"workload.max_tokens={TOKENS}"]))
    target.load()
    return target


@dataclass
class Run:
    """A run and its judgement, with the target still open."""

    target: OpenAITarget | EngineTarget
    generations: list[Generation]
    scores: list[TokenScores | None]

    @property
    def only(self) -> tuple[Generation, TokenScores]:
        """The one output and its scores."""
        (generation,), (scores,) = self.generations, self.scores
        assert scores is not None
        return generation, scores

    @property
    def verdict(self) -> Verdict:
        c, target = self.target.config, self.target
        by = target.judged_by() if isinstance(target, OpenAITarget) else JudgedBy("", c.model.dtype)
        rounding = target.rounding(self.generations[0]) if self.scores[0] is not None else None
        tolerance = tolerance_for(by.dtype, rounding)
        facts = RouteFacts(c.route.draft_tokens, c.sampling.temperature, tolerance, reference=by.line)
        return judge(self.generations, self.scores, c.gate, facts)

    @property
    def audit(self) -> Evidence:
        return next(e for e in self.verdict.evidence if e.kind == "audit")


def generated(target: OpenAITarget | EngineTarget) -> Run:
    """Generate and score."""
    target.load()
    generations = list(target.generate(target.prompts(), 0, lambda progress: None))
    return Run(target, generations, [target.score(generation) for generation in generations])


@pytest.fixture
def ask() -> Iterator[Callable[[ExperimentConfig], Run]]:
    """Runs a configuration against its server."""
    targets = []

    def run(config: ExperimentConfig) -> Run:
        check(config)
        targets.append(OpenAITarget(config))
        return generated(targets[-1])

    yield run
    for target in targets:
        target.close()


Ask = Callable[[ExperimentConfig], Run]


def recorded(folder: Path, *more: str) -> dict[str, Any]:
    """A whole run with its record: the result."""
    given = [PAGE, f"workload.max_tokens={TOKENS}", "seed=5", "tracking=off", f"tracking.runs_dir={folder}"]
    return run_experiment(compose([*given, *more]), Nobody()).result


def in_process(*more: str) -> Run:
    """The same run in this process."""
    return generated(EngineTarget(compose([PAGE, f"workload.max_tokens={TOKENS}", "seed=5", *more])))


def first_bad(result: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(
        e["details"]["first_bad"] for e in result["verdict"]["evidence"] if e["kind"] == "audit"
    )
    return found


def truth(engine: EngineTarget, config: ExperimentConfig, generation: Generation) -> TokenScores:
    """The same tokens under the in-process reference, with the request's noise."""
    noise = KeyedNoise(request_seed(config.seed, generation.prompt.index, generation.repeat), 0, 0)
    ids, stop = list(generation.prompt.token_ids), engine.stop_ids
    return reference.score(engine.model, ids, generation.token_ids, config.sampling, stop, noise)


def agree(a: TokenScores, b: TokenScores, bounded: bool = False) -> None:
    """Equal, but for how far the likeliest token that top-k cuts is away, where that is a bound."""
    for f in fields(TokenScores):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if f.name == "raw_logprob":  # needs the whole row's sum: known at temperature 1 alone
            x = np.where(np.isnan(x), y, x)
        if f.name == "noise_winner_logit" and bounded:
            assert (x <= y + 1e-3).all()
        elif y.dtype.kind in "Uib":
            assert (x == y).all(), f.name
        else:
            np.testing.assert_allclose(x, y, atol=2e-4, rtol=1e-4, err_msg=f.name)


def test_a_fault_is_found_where_the_in_process_run_has_it(
    damaged: ServeProcess, sound: ServeProcess, config: Config, ask: Ask, tmp_path: Path
) -> None:
    """By the server's own prefill, by a second server, and by the engine."""
    served = recorded(tmp_path, "target=openai", f"target.base_url={damaged.url}")
    beside = in_process("route=split", "hazard=accepted_plus_one")
    assert served["verdict"]["kind"] == "route_fault"
    assert OWN in served["verdict"]["reason"]
    found, expected = first_bad(served), beside.audit.details["first_bad"]
    place = ("generation", "index", "token", "rule")
    assert [found[key] for key in place] == [expected[key] for key in place]
    explained = beside.target.explain(beside.generations[0], expected["index"])
    assert explained is not None and explained.drawn is not None
    context = {"before": explained.before, "token": explained.token, "after": explained.after}
    assert found["context"] == context and found["drawn"]["token"] == explained.drawn.token
    alternatives = [(a.token, a.text) for a in explained.alternatives]
    assert [(a["token"], a["text"]) for a in found["alternatives"]] == alternatives
    by_second = ask(config(damaged, reference_url=sound.url))
    assert f"reference: a second server at {sound.url}" in by_second.verdict.reason
    on_disk = config(damaged)
    on_disk.model = ModelSpec(name="web")
    by_engine = ask(on_disk)
    assert "reference: built-in engine, float32" in by_engine.verdict.reason
    for judged in (by_second, by_engine):
        assert judged.verdict.kind is VerdictKind.route_fault
        assert [judged.audit.details["first_bad"][key] for key in place] == [found[key] for key in place]
    assert by_engine.audit.details["tolerance"]["measured_on"] == TOKENS


def test_a_sound_run_passes_with_every_token_the_references_own(
    sound: ServeProcess, config: Config, ask: Ask, engine: EngineTarget
) -> None:
    served = ask(config(sound, reference=ReferenceKind.server))
    assert served.verdict.kind is VerdictKind.passed
    assert f"{TOKENS} are the token that the reference draws with the same noise; {OWN}" in served.audit.line
    generation, scores = served.only
    agree(scores, truth(engine, served.target.config, generation))
    served.target.config.target.reference_chunk = 30  # the same rows in four requests
    parts = served.target.score(generation)
    assert parts is not None
    agree(parts, scores)


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=0.8, min_p=0.05, top_p=1.0),
        Sampling(top_k=30),
        Sampling(top_k=8, presence_penalty=0.1, banned_ids=[5]),
    ],
    ids=["greedy", "min-p", "as many as are told", "rules"],
)
def test_a_servers_rows_score_as_the_engine_does(
    sound: ServeProcess, config: Config, ask: Ask, engine: EngineTarget, sampling: Sampling
) -> None:
    served = ask(config(sound, sampling))
    generation, scores = served.only
    assert scores.known.all()
    agree(scores, truth(engine, served.target.config, generation), bounded=sampling.top_k == 30)
    assert served.verdict.kind is VerdictKind.passed


@pytest.mark.long
def test_an_output_that_fills_the_context_is_scored_to_its_last_token(
    sound: ServeProcess, config: Config, ask: Ask, engine: EngineTarget
) -> None:
    full = config(sound)
    prompt = engine.prompts()[0]
    full.workload.max_tokens = LENGTH - len(prompt.token_ids)
    generation, scores = ask(full).only
    assert len(generation.token_ids) + len(generation.prompt.token_ids) == LENGTH
    agree(scores, truth(engine, full, generation))


def test_what_a_server_cannot_tell_is_said_and_not_guessed(
    sound: ServeProcess, config: Config, ask: Ask
) -> None:
    wide = ask(config(sound, Sampling(top_k=0)))
    assert wide.verdict.kind is VerdictKind.inconclusive
    metrics = wide.audit.metrics
    assert 0 < metrics["tokens"] < TOKENS and metrics["violations"] == 0
    assert "tokens not scored: the server tells 30 candidates a position" in wide.verdict.reason
    unsaid = ask(config(sound, Sampling(repetition_penalty=1.1)))
    assert unsaid.verdict.kind is VerdictKind.passed and unsaid.audit.metrics["audited"] == 0
    assert "sampling.repetition_penalty=1.1 acts on logits" in unsaid.audit.line
    for sampling, words in (
        (Sampling(repetition_penalty=1.1), "target.reference=server: the server cannot judge: sampling.rep"),
        (Sampling(top_p=1.0, top_k=0), "keeps more tokens than the 30"),
    ):
        with pytest.raises(UsageError, match=words):
            ask(config(sound, sampling, reference=ReferenceKind.server))


@pytest.mark.long
def test_the_checkpoint_on_this_disk_must_be_the_servers(
    sound: ServeProcess, config: Config, ask: Ask, engine: EngineTarget, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="model=tiny: not what the server has"):
        recorded(tmp_path, "target=openai", f"target.base_url={sound.url}", "model=tiny")
    on_disk = config(sound)
    on_disk.model = ModelSpec(name="web")
    served = ask(on_disk)
    generation, _ = served.only
    ids, encode = list(generation.prompt.token_ids), engine.source.text.encode
    letters = [i for letter in "<!DOCTYPE html>" for i in encode(letter)]
    for changed, words in (
        ([*ids, 9_999_999], "beyond the 4,096"),
        (letters, "is not tokenised as the checkpoint on this disk does it"),
        ([], "the server tells no token ids"),
    ):
        referee = EngineReference(on_disk, served.target._server, served.target._judge._dtype)  # type: ignore[attr-defined]
        other = replace(generation, prompt=replace(generation.prompt, token_ids=changed))
        assert referee.score(other) is None
        assert words in referee.judged_by().line


# Settings under which a hazard acts on one sequence alone, and tokens by which it is found: the noise of a
# request is that of the in-process run, so the tokens are the same ones.
ALONE = {
    "stale_metadata": ["route.state.scheme=slots"],
    "accepted_plus_one": [],
    "accepted_minus_one": [],
    "no_ssm_rollback": [],
    "no_conv_rollback": [],
    "rollover_drops_rows": ["route.state.block_size=16", "route.state.prefix_blocks=256"],
    "optimistic_lengths": [],
    "recovered_as_computed": [],
    "unseeded_draws": [],
    "padding_slot_0": ["target.max_num_seqs=2"],
}
ALONE_TOKENS = 150


@pytest.mark.long
@pytest.mark.parametrize("hazard", ALONE)
def test_each_hazard_is_found_at_the_token_of_the_in_process_run(
    config: Config, ask: Ask, hazard: str
) -> None:
    settings = ["route=split", *ALONE[hazard], f"hazard={hazard}"]
    server = ServeProcess(*settings)
    try:
        asked = config(server)
        asked.workload.max_tokens = ALONE_TOKENS
        served = ask(asked)
        beside = in_process(*settings, f"workload.max_tokens={ALONE_TOKENS}")
        assert (
            served.generations[0].token_ids == beside.generations[0].token_ids or hazard == "unseeded_draws"
        )
        assert served.verdict.kind is VerdictKind.route_fault
        place = ("index", "token", "rule") if hazard != "unseeded_draws" else ("rule",)
        found, expected = served.audit.details["first_bad"], beside.audit.details["first_bad"]
        assert [found[key] for key in place] == [expected[key] for key in place]
    finally:
        server.stop()


@pytest.mark.long
def test_drafts_with_a_wrong_q_are_found_without_the_noise(config: Config, ask: Ask) -> None:
    settings = ["route=split", "route.draft_sampling=probabilistic", "hazard=misreported_drafts"]
    server = ServeProcess(*settings)
    try:
        asked = config(server)
        asked.workload.max_tokens = 600
        served = ask(asked)
        beside = in_process(*settings, "workload.max_tokens=600")
        assert served.generations[0].token_ids == beside.generations[0].token_ids
        assert served.verdict.kind is beside.verdict.kind is VerdictKind.route_fault
        metrics, expected = served.audit.metrics, beside.audit.metrics
        assert metrics["noise_share"] == 0
        for name in ("log10_e", "p_value", "z", "z_collision", "violations", "edge"):
            np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-3, atol=1e-9)
    finally:
        server.stop()


@pytest.mark.long
@pytest.mark.timeout(500)  # 6,000 tokens through one server, scored twice
def test_a_fault_of_requests_that_come_and_go(ask: Ask, engine: EngineTarget) -> None:
    """Which round meets which request is a matter of time: so it is the judges that are compared."""
    server = ServeProcess(
        "route=split", "route.state.scheme=slots", "hazard=stale_column_0", "target.max_num_seqs=2"
    )
    try:
        url = f"target.base_url={server.url}"
        asked = compose(["target=openai", url, "workload=arrivals", "target.max_num_seqs=2", "seed=1001"])
        served = ask(asked)
        assert served.verdict.kind is VerdictKind.route_fault and OWN in served.verdict.reason
        inside = [truth(engine, asked, generation) for generation in served.generations]
        same = Run(served.target, served.generations, list(inside)).audit
        place = ("generation", "index", "token", "rule")
        found, expected = served.audit.details["first_bad"], same.details["first_bad"]
        assert [found[key] for key in place] == [expected[key] for key in place]
        assert served.audit.metrics["violations"] == same.metrics["violations"]
    finally:
        server.stop()
