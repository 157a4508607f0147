"""The tables of a run: one row a round, one row an audited token, one row a chunk of a server's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from sm70lab.schema import BETS, Generation, Round, TokenScores
from sm70lab.tracking.atomic import write_with

ROUNDS = "rounds.parquet"
AUDIT = "audit.parquet"
ARRIVALS = "arrivals.parquet"


def write_rounds(path: Path, generations: Sequence[Generation]) -> None:
    """One row a round: which generation, its number there, and the fields of ``Round``."""
    columns: dict[str, list[Any]] = {"generation": [], "round": []} | {f.name: [] for f in fields(Round)}
    for generation in generations:
        for number, r in enumerate(generation.rounds):
            columns["generation"].append(generation.key)
            columns["round"].append(number)
            for f in fields(Round):
                columns[f.name].append(getattr(r, f.name))
    _write(path, columns, {"generation": "string", "seconds": "float64"})


def read_rounds(path: Path) -> dict[str, list[Round]]:
    """Generation key → its rounds; empty where the file is not there."""
    if not path.exists():
        return {}
    import pyarrow.parquet as pq

    found: dict[str, list[Round]] = {}
    for row in pq.read_table(path).to_pylist():
        found.setdefault(row["generation"], []).append(Round(**{f.name: row[f.name] for f in fields(Round)}))
    return found


def write_arrivals(path: Path, generations: Sequence[Generation]) -> None:
    """One row a chunk with tokens: which generation, its number there, tokens so far (−1: unknown), and
    seconds since the request was sent."""
    rows = [(g.key, number, *arrival) for g in generations for number, arrival in enumerate(g.arrivals)]
    names = ("generation", "chunk", "tokens", "seconds")
    columns: dict[str, list[Any]] = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    _write(path, columns, {"generation": "string", "seconds": "float64"})


def write_audit(path: Path, generations: Sequence[Generation], scores: dict[str, TokenScores]) -> None:
    """One row a token: which generation, position, token id, and the fields of ``TokenScores``
    (the bets in a column each)."""
    import numpy as np

    scored = [generation for generation in generations if generation.key in scores]
    columns: dict[str, Any] = {
        "generation": np.concatenate([np.repeat(g.key, len(g.token_ids)) for g in scored]).astype(object),
        "position": np.concatenate([np.arange(len(g.token_ids)) for g in scored]),
        "token_id": np.concatenate([np.asarray(g.token_ids, dtype=np.int64) for g in scored]),
    }
    for f in fields(TokenScores):
        values = np.concatenate([np.asarray(getattr(scores[g.key], f.name)) for g in scored])
        if f.name == "log_bets":
            columns |= {f"log_bet.{name}": values[:, i].copy() for i, name in enumerate(BETS)}
        else:
            columns[f.name] = values.astype(object) if values.dtype.kind == "U" else values
    _write(path, columns, {"generation": "string", "cut_rule": "string"})


def _write(path: Path, columns: dict[str, Any], types: dict[str, str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {name: pa.array(values, type=_type(pa, name, values, types)) for name, values in columns.items()}
    table = pa.table(arrays)
    write_with(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


def _type(pa: Any, name: str, values: Any, types: dict[str, str]) -> Any:
    if name in types:
        return pa.type_for_alias(types[name])
    return pa.int64() if isinstance(values, list) else None  # numpy arrays keep their own
