"""The whole round of kernels against the plain decoder: the same tokens, round by round."""

from __future__ import annotations

import pytest

from sm70lab.schema import DraftHeadKind, DraftSampling, Proposal, Sampling
from tests.engine import tiny
from tests.kernels_gpu.rounds import HOT, OFFICIAL, route, stand_in, steps


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


@pytest.mark.parametrize(
    ("k", "drafts", "asked", "more"),
    [
        (4, DraftSampling.coupled, HOT, {}),
        (2, DraftSampling.probabilistic, OFFICIAL, {"proposal": Proposal.top_k}),
        (3, DraftSampling.greedy, OFFICIAL, {"draft_head": DraftHeadKind.shortlist, "shortlist_size": 40}),
        (1, DraftSampling.token_matching, OFFICIAL, {"draft_head": DraftHeadKind.int8}),
        (4, DraftSampling.coupled, tiny.GREEDY, {}),
        (3, DraftSampling.probabilistic, HOT, {}),
        (0, DraftSampling.coupled, OFFICIAL, {}),
    ],
)
def test_a_whole_round_delivers_what_the_plain_round_delivers(
    k: int, drafts: DraftSampling, asked: Sampling, more: dict[str, object]
) -> None:
    way = route(k, drafts, **more)
    expected = steps(way, asked, whole=False)
    assert steps(way, asked, whole=True) == expected
    if asked is HOT:
        assert len({len(tokens) for tokens in expected[1:]}) > 1  # rounds that accept, and not all alike
