"""Published results of others: read from a data file, labelled as published, never as measured here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import yaml

AUDIT = Path(__file__).with_name("mtp_audit.yaml")


class Needs(str, Enum):
    """Where a row's variation exists."""

    engine = "engine"  # the built-in engine
    vllm = "vllm"  # the vLLM fork, by target=vllm


class PublishedResult(str, Enum):
    """What the source says of long output."""

    passed = "pass"
    failed = "fail"
    mixed = "mixed"
    none = "none"  # no long output was run


@dataclass(frozen=True)
class Source:
    """Where the rows stand."""

    title: str
    repository: str
    commit: str
    file: str
    hardware: str
    model: str


@dataclass(frozen=True)
class PublishedRow:
    """One row of the matrix; the preset of the same name runs its variation."""

    id: str
    line: int  # of the source file
    needs: Needs
    result: PublishedResult
    tok_s: tuple[float, ...]  # tokens a second, as printed
    variation: str
    remark: str
    hardware: str | None = None  # None: the source's own


def matrix() -> tuple[Source, list[PublishedRow]]:
    """The audit's experiment matrix, in its order."""
    values = yaml.safe_load(AUDIT.read_text(encoding="utf-8"))
    rows = [
        PublishedRow(
            **{
                **row,
                "needs": Needs(row["needs"]),
                "result": PublishedResult(row["result"]),
                "tok_s": tuple(row["tok_s"]),
            }
        )
        for row in values["rows"]
    ]
    return Source(**values["source"]), rows
