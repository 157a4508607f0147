"""Routes side by side: is one worse than the baseline, is it faster, and is the question fair?

An arm is what one side of a comparison ran: one run, or several of one route. Generations pair by
(prompt, repeat, seed). The tests themselves are in ``judge.statistics``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from sm70lab.judge import statistics
from sm70lab.judge.acceptance import Pooled, pool
from sm70lab.judge.statistics import PassRate, SpeedRatio
from sm70lab.schema import DraftSampling, Round, Sprt, VerdictKind

ALPHA = 0.05  # of every decision here, after correction for the number of routes
POWER = 0.8  # of the numbers of runs still needed
DESIGN = (Sprt().p0, Sprt().p1)  # the pass rates to be told apart where the arms show no difference
PASSED = {
    VerdictKind.passed: True,
    VerdictKind.route_fault: False,
    VerdictKind.model_degenerate: False,
    VerdictKind.inconclusive: None,
}
# The drafting rules under which every token is the no-draft run's own: ``engine.rejection``.
KEYED = (DraftSampling.token_matching.name, DraftSampling.coupled.name)

Key = tuple[str, int, int]  # prompt, repeat, seed


@dataclass(frozen=True)
class Sample:
    """One generation."""

    key: Key
    passed: bool | None  # None: not judged by itself
    token_ids: Sequence[int]
    rounds: Sequence[Round]
    streamed: tuple[int, float] | None = None  # of a server: tokens after the first chunk, their seconds

    @property
    def pooled(self) -> Pooled:
        """Its rounds added up; a server's output, whose rounds are not seen, has tokens and seconds alone."""
        rounds = pool(self.rounds)
        if self.rounds or self.streamed is None:
            return rounds
        return replace(rounds, emitted=self.streamed[0], seconds=self.streamed[1])


@dataclass(frozen=True)
class RunRecord:
    """One finished run as it is compared. ``facts``: dotted field → value, see ``fairness``."""

    name: str
    seed: int
    first_repeat: int
    verdict: VerdictKind
    reason: str
    speed_valid: bool
    by_generation: bool  # every generation has an outcome of its own
    sequential: bool  # repeats=auto: how many there are depended on what they showed
    samples: list[Sample]
    facts: dict[str, Any]
    tokens_keyed: bool  # greedy, without drafts, or drafted so that the tokens are the no-draft run's


@dataclass(frozen=True)
class Arm:
    """One side of a comparison."""

    label: str
    runs: list[RunRecord]

    @property
    def samples(self) -> dict[Key, Sample]:
        return {sample.key: sample for run in self.runs for sample in run.samples}

    @property
    def timed(self) -> dict[Key, Pooled]:
        """What the speed of each generation is made of, for the runs whose speed counts."""
        valid = [sample for run in self.runs if run.speed_valid for sample in run.samples]
        return {sample.key: sample.pooled for sample in valid}

    def outcomes(self, by_generation: bool) -> dict[Any, bool | None]:
        """Pass or fail by generation, or by run, keyed so that arms pair."""
        if by_generation:
            return {key: sample.passed for key, sample in self.samples.items()}
        return {(run.seed, run.first_repeat): PASSED[run.verdict] for run in self.runs}

    @property
    def by_generation(self) -> bool:
        return all(run.by_generation for run in self.runs)

    @property
    def faults(self) -> list[str]:
        """The runs that are a ``route_fault``, with their reason (less its summary in brackets)."""
        faulty = [run for run in self.runs if run.verdict is VerdictKind.route_fault]
        return [f"{run.name}: {run.reason.partition(' [')[0]}" for run in faulty]


@dataclass(frozen=True)
class Speeds:
    """Speeds of one arm over its valid runs, all rounds added up; NaN where nothing counts."""

    tokens_per_second: float
    rounds_per_second: float
    acceptance_length: float
    valid_runs: int


class Quality(str, Enum):
    """What the pass rates say of a route against the baseline."""

    worse = "worse"
    undecided = "not decided"
    no_regression = "no regression"


class Speed(str, Enum):
    """What the speeds say of a route against the baseline."""

    faster = "faster"
    slower = "slower"
    undecided = "speed not decided"
    not_compared = "speed not compared"


@dataclass(frozen=True)
class Tokens:
    """How many paired outputs are token for token equal; ``words`` say where not, or why it says nothing."""

    pairs: int
    equal: int
    comparable: bool
    words: str


@dataclass
class Against:
    """One route against the baseline."""

    label: str
    runs: list[str]
    unit: str  # what passes or fails in this pair of arms: "generation" or "run"
    rate: PassRate
    baseline_rate: PassRate  # in the same unit
    test: str  # McNemar or Boschloo, on what
    p_value: float
    p_adjusted: float
    faults: list[str]
    speeds: Speeds
    ratio: SpeedRatio
    rounds_ratio: SpeedRatio
    speed_p_adjusted: float
    tokens: Tokens
    runs_needed: int
    runs_needed_words: str
    quality: Quality = Quality.undecided
    speed: Speed = Speed.not_compared
    speed_words: str = ""
    conclusion: str = ""


@dataclass
class Comparison:
    """All routes against one baseline."""

    baseline: str
    baseline_runs: list[str]
    baseline_rate: PassRate
    baseline_speeds: Speeds
    baseline_faults: list[str]
    unit: str  # of ``baseline_rate``
    routes: list[Against]
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """1: a route is worse; else 3: one is not decided; else 0. Speed does not count."""
        found = {route.quality for route in self.routes}
        return 1 if Quality.worse in found else 3 if Quality.undecided in found else 0


def compare(arms: Sequence[Arm], speed_refused: dict[str, str] | None = None) -> Comparison:
    """Compare every arm with the first. ``speed_refused``: label → why its speed is not comparable.

    The arms must be fair to each other: ``fairness.refuse_unfair`` comes before.
    """
    refused = speed_refused or {}
    baseline, *others = arms
    routes = [_against(baseline, arm, arm.label in refused) for arm in others]
    adjusted = statistics.false_discovery([route.p_value for route in routes])
    speed_adjusted = statistics.false_discovery([route.ratio.p_value for route in routes])
    for route, p, speed_p in zip(routes, adjusted, speed_adjusted, strict=True):
        route.p_adjusted, route.speed_p_adjusted = p, speed_p
        _conclude(route, refused.get(route.label))
    return Comparison(
        baseline=baseline.label,
        baseline_runs=[run.name for run in baseline.runs],
        baseline_rate=_rate(baseline, baseline.by_generation),
        baseline_speeds=_speeds(baseline),
        baseline_faults=baseline.faults,
        unit=_unit(baseline.by_generation),
        routes=routes,
        notes=list(_notes(arms)),
    )


def _unit(by_generation: bool) -> str:
    return "generation" if by_generation else "run"


def _against(baseline: Arm, arm: Arm, speed_refused: bool) -> Against:
    by_generation = baseline.by_generation and arm.by_generation
    test, p_value = _pass_rate_test(baseline, arm, by_generation)
    a, b = ({}, {}) if speed_refused else (baseline.timed, arm.timed)
    ratio, rounds_ratio = (_ratio(a, b, name) for name in ("tokens_per_second", "rounds_per_second"))
    return Against(
        label=arm.label,
        runs=[run.name for run in arm.runs],
        unit=_unit(by_generation),
        rate=_rate(arm, by_generation),
        baseline_rate=_rate(baseline, by_generation),
        test=test,
        p_value=p_value,
        p_adjusted=p_value,
        faults=arm.faults,
        speeds=_speeds(arm),
        ratio=ratio,
        rounds_ratio=rounds_ratio,
        speed_p_adjusted=ratio.p_value,
        tokens=_tokens(baseline, arm),
        runs_needed=0,
        runs_needed_words="",
        speed_words=_why_untimed(baseline, arm),
    )


def _ratio(a: dict[Key, Pooled], b: dict[Key, Pooled], name: str) -> statistics.SpeedRatio:
    """Of one speed, over the pairs that both have one."""
    speeds = [(getattr(a[key], name), getattr(b[key], name)) for key in a if key in b]
    timed = [pair for pair in speeds if all(x > 0 for x in pair)]  # no seconds: NaN, not above 0
    return statistics.speed_ratio([x for x, _ in timed], [y for _, y in timed])


def _why_untimed(baseline: Arm, arm: Arm) -> str:
    """Why no pair has a speed, should there be none."""
    for side in (baseline, arm):
        passing = [run for run in side.runs if run.verdict is VerdictKind.passed]
        if passing and not any(run.speed_valid for run in passing):
            return f"{side.label} passes, but none of its speeds is valid: {passing[0].name} says why"
    a, b = baseline.timed, arm.timed
    pairs = [key for key in a if key in b]
    if pairs and not any(a[key].seconds and b[key].seconds for key in pairs):
        return "no times are recorded: a server that tells neither ids nor usage has no tok/s"
    return "no pair of passing runs"


def _rate(arm: Arm, by_generation: bool) -> PassRate:
    judged = [passed for passed in arm.outcomes(by_generation).values() if passed is not None]
    return statistics.pass_rate(sum(judged), len(judged))


def _pass_rate_test(baseline: Arm, arm: Arm, by_generation: bool) -> tuple[str, float]:
    """McNemar where every outcome has its pair, else Boschloo on all of them."""
    a, b = baseline.outcomes(by_generation), arm.outcomes(by_generation)
    pairs = [(a[key], b[key]) for key in a if key in b]
    judged = [(x, y) for x, y in pairs if x is not None and y is not None]
    if pairs and len(pairs) == len(a) == len(b):
        only_a = sum(bool(x) and not y for x, y in judged)
        only_b = sum(bool(y) and not x for x, y in judged)
        return f"McNemar, {_count(len(judged), 'pair')}", statistics.paired_p(only_a, only_b)
    p_value = statistics.unpaired_p(_rate(baseline, by_generation), _rate(arm, by_generation))
    return f"Boschloo, {len(pairs)} of {max(len(a), len(b))} paired", p_value


def _speeds(arm: Arm) -> Speeds:
    valid = [run for run in arm.runs if run.speed_valid]
    samples = [sample for run in valid for sample in run.samples]
    total = pool([r for sample in samples for r in sample.rounds])
    if not total.rounds:
        streams = [sample.pooled for sample in samples]
        total = replace(
            total, emitted=sum(s.emitted for s in streams), seconds=sum(s.seconds for s in streams)
        )
    rounds_per_second = total.rounds_per_second if total.rounds else math.nan
    length = total.acceptance_length if total.tested else math.nan
    return Speeds(total.tokens_per_second, rounds_per_second, length, len(valid))


def _tokens(baseline: Arm, arm: Arm) -> Tokens:
    """Equal outputs, and the first difference of the first pair that differs."""
    a, b = baseline.samples, arm.samples
    pairs = [key for key in sorted(a) if key in b]
    differing = [key for key in pairs if list(a[key].token_ids) != list(b[key].token_ids)]
    equal = len(pairs) - len(differing)
    unkeyed = [x.label for x in (baseline, arm) if not all(run.tokens_keyed for run in x.runs)]
    if not pairs:
        return Tokens(0, 0, False, "no pair")
    if unkeyed:
        draw = "draw their own" if len(unkeyed) > 1 else "draws its own"
        words = f"not comparable: {' and '.join(unkeyed)} {draw} (draft_sampling=coupled does not)"
        return Tokens(len(pairs), equal, False, words)
    if not differing:
        return Tokens(len(pairs), equal, True, f"all {len(pairs)} equal" if len(pairs) > 1 else "equal")
    prompt, repeat, seed = key = differing[0]
    x, y = a[key].token_ids, b[key].token_ids
    same = next((i for i, (s, t) in enumerate(zip(x, y, strict=False)) if s != t), min(len(x), len(y)))
    where = f"{prompt}-r{repeat} seed {seed}, token {same:,}"
    return Tokens(len(pairs), equal, True, f"{equal} of {len(pairs)} equal; first difference {where}")


def _conclude(route: Against, speed_refused: str | None) -> None:
    """Fill in quality, speed, the runs still needed and the one line."""
    rate, base = route.rate, route.baseline_rate
    lower = rate.judged > 0 and base.judged > 0 and rate.rate < base.rate
    significant = route.p_adjusted < ALPHA
    if route.faults or (lower and significant):
        route.quality = Quality.worse
    elif lower or not (rate.judged and base.judged):
        route.quality = Quality.undecided
    else:
        route.quality = Quality.no_regression
    decided = significant or route.quality is Quality.worse
    route.runs_needed, route.runs_needed_words = (0, "decided") if decided else _still_needed(route)
    route.speed, route.speed_words = _speed(route, speed_refused)
    route.conclusion = f"{_quality_words(route)}; {_speed_words(route)}"


def _still_needed(route: Against) -> tuple[int, str]:
    """Outcomes an arm still missing: to confirm the difference seen, or to see one of ``DESIGN``."""
    a, b = DESIGN
    base, rate = route.baseline_rate, route.rate
    if base.judged and rate.judged and base.rate != rate.rate:
        # half an outcome of either kind added, since 0 and 1 are no estimates of a rate (Agresti 2013)
        a, b = ((r.passed + 0.5) / (r.judged + 1) for r in (base, rate))
    have = min(base.judged, rate.judged)
    more = max(0, statistics.runs_needed(a, b, ALPHA, POWER) - have)
    return more, f"{more} more {route.unit}s an arm tell {a:.0%} from {b:.0%}" if more else "enough"


def _speed(route: Against, refused: str | None) -> tuple[Speed, str]:
    ratio = route.ratio
    if refused is not None:
        return Speed.not_compared, refused
    if route.quality is Quality.worse:
        return Speed.not_compared, "a worse route's speed does not count"
    if not ratio.pairs:
        return Speed.not_compared, route.speed_words
    if route.speed_p_adjusted >= ALPHA or ratio.low <= 1 <= ratio.high:
        least = statistics.pairs_to_decide(ALPHA)
        few = f"; {_count(least - ratio.pairs, 'more pair')} at least" if ratio.pairs < least else ""
        return Speed.undecided, f"p = {route.speed_p_adjusted:.2g} over {_count(ratio.pairs, 'pair')}{few}"
    return (Speed.faster if ratio.ratio > 1 else Speed.slower), f"p = {route.speed_p_adjusted:.2g}"


def _quality_words(route: Against) -> str:
    rate, base = route.rate, route.baseline_rate
    counts = f"{rate.passed} of {rate.judged} {route.unit}s pass, baseline {base.passed} of {base.judged}"
    if route.faults:
        more = f" and {len(route.faults) - 1} more" if len(route.faults) > 1 else ""
        return f"worse: route_fault in {route.faults[0]}{more}"
    if route.quality is Quality.worse:
        return f"worse: {counts}, p = {route.p_adjusted:.2g}"
    if not rate.judged or not base.judged:
        return "not decided: no outcome was judged" if not rate.judged else "not decided: no baseline outcome"
    if route.quality is Quality.undecided:
        return f"not decided: {counts}, p = {route.p_adjusted:.2g}"
    better = ", significantly more" if route.p_adjusted < ALPHA else ""
    return f"no regression: {counts}{better}"


def _speed_words(route: Against) -> str:
    if route.speed is Speed.not_compared:
        return f"{route.speed.value}: {route.speed_words}"
    factor = f"{route.ratio.ratio:.2f}×"
    if not math.isnan(route.ratio.low):
        factor += f" ({route.ratio.low:.2f} to {route.ratio.high:.2f})"
    return f"{route.speed.value}: {factor}, {route.speed_words}"


def _notes(arms: Sequence[Arm]) -> Iterator[str]:
    for arm in arms:
        lacking = [run.name for run in arm.runs if not run.by_generation]
        if lacking:
            yield (
                f"{arm.label} is judged by run, not by generation: {lacking[0]} is an older record, or has a "
                "fault that only the whole run shows"
            )
    if any(run.sequential for arm in arms for run in arm.runs):
        yield "repeats=auto stopped on what it saw: pass-rate intervals and p-values are nominal"
    baseline = arms[0].samples
    for arm in arms[1:]:
        alone = len(baseline.keys() ^ arm.samples.keys())
        if alone:
            yield f"{arm.label}: {_count(alone, 'generation')} without a partner in the other arm"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
