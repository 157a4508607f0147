"""What is sent: sampling as request fields, seeds, and what a server cannot take."""

from __future__ import annotations

import pytest

from sm70lab.errors import UsageError
from sm70lab.schema import Sampling
from sm70lab.targets.base import request_seed
from sm70lab.targets.openai_request import LLAMA_CPP, VLLM, sampling_fields, without_refused


def test_everything_is_sent_so_that_no_server_default_acts() -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=0, stop_ids=[7], min_tokens=3, stop_strings=["x"])
    body = sampling_fields(sampling, 2**40, VLLM).body
    assert body == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 2**40,
        "min_tokens": 3,
        "stop_token_ids": [7],
        "stop": ["x"],
    }


def test_llama_cpp_has_names_and_seeds_of_its_own() -> None:
    body = sampling_fields(Sampling(repetition_penalty=1.1), 2**40 + 5, LLAMA_CPP).body
    assert body["repeat_penalty"] == 1.1 and "repetition_penalty" not in body
    assert body["seed"] == 5
    with pytest.raises(UsageError, match=r"sampling\.min_tokens=4: llama\.cpp"):
        sampling_fields(Sampling(min_tokens=4), 0, LLAMA_CPP)


def test_bans_are_the_strongest_bias_and_said_to_be() -> None:
    found = sampling_fields(Sampling(banned_ids=[3], logit_bias={3: 5.0, 4: 1.5}), 0, VLLM)
    assert found.body["logit_bias"] == {"3": -100.0, "4": 1.5}
    assert any("banned_ids" in note for note in found.notes)
    with pytest.raises(UsageError, match=r"sampling\.logit_bias=\{4: 101\.0\}: the API takes −100 to 100"):
        sampling_fields(Sampling(logit_bias={4: 101.0}), 0, VLLM)


def test_unknown_fields_are_left_out_only_where_nothing_is_lost() -> None:
    body = {"prompt": "x", "top_k": -1, "return_token_ids": True}
    assert without_refused(body, "Extra inputs: top_k, return_token_ids") == (
        {"prompt": "x"},
        ["top_k", "return_token_ids"],
    )
    assert without_refused(body, "prompt is too long") is None
    with pytest.raises(UsageError, match=r"sampling\.top_k=20: the server refuses the field top_k"):
        without_refused(body | {"top_k": 20}, "unknown field top_k")
    with pytest.raises(UsageError, match=r"sampling\.stop_ids=\[7\]"):
        without_refused({"stop_token_ids": [7]}, "unknown field stop_token_ids")


def test_seeds_of_requests_differ_and_the_first_is_the_runs_own() -> None:
    seeds = {request_seed(20260620, prompt, repeat) for prompt in range(20) for repeat in range(20)}
    assert len(seeds) == 400 and all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(20260620, 0, 0) == 20260620
    assert request_seed(20260620, 1, 0) == request_seed(20260620, 1, 0) != request_seed(20260621, 1, 0)
