"""End tokens, stop strings and budgets, exact wherever in a round they fall; no broken characters."""

from __future__ import annotations

import itertools

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sm70lab.engine.stopping import Delivery
from sm70lab.engine.text import NumberText, _TokenizerStream


def delivery(
    stop_ids: frozenset[int] = frozenset(), strings: list[str] | None = None, budget: int = 100
) -> Delivery:
    return Delivery(NumberText(64).stream(), stop_ids, strings or [], budget)


@pytest.mark.parametrize("index", range(5))
def test_nothing_after_an_end_token_at_any_draft_index(index: int) -> None:
    d = delivery(frozenset({9}))
    tokens = [1, 2, 3, 4, 5]
    tokens[index] = 9
    assert d.push(tokens) == index + 1
    assert d.finish_reason == "stop"
    assert d.token_ids == tokens[: index + 1]
    assert d.text == "".join(f"{t} " for t in tokens[:index])


def test_end_token_before_the_budget_in_one_round_wins() -> None:
    d = delivery(frozenset({9}), budget=3)
    d.push([1])
    assert d.push([2, 9, 5]) == 2
    assert d.finish_reason == "stop"
    assert d.token_ids == [1, 2, 9]


def test_budget_before_the_end_token_wins() -> None:
    d = delivery(frozenset({9}), budget=2)
    assert d.push([1, 2, 9]) == 2
    assert d.finish_reason == "length"


@pytest.mark.parametrize("budget", range(1, 13))
def test_budget_is_exact(budget: int) -> None:
    d = delivery(budget=budget)
    for start in itertools.count(0, 4):
        d.push(list(range(start, start + 4)))
        if d.finish_reason:
            break
    assert d.token_ids == list(range(budget))
    assert d.finish_reason == "length"


@pytest.mark.parametrize("cut", range(1, 6))
def test_stop_string_across_tokens_and_rounds(cut: int) -> None:
    d = delivery(strings=["3 4", "zz"])
    tokens = [1, 2, 3, 4, 5]
    d.push(tokens[:cut])
    if not d.finish_reason:
        d.push(tokens[cut:])
    assert d.finish_reason == "stop"
    assert d.token_ids == [1, 2, 3, 4]
    assert d.text == "1 2 "


def byte_tokenizer() -> Tokenizer:
    """One token a byte, so that every multi-byte character is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("text", ["한글 텍스트", "a 😀👩‍👩‍👧 b", "数据库 é ñ", "plain"])
def test_multi_byte_characters_never_break(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text).ids
    for budget in range(1, len(ids) + 1):
        d = Delivery(_TokenizerStream(tokenizer), frozenset(), [], budget)
        for token in ids:
            d.push([token])
            if d.finish_reason:
                break
        assert "\ufffd" not in d.text
        assert text.startswith(d.text)
    assert d.text == text
