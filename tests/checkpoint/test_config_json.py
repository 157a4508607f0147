"""config.json and generation_config.json: what cannot be run is refused by name."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from refusal import MakeFolder, load, refused
from tiny_checkpoints import edit_config

from sm70lab.engine.architecture import Architecture
from sm70lab.errors import UsageError


def test_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "model.path")


def test_a_file_for_a_folder(folder: Path) -> None:
    refused(folder / "config.json", "config.json", "model.path")


def test_missing(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, "config.json", str(folder))


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b"3", b"null", b"\xff\xfe\x00", b'{"a": 1} x'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_not_a_json_object(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    refused(folder, name)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "Qwen3_5_text", "", None])
def test_unknown_model_type(folder: Path, kind: str | None) -> None:
    edit_config(folder, model_type=kind)
    refused(folder, "model_type", repr(kind), "qwen3_5_text", "qwen3_next")


@pytest.mark.parametrize("name", ["dense", "multimodal"])
def test_quantised(copy_of: MakeFolder, name: str) -> None:
    folder = copy_of(name)
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    refused(folder, "quantised")


def test_quantised_beside_the_language_part(copy_of: MakeFolder) -> None:
    folder = copy_of("multimodal")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    refused(folder, "quantised")


@pytest.mark.parametrize(
    "types",
    [
        ["linear_attention"] * 3,
        ["full_attention"] * 5,
        ["linear_attention"] * 3 + ["sliding_attention"],
        ["linear_attention"] * 3 + [None],
        ["linear_attention"] * 3 + [["full_attention"]],
        "full_attention",
        {"0": "full_attention"},
        7,
    ],
)
def test_bad_layer_types(folder: Path, types: Any) -> None:
    edit_config(folder, layer_types=types)
    refused(folder, "config.json")


def test_layer_types_that_do_not_fit_the_tensors(folder: Path) -> None:
    edit_config(folder, layer_types=["full_attention", *["linear_attention"] * 3])
    refused(folder, "model.layers.0.self_attn", "model.layers.0.linear_attn")


def test_layer_types_by_interval(folder: Path) -> None:
    """Without layer_types, every fourth layer is full attention."""
    edit_config(folder, layer_types=None)
    assert load(folder).arch.layer_types == (*("linear_attention",) * 3, "full_attention")


REQUIRED = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_required_key(folder: Path, key: str) -> None:
    edit_config(folder, **{key: None})
    refused(folder, "config.json", key)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.2}},
            "partial_rotary_factor",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 2}}, "partial_rotary_factor"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"num_experts": 4, "num_experts_per_tok": None}, "num_experts_per_tok"),
    ],
)
def test_values_that_cannot_be(folder: Path, changes: dict[str, Any], named: str) -> None:
    edit_config(folder, **changes)
    refused(folder, "config.json", named)


def test_other_activation(folder: Path) -> None:
    """The engine has SiLU only: another activation must not be taken for it."""
    edit_config(folder, hidden_act="gelu")
    refused(folder, "hidden_act", "gelu")


def test_end_tokens_of_both_files(folder: Path) -> None:
    edit_config(folder, eos_token_id=[5, 1])
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}', encoding="utf-8")
    assert load(folder).arch.eos_token_ids == (1, 5, 7)


ODD_VALUES: list[Any] = [
    "x",
    "",
    -1,
    0,
    1.5,
    True,
    [],
    ["x"],
    {},
    {"a": 1},
    10**30,
    float("nan"),
    float("inf"),
]
KEYS = [
    *REQUIRED,
    "model_type",
    "intermediate_size",
    "head_dim",
    "layer_types",
    "full_attention_interval",
    "rope_parameters",
    "rope_theta",
    "partial_rotary_factor",
    "rms_norm_eps",
    "attention_bias",
    "tie_word_embeddings",
    "mtp_num_hidden_layers",
    "max_position_embeddings",
    "eos_token_id",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "mlp_only_layers",
    "decoder_sparse_step",
    "quantization_config",
    "text_config",
]


@pytest.mark.parametrize("key", KEYS)
def test_any_value_is_read_or_refused(originals: MakeFolder, key: str) -> None:
    """No value of a key escapes as another exception than ``UsageError``."""
    whole = json.loads((originals("next_per_expert") / "config.json").read_text(encoding="utf-8"))
    for value in [None, *ODD_VALUES]:
        for base in (whole, {k: v for k, v in whole.items() if k != "head_dim"}):
            with contextlib.suppress(UsageError):
                Architecture.from_dict({**base, key: value}, "config.json")


@pytest.mark.parametrize("key", ["rope_type", "rope_theta", "partial_rotary_factor"])
def test_any_rope_value_is_read_or_refused(originals: MakeFolder, key: str) -> None:
    whole = json.loads((originals("dense") / "config.json").read_text(encoding="utf-8"))
    for value in [None, *ODD_VALUES]:
        with contextlib.suppress(UsageError):
            Architecture.from_dict(
                {**whole, "rope_parameters": {**whole["rope_parameters"], key: value}}, "config.json"
            )
