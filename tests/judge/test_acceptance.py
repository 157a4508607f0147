"""Pooling, the identity, windows, and every named finding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sm70lab.judge import acceptance
from sm70lab.schema import Gate, Generation, Round, Status


def rounds_of(accepted: list[int], drafted: int = 4, start: int = 0, seconds: float = 0.05) -> list[Round]:
    out, position = [], start
    for a in accepted:
        out.append(Round(position, drafted, a, a + 1, seconds))
        position += a + 1
    return out


def run(make: Any, rounds: list[Round], ids: list[int] | None = None, **kwargs: Any) -> Generation:
    end = rounds[-1].position + rounds[-1].emitted
    return make(token_ids=list(range(end)) if ids is None else ids, rounds=rounds, **kwargs)


def random_accepts(seed: int, count: int, rates: tuple[float, ...] = (0.97, 0.93, 0.93, 0.87)) -> list[int]:
    hits = np.random.default_rng(seed).random((count, len(rates))) < np.array(rates)
    return np.cumprod(hits, axis=1).sum(axis=1).tolist()


def test_counts_are_pooled_not_rates() -> None:
    first = rounds_of([1, 0], drafted=1)
    second = rounds_of([1] * 90 + [0] * 10, drafted=1)
    total = acceptance.pool([*first, *second])
    assert (total.accepted, total.tested) == ((91,), (102,))
    assert total.rates == [pytest.approx(91 / 102)]


def test_rates_are_cumulative() -> None:
    assert acceptance.pool(rounds_of([4, 2, 0, 2])).rates == [0.75, 0.75, 0.25, 0.25]


def test_identity_on_random_rounds() -> None:
    rounds = rounds_of(random_accepts(1, 500))
    total = acceptance.pool(rounds)
    assert total.acceptance_length == pytest.approx(np.mean([r.emitted for r in rounds]), abs=1e-12)
    assert total.acceptance_length == pytest.approx(1 + sum(total.rates), abs=1e-12)


def test_only_tested_positions_count() -> None:
    short = Round(0, 1, 1, 2, 0.1)  # a round with one draft tests one position
    cut = Round(2, 4, 2, 2, 0.1)  # the end token was the second accepted draft
    total = acceptance.pool([short, cut, *rounds_of([0], start=4)])
    assert total.tested == (3, 2, 1, 1)
    assert total.accepted == (2, 1, 0, 0)
    assert total.complete_rounds == 1
    assert total.acceptance_length == 1.0
    assert total.emitted == 5


def test_windows_tile_the_output(make: Any) -> None:
    generation = run(make, rounds_of(random_accepts(2, 600)))
    parts = acceptance.windows(generation, 500)
    assert [w.start for w in parts] == list(range(0, len(generation.token_ids), 500))
    assert sum(w.pooled.rounds for w in parts) == 600
    assert sum(w.pooled.emitted for w in parts) == len(generation.token_ids)
    assert parts[0].pooled.rounds == sum(r.position < 500 for r in generation.rounds)
    whole = acceptance.pool(generation.rounds)
    assert tuple(np.sum([w.pooled.accepted for w in parts], axis=0)) == whole.accepted
    assert parts[0].pooled.rounds_per_second == pytest.approx(20.0)
    assert parts[0].pooled.tokens_per_second == pytest.approx(
        20.0 * parts[0].pooled.emitted / parts[0].pooled.rounds
    )


def test_healthy_run(make: Any, gate: Gate) -> None:
    found = acceptance.evidence([run(make, rounds_of(random_accepts(3, 1500)))], gate, 4)
    assert found.status is Status.ok
    assert found.details["findings"] == {}
    assert found.metrics["rate_1"] == pytest.approx(0.97, abs=0.02)
    assert 3.5 < found.metrics["acceptance_length"] < 4.7


def test_plateau_in_a_loop_is_bad(make: Any, gate: Gate) -> None:
    rounds = rounds_of([*random_accepts(4, 300), *[4] * 500])
    end = rounds[-1].position + 5
    begin = rounds[300].position
    loop = [*range(begin), *[7, 8, 9] * end][:end]
    found = acceptance.evidence([run(make, rounds, loop)], gate, 4)
    assert found.status is Status.bad
    assert "plateau" in found.details["findings"]
    assert "repeating" in found.line
    fresh = acceptance.evidence([run(make, rounds)], gate, 4)
    assert fresh.status is Status.warn  # the same acceptance on a text that does not repeat
    assert "plateau" in fresh.details["findings"]


def test_a_repeating_text_at_ordinary_acceptance_is_no_plateau(make: Any, gate: Gate) -> None:
    rounds = rounds_of(random_accepts(5, 400))
    end = rounds[-1].position + rounds[-1].emitted
    found = acceptance.evidence([run(make, rounds, ([7, 8, 9] * end)[:end])], gate, 4)
    assert "plateau" not in found.details["findings"]


def test_plateau_threshold() -> None:
    for rejected, expected in ((1, True), (2, False)):
        pooled = acceptance.pool(rounds_of([4] * (200 - rejected) + [3] * rejected))
        assert acceptance.Window("g", 0, pooled, 0.0).plateau is expected
    assert not acceptance.Window("g", 0, acceptance.pool(rounds_of([4] * 19)), 0.0).plateau


def test_permanent_zero(make: Any, gate: Gate) -> None:
    found = acceptance.evidence([run(make, rounds_of([2, 1, 2, 0] * 40))], gate, 4)
    assert found.status is Status.warn
    assert found.details["findings"]["permanent_zero"] == "draft 3 was never accepted in 80 chances"
    few = acceptance.evidence([run(make, rounds_of([2, 1, 2, 0] * 9))], gate, 4)
    assert "permanent_zero" not in few.details["findings"]


def test_chance_level(make: Any, gate: Gate) -> None:
    found = acceptance.evidence([run(make, rounds_of([1] + [0] * 59))], gate, 4)
    assert found.status is Status.warn
    assert "1 of 60" in found.details["findings"]["chance_level"]
    assert "chance_level" not in acceptance.evidence([run(make, rounds_of([1] * 6 + [0] * 54))], gate, 4).line


def test_rise_with_repetition(make: Any, gate: Gate) -> None:
    accepts: list[int] = []
    for step in range(10):
        rate = 0.5 + 0.045 * step
        accepts += random_accepts(20 + step, 150, (rate,) * 4)
    rounds = rounds_of(accepts)
    end = rounds[-1].position + rounds[-1].emitted
    rng = np.random.default_rng(0)
    ids = [i if rng.random() > (i / end) ** 2 else 7 for i in range(end)]
    found = acceptance.evidence([run(make, rounds, ids)], gate, 4)
    assert "rise_with_repetition" in found.details["findings"]
    # Sound text drafts better where it repeats itself, too: only with a window of old text is it a sign.
    mild = [i if rng.random() > 0.07 * (i / end) ** 2 else 7 for i in range(end)]
    sound = acceptance.evidence([run(make, rounds, mild)], gate, 4)
    assert min(w["novelty"] for w in sound.details["windows"]) > acceptance.RISE_NOVELTY
    assert "rise_with_repetition" not in sound.details["findings"]
    assert "rise_with_repetition" not in acceptance.evidence([run(make, rounds)], gate, 4).details["findings"]


def test_no_drafts(make: Any, gate: Gate) -> None:
    for rounds in ([], rounds_of([0] * 100, drafted=0)):
        found = acceptance.evidence([make(token_ids=range(100), rounds=rounds)], gate, 0)
        assert found.status is Status.ok
        assert found.line == "no drafts"
        assert "acceptance_length" not in found.metrics


def test_a_drafting_route_without_rounds_is_unknown(make: Any, gate: Gate) -> None:
    assert acceptance.evidence([make(token_ids=range(100))], gate, 4).status is Status.unknown


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Round(0, 4, 5, 6, 0.1), "5 accepted of 4"),
        (Round(0, 5, 2, 3, 0.1), "2 accepted of 5"),
        (Round(0, 4, 2, 4, 0.1), "4 tokens from 2"),
        (Round(0, 4, 2, 2, 0.1), "2 tokens from 2"),
        (Round(3, 4, 2, 3, 0.1), "ended at 6"),
    ],
)
def test_rounds_that_do_not_add_up(fault: Round, words: str, make: Any, gate: Gate) -> None:
    rounds = [fault, *rounds_of([1, 1], start=fault.emitted)]
    found = acceptance.evidence([run(make, rounds)], gate, 4)
    assert found.status is Status.warn
    assert any(words in line for line in found.details["accounting"])


def test_rounds_must_cover_the_tokens(make: Any, gate: Gate) -> None:
    found = acceptance.evidence([run(make, rounds_of([1, 1]), ids=[1, 2, 3])], gate, 4)
    assert "end at token 4 of 3" in found.details["findings"]["accounting"]
    cut = [*rounds_of([1, 1]), Round(4, 4, 3, 3, 0.1)]  # the last round may be cut
    assert acceptance.evidence([run(make, cut)], gate, 4).details["accounting"] == []
    after_prefill = rounds_of([1, 1], start=1)  # the first token may come from the prefill
    assert acceptance.evidence([run(make, after_prefill)], gate, 4).details["accounting"] == []


def test_a_reference_run_that_drafts_is_named(make: Any, gate: Gate) -> None:
    found = acceptance.evidence([run(make, rounds_of([1, 1], drafted=1))], gate, 0)
    assert "route: 0" in found.details["findings"]["accounting"]
