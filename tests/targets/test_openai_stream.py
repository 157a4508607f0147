"""Server-sent events cut anywhere, and what one chunk says."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm70lab.schema import Speculation
from sm70lab.targets.openai_stream import EventStream, MalformedError, read_chunk

EVENTS = ["a", "ü🙂\u2028x", '{"k": "v"}', "two\nlines", " blank", "[DONE]"]


def encoded(events: list[str], end: str) -> bytes:
    parts = [f": comment {index}{end}id: 3{end}" for index in range(len(events))]
    for index, event in enumerate(events):
        parts[index] += "".join(f"data: {line}{end}" for line in event.split("\n")) + end
    return "".join(parts).encode()


@settings(deadline=None, max_examples=150)
@given(end=st.sampled_from(["\n", "\r", "\r\n"]), cuts=st.lists(st.integers(0, 400)), bom=st.booleans())
def test_any_cut_gives_the_same_events(end: str, cuts: list[int], bom: bool) -> None:
    data = (b"\xef\xbb\xbf" if bom else b"") + encoded(EVENTS, end)
    places = sorted({0, *(cut % len(data) for cut in cuts), len(data)})
    stream = EventStream()
    found = [event for a, b in pairwise(places) for event in stream.feed(data[a:b])]
    assert found == EVENTS
    assert (stream.pending, stream.bad_utf8) == (False, 0)


def test_data_without_a_blank_and_fields_without_a_colon() -> None:
    assert list(EventStream().feed(b"data:x\nevent\nretry: 5\ndata\n\n\n\n")) == ["x\n"]


def test_bad_utf8_is_counted_and_kept() -> None:
    stream = EventStream()
    assert list(stream.feed(b"data: a\xff\xfeb\n\n")) == ["a\ufffd\ufffdb"]
    assert stream.bad_utf8 == 1


def test_an_event_without_an_end_is_refused_and_comments_are_not_counted() -> None:
    stream = EventStream(limit=1000)
    for _ in range(50):
        assert list(stream.feed(b": " + b"x" * 100 + b"\n")) == []
    assert list(stream.feed(b"data: " + b"x" * 900)) == []
    with pytest.raises(MalformedError, match="longer than"):
        list(stream.feed(b"x" * 101))


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_and_content(name: str) -> None:
    delta = {"content": "c", name: "r"}
    chunk = read_chunk(json.dumps({"id": "1", "choices": [{"index": 0, "delta": delta, "token_ids": [4]}]}))
    assert (chunk.content, chunk.reasoning, chunk.token_ids, chunk.id) == ("c", "r", (4,), "1")


def test_a_completion_with_usage() -> None:
    value = {
        "choices": [{"text": "t", "finish_reason": "stop", "stop_reason": 7, "prompt_token_ids": [1, 2]}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 9},
    }
    chunk = read_chunk(json.dumps(value))
    assert (chunk.content, chunk.finish_reason, chunk.stop_reason) == ("t", "stop", 7)
    assert (chunk.prompt_token_ids, chunk.prompt_tokens, chunk.completion_tokens) == ((1, 2), 2, 9)


@pytest.mark.parametrize(
    ("value", "message", "code"),
    [
        ({"error": {"message": "too long", "type": "BadRequest", "code": 400}}, "too long", 400),
        ({"object": "error", "message": "m", "code": 404}, "m", 404),  # older vLLM and SGLang
        ({"error": "plain words"}, "plain words", None),
        ({"detail": "Unauthorized"}, "Unauthorized", None),  # FastAPI
    ],
)
def test_errors_as_servers_word_them(value: dict[str, object], message: str, code: int | None) -> None:
    error = read_chunk(json.dumps(value)).error
    assert error is not None and (str(error), error.code) == (message, code)


@pytest.mark.parametrize(
    "data",
    [
        "{",
        "3",
        '{"choices": 1}',
        '{"choices": [{"index": 1}]}',
        '{"choices": [{}, {}]}',
        '{"choices": [{"delta": "x"}]}',
        '{"choices": [{"text": 5}]}',
        '{"choices": [{"text": "", "token_ids": [true]}]}',
        '{"choices": [{"text": "", "token_ids": [-1]}]}',
        "[" * 100_000,
    ],
)
def test_what_is_no_chunk(data: str) -> None:
    with pytest.raises(MalformedError):
        read_chunk(data)


def test_drafts_of_one_request() -> None:
    spec = {
        "num_spec_steps": 10,
        "num_draft_tokens": 20,
        "num_accepted_draft_tokens": 11,
        "acceptance_histogram": [3, 3, 4],  # steps that accepted 0, 1 and 2
    }
    chunk = read_chunk(json.dumps({"choices": [], "metrics": {"speculative_decoding": spec}}))
    assert chunk.speculation == Speculation(10, 20, 11, (7, 4))
    timings = {"draft_n": 30, "draft_n_accepted": 12}
    assert read_chunk(json.dumps({"choices": [], "timings": timings})).speculation == Speculation(0, 30, 12)
    plain = read_chunk(json.dumps({"choices": [], "timings": {"predicted_n": 3}}))
    assert (plain.speculation, plain.completion_tokens) == (None, 3)
