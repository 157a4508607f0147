"""Counters of three servers, windows between their readings, and other people's traffic."""

from __future__ import annotations

import pytest

from sm70lab.targets.prometheus import Own, Reading, Watch, read

VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="1",model_name="m"} 20.0
vllm:generation_tokens_total{engine="0",model_name="other"} 5000.0
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e9
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 80.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 50.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 30.0
"""
LLAMA = """\
# HELP llamacpp:tokens_predicted_total Number of generation tokens processed
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 64
llamacpp:spec_decode_num_drafts_total 10
llamacpp:spec_decode_num_draft_tokens_total 40
llamacpp:spec_decode_num_accepted_tokens_total 22
llamacpp:requests_processing 1
"""
SGLANG = """\
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 300.0
sglang:spec_verify_calls_total{model_name="m"} 100.0
sglang:num_running_reqs{model_name="m"} 1.0
"""


def test_the_names_of_each_server() -> None:
    assert read(VLLM, "m", 5.0) == Reading("vllm", 5.0, 120, 2, 40, 80, 50, (30, 20))
    assert read(LLAMA, "m", 0.0) == Reading("llama.cpp", 0.0, 64, 1, 10, 40, 22, ())
    assert read(SGLANG, "m", 0.0) == Reading("sglang", 0.0, 300, 1, 100, 0, 200, ())
    without = "\n".join(line for line in VLLM.splitlines() if "spec_decode" not in line) + "\n"
    found = read(without, "m", 0.0)
    assert found is not None and found.drafts is None
    assert read("# TYPE python_gc counter\npython_gc 3\n", "m", 0.0) is None
    with pytest.raises(ValueError, match=r".+"):
        read("this { is no page 1 2 3\n", "m", 0.0)


def reading(at: float, tokens: int, running: int = 0, drafts: int = 0, *accepted: int) -> Reading:
    return Reading("vllm", at, tokens, running, drafts, drafts * len(accepted), sum(accepted), accepted)


def watch(*entries: tuple[Reading, dict[str, Own], int]) -> Watch:
    found = Watch()
    for entry in entries:
        found.add(*entry)
    return found


def own(tokens: int) -> dict[str, Own]:
    return {"p-r0": Own(tokens, tokens)}


def test_windows_hold_what_the_counters_rose_by() -> None:
    watched = watch(
        (reading(0, 1000, 0, 50, 20, 10), {}, 0),
        (reading(2, 1500, 1, 250, 170, 110), own(490), 1),
        (reading(3, 1700, 0, 300, 220, 160), own(700), 0),
    )
    first, second = watched.windows()
    assert (first.tokens, first.seconds, first.drafts, first.draft_tokens) == (500, 2, 200, 400)
    assert (first.accepted, first.accepted_per_position) == (250, (150, 100))
    assert (first.spans, second.spans) == ((("p-r0", 0, 490),), (("p-r0", 490, 700),))
    assert not first.other_traffic and not second.other_traffic and watched.traffic() == ""


def test_tokens_of_others_show() -> None:
    watched = watch((reading(0, 0), {}, 0), (reading(1, 500), own(500), 1), (reading(2, 1500), own(900), 0))
    assert [w.other_traffic for w in watched.windows()] == [False, True]
    assert "the server counted 1,500 tokens, this run's are 900" in watched.traffic()


def test_tokens_on_their_way_to_a_busy_client_are_nobody_elses() -> None:
    watched = watch((reading(0, 0), {}, 0), (reading(1, 900), own(500), 1), (reading(2, 1000), own(1000), 0))
    assert [w.other_traffic for w in watched.windows()] == [False, False]


def test_requests_of_others_show() -> None:
    before = watch((reading(0, 0, 1), {}, 0), (reading(1, 500), own(500), 0))
    assert "1 more requests ran" in before.traffic()
    assert [w.other_traffic for w in before.windows()] == [True]
    lag = watch((reading(0, 0), {}, 0), (reading(1, 400, 2), own(400), 1), (reading(2, 500, 0), own(500), 0))
    assert lag.traffic() == ""  # one reading may show a request that has just ended


def test_tokens_that_are_not_known_accuse_nobody() -> None:
    watched = watch((reading(0, 0), {}, 0), (reading(1, 500), {"p-r0": Own(1800, None)}, 0))
    (window,) = watched.windows()
    assert not window.other_traffic and window.spans == (("p-r0", 0, 1800),) and watched.traffic() == ""


def test_a_server_that_began_again_gives_no_window() -> None:
    watched = watch((reading(0, 900), {}, 0), (reading(1, 100), own(200), 1), (reading(2, 300), own(400), 0))
    assert [w.tokens for w in watched.windows()] == [200]
    assert watched.record()["restarted"] is True
    assert [r["seconds"] for r in watched.record()["readings"]] == [0, 1, 2]
