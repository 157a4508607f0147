"""The thread that owns the engine: faults stay where they are, and hazards have their in-process tokens."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sm70lab.config import compose
from sm70lab.engine.decoder import Decoder
from sm70lab.engine.hazards import HAZARDS, hazard_named
from sm70lab.engine.sequence import Sequence
from sm70lab.schema import ExperimentConfig, Generation, PromptSpec
from sm70lab.serving.answers import joined
from sm70lab.serving.intake import Intake, Limits
from sm70lab.serving.job import Delta, Event, Failure, Job
from sm70lab.serving.metrics import Metrics
from sm70lab.serving.protocol import CompletionRequest
from sm70lab.serving.worker import Worker
from sm70lab.targets.engine import EngineTarget

CACHE = ("route.state.block_size=8", "route.state.prefix_blocks=8", "route.state.prefill_chunk=5")
TEXTS = {"a": "1 2 3 4 5 6 7 8 9 10", "b": "4 5"}
POSITIONS = 200
BUDGET = 30
QUICK = ("no_ssm_rollback", "float16_state")  # of the hazards; the others are in the long tests


def config(*settings: str) -> ExperimentConfig:
    return compose(["model=tiny", *CACHE, f"workload.max_tokens={BUDGET}", "seed=11", *settings])


class Served:
    """A worker and what its jobs told."""

    def __init__(self, worker: Worker, intake: Intake) -> None:
        self.worker, self.intake = worker, intake

    def ask(self, text: str, **fields: Any) -> queue.Queue[Event]:
        """Submit a completion."""
        events: queue.Queue[Event] = queue.Queue()
        body = CompletionRequest(prompt=text, seed=11, max_tokens=fields.pop("max_tokens", BUDGET), **fields)
        self.job: Job = self.intake.completion(body, events.put)
        self.worker.submit(self.job)
        return events


@contextmanager
def served(made: ExperimentConfig, repetition_stop: bool = False) -> Iterator[Served]:
    target = EngineTarget(made)
    worker = Worker(target, POSITIONS, 8, Metrics("tiny", made.route.draft_tokens))
    worker.start()
    worker.ready.result(60)
    try:
        yield Served(worker, Intake(target, "tiny", Limits(POSITIONS, repetition_stop=repetition_stop)))
    finally:
        worker.close()
        worker.join(60)
        assert not worker.is_alive()


def whole(events: queue.Queue[Event]) -> Delta:
    """All of an answer."""
    deltas: list[Delta] = []
    while not deltas or deltas[-1].finish_reason is None:
        event = events.get(timeout=60)
        assert isinstance(event, Delta), event
        deltas.append(event)
    return joined(deltas)


def in_process(made: ExperimentConfig, *names: str) -> list[Generation]:
    made.workload.prompts = [PromptSpec(name, text=TEXTS[name]) for name in names]
    target = EngineTarget(made)
    target.load()
    return list(target.generate(target.prompts(), 0, lambda progress: None))


def able() -> list[str]:
    """Hazards that change something here and draw what they draw again."""
    made = config()
    found = [n for n in HAZARDS if hazard_named(n).cannot_act(made.route, made.sampling, 1) is None]
    return [name for name in found if name != "unseeded_draws"]


@pytest.mark.parametrize(
    "hazard", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in able()]
)
def test_a_hazard_has_its_in_process_tokens(hazard: str) -> None:
    settings = (f"hazard={hazard}",)
    (twin,) = in_process(config(*settings), "a")
    with served(config(*settings)) as server:
        found = whole(server.ask(TEXTS["a"]))
    assert found.token_ids == twin.token_ids
    assert (found.finish_reason, found.note) == (twin.finish_reason, twin.note)


@pytest.mark.long
def test_the_faults_themselves_were_served() -> None:
    honest = in_process(config(), "a")[0].token_ids
    changed = [n for n in able() if in_process(config(f"hazard={n}"), "a")[0].token_ids != honest]
    assert {"no_ssm_rollback", "accepted_plus_one"} <= set(changed)


def spoil(monkeypatch: pytest.MonkeyPatch, prompt: list[int], after: int) -> None:
    """NaN logits in the rounds of one prompt, once it has ``after`` tokens."""
    true_check = Decoder._finite

    def check(decoder: Decoder, logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
        bad = list(sequence.prompt_ids) == prompt and len(sequence.output) > after
        return true_check(decoder, logits * torch.nan if bad else logits, sequence)

    monkeypatch.setattr(Decoder, "_finite", check)


def test_nan_logits_end_one_answer_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("route=split", "target.max_num_seqs=2")
    alone = {name: in_process(config(*settings), name)[0].token_ids for name in TEXTS}
    with served(config(*settings)) as server:
        spoil(monkeypatch, [ord(c) % 64 for c in TEXTS["b"]], after=8)
        good, bad = server.ask(TEXTS["a"], logprobs=0), server.ask(TEXTS["b"])
        broken, sound = whole(bad), whole(good)
        again = whole(server.ask(TEXTS["a"]))
    assert broken.finish_reason == "non_finite" and "after" in broken.note
    assert 8 < len(broken.token_ids) < BUDGET
    assert broken.token_ids == alone["b"][: len(broken.token_ids)]
    assert sound.token_ids == again.token_ids == alone["a"] and sound.finish_reason == "length"
    assert [row.own.token for row in sound.rows] == alone["a"]
    assert sound.text == "".join(f"{token} " for token in alone["a"])


def test_a_restart_that_comes_to_other_tokens_is_an_error_not_a_mixture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = ("route=split", "target.max_num_seqs=2")
    with served(config(*settings, "hazard=unseeded_draws")) as server:
        spoil(monkeypatch, [ord(c) % 64 for c in TEXTS["b"]], after=8)
        good, bad = server.ask(TEXTS["a"]), server.ask(TEXTS["b"])
        assert whole(bad).finish_reason == "non_finite"
        events: list[Event] = []
        while not events or not isinstance(events[-1], Failure):
            events.append(good.get(timeout=60))
        assert all(isinstance(event, Delta) and event.finish_reason is None for event in events[:-1])


def test_an_engine_that_breaks_fails_what_runs_and_serves_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = in_process(config(), "a")[0].token_ids
    with served(config()) as server:
        with monkeypatch.context() as patch:

            def broken(*arguments: object) -> None:
                raise RuntimeError("no memory")

            patch.setattr(Decoder, "round", broken)
            events = server.ask(TEXTS["a"])
            assert isinstance(events.get(timeout=60), Delta)  # the prefill's
            failure = events.get(timeout=60)
            assert isinstance(failure, Failure) and "RuntimeError" in failure.message
        assert whole(server.ask(TEXTS["a"])).token_ids == alone
    assert "no memory" in capsys.readouterr().err


def test_a_loop_ends_with_its_own_reason_where_the_server_or_the_request_says_so() -> None:
    """A strong bias makes one token certain: a loop of period 1, which ends at its 180th token."""
    loop: dict[str, Any] = {"logit_bias": {"34": 100}, "max_tokens": 183}
    with served(config("route=no_mtp"), repetition_stop=True) as server:
        stopped = whole(server.ask(TEXTS["b"], **loop))
        assert (stopped.finish_reason, stopped.token_ids) == ("repetition", [34] * 180)
        let = whole(server.ask(TEXTS["b"], **loop, repetition_stop=False))
        assert (let.finish_reason, let.token_ids) == ("length", [34] * 183)


def test_jobs_that_are_cancelled_while_they_wait_or_score_never_get_a_slot() -> None:
    with served(config()) as server:
        running = server.ask(TEXTS["a"], max_tokens=80)
        waiting = server.ask(TEXTS["b"])
        waiting_job = server.job
        scored = server.ask(TEXTS["b"], prompt_logprobs=0)
        running.get(timeout=60)
        server.worker.cancel(waiting_job, "abort")
        server.worker.cancel(server.job, "abort")
        for events in (waiting, scored):
            event = events.get(timeout=60)
            assert isinstance(event, Delta) and event.finish_reason == "abort" and not event.token_ids
        assert waiting_job.times.admitted == 0
        assert len(joined([*drain(running)]).token_ids) > 60


def drain(events: queue.Queue[Event]) -> Iterator[Delta]:
    """What is left of an answer."""
    yield whole(events)


def test_a_prompt_is_scored_while_another_decodes() -> None:
    """Scoring a prompt takes turns with decoding, and its answer has all of it."""
    with served(config("target.max_num_seqs=2")) as server:
        first = server.ask(TEXTS["a"], max_tokens=40)
        second = server.ask(TEXTS["a"], max_tokens=5, prompt_logprobs=2)
        job = server.job
        assert len(whole(second).token_ids) == 5 and len(whole(first).token_ids) == 40
        assert len(job.prompt_rows) == len(job.request.prompt_ids) - 1
        assert all(len(row.likeliest) == 2 for row in job.prompt_rows)
        assert job.times.finished <= time.perf_counter()
