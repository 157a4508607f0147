"""Every way in which a server or the network fails, over real sockets: line, verdict, what is kept."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import self_signed
from failure_scripts import ANSWER, KEY, PROMPTS, SCRIPTS, SHAPES, SOUND, THINKING
from remote_runs import ASKED, TOKENS, Ran, run, told
from script_process import HTTP, ScriptProcess, write_scripts

from sm70lab.errors import UsageError
from sm70lab.schema import ModelSpec, Prompt, PromptSpec, ReferenceKind, Route, TargetConfig
from sm70lab.stop_signals import Interrupted
from sm70lab.targets.openai_answer import Answer
from sm70lab.targets.openai_client import Client, facts
from sm70lab.targets.openai_stream import EventStream
from tests.cli.lab import default_signals

SECONDS = 60

# ----------------------------------------------------------------- nothing came: one line, exit code 2


@pytest.mark.parametrize(
    ("script", "changes", "words"),
    [
        ("keyed", {}, "HTTP 401 Unauthorized.*target.api_key_env"),
        ("healthy", {"target__served_model": "other"}, "target.served_model=other: .* serves scripted"),
        ("refused", {}, "chat/completions: HTTP 400 Bad Request: temperature must be non-negative$"),
        ("not_found", {}, "HTTP 404 Not Found: no such route"),
        ("always_too_many", {}, r"HTTP 429 .*\(after 3 tries\)"),
        (
            "always_broken",
            {"target__retries": 1},
            r"HTTP 500 .*CUDA error: an illegal access \(after 2 tries\)",
        ),
        ("busy_page", {"target__retries": 0}, r"HTTP 502 .*<h1>502 Bad Gateway</h1>.*\(after one try\)"),
        ("not_json", {"target__retries": 0}, r"neither a stream of events nor JSON came \(text/html\)"),
        ("not_http", {"target__retries": 0}, "not HTTP"),
        ("error_first", {"target__retries": 0}, "EngineCore encountered an issue"),
        (
            "stall_first",
            {"target__retries": 0, "target__read_timeout_s": 0.5},
            r"target.read_timeout_s=0.5",
        ),
        (
            "stall_before_status",
            {"target__retries": 0, "target__total_timeout_s": 0.5},
            r"target.total_timeout_s=0.5",
        ),
        ("refuses_top_k", {}, "sampling.top_k=20: the server refuses the field top_k"),
        ("bare", {}, "bare/v1/models: HTTP 404"),
        ("no_chat", {}, "no_chat/v1/chat/completions: HTTP 404"),
        ("redirected", {}, "HTTP 307 .* to /elsewhere; set target.base_url"),
        ("nowhere", {}, "HTTP 404"),
    ],
)
def test_where_nothing_came_one_line_says_why(
    server: ScriptProcess, tmp_path: Path, script: str, changes: dict[str, Any], words: str
) -> None:
    base = server.scripts.get(script, f"{server.url}/{script}/v1")
    ran = run(base, tmp_path, **changes)
    assert ran.code == 2
    assert re.search(words, ran.line), ran.line
    assert ran.folder is None  # nothing was generated, so nothing is left


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("http://127.0.0.1:{closed}", "target.base_url=http://127.0.0.1:.* cannot be reached .*refused"),
        ("https://127.0.0.1:{open}", "target.base_url=https://127.0.0.1:.*(SSL|TLS)"),
        ("http://no-such-host.invalid:8000", "target.base_url=http://no-such-host.invalid:8000.* cannot be"),
    ],
    ids=["refused", "https to http", "unknown name"],
)
def test_servers_that_cannot_be_reached(server: ScriptProcess, tmp_path: Path, base: str, words: str) -> None:
    port = server.url.rpartition(":")[2]
    ran = run(base.format(closed=closed_port(), open=port), tmp_path, target__connect_timeout_s=5.0)
    assert ran.code == 2
    assert re.search(words, ran.line), ran.line
    assert ran.folder is None


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptProcess, Path]]:
    """A server that speaks https with a certificate of its own, and that certificate."""
    folder = tmp_path_factory.mktemp("secure")
    certificate, key = self_signed(folder)
    scripts = write_scripts(folder / "scripts", {"healthy": SCRIPTS["healthy"]})
    process = ScriptProcess(scripts / "healthy.yaml", f"tls_cert={certificate}", f"tls_key={key}")
    yield process, certificate
    assert process.stop() == (0, "")


@pytest.mark.long
def test_https(secure: tuple[ScriptProcess, Path], tmp_path: Path) -> None:
    process, certificate = secure
    base = process.base()
    unknown = run(base, tmp_path)
    assert unknown.code == 2 and "CERTIFICATE_VERIFY_FAILED" in unknown.line, unknown.line
    assert "target.tls_ca" in unknown.line
    plain = run(base.replace("https", "http"), tmp_path)
    assert plain.code == 2 and "target.base_url=http://" in plain.line, plain.line
    named = run(base, tmp_path, target__tls_ca=str(certificate))
    assert named.code == 0, named.line


# ----------------------------------------------------------------- the key


def test_a_key_reaches_the_server_and_no_file(
    server: ScriptProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    ran = run(server.base("keyed"), tmp_path, target__api_key_env="THEIR_KEY")
    assert ran.code == 0, ran.line
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if KEY.encode() in path.read_bytes()]
    assert KEY not in repr(ran.lines) + repr(ran.generations)


def test_a_wrong_or_missing_key(
    server: ScriptProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THEIR_KEY", raising=False)
    missing = run(server.base("keyed"), tmp_path, target__api_key_env="THEIR_KEY")
    assert missing.code == 2 and "target.api_key_env=THEIR_KEY" in missing.line, missing.line
    monkeypatch.setenv("THEIR_KEY", "sk-not-the-one")
    wrong = run(server.base("keyed"), tmp_path, target__api_key_env="THEIR_KEY")
    assert wrong.code == 2
    assert re.search("HTTP 401 .*THEIR_KEY", wrong.line), wrong.line
    assert "sk-not-the-one" not in wrong.line
    assert wrong.folder is None


# ----------------------------------------------------------------- many failures in one run


@pytest.fixture(scope="module")
def everything(server: ScriptProcess, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One run whose every prompt meets another failure."""
    prompts = [PromptSpec(name, user=f"<{name}> {ASKED}") for name in PROMPTS]
    return run(
        server.base("everything"),
        tmp_path_factory.mktemp("everything"),
        workload__prompts=prompts,
        target__read_timeout_s=2.0,
        target__max_num_seqs=6,
    )


def test_failures_of_some_outputs_end_in_one_verdict_over_all(everything: Ran) -> None:
    assert (everything.code, everything.verdict) == (3, "inconclusive"), everything.line
    assert len(everything.generations) == len(PROMPTS)
    assert {g["prompt"] for g in everything.result["generations"]} == set(PROMPTS)


WHOLE = TOKENS
RESULTS = [  # prompt, finish reason, ids kept, characters kept, words of its note
    ("healthy", "length", WHOLE, WHOLE, "^$"),
    ("too_many_then_fine", "length", WHOLE, WHOLE, "^$"),
    ("broken_then_fine", "length", WHOLE, WHOLE, "^$"),
    ("cut_then_fine", "length", WHOLE, WHOLE, "^$"),
    ("error_then_fine", "length", WHOLE, WHOLE, "^$"),
    ("always_broken", "server_error", 0, 0, r"no token came: HTTP 500 .*illegal access \(after 3 tries\)"),
    ("error_within", "server_error", 100, 100, "after 100 tokens in 100 chunks: EngineDeadError: the engine"),
    ("always_cut", "connection_lost", 0, 0, r"no token came: .*broke off.*\(after 3 tries\)"),
    ("stall_middle", "timeout", 100, 100, "target.read_timeout_s=2.*after 100 tokens"),
    ("cut", "connection_lost", 100, 100, "broke off.* after 100 tokens"),
    ("cut_close", "connection_lost", 100, 100, "ended without a finish_reason after 100 tokens"),
    ("reset", "connection_lost", 100, 100, "connection was lost, after 100 tokens"),
    ("too_long", "length", WHOLE, WHOLE, "broke off"),
    ("malformed", "malformed", 100, WHOLE, r"chunk 101: not JSON: '\{\"choices\": \['"),
    ("malformed_first", "malformed", 0, WHOLE, "chunk 1: not JSON"),
    ("wrong_shape", "malformed", 100, WHOLE, "chunk 101: choices is no list of objects"),
    ("wrong_ids", "malformed", 100, WHOLE, "chunk 101: token ids that are no numbers"),
    ("not_utf8", "length", 100, WHOLE + 1, "not UTF-8"),
    ("junk_lines", "length", WHOLE, WHOLE, "^$"),
    ("duplicate", "length", WHOLE + 1, WHOLE + 1, f"{WHOLE + 1} tokens came, and max_tokens was {WHOLE}"),
    ("other_id", "length", WHOLE, WHOLE, "the id of the answer changed from .* to .*-other"),
    ("wrong_usage", "length", WHOLE, WHOLE, f"usage counts 10 tokens, and {WHOLE} ids came"),
    ("no_usage_no_ids", "length", 0, WHOLE, ""),
    ("no_ids", "length", 0, WHOLE, ""),
    ("no_finish", "connection_lost", WHOLE, WHOLE, "ended without a finish_reason"),
    ("no_done", "length", WHOLE, WHOLE, r"without \[DONE\]"),
    ("empty", "stop", 1, 0, "^$"),
]


@pytest.mark.parametrize(("name", "reason", "ids", "characters", "words"), RESULTS)
def test_what_came_is_kept_and_the_note_says_what_failed(
    everything: Ran, name: str, reason: str, ids: int, characters: int, words: str
) -> None:
    output = everything.output(name)
    assert (output.finish_reason, len(output.token_ids), len(output.text)) == (reason, ids, characters)
    assert re.search(words, output.note), output.note
    assert "\n" not in output.note
    text, record = everything.kept(name)
    assert text == output.text
    assert record["token_ids"] == output.token_ids
    assert record["finish_reason"] == reason and record["note"] == output.note
    if characters == WHOLE and name != "not_utf8":
        assert text == told(f"<{name}> {ASKED}", list(PROMPTS).index(name))[:characters]
        assert output.token_ids == list(text.encode())[:ids]
    if reason == "malformed":  # ids behind the gap have no known place, and are kept apart
        assert record["request"]["later_token_ids"] == list(text.encode())[ids:]


def test_a_half_body_keeps_its_half(everything: Ran) -> None:
    output = everything.output("too_short")
    assert output.finish_reason == "connection_lost" and "inside an event" in output.note
    assert TOKENS / 3 < len(output.token_ids) < TOKENS / 1.5
    assert told(f"<too_short> {ASKED}", list(PROMPTS).index("too_short")).startswith(output.text)


@pytest.mark.parametrize(
    ("name", "tries"),
    [
        ("too_many_then_fine", ["HTTP 429"]),
        ("broken_then_fine", ["HTTP 500", "HTTP 500"]),
        ("cut_then_fine", ["broke off"]),
        ("error_then_fine", ["EngineCore encountered an issue"]),
        ("healthy", []),
    ],
)
def test_tries_that_failed_are_recorded(everything: Ran, name: str, tries: list[str]) -> None:
    failed = everything.output(name).request["failed_tries"]
    assert len(failed) == len(tries)
    assert all(word in each["error"] for word, each in zip(tries, failed, strict=True))


SPLIT = ["told", "told_in_newer_field", "bytes", "bytes_crlf", "bytes_cr", "three_bytes"]


@pytest.mark.parametrize("name", SPLIT)
def test_reasoning_and_content_are_whole_however_they_were_cut(everything: Ran, name: str) -> None:
    output = everything.output(name)
    assert (output.reasoning, output.text) == (THINKING, ANSWER)
    assert output.finish_reason == "stop" and output.note == ""
    assert "\ufffd" not in output.full_text
    assert output.token_ids[-1] == 256  # the end token is the last id, and has no text
    assert bytes(output.token_ids[:-1]).decode() == f"{THINKING}\n</think>\n\n{ANSWER}"


def test_reasoning_in_the_content_stays_there(everything: Ran) -> None:
    output = everything.output("told_in_content")
    assert output.text == f"<think>\n{THINKING}\n</think>\n\n{ANSWER}"


def test_a_stream_cut_at_any_byte_reads_the_same(server: ScriptProcess) -> None:
    """Two deliveries for each place between two bytes of one recorded answer."""
    asked = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "max_tokens": 50}
    address = server.base("short") + "/chat/completions"
    short = HTTP.post(address, json={**asked, "stream": True, "return_token_ids": True}).content
    for at in range(1, len(short)):
        events, answer = EventStream(), Answer(Prompt(0, "p", "", [], 50), 0, 0, {})
        for part in (short[:at], short[at:]):
            for event in events.feed(part):
                answer.event(event, 0.0)
        answer.close(events.pending)
        found = answer.generation()
        assert (found.reasoning, found.text, found.note) == ("hm 🙂", "Tee? 🙂 안", ""), at


def test_a_line_without_an_end_takes_no_memory(server: ScriptProcess, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ran = run(server.base("huge_line"), tmp_path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert ran.output().finish_reason == "malformed"
    assert "longer than 16 MiB, after 100 tokens" in ran.output().note
    assert grown < 80_000  # KiB, of a line of 100 MB
    assert (ran.code, len(ran.kept()[1]["token_ids"])) == (3, 100)
    (call,) = server.generations("huge_line")
    assert call["ended"] == "the client left"


@pytest.mark.long
def test_an_answer_that_takes_too_long_is_cut(server: ScriptProcess, tmp_path: Path) -> None:
    """Comments keep the connection alive; the limit of the whole answer ends it all the same."""
    ran = run(server.base("trickle"), tmp_path, target__total_timeout_s=1.0, gate__min_tokens=10)
    output = ran.output()
    assert (ran.code, ran.verdict, output.finish_reason) == (3, "inconclusive", "timeout")
    assert re.search("target.total_timeout_s=1.*after .* tokens", output.note), output.note
    assert 20 < len(output.token_ids) < 110
    assert told().startswith(ran.kept()[0])
    assert f"page-r0: timeout: {output.note}" in ran.reason


# ----------------------------------------------------------------- verdicts


def test_one_lost_connection_is_no_fault_of_the_route(server: ScriptProcess, tmp_path: Path) -> None:
    ran = run(server.base("cut"), tmp_path)
    assert (ran.code, ran.verdict) == (3, "inconclusive")
    assert "page-r0: connection_lost" in ran.reason and "no fault of the route" in ran.reason
    assert (ran.folder is not None) and (ran.folder / "DONE").exists()
    assert ran.result["speed"]["valid"] is False


def test_a_collapse_is_found_where_it_begins_and_blamed_on_nobody(
    server: ScriptProcess, tmp_path: Path
) -> None:
    ran = run(server.base("collapse"), tmp_path, workload__max_tokens=1500)
    assert (ran.code, ran.verdict) == (3, "inconclusive")  # no reference: whose fault it is stays open
    assert "an audit must say whose fault it is" in ran.reason
    (failure,) = ran.evidence("shape")["details"]["generations"]["page-r0"]["failures"]
    assert (failure["metric"], failure["position"], failure["token"]) == ("loop", 500, 500)
    assert (failure["unit"], failure["part"]) == ("5", "content")
    assert ran.result["speed"]["valid"] is False


@pytest.mark.long
def test_a_collapse_of_the_thinking(server: ScriptProcess, tmp_path: Path) -> None:
    ran = run(server.base("collapse_in_reasoning"), tmp_path, workload__max_tokens=1500)
    assert (ran.code, ran.verdict) == (3, "inconclusive")
    failures = ran.evidence("shape")["details"]["generations"]["page-r0"]["failures"]
    loop = next(f for f in failures if f["metric"] == "loop")
    assert loop["part"] == "reasoning" and loop["token"] == 500
    assert len(ran.output().reasoning or "") == 1500 and ran.output().text == ""


def test_the_plateau_of_a_loop_shows_in_the_counters(server: ScriptProcess, tmp_path: Path) -> None:
    ran = run(server.base("plateau"), tmp_path, workload__max_tokens=3000, gate__window_tokens=300)
    assert (ran.code, ran.verdict) == (3, "inconclusive")
    acceptance = ran.evidence("acceptance")
    assert acceptance["status"] == "bad", acceptance["line"]
    assert "plateau" in acceptance["details"]["findings"]
    healthy = run(server.base("drafting"), tmp_path, workload__max_tokens=3000, gate__window_tokens=300)
    assert (healthy.code, healthy.verdict) == (0, "pass")
    acceptance = healthy.evidence("acceptance")
    assert acceptance["status"] == "ok", acceptance["line"]
    rates = [acceptance["metrics"][f"rate_{i}"] for i in range(1, 5)]
    assert rates == pytest.approx([0.8, 0.6, 0.45, 0.3], abs=0.08)
    assert acceptance["metrics"]["acceptance_length"] == pytest.approx(3.15, abs=0.2)


def test_other_peoples_requests_are_noticed(server: ScriptProcess, tmp_path: Path) -> None:
    ran = run(server.base("traffic"), tmp_path)
    assert ran.code == 0, ran.reason
    acceptance = ran.evidence("acceptance")
    assert "other_traffic" in acceptance["details"]["findings"], acceptance["line"]
    assert ran.result["speed"]["valid"] is False


def test_tokens_that_nobody_counts_are_unknown_and_said_to_be(server: ScriptProcess, tmp_path: Path) -> None:
    ran = run(server.base("no_ids"), tmp_path)
    assert (ran.code, ran.verdict) == (0, "pass"), ran.reason
    assert ran.output().counted_tokens is None
    (recorded,) = ran.result["generations"]
    assert recorded["tokens"] == 0 and recorded["characters"] == TOKENS
    lines = [e["line"] for e in ran.result["verdict"]["evidence"]]
    assert any("token" in line and "unknown" in line for line in lines), lines


@pytest.mark.long
def test_a_server_that_refuses_to_tell_ids_is_asked_without(server: ScriptProcess, tmp_path: Path) -> None:
    refused = run(server.base("refuses_ids"), tmp_path)
    assert refused.code == 0, refused.reason
    assert refused.output().request["refused_fields"] == ["return_token_ids"]
    assert refused.output().tokens == TOKENS  # by the server's usage


@pytest.mark.long
def test_degenerate_outputs_are_found_over_the_wire(server: ScriptProcess, tmp_path: Path) -> None:
    prompts = [PromptSpec(name, user=f"<{name}> {ASKED}") for name in [*SHAPES, *SOUND]]
    ran = run(server.base("shapes"), tmp_path, workload__prompts=prompts, workload__max_tokens=3000)
    assert (ran.code, ran.verdict) == (3, "inconclusive"), ran.line
    shape = ran.evidence("shape")
    found = {key: [f["metric"] for f in g["failures"]] for key, g in shape["details"]["generations"].items()}
    missed = {
        name: found[f"{name}-r0"] for name, (_, metric) in SHAPES.items() if metric not in found[f"{name}-r0"]
    }
    assert not missed
    assert not [name for name in SOUND if found[f"{name}-r0"]]
    passed = {g["prompt"]: g["passed"] for g in ran.result["generations"]}
    assert passed == {**dict.fromkeys(SHAPES, False), **dict.fromkeys(SOUND, True)}


@pytest.mark.long
def test_a_budget_is_delivered_reported_and_asked_for(server: ScriptProcess, tmp_path: Path) -> None:
    prompts = [PromptSpec(f"p{n}", user=ASKED, max_tokens=n) for n in range(1, 13)]
    ran = run(server.base("healthy"), tmp_path, workload__prompts=prompts, gate__min_tokens=1)
    assert ran.code == 0, ran.reason
    for n, output in enumerate(ran.generations, 1):
        assert (len(output.token_ids), output.counted_tokens, output.finish_reason) == (n, n, "length")
        assert output.request["sent"]["max_tokens"] == n and output.note == ""


@pytest.mark.parametrize(
    ("script", "changes"),
    [
        ("bare", {"target__served_model": "anything"}),
        pytest.param("broken_metrics", {}, marks=pytest.mark.long),
        pytest.param("failing_pages", {}, marks=pytest.mark.long),
    ],
)
def test_servers_with_fewer_pages_are_judged_all_the_same(
    server: ScriptProcess, tmp_path: Path, script: str, changes: dict[str, Any]
) -> None:
    ran = run(server.base(script), tmp_path, **changes)
    assert (ran.code, ran.verdict) == (0, "pass"), ran.line
    assert ran.evidence("acceptance")["status"] == "unknown"


def test_a_header_that_http_forbids_is_one_line(server: ScriptProcess) -> None:
    headers = {"Content-Length": "3"}
    client = Client(TargetConfig(name="openai", base_url=server.base("healthy"), headers=headers))
    with pytest.raises(UsageError, match="HTTP allows no such request"):
        facts(client)
    client.close()


def test_a_server_that_tells_its_route_and_its_fault(server: ScriptProcess, tmp_path: Path) -> None:
    refused = run(server.base("tells"), tmp_path, route=Route(name="full_forward"))
    assert refused.code == 2 and not refused.generations and refused.folder is None
    assert refused.line.startswith("route=full_forward: the server runs spec_core_003 (its /version says so)")
    ran = run(server.base("tells"), tmp_path)
    assert ran.folder is not None
    line = "hazard: the server runs hazard=no_ssm_rollback (its /version says so)"
    summary = (ran.folder / "summary.md").read_text(encoding="utf-8")
    assert line in ran.evidence("acceptance")["line"] and line in summary
    assert "**HAZARD no_ssm_rollback: the server" in summary and not ran.result["speed"]["valid"]
    assert run(server.base("tells"), tmp_path, route=Route(name="spec_core_003")).code == 0


def test_a_named_route_without_drafts_is_not_a_server_that_drafts(
    server: ScriptProcess, tmp_path: Path
) -> None:
    ran = run(server.base("drafting"), tmp_path, route=Route(name="no_mtp", draft_tokens=0))
    assert (ran.code, ran.verdict) == (3, "inconclusive")
    assert re.fullmatch(
        "the named route drafts 0 tokens a round, the server [34][0-9.]*: this is not that route", ran.reason
    )


def test_a_reference_asked_for_by_name_must_score(server: ScriptProcess, tmp_path: Path) -> None:
    model = ModelSpec(name="web")
    ran = run(server.base("no_ids"), tmp_path, model=model, target__reference=ReferenceKind.engine)
    assert (ran.code, ran.verdict) == (3, "inconclusive")
    assert "target.reference=engine scored no token" in ran.reason and "no token ids" in ran.reason
    assert run(server.base("no_ids"), tmp_path, model=model).code == 0


def test_own_tokens_that_are_not_known_are_nobody_elses(server: ScriptProcess, tmp_path: Path) -> None:
    ran = run(server.base("drafting_malformed"), tmp_path)
    acceptance = ran.evidence("acceptance")
    assert "other_traffic" not in acceptance["details"]["findings"] and not ran.result["speed"]["shared"]
    assert "other traffic is not known: this run's own tokens are not all counted" in acceptance["line"]
    assert "tokens a round" in acceptance["line"] and "no drafts" not in acceptance["line"]
    assert ran.result["counters"]["other_traffic"] == ""


def test_of_an_output_that_never_came_it_is_said(server: ScriptProcess, tmp_path: Path) -> None:
    prompts = [PromptSpec("page", user=f"<healthy> {ASKED}"), PromptSpec("cut", user=f"<always_cut> {ASKED}")]
    ran = run(server.base("everything"), tmp_path, workload__prompts=prompts, target__retries=0)
    assert (ran.code, ran.verdict) == (3, "inconclusive"), ran.line
    assert ran.evidence("audit")["details"]["reference"].endswith("cut-r0 is not scored: no token came")
    outcome = next(g for g in ran.result["generations"] if g["prompt"] == "cut")
    assert "no token came" in outcome["failure"]
    assert "cut-r0: no token came" in ran.evidence("shape")["line"]


def test_a_refusal_in_the_middle_keeps_what_was_there(server: ScriptProcess, tmp_path: Path) -> None:
    prompts = [PromptSpec("page", user=ASKED), PromptSpec("other", user="a second page")]
    ran = run(server.base("refused_for_the_second"), tmp_path, workload__prompts=prompts)
    assert ran.code == 2 and "HTTP 400" in ran.line, ran.line
    assert ran.folder is not None and (ran.folder / "INTERRUPTED").exists()
    assert ran.kept()[0] == told()[:TOKENS]


@pytest.mark.long
def test_outputs_asked_for_at_once_are_never_mixed(server: ScriptProcess, tmp_path: Path) -> None:
    names = [f"p{i}" for i in range(6)]
    prompts = [PromptSpec(name, user=f"{name}: {ASKED}") for name in names]
    ran = run(server.base("healthy"), tmp_path, workload__prompts=prompts, target__max_num_seqs=6)
    assert ran.code == 0, ran.line
    for index, name in enumerate(names):
        text, record = ran.kept(name)
        assert text == told(f"{name}: {ASKED}", index)[:TOKENS]
        assert bytes(record["token_ids"]).decode() == text


# ----------------------------------------------------------------- the command itself


def command(base: str, folder: Path, *more: str) -> list[str]:
    settings = [f"target.base_url={base}", "tracking=off", f"workload.max_tokens={TOKENS}", *more]
    prompts = f"workload.prompts=[{{name: page, user: {ASKED}}}]"
    return [sys.executable, "-m", "sm70lab", "target=openai", prompts, *settings]


def kept_when_interrupted(server: ScriptProcess, folder: Path) -> None:
    """One interrupted output is on disk with all that came, and the server was let go."""
    (file,) = folder.glob("runs/*/*/generations/page-r0.tokens.json")
    record = json.loads(file.read_text())
    assert record["finish_reason"] == "interrupted" and len(record["token_ids"]) > 50
    text = file.with_name("page-r0.txt").read_text()
    assert told().startswith(text[:TOKENS]) and text == bytes(record["token_ids"]).decode()
    assert (file.parents[1] / "INTERRUPTED").exists() and not (file.parents[1] / "DONE").exists()
    assert server.generations("slow")[-1]["ended"] == "the client left"


def wait_for_tokens(server: ScriptProcess, seen: int) -> None:
    """Until the answer behind those seen before has sent more than fifty tokens."""
    deadline = time.monotonic() + SECONDS
    while not any(call["tokens"] > 50 for call in server.generations("slow")[seen:]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_keeps_what_came(server: ScriptProcess, tmp_path: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner in the background ignores it
    seen = len(server.generations("slow"))

    def press() -> None:
        wait_for_tokens(server, seen)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(Interrupted) as end:
        run(server.base("slow"), tmp_path / "runs", workload__max_tokens=3000)
    thread.join()
    assert end.value.exit_code == 130
    kept_when_interrupted(server, tmp_path)


@pytest.mark.long
def test_ctrl_c_of_the_command(server: ScriptProcess, tmp_path: Path) -> None:
    seen = len(server.generations("slow"))
    run = subprocess.Popen(
        command(server.base("slow"), tmp_path, "workload.max_tokens=3000"),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )
    wait_for_tokens(server, seen)
    run.send_signal(signal.SIGINT)
    _, stderr = run.communicate(timeout=SECONDS)
    assert run.returncode == 130
    assert "Traceback" not in stderr and "interrupted (Ctrl-C): 1 outputs" in stderr, stderr
    kept_when_interrupted(server, tmp_path)


@pytest.mark.long
def test_the_command_says_it_in_one_line(server: ScriptProcess, tmp_path: Path) -> None:
    def ends(script: str, *more: str) -> tuple[int, str]:
        done = subprocess.run(
            command(server.base(script), tmp_path, *more),
            cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr + done.stdout

    code, said = ends("always_broken", "target.retries=0")
    (line,) = [line for line in said.splitlines() if line.startswith("sm70lab:")]
    assert code == 2 and "HTTP 500 Internal Server Error: CUDA error: an illegal access" in line
    code, said = ends("cut")
    assert code == 3 and "connection_lost" in said, said
    code, said = ends("collapse", "workload.max_tokens=1500")
    assert code == 3 and "'5' × 1,000" in said, said
