"""Decode the cases, score them under the unchanged model, keep one file a run."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.sensitivity.cases import BASE, CASES, Case
from sm70lab.config import compose
from sm70lab.engine import decoder as engine_decoder
from sm70lab.engine.decoder import Decoder
from sm70lab.engine.hazards import hazard_named
from sm70lab.engine.sampling import truncate
from sm70lab.schema import ExperimentConfig, Generation, TokenScores
from sm70lab.targets.engine import EngineTarget

FIRST_SEED = 1_000
UNUSED = ("raw_logprob", "argmax", "top2_margin", "rank", "cdf_high")  # by the audit of sampled runs


class ChangedTarget(EngineTarget):
    """The engine with what a case changes."""

    def __init__(self, config: ExperimentConfig, case: Case) -> None:
        super().__init__(config)
        self.case = case

    def load(self, positions: int | None = None) -> None:
        super().load(positions)
        if self.case.weights is not None:
            self.case.weights(self.model)

    def decoder(self) -> Decoder:
        config = self.config
        return self.case.decoder(
            self.model,
            config.route,
            self._capacity,
            config.target.max_num_seqs,
            hazard_named(config.hazard),
            self.source.frequent,
        )


def make_all(folder: Path, names: list[str], runs: int, lossless: int, jobs: int) -> None:
    """Make every run that is not there, ``jobs`` at once."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [
        (name, FIRST_SEED + number)
        for name in names
        for number in range(lossless if CASES[name].group == "lossless" else runs)
    ]
    missing = [(name, seed) for name, seed in wanted if not path_of(folder, name, seed).exists()]
    missing.sort(key=lambda one: one[1])  # a run that is cut short has something of every case
    print(f"{len(wanted)} runs, {len(missing)} to make", flush=True)
    started = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        made = {pool.submit(make, folder, *one): one for one in missing}
        for number, future in enumerate(as_completed(made), 1):
            future.result()
            passed = time.perf_counter() - started
            print(f"{number} of {len(missing)}, {passed:.0f} s: {made[future]}", flush=True)


def path_of(folder: Path, name: str, seed: int) -> Path:
    """One run's file."""
    return folder / f"{name.replace(' ', '_').replace(',', '')}-s{seed}.npz"


def make(folder: Path, name: str, seed: int) -> None:
    """One run: decode, score, write."""
    case = CASES[name]
    target = ChangedTarget(compose([*BASE, *case.settings, f"seed={seed}"]), case)
    target.load()
    if case.truncate is not None:
        engine_decoder.truncate = case.truncate(truncate)  # type: ignore[attr-defined]
    started = time.perf_counter()
    generations = list(target.generate(target.prompts(), 0, lambda progress: None))
    seconds = time.perf_counter() - started
    engine_decoder.truncate = truncate  # type: ignore[attr-defined]
    judge = EngineTarget(
        compose([*BASE, *(s for s in case.settings if "hazard=" not in s), *case.judged_as, f"seed={seed}"])
    )
    judge.load()
    started = time.perf_counter()
    scored = [(g, judge.score(g)) for g in generations]
    audit_seconds = time.perf_counter() - started
    columns: dict[str, np.ndarray] = {"seconds": np.array([seconds, audit_seconds])}
    for number, (generation, scores) in enumerate(scored):
        if scores is not None:
            columns |= {f"{number}.{key}": value for key, value in _columns(generation, scores).items()}
    path = path_of(folder, name, seed)
    partial = path.with_name(f".{os.getpid()}-{path.name}")
    with partial.open("wb") as file:
        np.savez_compressed(file, **columns)  # type: ignore[arg-type]
    partial.rename(path)


def _columns(generation: Generation, scores: TokenScores) -> dict[str, np.ndarray]:
    kept = {f.name: np.asarray(getattr(scores, f.name)) for f in fields(TokenScores) if f.name not in UNUSED}
    found = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in kept.items()}
    found["log_bets"] = found["log_bets"].astype(np.float16)
    found["token_ids"] = np.array(generation.token_ids, dtype=np.int64)
    found["text"] = np.array(generation.text)
    found["prompt"] = np.array([generation.prompt.name, generation.prompt.text])
    found["index"] = np.array(generation.prompt.index)
    found["finish_reason"] = np.array(generation.finish_reason)
    rounds = [(r.position, r.drafted, r.accepted, r.emitted) for r in generation.rounds]
    found["rounds"] = np.array(rounds, dtype=np.int64).reshape(-1, 4)
    return found
