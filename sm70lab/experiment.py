"""One experiment from configuration to verdict: the only file that knows all the rooms below."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sm70lab.addresses import without_password
from sm70lab.config_checks_target import AS_SERVED, ENGINE, OPENAI, SERVED
from sm70lab.errors import UsageError
from sm70lab.schema import (
    AUTO_REPEATS,
    ExperimentConfig,
    Generation,
    Prompt,
    ReferenceKind,
    TokenScores,
    Tracking,
    Verdict,
)
from sm70lab.stop_signals import Interrupted, StopSignals
from sm70lab.targets.base import Counted, JudgedBy, Managed, Progress, Refereed, Target
from sm70lab.tracking import ledger
from sm70lab.tracking import result as results
from sm70lab.tracking.fingerprint import fingerprint, model_hash
from sm70lab.tracking.marker import Heartbeat, foreign
from sm70lab.tracking.run_folder import (
    FIGURES,
    RunFolder,
    dead_runs,
    finished_run,
    same_runs,
)

if TYPE_CHECKING:  # the judge brings scipy, which a mistake in usage need not wait for
    from sm70lab.judge.outcomes import GenerationOutcome, SequentialRepeats
    from sm70lab.judge.verdict import RouteFacts

TARGETS = {
    "engine": ("sm70lab.targets.engine", "EngineTarget"),
    "openai": ("sm70lab.targets.openai", "OpenAITarget"),
    "vllm": ("sm70lab.targets.vllm", "VllmTarget"),
}


class Observer(Protocol):
    """Whoever watches a run: a terminal, a test."""

    def stage(self, line: str) -> None:
        """What happens now."""

    def waiting(self, line: str) -> None:
        """What something that is waited for said last."""

    def plan(self, prompts: list[Prompt], repeats: int) -> None:
        """What will be generated."""

    def progress(self, progress: Progress) -> None:
        """How far the current generation is."""

    def generated(self, generation: Generation) -> None:
        """One generation ended."""

    def note(self, line: str) -> None:
        """Something worth a line that is not an error."""


@dataclass(frozen=True)
class Outcome:
    """One experiment's end."""

    result: dict[str, Any]  # the content of result.json
    folder: Path
    exit_code: int
    skipped: bool = False  # this fingerprint was finished before; the record is the earlier one
    pending: str | None = None  # why MLflow has yet to get the record
    ledger: str | None = None  # of a skipped run: its variant's line in the ledger
    tracking: Tracking = field(default_factory=Tracking)  # where the record went


@dataclass
class _Run:
    """A run in the making."""

    config: ExperimentConfig
    fingerprint: str
    model_hash: str
    folder: RunFolder
    observer: Observer
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    loaded: dict[str, str | int | float] = field(default_factory=dict)
    generations: list[Generation] = field(default_factory=list)
    scores: dict[str, TokenScores] = field(default_factory=dict)
    facts: RouteFacts | None = None
    outcomes: dict[str, GenerationOutcome] = field(default_factory=dict)
    sequential: SequentialRepeats | None = None  # of repeats=auto
    audited: int = 0  # generations put to the reference
    counters: dict[str, Any] | None = None  # of a server, as they were read

    def result(self, verdict: Verdict | None, interrupted: str | None = None) -> dict[str, Any]:
        result = results.build(
            self.config, self.fingerprint, self.started, self.loaded, self.generations, verdict, interrupted
        )
        return result | {"counters": self.counters}


def run_experiment(
    config: ExperimentConfig,
    observer: Observer,
    build: Callable[[ExperimentConfig], Target] | None = None,
) -> Outcome:
    """Run one checked configuration, or return the record of the run that finished it before.

    ``build`` makes the target (the configured one by default). Raises ``UsageError`` where it cannot
    run, and ``Interrupted`` once the record of an interrupted run is safe.
    """
    with StopSignals() as stop:
        return _run_experiment(config, observer, build or build_target, stop)


def _run_experiment(
    config: ExperimentConfig,
    observer: Observer,
    build: Callable[[ExperimentConfig], Target],
    stop: StopSignals,
) -> Outcome:
    weights = model_hash(config.model, config.target)
    mark = fingerprint(config, weights)
    _close_dead(config, observer)  # first: one that died while MLflow was told is finished all the same
    earlier = finished_run(config, mark)
    if earlier is not None and not config.force:
        recorded = earlier.result()
        assert recorded is not None
        code, row = results.exit_code(recorded), ledger.row_line(config, weights)
        return Outcome(recorded, earlier.path, code, skipped=True, ledger=row, tracking=config.tracking)
    if not config.force and (rejected := ledger.rejection(config, weights)) is not None:
        raise UsageError(f"{rejected.line}: run it all the same with force=true")
    _refuse_twin(config, mark)
    run = _Run(config, mark, weights, RunFolder.claim(config, mark, weights), observer)
    with Heartbeat(run.folder.running):
        return _run_claimed(run, earlier, build, stop)


def _run_claimed(
    run: _Run, earlier: RunFolder | None, build: Callable[[ExperimentConfig], Target], stop: StopSignals
) -> Outcome:
    config = run.config
    try:
        _refuse_twin(config, run.fingerprint, own=run.folder)
        target = build(config)
        try:
            verdict = _generate_and_judge(run, target)
        finally:
            if isinstance(target, Managed):
                run.folder.save_texts(target.artifacts())
            if isinstance(target, Counted):
                run.counters = target.readings()
            target.close()
        result = _record(run, verdict, earlier)
    except KeyboardInterrupt:
        _keep_interrupted(run, stop.what)
        raise Interrupted(stop.what, stop.exit_code) from None
    except UsageError as error:
        if run.generations:
            _keep_interrupted(run, str(error))
        else:
            run.folder.discard()
        raise
    except Exception as error:
        _keep_interrupted(run, f"{type(error).__name__}: {error}", traceback.format_exc())
        raise
    try:
        pending = _tell_mlflow(run)
    except KeyboardInterrupt:
        raise Interrupted(stop.what, stop.exit_code) from None
    finally:
        run.folder.finish()  # the record is whole; MLFLOW_PENDING says what is left to do
    code = results.exit_code(result)
    return Outcome(result, run.folder.path, code, pending=pending, tracking=run.config.tracking)


def build_target(config: ExperimentConfig) -> Target:
    """The configured target. Imports torch; nothing before this does."""
    module, name = TARGETS[config.target.name]
    target: Target = getattr(importlib.import_module(module), name)(config)
    return target


def _generate_and_judge(run: _Run, target: Target) -> Verdict:
    config, observer = run.config, run.observer
    observer.stage(f"loading {config.model.name}")
    if isinstance(target, Managed):
        target.watch(observer.waiting, observer.note)
    target.load()
    run.loaded = {"model_hash": run.model_hash, **target.describe()}
    _refuse_other_weights(run)
    _refuse_other_route(run)
    prompts = target.prompts()
    repeats = config.sprt.max_repeats if isinstance(config.repeats, str) else config.repeats
    observer.plan(prompts, repeats)
    for repeat in range(config.first_repeat, config.first_repeat + repeats):
        for generation in target.generate(prompts, repeat, observer.progress):
            run.generations.append(generation)
            run.folder.save_generation(generation)
            observer.generated(generation)
        if config.repeats == AUTO_REPEATS and _decided(run, target):
            break
    _audit(run, target)
    observer.stage("judging")
    return _judge(run, target)


def _refuse_other_weights(run: _Run) -> None:
    """A server that tells its weights' hash must have the weights that ``model`` names."""
    model, told = run.config.model, run.loaded.get("server.version.model_hash")
    if told and model.name != SERVED and told != run.model_hash:
        raise UsageError(
            f"model={model.path or model.name}: not what the server has (model_hash {str(told)[:12]}… there, "
            f"{run.model_hash[:12]}… here); name its checkpoint, or leave model out"
        )


def _refuse_other_route(run: _Run) -> None:
    """A server that tells its route must have the one that ``route`` names."""
    config, told = run.config, run.loaded.get(results.SERVER_ROUTE)
    if config.target.name == OPENAI and told and config.route.name not in (AS_SERVED, told):
        raise UsageError(
            f"route={config.route.name}: the server runs {told} (its /version says so); leave route out, or "
            "name that one"
        )


def _audit(run: _Run, target: Target) -> None:
    """Score what has not been scored yet."""
    if not run.config.audit:
        return
    for generation in run.generations[run.audited :]:
        run.audited += 1
        run.observer.stage(f"auditing {generation.key} ({run.audited} of {len(run.generations)})")
        if (scores := target.score(generation)) is not None:
            run.scores[generation.key] = scores


def _decided(run: _Run, target: Target) -> bool:
    """Judge the repeat that has just ended and put it to the sequential test."""
    from sm70lab.judge.outcomes import SequentialRepeats
    from sm70lab.judge.statistics import Decision

    if run.sequential is None:
        run.sequential = SequentialRepeats(run.config.sprt)
    _audit(run, target)
    decision = run.sequential.add(_outcomes(run, target))
    run.observer.note(run.sequential.line)
    return decision is not Decision.undecided


def _outcomes(run: _Run, target: Target) -> list[GenerationOutcome]:
    """Judge each generation that has not been judged by itself yet."""
    from sm70lab.judge.outcomes import generation_outcome

    facts, fresh = _facts(run, target), []
    for generation in run.generations[len(run.outcomes) :]:
        scores = run.scores.get(generation.key)
        outcome = generation_outcome(generation, scores, run.config.gate, facts)
        run.outcomes[generation.key] = outcome
        fresh.append(outcome)
    return fresh


def _judge(run: _Run, target: Target) -> Verdict:
    from sm70lab.judge.verdict import judge

    scores = [run.scores.get(generation.key) for generation in run.generations]
    facts = replace(_facts(run, target), reference=_judged_by(run, target).line)
    verdict = judge(run.generations, scores, run.config.gate, facts, target.counters())
    _outcomes(run, target)
    for evidence in verdict.evidence:
        if (first := evidence.details.get("first_bad")) is not None:
            _explain(first, run, target)
    return verdict


def _facts(run: _Run, target: Target) -> RouteFacts:
    """What the judge must know of the run; the reference's rounding is measured once."""
    from sm70lab.judge.tolerance import tolerance_for
    from sm70lab.judge.verdict import RouteFacts

    if run.facts is None:
        config = run.config
        served, kind = config.target.name != ENGINE, config.target.reference
        asked = served and kind in (ReferenceKind.engine, ReferenceKind.server)
        scored = next((g for g in run.generations if g.key in run.scores), None)
        run.facts = RouteFacts(
            draft_tokens=config.route.draft_tokens,
            temperature=config.sampling.temperature,
            served=served,
            named_route=config.route.name != AS_SERVED,
            hazard=str(run.loaded.get(results.SERVER_HAZARD, results.NO_HAZARD)),
            must_audit=f"target.reference={kind.value}" if asked else "",
            tolerance=tolerance_for(
                _judged_by(run, target).dtype, target.rounding(scored) if scored else None
            ),
        )
    return run.facts


def _judged_by(run: _Run, target: Target) -> JudgedBy:
    return target.judged_by() if isinstance(target, Refereed) else JudgedBy("", run.config.model.dtype)


def _explain(first_bad: dict[str, Any], run: _Run, target: Target) -> None:
    """Put the text around the first bad token, and what the reference would have said, beside it."""
    generation = next(g for g in run.generations if g.key == first_bad["generation"])
    if (found := target.explain(generation, first_bad["index"])) is not None:
        explained = asdict(found)
        first_bad |= {name: explained.pop(name) for name in ("alternatives", "drawn")}
        first_bad["context"] = explained


def _record(run: _Run, verdict: Verdict, earlier: RunFolder | None) -> dict[str, Any]:
    from sm70lab.tracking.figures import write_figures

    run.observer.stage("recording")
    run.folder.save_tables(run.generations, run.scores)
    write_figures(run.folder.path / FIGURES, verdict)
    result = run.result(verdict)
    for generation in result["generations"]:
        outcome = run.outcomes[generation["key"]]
        generation |= {"passed": outcome.passed, "failure": outcome.line}
    if run.sequential is not None:
        result["sequential"] = run.sequential.record()
    if earlier is not None:
        result["reproduces"] = _reproduces(run, earlier)
    run.folder.save_result(result, results.summary(result))
    return result


def _reproduces(run: _Run, earlier: RunFolder) -> dict[str, Any]:
    now = {generation.key: generation.token_ids for generation in run.generations}
    try:
        return results.compare_tokens(earlier.path.name, earlier.token_ids(), now)
    except UsageError as error:  # the earlier record is damaged: no reason to lose this one
        return results.not_compared(earlier.path.name, str(error))


def _keep_interrupted(run: _Run, what: str, trace: str | None = None) -> None:
    """Keep what was generated, with the word of what ended the run."""
    for generation in run.generations:
        run.folder.save_generation(generation)
    run.folder.save_tables(run.generations, {})
    result = run.result(None, interrupted=what)
    run.folder.save_result(result, results.summary(result))
    if run.config.tracking.mlflow:
        run.folder.set_pending("interrupted")
    run.folder.interrupt(what, trace)
    tokens = sum(generation.tokens for generation in run.generations)
    run.observer.note(
        f"interrupted ({what}): {len(run.generations)} outputs, {tokens} tokens kept in {run.folder}"
    )


def _tell_mlflow(run: _Run) -> str | None:
    """Send this run, and whatever else is pending. Returns why it could not be sent, if so.

    Raises nothing but ``KeyboardInterrupt``: whatever MLflow does, the record is whole.
    """
    if not run.config.tracking.mlflow:
        return None
    try:
        reason = _send_to_mlflow(run)
    except Exception as error:
        reason = without_password(f"{type(error).__name__}: {error}")
        with suppress(UsageError):  # a full disk is heard of when DONE is written
            run.folder.set_pending(reason)
    if reason is not None:
        run.observer.note(f"MLflow: {reason}; {run.folder} is complete, send it later: sm70lab sync")
    return reason


def _send_to_mlflow(run: _Run) -> str | None:
    from sm70lab.tracking import mlflow_store

    tracking = run.config.tracking
    run.observer.stage(f"sending to {without_password(mlflow_store.store_uri(tracking))}")
    reason = mlflow_store.record(run.folder, tracking)
    if reason is None:
        for folder, failed in mlflow_store.send_pending(tracking):
            if failed is not None:
                run.observer.note(f"{folder} stays pending: {failed}")
    return reason


def _refuse_twin(config: ExperimentConfig, mark: str, own: RunFolder | None = None) -> None:
    """Two processes must not do the same run at once; of two that start together the later gives way."""
    for folder in same_runs(config, mark):
        if own is not None and folder.path == own.path:
            return
        owner = folder.owner()
        if owner is not None and not folder.done:
            gone = f", or if that process is gone delete {folder}/RUNNING" if foreign(owner) else ""
            raise UsageError(
                f"{folder}: this run is going on as process {owner.get('pid')} on {owner.get('host')}; "
                f"wait for it, or change seed or name{gone}"
            )


def _close_dead(config: ExperimentConfig, observer: Observer) -> None:
    for folder in dead_runs(Path(config.tracking.runs_dir)):
        end = "finished" if folder.done else "interrupted"
        observer.note(f"{folder}: its process is gone; closed as {end}")
        if config.tracking.mlflow:
            folder.set_pending("killed")
