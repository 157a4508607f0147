"""Acceptance health: rates per draft position, windows over output tokens, named findings.

Rates are cumulative and pooled: position i's rate is the rounds whose first i drafts were all
accepted, over the rounds that put an i-th draft to the test; counts are added before dividing, so
1 of 2 and 90 of 100 make 91 of 102. (Conditional rates rise with the position by survivorship.)
The acceptance length is 1 + Σ rates over complete rounds (Leviathan, Kalman and Matias 2023: the
expected tokens of a round are the accepted prefix and one more).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from sm70lab.schema import Evidence, Gate, Generation, Round, Status

PLATEAU_RATE = 0.995  # every position at or above it: target and draft follow the same loop, or agree
PLATEAU_ROUNDS = 20  # fewer complete rounds in a window cannot show a plateau
NOVELTY_NGRAM = 8  # tokens
LOW_NOVELTY = 0.1  # healthy HTML and CSS: a median window of 0.6 to 0.95, a loop: 0
CHANCE_RATE = 0.05  # first-draft rate of a broken draft head
CHANCE_ROUNDS = 50
ZERO_CHANCES = 20  # tests of a position that no draft survives, before it is called dead
RISE_WINDOWS = 8
RISE_CORRELATION = -0.7  # Spearman's ρ of acceptance length and novelty over windows
RISE_P = 0.01
RISE_NOVELTY = 0.3  # a window below it: sound text drafts better where it repeats itself, too


@dataclass(frozen=True)
class Pooled:
    """Counts over a set of rounds. Rounds cut by an end token or the budget are kept apart."""

    tested: tuple[int, ...]  # rounds that put draft i + 1 to the test
    accepted: tuple[int, ...]  # of these, rounds that accepted it
    complete_rounds: int  # with the full number of drafts, and not cut
    complete_accepted: tuple[int, ...]  # rounds of these that accepted draft i + 1
    rounds: int
    emitted: int
    seconds: float

    @property
    def rates(self) -> list[float]:
        """Cumulative acceptance rate per draft position; NaN where nothing was tested."""
        return [_ratio(a, n) for a, n in zip(self.accepted, self.tested, strict=True)]

    @property
    def acceptance_length(self) -> float:
        """Tokens a complete round: 1 + Σ rates; NaN without complete rounds."""
        return 1.0 + _ratio(sum(self.complete_accepted), self.complete_rounds)

    @property
    def rounds_per_second(self) -> float:
        return _ratio(self.rounds, self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return _ratio(self.emitted, self.seconds)


@dataclass(frozen=True)
class Window:
    """One window of one generation's output tokens; a round belongs where it begins."""

    generation: str
    start: int  # tokens
    pooled: Pooled
    novelty: float  # share of the window's token 8-grams not seen earlier in this output

    @property
    def plateau(self) -> bool:
        """Every draft of every position accepted, as good as always, over enough rounds."""
        pooled = self.pooled
        enough = bool(pooled.tested) and pooled.complete_rounds >= PLATEAU_ROUNDS
        return enough and min(pooled.rates) >= PLATEAU_RATE


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value


def _is_cut(round_: Round) -> bool:
    """Whether an end token or the budget ended the round inside its accepted drafts."""
    return round_.emitted <= round_.accepted


def pool(rounds: Sequence[Round]) -> Pooled:
    """Add up rounds. In a cut round only the delivered drafts count as tested."""
    k = max((r.drafted for r in rounds), default=0)
    complete = [r for r in rounds if not _is_cut(r) and r.drafted == k]
    positions = range(1, k + 1)
    return Pooled(
        tested=tuple(sum((r.accepted if _is_cut(r) else r.drafted) >= i for r in rounds) for i in positions),
        accepted=tuple(sum(r.accepted >= i for r in rounds) for i in positions),
        complete_rounds=len(complete),
        complete_accepted=tuple(sum(r.accepted >= i for r in complete) for i in positions),
        rounds=len(rounds),
        emitted=sum(r.emitted for r in rounds),
        seconds=sum(r.seconds for r in rounds),
    )


def novel(token_ids: Sequence[int]) -> np.ndarray:
    """Bool, one entry an 8-gram: whether it is this 8-gram's first occurrence in the output."""
    grams = [tuple(token_ids[i : i + NOVELTY_NGRAM]) for i in range(len(token_ids) - NOVELTY_NGRAM + 1)]
    seen: set[tuple[int, ...]] = set()
    flags = np.zeros(len(grams), dtype=bool)
    for i, gram in enumerate(grams):
        flags[i] = gram not in seen
        seen.add(gram)
    return flags


def windows(generation: Generation, window_tokens: int) -> list[Window]:
    """Cut one generation into windows of ``window_tokens`` output tokens; the last may be short."""
    groups: dict[int, list[Round]] = {}
    for round_ in generation.rounds:
        groups.setdefault(round_.position // window_tokens, []).append(round_)
    flags = novel(generation.token_ids)
    result = []
    for index, rounds in sorted(groups.items()):
        part = flags[index * window_tokens : (index + 1) * window_tokens]
        novelty = float(part.mean()) if part.size else float("nan")
        result.append(Window(generation.key, index * window_tokens, pool(rounds), novelty))
    return result


def accounting(generation: Generation, draft_tokens: int) -> list[str]:
    """What does not add up in the rounds; empty when they tile the output and match the route.

    Every round but the last emits accepted + 1 tokens, the next begins where it ended, and the last
    ends at the last token. Only then does the identity hold: tokens a complete round = 1 + Σ rates.
    """
    faults = []
    position = generation.rounds[0].position if generation.rounds else 0
    for number, r in enumerate(generation.rounds):
        last = number == len(generation.rounds) - 1
        if not 0 <= r.accepted <= r.drafted <= draft_tokens:
            faults.append(
                f"round {number}: {r.accepted} accepted of {r.drafted} drafts (route: {draft_tokens})"
            )
        if not (r.emitted == r.accepted + 1 or (last and r.accepted <= r.emitted <= r.accepted + 1)):
            faults.append(f"round {number}: {r.emitted} tokens from {r.accepted} accepted")
        if r.position != position:
            faults.append(f"round {number}: begins at {r.position}, the one before ended at {position}")
        position = r.position + r.emitted
    if generation.rounds and position != len(generation.token_ids):
        faults.append(f"rounds end at token {position} of {len(generation.token_ids)}")
    return [f"{generation.key} {fault}" for fault in faults]


def findings_of(total: Pooled, parts: list[Window], faults: list[str]) -> dict[str, str]:
    """Named findings, each in words with its numbers."""
    found = {}
    plateau = [w for w in parts if w.plateau]
    looping = [w for w in plateau if w.novelty < LOW_NOVELTY]
    if plateau:
        w = (looping or plateau)[0]
        found["plateau"] = (
            f"every position ≥ {PLATEAU_RATE} in {len(plateau)} of {len(parts)} windows, "
            f"{len(looping)} of them repeating; first: {w.generation} from token {w.start:,}, "
            f"novelty {w.novelty:.2f}"
        )
    for i, (accepted, tested) in enumerate(zip(total.accepted, total.tested, strict=True)):
        chances = min(tested, total.accepted[i - 1]) if i else tested
        if accepted == 0 and chances >= ZERO_CHANCES:
            found["permanent_zero"] = f"draft {i + 1} was never accepted in {chances:,} chances"
            break
    if total.tested and total.tested[0] >= CHANCE_ROUNDS and total.rates[0] < CHANCE_RATE:
        found["chance_level"] = (
            f"first draft accepted in {total.accepted[0]:,} of {total.tested[0]:,} rounds: broken draft head?"
        )
    usable = [w for w in parts if w.pooled.complete_rounds >= PLATEAU_ROUNDS and not np.isnan(w.novelty)]
    lengths = [w.pooled.acceptance_length for w in usable]
    novelties = [w.novelty for w in usable]
    repetitive = min(novelties, default=1.0) < RISE_NOVELTY
    if len(usable) >= RISE_WINDOWS and repetitive and len(set(lengths)) > 1:
        result = stats.spearmanr(lengths, novelties)
        if result.statistic <= RISE_CORRELATION and result.pvalue < RISE_P:
            found["rise_with_repetition"] = (
                f"acceptance length rises as the text repeats itself (Spearman ρ {result.statistic:.2f} "
                f"over {len(usable)} windows)"
            )
    if faults:
        found["accounting"] = f"the rounds do not add up: {faults[0]}" + (
            f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        )
    return found


def series(parts: list[Window]) -> list[dict[str, Any]]:
    """One entry a window: what a chart over output tokens needs."""
    return [
        {
            "generation": w.generation,
            "token": w.start,
            "acceptance_length": _number(w.pooled.acceptance_length),
            "rates": [_number(rate) for rate in w.pooled.rates],
            "novelty": _number(w.novelty),
            "rounds_per_second": _number(w.pooled.rounds_per_second),
            "tokens_per_second": _number(w.pooled.tokens_per_second),
        }
        for w in parts
    ]


def evidence(generations: Sequence[Generation], gate: Gate, draft_tokens: int) -> Evidence:
    """Acceptance over all generations.

    ``bad`` where a window is at the plateau while its text repeats; ``warn`` on any other finding;
    ``unknown`` where a drafting route reports no rounds; else ``ok``. ``metrics`` holds the pooled
    numbers (rates as ``rate_1``…, per second where time was measured), ``details`` the ``findings``,
    the ``windows`` (None where a window has no such number) and the ``accounting`` faults.
    """
    rounds = [r for g in generations for r in g.rounds]
    total = pool(rounds)
    parts = [w for g in generations for w in windows(g, gate.window_tokens)]
    faults = [fault for g in generations for fault in accounting(g, draft_tokens)]
    found = findings_of(total, parts, faults)
    metrics = _metrics(total)
    details = {"findings": found, "windows": series(parts), "accounting": faults}
    if draft_tokens == 0 and not total.tested:
        line = "no drafts" + (f"; {found['accounting']}" if faults else "")
        return Evidence("acceptance", Status.warn if faults else Status.ok, line, metrics, details)
    if not total.tested:
        line = f"{draft_tokens} drafts a round asked for, none reported"
        return Evidence("acceptance", Status.unknown, line, metrics, details)
    bad = any(w.plateau and w.novelty < LOW_NOVELTY for w in parts)
    status = Status.bad if bad else Status.warn if found else Status.ok
    rates = " ".join(f"{rate:.3f}" for rate in total.rates)
    line = f"{total.acceptance_length:.2f} tokens a round over {total.rounds:,} rounds, by position {rates}"
    line += "".join(f"; {name}: {text}" for name, text in found.items())
    return Evidence("acceptance", status, line, metrics, details)


def _metrics(total: Pooled) -> dict[str, float]:
    values = {f"rate_{i}": rate for i, rate in enumerate(total.rates, 1)}
    values |= {
        "rounds": float(total.rounds),
        "rounds_per_second": total.rounds_per_second,
        "tokens_per_second": total.tokens_per_second,
    }
    if total.tested:
        values["acceptance_length"] = total.acceptance_length
    return {name: value for name, value in values.items() if not np.isnan(value)}
