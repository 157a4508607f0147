"""Comparisons of arms built by hand: pairing, tests, speeds that count, tokens, fairness, conclusions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from sm70lab.errors import UsageError
from sm70lab.judge.comparison import Arm, Quality, RunRecord, Sample, Speed, compare
from sm70lab.judge.fairness import facts, refuse_unfair
from sm70lab.schema import Round, VerdictKind

SETTINGS: dict[str, Any] = {
    "name": "t",
    "route": {"name": "split", "draft_tokens": 4},
    "target": {"name": "engine", "threads": 1, "device": "auto"},
    "model": {"name": "web", "path": "/a", "dtype": "float32"},
    "workload": {"name": "web", "max_tokens": 3000, "prompts": [{"name": "html", "text": "<p>"}]},
    "sampling": {"temperature": 1.0, "min_tokens": 0, "stop_ids": []},
    "gate": {"name": "strict"},
    "hazard": "none",
    "seed": 1,
    "repeats": 1,
}


def run_record(
    seed: int = 1,
    *,
    passed: bool | None = True,
    seconds: float = 0.01,
    accepted: int = 2,
    ids: list[int] | None = None,
    kind: VerdictKind | None = None,
    config: dict[str, Any] | None = None,
    **changes: Any,
) -> RunRecord:
    """One run of two prompts, 30 rounds each; ``seconds`` a round."""
    kinds = {True: VerdictKind.passed, False: VerdictKind.model_degenerate, None: VerdictKind.inconclusive}
    verdict = kind or kinds[passed]
    rounds = [Round(i * (accepted + 1), 4, accepted, accepted + 1, seconds * (1 + i % 3)) for i in range(30)]
    tokens = list(range(90)) if ids is None else ids
    samples = [Sample((name, 0, seed), passed, tokens, rounds) for name in ("css", "html")]
    values: dict[str, Any] = {
        "name": f"t/run-s{seed}",
        "seed": seed,
        "first_repeat": 0,
        "verdict": verdict,
        "reason": "token 17 [and numbers]",
        "speed_valid": verdict is VerdictKind.passed,
        "by_generation": True,
        "sequential": False,
        "samples": samples,
        "facts": facts(config or SETTINGS, "ab12", "a processor"),
        "tokens_keyed": True,
    }
    return RunRecord(**values | changes)


def arm(label: str, runs: list[RunRecord]) -> Arm:
    return Arm(label, runs)


BASE = arm("no_mtp", [run_record(seed, seconds=0.02 * (1 + 0.01 * seed)) for seed in range(1, 5)])


def test_a_faster_route_that_passes() -> None:
    route = arm("split", [run_record(seed, seconds=0.01 * (1 + 0.013 * seed)) for seed in range(1, 5)])
    found = compare([BASE, route])
    (against,) = found.routes
    assert (found.exit_code, found.unit) == (0, "generation")
    assert (against.quality, against.speed) == (Quality.no_regression, Speed.faster)
    assert against.test == "McNemar, 8 pairs"
    assert against.ratio.ratio == pytest.approx(2.0, rel=0.02)
    assert against.ratio.low < against.ratio.ratio < against.ratio.high
    assert against.rounds_ratio.ratio == pytest.approx(against.ratio.ratio)
    assert against.speeds.acceptance_length == pytest.approx(3.0)
    assert against.tokens.words == "all 8 equal"
    assert against.runs_needed == 76 - 8
    assert "no regression: 8 of 8 generations pass, baseline 8 of 8; faster: 1.99× (" in against.conclusion
    back = compare([route, BASE]).routes[0]
    assert back.speed is Speed.slower
    assert back.ratio.ratio == pytest.approx(1 / against.ratio.ratio)


def served(label: str, seconds: float | None) -> Arm:
    """The baseline's outputs as from a server: no rounds, 89 tokens after the first in ``seconds``."""

    def sample(one: Sample, number: int) -> Sample:
        streamed = None if seconds is None else (89, seconds * (1 + 0.01 * number))
        return replace(one, rounds=[], streamed=streamed)

    return arm(label, [replace(r, samples=[sample(s, r.seed) for s in r.samples]) for r in BASE.runs])


def test_the_speeds_of_two_servers_are_those_of_their_streams() -> None:
    slow, fast = served("slow", 2.0), served("fast", 1.0)
    found = compare([slow, fast])
    (against,) = found.routes
    assert against.speed is Speed.faster and against.ratio.pairs == 8
    assert against.ratio.ratio == pytest.approx(2.0)
    assert against.rounds_ratio.pairs == 0  # a server's rounds are not seen
    assert against.speeds.tokens_per_second == pytest.approx(4 * 89 / (1.01 + 1.02 + 1.03 + 1.04))
    assert math.isnan(against.speeds.rounds_per_second) and math.isnan(against.speeds.acceptance_length)
    mixed = compare([BASE, fast]).routes[0]
    assert mixed.ratio.pairs == 8 and mixed.rounds_ratio.pairs == 0


def test_why_no_speed_is_compared() -> None:
    (against,) = compare([served("a", None), served("b", 1.0)]).routes
    assert against.quality is Quality.no_regression and against.speed is Speed.not_compared
    assert against.speed_words.startswith("no times are recorded")
    shared = arm("b", [replace(run, speed_valid=False) for run in BASE.runs])
    (against,) = compare([BASE, shared]).routes
    assert against.speed_words == "b passes, but none of its speeds is valid: t/run-s1 says why"


def test_six_pairs_at_least_decide_a_speed() -> None:
    two = [run_record(seed, seconds=0.001 * seed) for seed in (1, 2)]
    against = compare([BASE, arm("split", two)]).routes[0]
    assert against.speed is Speed.undecided
    assert "2 more pairs at least" in against.speed_words


@pytest.mark.parametrize("kind", [VerdictKind.route_fault, VerdictKind.model_degenerate])
def test_a_loop_is_never_a_gain(kind: VerdictKind) -> None:
    loops = [run_record(s, passed=False, kind=kind, accepted=4, seconds=0.001) for s in range(1, 5)]
    found = compare([BASE, arm("split", loops)])
    (against,) = found.routes
    assert (found.exit_code, against.quality, against.speed) == (1, Quality.worse, Speed.not_compared)
    for value in (against.ratio.ratio, *vars(against.speeds).values()):
        assert value == 0 or math.isnan(value)
    assert "faster" not in against.conclusion


def test_the_passing_runs_of_a_worse_route_are_not_ranked_either() -> None:
    fast = [run_record(s, seconds=0.001) for s in range(1, 5)]
    broken = run_record(5, passed=False, kind=VerdictKind.route_fault)
    against = compare([BASE, arm("split", [*fast, broken])]).routes[0]
    assert against.quality is Quality.worse
    assert against.speed is Speed.not_compared
    assert against.conclusion.startswith("worse: route_fault in t/run-s5: token 17; speed")


def test_a_lower_pass_rate_must_be_significant() -> None:
    base = arm("no_mtp", [run_record(seed) for seed in range(10)])

    def against(failures: int) -> Any:
        return compare([base, arm("split", [run_record(s, passed=s >= failures) for s in range(10)])])

    few, many = against(1), against(4)  # two generations each
    assert (few.exit_code, few.routes[0].quality) == (3, Quality.undecided)
    assert few.routes[0].p_value == pytest.approx(0.5)
    assert few.routes[0].runs_needed > 0
    assert "not decided: 18 of 20 generations pass, baseline 20 of 20, p = 0.5" in few.routes[0].conclusion
    assert (many.exit_code, many.routes[0].quality) == (1, Quality.worse)
    assert many.routes[0].p_value == pytest.approx(2 / 2**8)
    assert many.routes[0].runs_needed == 0
    better = compare([arm("a", [run_record(s, passed=s >= 4) for s in range(10)]), base])
    assert (better.exit_code, "significantly more" in better.routes[0].conclusion) == (0, True)


def test_many_routes_are_corrected() -> None:
    base = arm("no_mtp", [run_record(seed) for seed in range(10)])
    sound = [arm(f"sound{i}", base.runs) for i in range(4)]
    worse = arm("split", [run_record(s, passed=s >= 3) for s in range(10)])
    alone = compare([base, worse]).routes[0]
    beside = compare([base, worse, *sound]).routes[0]
    assert alone.p_adjusted == alone.p_value == beside.p_value == pytest.approx(2 / 2**6)
    assert beside.p_adjusted == pytest.approx(5 * 2 / 2**6)
    assert (alone.quality, beside.quality) == (Quality.worse, Quality.undecided)


def test_seeds_that_do_not_pair_are_compared_as_two_samples() -> None:
    base = arm("no_mtp", [run_record(seed) for seed in range(10)])
    other = arm("split", [run_record(seed, passed=seed >= 15) for seed in range(9, 19)])
    against = compare([base, other]).routes[0]
    assert against.test == "Boschloo, 2 of 20 paired"
    assert against.quality is Quality.worse
    notes = compare([base, other]).notes
    assert any("split: 36 generations without a partner" in note for note in notes)


def test_records_without_outcomes_of_generations_are_judged_by_run() -> None:
    old = [
        run_record(seed, passed=None, kind=VerdictKind.passed, by_generation=False) for seed in range(1, 5)
    ]
    found = compare([BASE, arm("split", old)])
    (against,) = found.routes
    assert (found.unit, found.baseline_rate.judged) == ("generation", 8)
    assert (against.unit, against.baseline_rate.judged, against.rate.passed) == ("run", 4, 4)
    assert against.test == "McNemar, 4 pairs"
    assert "split is judged by run, not by generation: t/run-s1" in found.notes[0]
    assert compare([arm("old", old), BASE]).unit == "run"


def test_nothing_judged_is_not_decided() -> None:
    found = compare([BASE, arm("split", [run_record(s, passed=None) for s in range(1, 5)])])
    assert (found.exit_code, found.routes[0].rate.judged) == (3, 0)
    assert "no outcome was judged" in found.routes[0].conclusion


def test_a_sequential_run_says_that_its_numbers_are_nominal() -> None:
    notes = compare([BASE, arm("split", [run_record(sequential=True)])]).notes
    assert any("nominal" in note for note in notes)


def test_tokens_are_compared_where_they_can_be() -> None:
    other = [run_record(1, ids=[*range(57), 3, *range(58, 90)]), run_record(2), run_record(3, ids=[0, 1])]
    tokens = compare([BASE, arm("split", other)]).routes[0].tokens
    assert tokens.words == "2 of 6 equal; first difference css-r0 seed 1, token 57"
    unkeyed = [run_record(s, tokens_keyed=False, ids=[s]) for s in (1, 2)]
    tokens = compare([BASE, arm("spec", unkeyed)]).routes[0].tokens
    assert (tokens.comparable, tokens.equal) == (False, 0)
    assert tokens.words.startswith("not comparable: spec draws its own")
    shorter = compare([arm("a", [run_record(ids=[1, 2, 3])]), arm("b", [run_record(ids=[1, 2])])])
    assert "token 2" in shorter.routes[0].tokens.words


# -------------------------------------------------------------------------------------- fairness


def changed(**changes: Any) -> dict[str, Any]:
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in SETTINGS.items()}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            config[section][name] = value
        else:
            config[section] = value
    return config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling__temperature": 0.8}, "sampling.temperature 1.0 against 0.8"),
        ({"sampling__min_tokens": 3000}, "sampling.min_tokens 0 against 3000"),
        ({"sampling__stop_ids": [5]}, "sampling.stop_ids [] against [5]"),
        ({"sampling__ignore_eos": True}, "sampling.ignore_eos not recorded against True"),
        ({"target__ignore_eos": True}, "target.ignore_eos not recorded against True"),
        ({"workload__max_tokens": 100}, "workload.max_tokens 3000 against 100"),
        (
            {"workload__prompts": [{"name": "html", "text": "<p><p>"}]},
            "workload.prompts[0].text <p> against <p><p>",
        ),
        ({"hazard": "off_by_one"}, "hazard none against off_by_one"),
        ({"gate__name": "fixed_quality"}, "gate.name strict against fixed_quality"),
        ({"model__dtype": "float16"}, "model.dtype float32 against float16"),
    ],
)
def test_unfair_pairs_are_refused_with_field_and_values(changes: dict[str, Any], words: str) -> None:
    pair = [arm("a", [run_record()]), arm("b", [run_record(config=changed(**changes))])]
    with pytest.raises(UsageError) as caught:
        refuse_unfair(pair)
    field = words.split(" ")[0]
    assert str(caught.value).startswith(f"unfair: a against b differ in {words}; ")
    assert str(caught.value).endswith(f"allow={field}")
    refused, notes = refuse_unfair(pair, [field])
    assert (refused, notes) == ({}, [f"b differs on purpose in {words}"])


def test_every_differing_field_is_named() -> None:
    other = changed(sampling__temperature=0.8, workload__max_tokens=7, hazard="off_by_one")
    pair = [arm("a", [run_record()]), arm("b", [run_record(config=other)])]
    with pytest.raises(UsageError, match=r"allow=hazard,sampling\.temperature,workload\.max_tokens"):
        refuse_unfair(pair)
    with pytest.raises(UsageError, match=r"differ in sampling\.temperature 1\.0 against 0\.8; workload"):
        refuse_unfair(pair, ["hazard"])
    assert refuse_unfair(pair, ["hazard", "sampling", "workload"])[0] == {}
    with pytest.raises(UsageError, match="allow=gate: does not differ"):
        refuse_unfair(pair, ["hazard", "sampling", "workload", "gate"])


def test_another_model_is_refused_by_its_hash() -> None:
    other = run_record(facts=facts(SETTINGS, "cd34", "a processor"))
    with pytest.raises(UsageError, match="model_hash ab12 against cd34"):
        refuse_unfair([BASE, arm("b", [other])])


def test_routes_seeds_names_and_places_may_differ() -> None:
    other = changed(
        route={"name": "x"}, name="u", seed=9, repeats=4, model__path="/b", workload__name="mine", force=True
    )
    assert refuse_unfair([BASE, arm("b", [run_record(config=other)])]) == ({}, [])


@pytest.mark.parametrize(
    ("facts_of_b", "words"),
    [
        (facts(SETTINGS, "ab12", "another"), "hardware a processor against another"),
        (facts(SETTINGS, "ab12", "a processor", threads=4), "target.threads 1 against 4"),
        (facts(changed(target__device="cuda"), "ab12", "a processor"), "target.device auto against cuda"),
    ],
)
def test_another_machine_refuses_the_speed_alone(facts_of_b: dict[str, Any], words: str) -> None:
    fast = arm("b", [run_record(s, seconds=0.001 * s, facts=facts_of_b) for s in range(1, 5)])
    refused, _ = refuse_unfair([BASE, fast])
    assert refused == {"b": f"differs in {words}"}
    against = compare([BASE, fast], refused).routes[0]
    assert (against.quality, against.speed) == (Quality.no_regression, Speed.not_compared)
    assert math.isnan(against.ratio.ratio)
    assert words in against.conclusion
    assert refuse_unfair([BASE, fast], [words.split(" ")[0]])[0] == {}
