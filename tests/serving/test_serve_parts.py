"""Small parts of the server on their own: held-back text, the reasoning split, the loop detector."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from sm70lab.engine.stopping import Delivery
from sm70lab.serving.reasoning import ReasoningSplit
from sm70lab.serving.repetition import LOOP_TOKENS, MAX_PERIOD, LoopDetector


def split(prompt: str, text: str, cuts: list[int]) -> tuple[str, str]:
    """Reasoning and content of a text that comes in pieces."""
    whole = ReasoningSplit(prompt)
    edges = [0, *cuts, len(text)]
    pairs = pairwise(edges)
    parts = [whole.push(text[a:b], last=b == len(text) and a == edges[-2]) for a, b in pairs]
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<think>why</think>\n\nso", "why", "\n\nso"),
        ("", "\n<think>why</think>so", "why", "so"),
        ("x<think>\n", "why</think>so", "why", "so"),
        ("x<think>\n", "why < so", "why < so", ""),
        ("", "<think>why</thin", "why</thin", ""),
        ("", "<thinking>", "", "<thinking>"),
        ("", "<thi", "", "<thi"),
        ("", "plain </think> text", "", "plain </think> text"),
        ("", "", "", ""),
    ],
)
def test_reasoning_is_split_wherever_the_pieces_end(
    prompt: str, text: str, reasoning: str, content: str
) -> None:
    assert split(prompt, text, []) == (reasoning, content)
    for cut in range(len(text)):
        assert split(prompt, text, [cut]) == (reasoning, content)
    assert split(prompt, text, list(range(1, len(text)))) == (reasoning, content)


class Letters:
    """One character a token."""

    def push(self, token: int) -> str:
        return chr(token)


@pytest.mark.parametrize("stops", [["abab"], ["ab", "babb"], ["aaab"], ["b"]])
def test_text_that_was_let_go_is_never_taken_back(stops: list[str]) -> None:
    draws = random.Random(1)
    for _ in range(300):
        delivery, sent = Delivery(Letters(), frozenset(), stops, 40), ""
        while delivery.finish_reason is None:
            delivery.push([ord(draws.choice("aab")) for _ in range(3)])
            settled = delivery.text[: -delivery.held or None]
            assert settled.startswith(sent)
            sent = settled
        assert sent == delivery.text
        assert delivery.finish_reason == "length" or delivery.stop_string in stops
        assert not any(stop in sent for stop in stops)


@pytest.mark.parametrize("period", [1, 2, 7, 100, MAX_PERIOD])
def test_a_loop_is_found_when_it_has_lasted_long_enough(period: int) -> None:
    detector = LoopDetector()
    text = list(range(1000, 1040)) + [i % period for i in range(2000)]
    fired = next(i for i, token in enumerate(text, 1) if detector.push(token))
    assert fired - 40 == max(LOOP_TOKENS, 3 * period)


def test_text_that_only_resembles_a_loop_is_none() -> None:
    detector, draws = LoopDetector(), random.Random(1)
    rows = [t for n in range(100) for t in (1, 2, 3, 100 + n, 4)]  # a table: each row has its number
    noise = [draws.randrange(3) for _ in range(3000)]
    assert not any(detector.push(token) for token in rows + noise)
