"""The engine behind the OpenAI API: a real server process, OpenAI's own client, tokens of the run itself."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from sm70lab.config import compose
from sm70lab.engine import reference
from sm70lab.schema import Generation, PromptSpec
from sm70lab.targets.engine import EngineTarget
from tests.cli.lab import default_signals
from tests.serving.served import PAGE, ServeProcess

SETTINGS = ("route=split", "target.max_num_seqs=4")
BUDGET = 24


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    served = ServeProcess(*SETTINGS, "max_model_len=600")
    yield served
    assert served.stop() == (0, "")


@cache
def engine() -> EngineTarget:
    """The same model and route in this process."""
    target = EngineTarget(compose([*SETTINGS]))
    target.load(600)
    return target


@cache
def in_process(*settings: str) -> Generation:
    """An in-process run of one prompt, the served run's twin."""
    target = engine()
    target.config = compose([*SETTINGS, f"workload.max_tokens={BUDGET}", *settings])
    target.config.workload.prompts = [PromptSpec("page", text=PAGE)]
    (generation,) = target.generate(target.prompts(), 0, lambda progress: None)
    return generation


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ((), {}),
        (("sampling.temperature=0",), {"temperature": 0}),
        (
            ("sampling.temperature=1.2", "sampling.top_k=0", "sampling.top_p=0.9", "sampling.min_p=0.01"),
            {"temperature": 1.2, "top_k": -1, "top_p": 0.9, "min_p": 0.01},
        ),
        (
            (
                "sampling.presence_penalty=1",
                "sampling.frequency_penalty=0.5",
                "sampling.logit_bias={34: -100}",
            ),
            {"presence_penalty": 1, "frequency_penalty": 0.5, "logit_bias": {"34": -100}},
        ),
        (
            ("sampling.repetition_penalty=1.3", "sampling.stop_ids=[2049]", "sampling.min_tokens=18"),
            {"repetition_penalty": 1.3, "stop_token_ids": [2049], "min_tokens": 18},
        ),
    ],
    ids=["official", "greedy", "cuts", "penalties", "stops"],
)
def test_a_seed_has_the_tokens_of_the_in_process_run(
    server: ServeProcess, settings: tuple[str, ...], fields: dict[str, Any]
) -> None:
    twin = in_process("seed=7", *settings)
    answer = server.completion(seed=7, max_tokens=BUDGET, **fields)
    choice = answer["choices"][0]
    assert choice["token_ids"] == twin.token_ids
    assert choice["prompt_token_ids"] == twin.prompt.token_ids
    assert choice["text"] == twin.text
    assert choice["finish_reason"] == twin.finish_reason
    drafting = answer["metrics"]["speculative_decoding"]
    assert drafting["num_accepted_draft_tokens"] == sum(r.accepted for r in twin.rounds)
    assert drafting["num_draft_tokens"] == sum(r.drafted for r in twin.rounds)


def test_speculation_off_drafts_nothing_and_draws_the_same(server: ServeProcess) -> None:
    twin = in_process("seed=7")
    for field in ({"speculative_decoding": False}, {"vllm_xargs": {"speculative_decoding": False}}):
        answer = server.completion(seed=7, max_tokens=BUDGET, **field)
        assert answer["choices"][0]["token_ids"] == twin.token_ids
        assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert sum(r.drafted for r in twin.rounds) > 0


def test_without_a_seed_two_answers_differ_and_tell_theirs(server: ServeProcess) -> None:
    first, second = (server.completion(max_tokens=BUDGET) for _ in range(2))
    assert first["choices"][0]["token_ids"] != second["choices"][0]["token_ids"]
    seed = first["metrics"]["seed"]
    assert server.ids(max_tokens=BUDGET, seed=seed) == first["choices"][0]["token_ids"]


# --------------------------------------------------------------------------- OpenAI's client


def test_streams_of_openais_client_equal_its_whole_answers(server: ServeProcess) -> None:
    client = server.client()
    (model,) = client.models.list().data
    extra = {"return_token_ids": True}
    common: dict[str, Any] = {"model": model.id, "max_tokens": 24, "seed": 3, "extra_body": extra}
    whole = client.completions.create(prompt=PAGE, **common)
    chunks = list(
        client.completions.create(prompt=PAGE, stream=True, stream_options={"include_usage": True}, **common)
    )
    *parts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in parts) == whole.choices[0].text
    ids = [i for chunk in parts for i in chunk.choices[0].token_ids]
    assert ids == whole.choices[0].token_ids and len(ids) == 24
    assert parts[0].choices[0].prompt_token_ids == whole.choices[0].prompt_token_ids
    assert [chunk.choices[0].finish_reason for chunk in parts][-2:] == [None, "length"]
    assert last.choices == [] and last.usage == whole.usage
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in parts)

    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "A page"}]}]
    chat = client.chat.completions.create(messages=messages, **common)
    pieces = list(client.chat.completions.create(messages=messages, stream=True, **common))
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == chat.choices[0].message.content
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[0].prompt_token_ids == chat.prompt_token_ids
    assert [i for p in pieces[1:] for i in p.choices[0].token_ids] == chat.choices[0].token_ids
    plain = server.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "A page"}], "max_completion_tokens": 24, "seed": 3},
    ).json()
    assert plain["choices"][0]["message"]["content"] == chat.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_itself(server: ServeProcess, stream: bool) -> None:
    text = server.completion(seed=3, max_tokens=40)["choices"][0]["text"]
    stop = text[30:38]  # crosses tokens
    cut = text[: text.index(stop)]
    body = {"seed": 3, "max_tokens": 40, "stop": [stop, "never there"], "stream": stream}
    if not stream:
        choice = server.completion(**body)["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (cut, "stop", stop)
        return
    chunks = events(server, body)
    assert "".join(c["choices"][0]["text"] for c in chunks) == cut
    for before, after in pairwise(chunks):
        assert before["choices"][0]["finish_reason"] is None
        assert after["id"] == chunks[0]["id"]
    assert chunks[-1]["choices"][0]["stop_reason"] == stop


def events(server: ServeProcess, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed completion."""
    with server.http.stream("POST", "/v1/completions", json={"prompt": PAGE, **body}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_stop_token_and_ignored_end(server: ServeProcess) -> None:
    ids = server.ids(seed=3, max_tokens=20)
    stopped = server.completion(seed=3, max_tokens=20, stop_token_ids=[ids[9]], ignore_eos=True)
    assert stopped["choices"][0]["token_ids"] == ids[: ids.index(ids[9]) + 1]
    assert stopped["choices"][0]["stop_reason"] == ids[9]


def test_continuous_usage(server: ServeProcess) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server, {"max_tokens": 9, "stream": True, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 9


# --------------------------------------------------------------------------- log-probabilities


def test_logprobs_of_the_run_are_those_of_the_reference(server: ServeProcess) -> None:
    """Rows of the run's own rounds, against a float32 prefill of the same tokens."""
    answer = server.completion(seed=5, max_tokens=20, logprobs=3)
    choice = answer["choices"][0]
    tokens = choice["prompt_token_ids"] + choice["token_ids"]
    scored = server.completion(prompt=tokens, max_tokens=1, prompt_logprobs=3)["choices"][0][
        "prompt_logprobs"
    ]
    assert scored[0] is None and len(scored) == len(tokens)
    start = len(choice["prompt_token_ids"])
    for at, token in enumerate(choice["token_ids"]):
        place = scored[start + at]
        own = place[str(token)]
        assert choice["logprobs"]["token_logprobs"][at] == pytest.approx(own["logprob"], abs=1e-3)
        assert choice["logprobs"]["tokens"][at] == own["decoded_token"]
        likeliest = sorted(entry["logprob"] for entry in place.values() if entry["rank"] <= 3)
        assert len(likeliest) == 3
        given = sorted(choice["logprobs"]["top_logprobs"][at].values())[-3:]
        assert given == pytest.approx(likeliest, abs=1e-3)
    offsets, text = choice["logprobs"]["text_offset"], choice["text"]
    assert all(text[o:].startswith(t) for o, t in zip(offsets, choice["logprobs"]["tokens"], strict=True))


def test_prompt_logprobs_are_the_references_own(server: ServeProcess) -> None:
    target = engine()
    ids = target.source.text.encode(PAGE * 13)
    assert len(ids) > 256  # more than one chunk
    found = server.completion(prompt=ids, max_tokens=1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    row = 0
    for logits in reference.prompt_logits(target.reference_model, ids):
        log_p = logits.double().log_softmax(-1)
        for values in log_p:
            row += 1
            ((key, entry),) = found[row].items()
            own = float(values[ids[row]])
            assert int(key) == ids[row] and entry["logprob"] == pytest.approx(own, abs=1e-9)
            assert entry["rank"] == int((values > own).sum()) + 1
    assert row == len(ids) - 1


def test_chat_logprobs(server: ServeProcess) -> None:
    client = server.client()
    answer = client.chat.completions.create(
        model="web",
        messages=[{"role": "user", "content": "A page"}],
        max_tokens=8,
        seed=3,
        logprobs=True,
        top_logprobs=2,
        extra_body={"prompt_logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True},
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [t.token for t in choice.logprobs.content] == [f"token_id:{i}" for i in choice.token_ids]
    for token in choice.logprobs.content:
        assert [t.logprob for t in token.top_logprobs] == sorted(
            (t.logprob for t in token.top_logprobs), reverse=True
        )
        assert len(token.top_logprobs) == 2 and token.bytes == list(token.token.encode())
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)


# --------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"prompt": "word " * 700}, None),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e-6}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1}, "min_p"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [4096]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 101}}, "logit_bias"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"model": "nobody"}, "model"),
    ],
)
def test_a_bad_value_is_one_error_object(server: ServeProcess, fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"prompt": PAGE, **fields})
    answer = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == (404 if param == "model" else 400)
    assert error["param"] == param and error["message"] and error["type"]


PROMPT = "prompt: must be a string or a list of token ids (one prompt a request)"
STOP = "stop: must be a string or a list of up to 64 strings, none of them empty"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": 5}, PROMPT),
        ({"prompt": None}, PROMPT),
        ({"prompt": ["a", "b"]}, PROMPT),
        ({"prompt": [True]}, PROMPT),
        ({"stop": ["a", None]}, STOP),
        ({"stop": 5}, STOP),
        ({"temperature": float("nan")}, "temperature: must be a finite number"),
        ({"temperature": float("inf")}, "temperature: must be a finite number"),
        ({"max_tokens": True}, "max_tokens: must be a valid integer"),
        ({"max_tokens": "5"}, "max_tokens: must be a valid integer"),
        ({"temperature": True}, "temperature: must be a valid number"),
        ({"top_k": 0, "seed": 1.5}, "seed: must be a valid integer"),
    ],
)
def test_a_bad_value_says_what_is_allowed(server: ServeProcess, fields: dict[str, Any], message: str) -> None:
    body = json.dumps({"prompt": PAGE, **fields})
    answer = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["message"]) == (400, message)
    assert error["param"] == message.partition(":")[0]


def test_whole_numbers_are_temperatures_too(server: ServeProcess) -> None:
    assert len(server.ids(temperature=1, top_p=1, max_tokens=2, ignore_eos=True)) == 2


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"{bad json", "application/json", "the body is not JSON: Expecting property name"),
        (b"[]", "application/json", "the body must be a JSON object"),
        (b"", "application/json", "the body is empty"),
        (b'{"prompt": "x"}', "text/plain", "send Content-Type: application/json"),
        (b'{"prompt": "x"}', None, "send Content-Type: application/json"),
    ],
)
def test_a_body_that_is_no_request_says_why(
    server: ServeProcess, body: bytes, kind: str | None, message: str
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = server.http.post("/v1/completions", content=body, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in error["message"] and error["param"] is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt": ' + b"[" * 100_000, b"\xff"])
def test_a_body_that_is_no_request(server: ServeProcess, body: bytes) -> None:
    answer = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == answer.json()["error"]["code"] == 400


def test_errors_reach_openais_client_as_its_own(server: ServeProcess) -> None:
    client = server.client()
    with pytest.raises(NotFoundError, match="nobody"):
        client.models.retrieve("nobody")
    with pytest.raises(BadRequestError, match="tools"):
        client.chat.completions.create(
            model="web",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    assert server.http.get("/nowhere").json()["error"]["code"] == 404
    assert server.http.get("/v1/completions").json()["error"]["code"] == 405


# --------------------------------------------------------------------------- metrics, many clients


def test_metrics_count_what_the_answers_say(server: ServeProcess) -> None:
    before = server.metrics()
    answer = server.completion(seed=9, max_tokens=30)
    after = server.metrics()

    def rose(name: str, label: str = "") -> float:
        return after[f"vllm:{name}", label] - before.get((f"vllm:{name}", label), 0)

    drafting = answer["metrics"]["speculative_decoding"]
    assert rose("prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert rose("generation_tokens_total") == 30
    assert rose("request_success_total", "length") == 1
    assert rose("time_to_first_token_seconds_count") == 1
    assert rose("e2e_request_latency_seconds_count") == 1
    assert rose("spec_decode_num_drafts_total") == drafting["num_spec_steps"] > 0
    assert rose("spec_decode_num_draft_tokens_total") == drafting["num_draft_tokens"]
    assert rose("spec_decode_num_accepted_tokens_total") == drafting["num_accepted_draft_tokens"] > 0
    positions = [rose("spec_decode_num_accepted_tokens_per_pos_total", str(i)) for i in range(4)]
    assert positions == drafting["num_accepted_tokens_per_pos"]
    assert sum(positions) == drafting["num_accepted_draft_tokens"]
    assert after["vllm:num_requests_running", ""] == after["vllm:num_requests_waiting", ""] == 0


SHAPES: list[dict[str, Any]] = [
    {"seed": 1},
    {"seed": 2, "temperature": 0},
    {"seed": 3, "speculative_decoding": False},
    {"seed": 4, "top_k": 0, "temperature": 1.3},
    {"seed": 5, "frequency_penalty": 1, "prompt": "body { color: red;"},
    {"seed": 6, "prompt": PAGE * 3},
    {"seed": 7, "logprobs": 1},
    {"seed": 8, "prompt": "<ul>\n  <li>"},
]


async def _at_once(
    server: ServeProcess, clients: int, seconds: float, tokens: int
) -> list[tuple[int, list[int]]]:
    """``clients`` clients ask for one answer after another for ``seconds``, half of them streamed."""
    deadline = time.monotonic() + seconds
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:

        async def one(number: int) -> list[tuple[int, list[int]]]:
            answers: list[tuple[int, list[int]]] = []
            while not answers or time.monotonic() < deadline:
                index = (number + len(answers)) % len(SHAPES)
                fields = {"prompt": PAGE, "return_token_ids": True, "max_tokens": tokens, **SHAPES[index]}
                asked: dict[str, Any] = {
                    "model": "web",
                    "prompt": fields.pop("prompt"),
                    "extra_body": fields,
                }
                if number % 2:
                    stream = await client.completions.create(stream=True, **asked)
                    ids = [i async for chunk in stream for i in chunk.choices[0].token_ids]
                else:
                    ids = (await client.completions.create(**asked)).choices[0].token_ids
                answers.append((index, ids))
            return answers

        found = await asyncio.gather(*(one(number) for number in range(clients)))
    return [answer for answers in found for answer in answers]


def _lose_and_mix_nothing(server: ServeProcess, seconds: float, tokens: int) -> None:
    solo = [server.ids(**{"max_tokens": tokens, **shape}) for shape in SHAPES]
    assert len({tuple(ids) for ids in solo}) == len(SHAPES)
    answers = asyncio.run(_at_once(server, 32, seconds, tokens))
    assert len(answers) >= 32
    for index, ids in answers:
        assert ids == solo[index]


def test_32_clients_at_once_lose_and_mix_nothing(server: ServeProcess) -> None:
    _lose_and_mix_nothing(server, seconds=0, tokens=5)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_32_clients_for_a_minute_lose_and_mix_nothing(server: ServeProcess) -> None:
    _lose_and_mix_nothing(server, seconds=60, tokens=24)
    server.wait_for("vllm:num_requests_running", 0)


CLIENT = """
import httpx, sys
body = {"prompt": "<ul>", "max_tokens": 580, "ignore_eos": True, "stream": sys.argv[2] == "stream"}
with httpx.stream("POST", sys.argv[1] + "/v1/completions", json=body, timeout=60) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""


@pytest.mark.parametrize("mode", ["stream", "whole"])
def test_a_killed_client_frees_its_slot(server: ServeProcess, mode: str) -> None:
    """kill -9 in the middle of four answers: all slots are free long before the answers would have ended."""
    aborted = server.metrics().get(("vllm:request_success_total", "abort"), 0)
    command = [sys.executable, "-c", CLIENT, server.url, mode]
    clients = [
        subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=default_signals) for _ in range(4)
    ]
    try:
        server.wait_for("vllm:num_requests_running", 4)
        if mode == "stream":
            for client in clients:
                assert client.stdout is not None and client.stdout.readline().startswith(b"data: ")
    finally:
        for client in clients:
            client.kill()
            client.communicate()
    server.wait_for("vllm:num_requests_running", 0)
    assert server.metrics()["vllm:request_success_total", "abort"] == aborted + 4
    with ThreadPoolExecutor(4) as pool:  # four slots still
        found = list(pool.map(lambda _: server.ids(seed=7, max_tokens=BUDGET), range(4)))
    assert found == [in_process("seed=7").token_ids] * 4
