"""The calibration's own parts: which files are taken, and what the synthetic degenerations are."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import sm70lab
from recipes.calibration import degenerations
from recipes.calibration.collect import LIMIT, collect
from sm70lab.judge import strict_gate
from sm70lab.schema import Gate, Generation, Prompt

SOUND = "".join(f"Line {i * 7919 % 9973} of {i * 104729 % 99991} says {i**3 % 7907}.\n" for i in range(900))
CHANGES = "".join(f"* change {i * 7919 % 9973}\n" for i in range(300))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(sm70lab.__file__).parent / "models" / "web" / "tokenizer.json"))


def test_files_are_sorted_by_kind_cut_and_taken_once(tmp_path: Path) -> None:
    texts = {
        "a/x.css": "a {\n}\n" * 200,
        "a/long.log": SOUND,
        "b/same.log": SOUND,
        "b/short.sql": "SELECT 1;",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "b" / "changelog.gz").write_bytes(gzip.compress(CHANGES.encode()))
    (tmp_path / "doc").mkdir()
    (tmp_path / "doc" / "changelog.gz").write_bytes(gzip.compress(CHANGES.encode()))
    (tmp_path / "b" / "picture.svg").write_bytes(b"<svg>\0" * 500)
    rows = list(collect([tmp_path], 300))
    assert sorted(row[0] for row in rows) == ["changelogs", "css", "logs"]
    assert next(row[3] for row in rows if row[0] == "logs") == SOUND[:LIMIT]
    assert {row[2] for row in rows} <= {"tuning", "held-out"}
    assert list(collect([tmp_path], 300)) == rows
    assert list(collect([tmp_path], 0)) == []


@pytest.mark.parametrize("shape", degenerations.MAKERS)
def test_a_piece_has_exactly_the_tokens_asked_for(shape: str, tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(4)
    short = degenerations.looping(shape, rng, SOUND, 300, 100, tokenizer)
    assert short.text.startswith(SOUND[:300])
    assert len(short.token_ids) == len(tokenizer.encode(SOUND[:300]).ids) + 100
    if short.period:
        piece = short.text[300:]
        assert piece[short.period :] == piece[: -short.period] or shape in (
            "only a counter changes", *degenerations.IRREGULAR
        )  # fmt: skip


@pytest.mark.parametrize("shape", [s for s in degenerations.MAKERS if s not in degenerations.IRREGULAR])
def test_every_shape_of_200_tokens_is_caught(shape: str, tokenizer: Tokenizer) -> None:
    for seed in range(3):
        case = degenerations.looping(shape, np.random.default_rng(seed), SOUND, 1500, 200, tokenizer)
        prompt = Prompt(0, "file", case.prompt, [0], 6000)
        output = Generation(prompt, 0, 1, case.token_ids, case.text, case.finish_reason, [], 0.0, 1.0)
        places = [f.position for f in strict_gate.findings(output, Gate(name="strict"))]
        assert min((abs(place - 1500) for place in places), default=10**9) <= max(24, case.period)
