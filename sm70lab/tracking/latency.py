"""What a user of a server felt: time to the first token, time between tokens, speed, over all requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sm70lab.judge.served_acceptance import decoded
from sm70lab.schema import Generation

PERCENTILES = (50, 90, 99)
MEASURES = ("ttft_seconds", "inter_token_seconds", "tokens_per_second", "tokens_per_second_with_ttft")


def latency(generations: Sequence[Generation]) -> dict[str, Any] | None:
    """Percentiles over requests of what each of them measured; None where none came from a server.

    - ``ttft_seconds``: from sending the request to its first token.
    - ``inter_token_seconds``: from the first chunk with tokens to the last one, over the tokens in between.
      (A chunk of a speculative round holds several tokens: ``chunk_gap_seconds`` has the gaps themselves,
      over all chunks of all requests.)
    - ``tokens_per_second``: its inverse; ``tokens_per_second_with_ttft``: all tokens over all of the time.

    Tokens are counted by ids or by the server's usage; without either only times are given.
    """
    served = [g for g in generations if g.arrivals]
    if not served:
        return None
    columns: dict[str, list[float]] = {name: [] for name in MEASURES}
    for generation in served:
        for name, value in _of_one(generation):
            columns[name].append(value)
    gaps = [b[1] - a[1] for g in served for a, b in zip(g.arrivals, g.arrivals[1:], strict=False)]
    found: dict[str, Any] = {"requests": len(served)}
    found |= {name: _percentiles(values) for name, values in columns.items() if values}
    if gaps:
        found["chunk_gap_seconds"] = _percentiles(gaps)
    return found


def _of_one(generation: Generation) -> Iterator[tuple[str, float]]:
    if generation.ttft_seconds is not None:
        yield "ttft_seconds", generation.ttft_seconds
    later, seconds = decoded(generation), generation.decode_seconds
    if later and seconds > 0:
        yield "inter_token_seconds", seconds / later
        yield "tokens_per_second", later / seconds
    whole = generation.arrivals[-1][1]
    if generation.tokens and whole > 0:
        yield "tokens_per_second_with_ttft", generation.tokens / whole


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def latency_line(found: dict[str, Any] | None) -> str | None:
    """For a person; None without a server."""
    if found is None:
        return None
    many = found["requests"] > 1
    shown = PERCENTILES if many else PERCENTILES[:1]
    parts = []
    for name, words, factor, digits, unit in (
        ("ttft_seconds", "first token", 1000, 0, " ms"),
        ("inter_token_seconds", "between tokens", 1000, 2, " ms"),
        ("tokens_per_second", "decoding", 1, 1, " tok/s"),
        ("tokens_per_second_with_ttft", "with the first token", 1, 1, " tok/s"),
    ):
        if name in found:
            values = " / ".join(f"{found[name][f'p{p}'] * factor:.{digits}f}" for p in shown)
            parts.append(f"{words} {values}{unit}")
    requests = f"p50 / p90 / p99 of {found['requests']} requests" if many else "one request"
    return f"{', '.join(parts)} ({requests})"
