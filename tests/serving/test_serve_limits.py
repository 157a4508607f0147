"""The limits of ``sm70lab serve``: key, body, queue, time, and its end."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import AuthenticationError, RateLimitError

from sm70lab.cli import main
from tests.serving.served import PAGE, ServeProcess

KEY = "s3cret"


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    served = ServeProcess(
        "route=no_mtp",
        "max_model_len=4000",
        "queue=1",
        "max_body=20000",
        "request_timeout_s=3",
        "grace_s=0.5",
        "api_key_env=SERVE_TEST_KEY",
        SERVE_TEST_KEY=KEY,
    )
    served.http.headers["Authorization"] = f"Bearer {KEY}"
    yield served
    served.stop()


@pytest.mark.parametrize("sent", [None, "Bearer wrong", f"Basic {KEY}", "Bearer", f"Bearer {KEY}x"])
def test_v1_asks_for_the_key(server: ServeProcess, sent: str | None) -> None:
    headers = {} if sent is None else {"Authorization": sent}
    for path in ("/v1/models", "/v1/nowhere"):
        answer = httpx.get(server.url + path, headers=headers)
        assert answer.status_code == answer.json()["error"]["code"] == 401
    for path in ("/health", "/version", "/metrics"):
        assert httpx.get(server.url + path, headers=headers).status_code == 200


def test_openais_client_with_and_without_the_key(server: ServeProcess) -> None:
    assert server.client(KEY).models.list().data[0].id == "web"
    with pytest.raises(AuthenticationError):
        server.client("wrong").models.list()


def test_a_body_over_the_limit(server: ServeProcess) -> None:
    body = json.dumps({"prompt": "x" * 20_000}).encode()
    kind = {"content-type": "application/json"}
    declared = server.http.post("/v1/completions", content=body, headers=kind)
    chunked = server.http.post("/v1/completions", content=iter([body[:9000], body[9000:]]), headers=kind)
    for answer in (declared, chunked):
        assert answer.status_code == answer.json()["error"]["code"] == 413
    fits = json.dumps({"prompt": "<p>", "max_tokens": 1, "user": "x" * 15_000}).encode()
    parts = iter([fits[:9000], fits[9000:]])
    assert server.http.post("/v1/completions", content=parts, headers=kind).status_code == 200


def test_a_full_queue_and_the_time_limit(server: ServeProcess) -> None:
    """One runs, one waits, the third is turned away; both get what there is when their time is up."""
    found: list[dict[str, Any]] = []

    def ask() -> None:
        found.append(server.completion(max_tokens=3900, ignore_eos=True))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for number, thread in enumerate(threads):
        thread.start()
        server.wait_for("vllm:num_requests_running", 1)
        server.wait_for("vllm:num_requests_waiting", number)
    with pytest.raises(RateLimitError) as refused:
        server.client(KEY).completions.create(model="web", prompt="<p>")
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert "the queue is full (1 running, 1 waiting)" in str(refused.value)
    for thread in threads:
        thread.join()
    assert [answer["choices"][0]["finish_reason"] for answer in found] == ["timeout"] * 2
    tokens = [answer["usage"]["completion_tokens"] for answer in found]
    assert tokens[0] > 0
    assert len(found[0]["choices"][0]["token_ids"]) == tokens[0]
    assert server.ids(max_tokens=3, seed=1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["foo=1"],
            "foo=1: no such setting of serve; choose from (route, target, model, sampling, hazard, port,",
        ),
        (["prot=1"], "did you mean port"),
        (["route=split,no_mtp"], "route=split,no_mtp: one server serves one route; start one for each"),
        (["sampling.top_k=1,2"], "one server serves one sampling.top_k"),
        (["grace_s=-1"], "grace_s=-1: must be 0 seconds or more"),
        (["target=openai"], "target=openai: serve runs the built-in engine; leave target out"),
        (["target=vllm"], "target=vllm: serve runs the built-in engine; leave target out"),
        (["experiment=AI", "model=sm70lab/models/web"], "target=vllm: serve runs the built-in engine"),
        (["port=x"], "port=x"),
        (["port=65536"], "port=65536"),
        (["queue=-1"], "queue=-1"),
        (["max_model_len=1"], "max_model_len=1"),
        (["max_model_len=16000000"], "max_model_len=16000000"),
        (["request_timeout_s=0"], "request_timeout_s=0: must be above 0 seconds"),
        (["repetition_stop=maybe"], "repetition_stop=maybe"),
        (["api_key_env=NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
        (["host=host.invalid"], "host.invalid"),
        (["seed=3"], "seed=3: does nothing in a server"),
        (["workload.max_tokens=3"], "workload.max_tokens"),
        (["target=openai", "target.base_url=http://127.0.0.1:1/v1"], "target=openai"),
        (["--verbose"], "--verbose"),
    ],
)
def test_a_bad_setting_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["serve", "port=0", *arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert says in err and err.count("\n") == 1


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", f"port={port}"]) == 2
        of_the_engine = capsys.readouterr().err
        assert main(["serve", "--script", "healthy", f"port={port}"]) == 2
    assert f"port={port}: cannot be used on 127.0.0.1 (Address already in use); choose" in of_the_engine
    assert capsys.readouterr().err == of_the_engine


def test_sigterm_gives_running_answers_what_there_is(server: ServeProcess) -> None:
    """The last test of this server: it ends."""
    body = {"prompt": PAGE, "max_tokens": 3900, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        chunks = [json.loads(next(lines))]
        server.process.send_signal(signal.SIGTERM)
        chunks += [json.loads(line) for line in lines if line != "[DONE]"]
    assert len(chunks) > 3  # it went on for the grace time
    assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
    assert server.stop() == (0, "")
