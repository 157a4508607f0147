"""Latency over requests, worked out by hand."""

from __future__ import annotations

import pytest

from sm70lab.schema import Generation, Prompt
from sm70lab.tracking.latency import latency, latency_line


def generation(name: str, arrivals: list[tuple[int, float]], tokens: int) -> Generation:
    first, last = arrivals[0][1], arrivals[-1][1]
    return Generation(
        Prompt(0, name, "", [], 100),
        0,
        1,
        [],
        "text",
        "stop",
        [],
        first,
        last - first,
        counted_tokens=tokens or None,
        arrivals=arrivals,
        ttft_seconds=first,
    )


def test_times_and_speeds_of_two_requests() -> None:
    a = generation("a", [(1, 0.5), (11, 1.5)], 11)  # 10 tokens in a second
    b = generation("b", [(4, 1.0), (8, 2.0), (24, 6.0)], 24)  # 20 tokens in 5 seconds
    found = latency([a, b])
    assert found is not None and found["requests"] == 2
    assert found["ttft_seconds"]["p50"] == 0.75
    assert found["inter_token_seconds"]["p50"] == pytest.approx((0.1 + 0.25) / 2)
    assert found["tokens_per_second"]["p50"] == pytest.approx((10 + 4) / 2)
    assert found["tokens_per_second_with_ttft"]["p50"] == pytest.approx((11 / 1.5 + 24 / 6.0) / 2)
    assert found["chunk_gap_seconds"]["p50"] == 1.0
    assert found["ttft_seconds"]["p99"] == pytest.approx(0.995)
    line = latency_line(found)
    assert line is not None and line.startswith("first token 750 / 950 / 995 ms")
    assert line.endswith("(p50 / p90 / p99 of 2 requests)")


def test_without_a_count_there_are_times_alone() -> None:
    found = latency([generation("a", [(-1, 0.5), (-1, 1.5)], 0)])
    assert found is not None and found.keys() == {"requests", "ttft_seconds", "chunk_gap_seconds"}
    assert latency_line(found) == "first token 500 ms (one request)"


def test_an_engine_run_has_none() -> None:
    engine = generation("a", [(1, 0.5)], 1)
    engine.arrivals = []
    assert latency([engine]) is None and latency_line(None) is None
