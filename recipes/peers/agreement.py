"""What two engines' runs of the same prompts say about each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sm70lab.schema import Generation, TokenScores

from .llama_server import Answer, Drafted

ACCEPTANCE_TOLERANCE = 0.02  # relative difference of drafted and of accepted counts


@dataclass
class Difference:
    """Where a run leaves llama.cpp's plain run. Margins are between the two likeliest tokens, in logits."""

    position: int
    llama_id: int | None  # None: that run has ended before
    other_id: int | None
    llama_margin: float | None  # None: the server gave no log-probability there
    engine_margin: float | None
    tie: bool


@dataclass
class Acceptance:
    """Drafts over the rounds that both engines count alike."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def add(self, other: Acceptance) -> None:
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted


@dataclass
class PromptReport:
    """One prompt in all runs."""

    name: str
    prompt_tokens: int
    tokens: int
    differences: dict[str, Difference | None]  # run → where it leaves llama.cpp's plain run
    totals: dict[str, tuple[int, int]]  # run → drafted and accepted as that engine itself counts
    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    equal_rounds: dict[str, int] = field(default_factory=dict)  # of the union, compared with llama.cpp
    union_rounds: dict[str, int] = field(default_factory=dict)
    scored: int = 0
    logprob_max: float = 0.0
    logprob_mean: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def same_ids(self) -> bool:
        return not any(self.differences.values())

    @property
    def same_rounds(self) -> bool:
        """True also where rounds could not be compared."""
        return self.equal_rounds.get("engine_mtp") == self.union_rounds.get("engine_mtp")

    @property
    def lead_explains(self) -> bool:
        """Whether every round is equal once the engine's draft head gets llama.cpp's lead row."""
        equal = self.equal_rounds.get("engine_lead")
        return equal is not None and equal == self.union_rounds["engine_lead"]


@dataclass
class Runs:
    """Everything that was run for one prompt."""

    llama_plain: Answer
    llama_mtp: Answer
    engine_plain: Generation
    engine_mtp: Generation
    scores: TokenScores  # of llama_plain's ids, by the reference
    engine_lead: Generation | None = None  # MTP with llama.cpp's extra row, where rounds differ


def judge_prompt(runs: Runs, drafts: int, tie: float) -> PromptReport:
    """Compare ids, rounds and log-probabilities of one prompt."""
    plain, prompt = runs.llama_plain, runs.engine_plain.prompt
    others = {
        "llama_mtp": runs.llama_mtp.ids,
        "engine_plain": runs.engine_plain.token_ids,
        "engine_mtp": runs.engine_mtp.token_ids,
    }
    report = PromptReport(
        prompt.name,
        len(prompt.token_ids),
        len(plain.ids),
        {name: difference(plain, ids, runs.scores, tie) for name, ids in others.items()},
        {
            "llama_mtp": (runs.llama_mtp.drafted, runs.llama_mtp.accepted),
            "engine_mtp": _totals(runs.engine_mtp),
        },
    )
    count = report.scored = len(plain.logprobs)
    if count:
        gaps = np.abs(np.array([*plain.logprobs.values()]) - runs.scores.raw_logprob[[*plain.logprobs]])
        report.logprob_max, report.logprob_mean = float(gaps.max()), float(gaps.mean())
    if not report.same_ids:
        report.notes.append("its ids differ, so its rounds stay out of the comparison")
    elif runs.llama_mtp.rounds is None:
        report.notes.append("the server's log does not account for its draft counts: rounds not compared")
    else:
        _compare_rounds(report, runs, runs.llama_mtp.rounds, drafts)
    return report


def difference(plain: Answer, other: Sequence[int], scores: TokenScores, tie: float) -> Difference | None:
    """The first position where ``other`` leaves llama.cpp's plain ids, with both engines' margins."""
    ids = plain.ids
    if list(other) == ids:
        return None
    shared = min(len(ids), len(other))
    at = next((i for i in range(shared) if ids[i] != other[i]), shared)
    llama = plain.margins.get(at)
    engine = float(scores.top2_margin[at]) if at < len(ids) else None
    return Difference(
        at,
        ids[at] if at < len(ids) else None,
        other[at] if at < len(other) else None,
        llama,
        engine,
        tie=engine is not None and engine <= tie and (llama is None or llama <= tie),
    )


def _compare_rounds(report: PromptReport, runs: Runs, llama: list[Drafted], drafts: int) -> None:
    theirs = whole(llama, drafts, report.tokens)
    report.acceptance["llama_mtp"] = _sum(theirs.values())
    for name, generation in (("engine_mtp", runs.engine_mtp), ("engine_lead", runs.engine_lead)):
        if generation is None:
            continue
        rounds = [Drafted(r.position, r.drafted, r.accepted) for r in generation.rounds]
        ours = whole(rounds, drafts, report.tokens)
        report.acceptance[name] = _sum(ours.values())
        report.equal_rounds[name] = sum(theirs.get(at) == r for at, r in ours.items())
        report.union_rounds[name] = len(theirs.keys() | ours.keys())


def whole(rounds: Iterable[Drafted], drafts: int, tokens: int) -> dict[int, Drafted]:
    """The rounds whose drafts and one token more all fit the output, by position.

    The last rounds are left out because the engines end differently: llama.cpp drafts no further
    than the budget and counts drafts after an end token; the engine drafts all and counts the delivered.
    """
    return {r.position: r for r in rounds if r.position + drafts + 1 <= tokens}


def _sum(rounds: Iterable[Drafted]) -> Acceptance:
    found = list(rounds)
    return Acceptance(len(found), sum(r.drafted for r in found), sum(r.accepted for r in found))


def _totals(generation: Generation) -> tuple[int, int]:
    return sum(r.drafted for r in generation.rounds), sum(r.accepted for r in generation.rounds)


@dataclass
class Comparison:
    """All prompts, pooled."""

    prompts: list[PromptReport]

    @property
    def pooled(self) -> dict[str, Acceptance]:
        """Acceptance of each drafting run over the prompts whose ids are equal everywhere."""
        total = {name: Acceptance() for name in ("llama_mtp", "engine_mtp")}
        for prompt in self.prompts:
            for name in total.keys() & prompt.acceptance.keys():
                total[name].add(prompt.acceptance[name])
        return total

    @property
    def faults(self) -> list[str]:
        """Reasons why the engines do not agree; empty when they do.

        Counts that differ are none where the lead row accounts for the whole difference.
        """
        found = []
        for prompt in self.prompts:
            runs = [run for run, d in prompt.differences.items() if d and not d.tie]
            if runs:
                found.append(f"{prompt.name}: ids differ beyond a tie in {', '.join(runs)}")
        pooled = self.pooled
        peer, engine = pooled["llama_mtp"], pooled["engine_mtp"]
        if not peer.drafted or not engine.drafted:
            return [*found, "no prompt is left on which acceptance can be compared"]
        if self.explained:
            return found
        for what in ("drafted", "accepted"):
            theirs, ours = getattr(peer, what), getattr(engine, what)
            if abs(theirs - ours) >= ACCEPTANCE_TOLERANCE * max(theirs, 1):
                found.append(f"{what} counts differ by 2 % or more: llama.cpp {theirs}, engine {ours}")
        return found

    @property
    def explained(self) -> bool:
        """Whether llama.cpp's lead row accounts for every unequal round."""
        unequal = [p for p in self.prompts if not p.same_rounds]
        return all(p.lead_explains for p in unequal)

    @property
    def rounds(self) -> tuple[int, int]:
        """(rounds of the engine equal to llama.cpp's, rounds in the union)."""
        equal = sum(p.equal_rounds.get("engine_mtp", 0) for p in self.prompts)
        return equal, sum(p.union_rounds.get("engine_mtp", 0) for p in self.prompts)

    @property
    def logprobs(self) -> tuple[int, float, float]:
        """(tokens scored, largest, mean difference)."""
        scored = sum(p.scored for p in self.prompts)
        mean = sum(p.logprob_mean * p.scored for p in self.prompts) / max(scored, 1)
        return scored, max((p.logprob_max for p in self.prompts), default=0.0), mean

    def as_json(self) -> dict[str, Any]:
        """Everything, for ``--json``."""
        scored, largest, mean = self.logprobs
        return {
            "agree": not self.faults,
            "faults": self.faults,
            "pooled": {n: {**asdict(a), "rate": a.rate} for n, a in self.pooled.items()},
            "equal_rounds": self.rounds[0],
            "union_rounds": self.rounds[1],
            "logprob": {"tokens": scored, "max": largest, "mean": mean},
            "prompts": [asdict(p) for p in self.prompts],
        }
