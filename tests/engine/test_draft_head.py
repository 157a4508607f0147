"""Draft heads: the same logits for fewer ids, nearly the same in int8, and what orders a shortlist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sm70lab.engine import draft_head
from sm70lab.engine.draft_head import Int8Head, build, int8_linear, read_frequency
from sm70lab.engine.loading import EMBEDDED
from sm70lab.errors import UsageError
from sm70lab.kernels import native
from sm70lab.kernels.arithmetic import Arithmetic
from tests.engine.assertions import assert_close

VOCABULARY, HIDDEN = 50, 24


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_columns(matrix: torch.Tensor) -> torch.Tensor:
    """The same matrix in the other memory order."""
    return matrix.t().contiguous().t()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["full", "shortlist", "int8"])
def test_logits_are_float32_or_better(kind: str, dtype: torch.dtype) -> None:
    weight, hidden = drawn(VOCABULARY, HIDDEN, dtype=dtype), drawn(3, HIDDEN, dtype=dtype, seed=1)
    logits = build(kind, weight, 7, None).logits(hidden)
    assert logits.dtype == torch.promote_types(dtype, torch.float32)
    assert logits.shape == (3, 7 if kind == "shortlist" else VOCABULARY)


def test_the_full_head_is_the_targets_own() -> None:
    weight, hidden = drawn(VOCABULARY, HIDDEN), drawn(3, HIDDEN, seed=1)
    head = build("full", weight, 7, None)
    assert torch.equal(head.logits(hidden), F.linear(hidden, weight))
    columns = torch.tensor([[4, 0], [49, 7]])
    assert torch.equal(head.ids(columns), columns)


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, by_columns])
def test_a_shortlist_has_the_full_logits_of_its_ids(layout) -> None:  # type: ignore[no-untyped-def]
    weight, hidden = layout(drawn(VOCABULARY, HIDDEN)), drawn(3, HIDDEN, seed=1)
    frequent = [41, 3, 17, 0, 49, 8]
    head = build("shortlist", weight, 5, frequent)
    assert_close(head.logits(hidden), F.linear(hidden, weight)[:, frequent[:5]], 1e-6)
    assert head.ids(torch.tensor([[0, 4], [2, 2]])).tolist() == [[41, 49], [17, 17]]


def test_a_shortlist_follows_frequency_and_then_id_order() -> None:
    weight = drawn(VOCABULARY, HIDDEN)
    every = torch.arange(5)
    assert build("shortlist", weight, 5, None).ids(every).tolist() == [0, 1, 2, 3, 4]
    assert build("shortlist", weight, 5, [9, 1]).ids(every).tolist() == [9, 1, 0, 2, 3]


@pytest.mark.parametrize("size", [0, VOCABULARY + 1])
def test_a_shortlist_size_that_does_not_fit_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match=f"shortlist_size={size}: must be 1 to {VOCABULARY}"):
        build("shortlist", drawn(VOCABULARY, HIDDEN), size, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_int8_logits_are_within_the_rounding_of_their_codes(dtype: torch.dtype) -> None:
    """Half a code a weight: |error| ≤ Σ|x| · scale / 2, and rounding of the sum itself."""
    weight, hidden = drawn(VOCABULARY, HIDDEN, dtype=dtype), drawn(3, HIDDEN, dtype=dtype, seed=1)
    weight[4] = 0
    head = build("int8", weight, 7, None)
    assert isinstance(head, Int8Head)
    error = (head.logits(hidden).double() - F.linear(hidden.double(), weight.double())).abs()
    assert bool((error <= hidden.double().abs().sum(-1, keepdim=True) * head.scale.double() / 2 + 1e-5).all())
    assert head.codes.abs().amax(-1).tolist() == [0 if row == 4 else 127 for row in range(VOCABULARY)]
    assert bool((head.logits(hidden)[:, 4] == 0).all())


def test_int8_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hidden = drawn(VOCABULARY, HIDDEN, dtype=torch.float64), drawn(3, HIDDEN, dtype=torch.float64)
    whole = Int8Head(weight, Arithmetic.plain)
    wanted = int8_linear(hidden, whole.codes, whole.scale, Arithmetic.plain)
    monkeypatch.setattr(draft_head, "BLOCK_ROWS", 16)
    blocks = Int8Head(weight, Arithmetic.plain)
    assert torch.equal(blocks.codes, whole.codes) and torch.equal(blocks.scale, whole.scale)
    assert_close(int8_linear(hidden, blocks.codes, blocks.scale, Arithmetic.plain), wanted, 1e-14)


@pytest.mark.parametrize("arithmetic", [Arithmetic.by_row, Arithmetic.native])
@pytest.mark.parametrize("kind", ["full", "shortlist", "int8"])
def test_a_row_has_the_bits_that_it_has_alone(kind: str, arithmetic: Arithmetic) -> None:
    if arithmetic is Arithmetic.native and (reason := native.available()) is not None:
        pytest.skip(reason)
    weight, hidden = drawn(VOCABULARY, HIDDEN), drawn(5, HIDDEN, seed=1)
    head, plain = (build(kind, weight, 20, None, how) for how in (arithmetic, Arithmetic.plain))
    logits = head.logits(hidden)
    assert torch.equal(logits, torch.cat([head.logits(row[None]) for row in hidden]))
    assert_close(logits, plain.logits(hidden), 1e-6)


def test_no_frequency_file_is_none(tmp_path: Path) -> None:
    assert read_frequency(tmp_path, 9) is None


def test_a_frequency_file_may_stop_early(tmp_path: Path) -> None:
    (tmp_path / "token_frequency.json").write_text("[8, 0, 3]")
    assert read_frequency(tmp_path, 9) == [8, 0, 3]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[1, 2", "cannot be read as JSON"),
        ("\udcff", "cannot be read as JSON"),
        ('{"ids": [1]}', "must be a JSON list of token ids, found dict"),
        ("[1, 2, 1]", "entry 2 repeats id 1"),
        ("[1, 9]", r"entry 1 is 9; ids of this model are 0\.\.8"),
        ("[-1]", "entry 0 is -1"),
        ("[true]", "entry 0 is True"),
        ("[1.0]", "entry 0 is 1.0"),
        ('["1"]', "entry 0 is '1'"),
    ],
)
def test_a_bad_frequency_file_is_refused(tmp_path: Path, text: str, wrong: str) -> None:
    file = tmp_path / "token_frequency.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=rf"token_frequency\.json: {wrong}"):
        read_frequency(tmp_path, 9)


def test_the_embedded_model_ranks_all_its_ids() -> None:
    size = json.loads((EMBEDDED / "config.json").read_text())["vocab_size"]
    ids = read_frequency(EMBEDDED, size)
    assert ids is not None and sorted(ids) == list(range(size)) and ids != list(range(size))
