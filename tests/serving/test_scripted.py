"""The scripted server over real sockets: bytes, faults, counters, its file format and its end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from script_process import HTTP, ScriptProcess, playing, write_scripts

from sm70lab.cli import main
from sm70lab.config import compose
from sm70lab.raw_text import dump_yaml, load_yaml
from sm70lab.schema import Gate, Generation, Prompt, Round, ShapeGate, Status
from sm70lab.serving import script_file
from sm70lab.serving.script import Good
from sm70lab.serving.script_text import sound
from sm70lab.serving.script_tokens import WEB, FileTokens
from sm70lab.tracking.run_folder import RunFolder

HANGUL = "안녕, 세계 🙂 — ends"


def answers(*each: dict[str, Any], **script: Any) -> dict[str, Any]:
    return {"answers": list(each), **script}


SCRIPTS: dict[str, dict[str, Any]] = {
    "plain": answers({"text": HANGUL, "reasoning": "hm …"}),
    "bytes": answers({"text": HANGUL, "wire": {"split": 1, "line_end": "crlf", "byte_order_mark": True}}),
    "long": answers({"text": "y", "wire": {"framing": "too_long"}}),
    "short": answers({"text": "y", "wire": {"framing": "too_short"}}),
    "close": answers({"text": "y", "wire": {"framing": "close"}}),
    "none": answers({"body": "hello, no HTTP", "wire": {"framing": "none"}}),
    "cut": answers({"faults": [{"kind": "cut", "at": 7}]}),
    "reset": answers({"faults": [{"kind": "reset", "at": 7}]}),
    "before": answers({"faults": [{"kind": "cut", "at": -1}]}),
    "stall": answers({"faults": [{"kind": "stall", "at": 7}]}),
    "pause": answers({"text": "abcd", "faults": [{"kind": "stall", "at": 2, "seconds": 0.3}]}),
    "order": answers(
        {"times": 2, "status": 429, "headers": {"retry-after": "3"}},
        {"match": {"prompt": "special"}, "text": "special answer"},
        {"match": {"endpoint": "completions"}, "text": "completed"},
        {"times": 1, "text": "chatted"},
    ),
    "refusing": answers({}, refuses=["return_token_ids"], max_model_len=50, endpoints=["chat"]),
    "bare": answers({}, version=None, served_models=None, counters=None),
    "keyed": answers({"text": "y"}, api_key="sesame"),
    "pages": answers({}, pages={"/metrics": {"status": 500, "body": "no"}}),
    "drafts": answers(
        {"collapse": {"at": 500, "unit": "5"}},
        counters={"drafts": 3, "acceptance": [0.9, 0.6, 0.3], "plateau": True},
    ),
    "traffic": answers({"text": "y"}, counters={"other_traffic": 4000.0}),
    "wrong": answers({"text": "abc", "usage": "always", "usage_tokens": 77, "finish": "missing"}),
    "extra": answers(
        {
            "text": "abc",
            "faults": [{"kind": "duplicate", "at": 2}, {"kind": "other_id", "at": 3}],
            "wire": {"comment_every": 1, "done": False},
        }
    ),
    "error": answers({"faults": [{"kind": "error", "at": 5, "message": "died", "code": 503}]}),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptProcess]:
    with playing(tmp_path_factory.mktemp("scripts"), SCRIPTS) as process:
        yield process


def body(prompt: str = "Hello", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    asked = {"return_token_ids": True, "stream_options": {"include_usage": True}}
    return {"model": "scripted", "messages": messages, "max_tokens": 40, "stream": True, **asked, **more}


def post(server: ScriptProcess, name: str, **more: Any) -> httpx.Response:
    return HTTP.post(server.base(name) + "/chat/completions", json=body(**more))


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("\ufeff") for line in text.splitlines()]
    data = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    return [json.loads(line) if line != "[DONE]" else line for line in data]


def content(found: list[Any], field: str = "content") -> str:
    deltas = [c["delta"] for e in found if isinstance(e, dict) for c in e.get("choices", ())]
    return "".join(delta.get(field, "") for delta in deltas)


def ids(found: list[Any]) -> list[int]:
    return [i for e in found if isinstance(e, dict) for c in e.get("choices", ()) for i in c["token_ids"]]


def test_a_stream_has_every_part(server: ScriptProcess) -> None:
    found = events(post(server, "plain", max_tokens=100).text)
    assert found[0]["prompt_token_ids"] == list(b"Hello")
    assert content(found, "reasoning_content") == "hm …"
    assert content(found) == HANGUL
    expected = [*"hm …\n</think>\n\n".encode(), *HANGUL.encode(), 256]
    assert ids(found) == expected
    assert found[-3]["choices"][0]["finish_reason"] == "stop"
    assert found[-2]["usage"] == {
        "prompt_tokens": 5, "completion_tokens": len(expected), "total_tokens": 5 + len(expected)
    }  # fmt: skip
    assert found[-1] == "[DONE]"


def test_the_answer_at_once_is_the_stream_joined(server: ScriptProcess) -> None:
    whole = post(server, "plain", stream=False, max_tokens=100).json()["choices"][0]
    found = events(post(server, "plain", max_tokens=100).text)
    assert whole["message"]["content"] == content(found)
    assert whole["message"]["reasoning_content"] == content(found, "reasoning_content")
    assert whole["token_ids"] == ids(found)


def test_split_at_every_byte_with_a_mark_and_crlf(server: ScriptProcess) -> None:
    with HTTP.stream("POST", server.base("bytes") + "/chat/completions", json=body()) as response:
        read = list(response.iter_raw())
    assert {len(piece) for piece in read} == {1}
    raw = b"".join(read)
    assert raw.startswith(b"\xef\xbb\xbfdata:") and raw.count(b"\r\n\r\n") == raw.count(b"\n") / 2
    assert content(events(raw.decode())) == HANGUL


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("long", httpx.RemoteProtocolError),  # the body ends before its length
        ("cut", httpx.RemoteProtocolError),
        ("reset", httpx.ReadError),
        ("before", httpx.RemoteProtocolError),
        ("none", httpx.RemoteProtocolError),
    ],
)
def test_broken_connections_break_as_real_ones_do(
    server: ScriptProcess, name: str, error: type[Exception]
) -> None:
    got = b""

    def read() -> None:
        nonlocal got
        with HTTP.stream("POST", server.base(name) + "/chat/completions", json=body()) as response:
            for piece in response.iter_raw():
                got += piece

    with pytest.raises(error):
        read()
    if name in ("cut", "reset"):
        assert len(ids(events(got.decode()))) == 7
        call = server.generations(name)[-1]
        assert (call["ended"], call["tokens"], call["status"]) == (name, 7, 200)


def test_a_body_longer_than_its_length_is_cut_by_the_client(server: ScriptProcess) -> None:
    short, close = post(server, "short"), post(server, "close")
    assert len(short.content) == int(short.headers["content-length"])
    assert "[DONE]" not in short.text and events(close.text)[-1] == "[DONE]"


def test_stalls(server: ScriptProcess) -> None:
    started = time.monotonic()
    assert content(events(post(server, "pause").text)) == "abcd"
    assert time.monotonic() - started >= 0.3
    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(server.base("stall") + "/chat/completions", json=body(), timeout=0.5)
    deadline = time.monotonic() + 10
    while server.generations("stall")[-1]["ended"] == "open" and time.monotonic() < deadline:
        time.sleep(0.02)
    call = server.generations("stall")[-1]
    assert (call["ended"], call["tokens"]) == ("the client left", 7)


def test_answers_in_order_by_match_and_until_used_up(server: ScriptProcess) -> None:
    codes = [post(server, "order").status_code for _ in range(2)]
    assert codes == [429, 429]
    assert server.generations("order")[0]["status"] == 429
    assert content(events(post(server, "order", prompt="a special one").text)) == "special answer"
    address = server.base("order") + "/completions"
    whole = HTTP.post(address, json={"model": "scripted", "prompt": "x", "max_tokens": 20}).json()
    assert whole["choices"][0]["text"] == "completed"
    assert content(events(post(server, "order").text)) == "chatted"
    assert "no answer left" in post(server, "order").json()["error"]["message"]
    assert server.told("order")["used"] == [2, 1, 1, 1]


def test_refusals_are_those_of_a_real_server(server: ScriptProcess) -> None:
    assert "return_token_ids" in post(server, "refusing").json()["error"]["message"]
    address = server.base("refusing") + "/chat/completions"
    plain = {"model": "scripted", "messages": body()["messages"], "max_tokens": 40}
    assert HTTP.post(address, json=plain).status_code == 200
    longest = HTTP.post(address, json=plain | {"max_tokens": 46})
    assert longest.status_code == 400 and "maximum context length is 50" in longest.text
    assert HTTP.post(address, json=plain | {"model": "x"}).json()["error"]["code"] == 404
    assert HTTP.post(address, json=plain | {"max_tokens": 0}).status_code == 400
    assert HTTP.post(address, json=plain | {"messages": []}).status_code == 400
    assert HTTP.post(address, content=b"{").status_code == 400
    assert HTTP.post(server.base("refusing") + "/completions", json=plain).status_code == 404


def test_pages(server: ScriptProcess) -> None:
    root = server.base("plain").removesuffix("/v1")
    assert HTTP.get(root + "/version").json() == {"version": "0.0.0+scripted"}
    assert [m["id"] for m in HTTP.get(root + "/v1/models").json()["data"]] == ["scripted"]
    bare = server.base("bare").removesuffix("/v1")
    assert {HTTP.get(bare + page).status_code for page in ("/version", "/v1/models", "/metrics")} == {404}
    assert post(server, "bare", model="any name").status_code == 200
    broken = HTTP.get(server.base("pages").removesuffix("/v1") + "/metrics")
    assert (broken.status_code, broken.text) == (500, "no")
    assert "/plain/v1" in HTTP.get(server.url + "/nowhere/v1/models").json()["error"]["message"]


def test_a_key_is_asked_for_and_not_told(server: ScriptProcess) -> None:
    assert post(server, "keyed").status_code == 401
    key = {"authorization": "Bearer sesame"}
    address = server.base("keyed") + "/chat/completions"
    assert HTTP.post(address, json=body(), headers=key).status_code == 200
    assert "sesame" not in json.dumps(server.told("keyed"))


def counters(server: ScriptProcess, name: str) -> dict[str, float]:
    text = HTTP.get(server.base(name).removesuffix("/v1") + "/metrics").text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {
        key.replace('engine="0",', "").replace('model_name="scripted"', ""): float(v) for key, _, v in lines
    }


def test_counters_move_with_the_tokens(server: ScriptProcess) -> None:
    before = counters(server, "drafts")
    assert set(before.values()) == {0.0}
    found = events(post(server, "drafts", max_tokens=500).text)
    middle = counters(server, "drafts")
    assert middle["vllm:generation_tokens_total{}"] == 500 == len(ids(found))
    rounds = middle["vllm:spec_decode_num_drafts_total{}"]
    assert middle["vllm:spec_decode_num_draft_tokens_total{}"] == 3 * rounds
    name = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{,position="{}"}}'
    rates = [middle[name.format(position)] / rounds for position in range(3)]
    assert rates == pytest.approx([0.9, 0.6, 0.3], abs=0.15)
    chunks = [c["token_ids"] for e in found if isinstance(e, dict) for c in e["choices"] if c["token_ids"]]
    assert len(chunks) == rounds + 1  # and the prefill's
    post(server, "drafts", max_tokens=1300)
    after = counters(server, "drafts")
    collapsed = after["vllm:spec_decode_num_drafts_total{}"] - 2 * rounds
    assert collapsed == pytest.approx(800 / 4, abs=2)  # from the collapse on every draft is accepted
    assert after['vllm:request_success_total{finished_reason="length",}'] == 2


def test_other_traffic_moves_the_counters_by_itself(server: ScriptProcess) -> None:
    first = counters(server, "traffic")
    time.sleep(0.3)
    second = counters(server, "traffic")
    assert second["vllm:generation_tokens_total{}"] - first["vllm:generation_tokens_total{}"] > 500
    assert second["vllm:num_requests_running{}"] == 1


def test_wrong_usage_no_finish_reason(server: ScriptProcess) -> None:
    found = events(post(server, "wrong", stream_options=None).text)
    assert found[-2]["usage"]["completion_tokens"] == 77
    assert all(c["finish_reason"] is None for e in found[:-1] for c in e["choices"])


def test_duplicates_other_ids_and_comments(server: ScriptProcess) -> None:
    text = post(server, "extra").text
    found = events(text)
    assert content(found) == "abbc"
    assert len({e["id"] for e in found}) == 2
    assert text.count(": keep-alive\n") == 4 and "[DONE]" not in text


def test_an_error_within_the_stream_ends_it_as_vllm_does(server: ScriptProcess) -> None:
    found = events(post(server, "error").text)
    assert found[-1] == "[DONE]"
    assert (found[-2]["error"]["message"], found[-2]["error"]["code"]) == ("died", 503)
    assert len(ids(found[:-2])) == 5


def test_two_requests_at_once_have_their_own_answers(server: ScriptProcess) -> None:
    alone = {p: content(events(post(server, "drafts", prompt=p, max_tokens=900).text)) for p in ("a", "b")}
    together: dict[str, str] = {}

    def ask(prompt: str) -> None:
        together[prompt] = content(events(post(server, "drafts", prompt=prompt, max_tokens=900).text))

    threads = [threading.Thread(target=ask, args=(p,)) for p in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone and alone["a"] != alone["b"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_while_it_serves(tmp_path: Path, number: signal.Signals) -> None:
    scripts = write_scripts(tmp_path, {"stall": SCRIPTS["stall"]})
    process = ScriptProcess(scripts / "stall.yaml")
    host, _, port = process.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        content = json.dumps(body()).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        assert client.recv(10) == b"HTTP/1.1 2"
        assert process.stop(number) == (0, "")


def test_a_recorded_run_is_played_again(recorded_web_run: Path, tmp_path: Path) -> None:
    """Its ids, its text in their pieces, its rounds in the chunks and counters."""
    script = {"answers": [{"run": {"folder": str(recorded_web_run)}}], "counters": {"drafts": 0}}
    process = ScriptProcess(write_scripts(tmp_path, {"again": script}) / "again.yaml")
    try:
        found = events(post(process, "", max_tokens=10_000).text)
        record = json.loads((recorded_web_run / "generations" / "page-r0.tokens.json").read_text())
        assert ids(found) == record["token_ids"]
        assert content(found) == (recorded_web_run / "generations" / "page-r0.txt").read_text()
        assert found[-3]["choices"][0]["finish_reason"] == record["finish_reason"]
        chunks = [c["token_ids"] for e in found if isinstance(e, dict) for c in e["choices"]]
        assert {len(chunk) for chunk in chunks[2:-5]} == {3}  # a round each
        moved = counters(process, "")
        drafts, accepted = (
            moved[f"vllm:spec_decode_num_{name}_total{{}}"] for name in ("drafts", "accepted_tokens")
        )
        assert drafts > 50 and accepted == 2 * drafts
    finally:
        process.stop()


@pytest.fixture(params=["web", pytest.param("unknown", marks=pytest.mark.long)])
def recorded_web_run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder by the product's own writer; with a tokenizer that is here, and with one that is not."""
    tokens = FileTokens(WEB)
    text = sound(Good.html, 900, "recorded") + HANGUL
    ids = tokens.encode(text)
    config = compose([f"tracking.runs_dir={tmp_path / 'runs'}"])
    folder = RunFolder.claim(config, "f" * 64)
    rounds = [Round(at, 4, 2, 3, 0.01) for at in range(1, len(ids) - 3, 3)]
    prompt = Prompt(0, "page", "x", [1], 10_000)
    folder.save_generation(Generation(prompt, 0, 1, ids, text, "stop", rounds, 0.1, 1.0))
    folder.save_tables([Generation(prompt, 0, 1, ids, text, "stop", rounds, 0.1, 1.0)], {})
    if request.param == "unknown":
        values = load_yaml(folder.path / "config.yaml")
        values["model"]["path"] = str(tmp_path / "gone")
        (folder.path / "config.yaml").write_text(dump_yaml(values))
    return folder.path


def test_a_recorded_stream_is_played_byte_for_byte(server: ScriptProcess, tmp_path: Path) -> None:
    raw = post(server, "plain").content
    (tmp_path / "kept.sse").write_bytes(raw)
    scripts = write_scripts(tmp_path, {"replay": answers({"sse": "kept.sse", "faults": []})})
    process = ScriptProcess(scripts / "replay.yaml")
    try:
        assert post(process, "").content == raw
    finally:
        process.stop()


# --------------------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("answers: [{colapse: {}}]", "answers[0].colapse: no such key; did you mean collapse?"),
        ("answers: [{}, {match: {modle: a}}]", "answers[1].match.modle: no such key; did you mean model?"),
        ("answers: [{faults: [{kind: stal}]}]", "answers[0].faults[0].kind: Invalid value 'stal'"),
        ("answers: [{collapse: {}, text: a}]", "answers[0].collapse: an answer has one source"),
        ("answers: [{status: 500, text: a}]", "answers[0].text: status 500"),
        ("answers: [{text: a, faults: [{kind: error, at: -1}]}]", "answers[0].faults[0].at: -1"),
        ("answers: []", "answers: at least one"),
        ("answers: 5", "answers: must be a list, not 5"),
        ("answers: [5]", "answers[0]: must be keys and values"),
        ("answers: [{faults: 3}]", "answers[0].faults: must be a list, not 3"),
        ("answers: [{wire: x}]", "answers[0].wire: must be keys and values"),
        ("pages: {/m: 3}", "pages./m: must be keys and values"),
        ("served_models: x", "served_models: must be a list, not 'x'"),
        ("counters: {drafts: 2, acceptance: [0.5]}", "counters.acceptance: needs 2 rates"),
        ("counters: {drafts: 2, acceptance: [0.5, 0.6]}", "counters.acceptance: rates"),
        ("answers: [{sse: nowhere.sse}]", "nowhere.sse: no such file"),
        ("answers: [{run: {folder: nowhere}}]", "run.folder: "),
        ("tokenizer: nowhere", "tokenizer: "),
        ("- 1", "must be a mapping"),
        ("answers: [", "not YAML"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert main(["serve", "--script", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in line and said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--script"], "needs a file"),
        (["--script", "nowhere"], "no such file, and no script of that name"),
        (["--script", "healthy", "prot=1"], "did you mean port?"),
        (["--script", "healthy", "port=70000"], "must be 0 (a free one) to 65535"),
        (["--script", "healthy", "tls_cert=none.pem"], "tls_cert=none.pem: no such file"),
        (["--script", "healthy", "host=203.0.113.7"], "cannot be used on 203.0.113.7"),
        (["--script", "healthy", "--jsn"], "no such option"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(["serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_bundled_scripts_load_and_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--script", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    names = script_file.bundled()
    assert [line.split()[0] for line in listed] == list(names)
    assert all(
        script_file.load(path).about in line for line, path in zip(listed, names.values(), strict=True)
    )


def test_the_line_names_the_address(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "sm70lab", "serve", "--script", "healthy"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    word, _, address = process.stdout.readline().strip().rpartition(" ")
    assert word == "listening on"
    assert HTTP.get(address + "/health").status_code == 200
    process.terminate()
    assert process.wait(30) == 0


@pytest.mark.parametrize("good", list(Good))
@pytest.mark.parametrize("shape", list(ShapeGate))
def test_made_up_text_is_sound(good: Good, shape: ShapeGate) -> None:
    from sm70lab.judge.verdict import shape_evidence

    for key, characters in (("a", 300), ("b", 4000), ("c", 15_000)):
        text = sound(good, characters, key)
        assert len(text) >= characters and text == sound(good, characters, key)
        prompt = Prompt(0, "p", "Write.", [1], 50_000, "html" if good is Good.html else None)
        made = Generation(prompt, 0, 0, list(text.encode()), text, "stop", [], 0.0, 1.0)
        evidence = shape_evidence([made], Gate(shape=shape))
        assert evidence.status is Status.ok, evidence.line
