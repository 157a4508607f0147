"""safetensors files: every tensor must be there, alone, whole and finite."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from refusal import MakeFolder, load, refused
from safetensors.torch import save_file
from tiny_checkpoints import PER_EXPERT, edit_config, read_tensors

from sm70lab.engine.loading import find
from sm70lab.errors import UsageError
from sm70lab.schema import ExperimentConfig, ModelSpec, PromptSpec, Route
from sm70lab.targets.engine import EngineTarget
from sm70lab.tracking.fingerprint import model_hash

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def rewrite(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Put tensors into the folder's one file, or take them out of it."""
    tensors = read_tensors(folder / WEIGHTS)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def names_of(folder: Path) -> list[str]:
    return sorted(read_tensors(folder / WEIGHTS))


@pytest.mark.parametrize("recipe", ["dense", "next_per_expert", "moe_per_expert"])
def test_every_missing_tensor_is_listed(copy_of: MakeFolder, recipe: str) -> None:
    """Each draft-head tensor, and each kind of tensor of the target, taken out alone."""
    folder = copy_of(recipe)
    file = folder / WEIGHTS
    tensors = read_tensors(file)
    names = [n for n in tensors if n.startswith("mtp.") or ".layers." not in n or ".layers.3." in n]
    names = [n for n in names if not (match := PER_EXPERT.fullmatch(n)) or match[2] in "05"]
    assert len(names) > 20
    for name in names:
        save_file({n: t for n, t in tensors.items() if n != name}, file)
        with pytest.raises(UsageError) as caught:
            find(ModelSpec(name="checkpoint", path=str(folder)))  # before any weight is read
        if match := PER_EXPERT.fullmatch(name):
            assert match[1] in str(caught.value)
        else:
            assert f"missing {name}" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    gone = [n for n in names_of(folder) if n.startswith("mtp.")]
    rewrite(folder, dict.fromkeys(gone))
    refused(folder, "mtp.fc.weight", f"and {len(gone) - 6} more")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.4.input_layernorm.weight",
        "model.layers.0.linear_attn.in_proj_qkv.weight_scale_inv",
        "mtp.layers.1.input_layernorm.weight",
        "mtp.embed_tokens.weight",
        "adapter.weight",
    ],
)
def test_left_over_tensor(folder: Path, name: str) -> None:
    rewrite(folder, {name: torch.zeros(3)})
    refused(folder, "left over", name)


def test_left_over_draft_head(folder: Path) -> None:
    """A head in the file that config.json does not know."""
    edit_config(folder, mtp_num_hidden_layers=0)
    refused(folder, "left over", "mtp.fc.weight")


def test_left_over_head_of_a_tied_model(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    refused(folder, "left over", "lm_head.weight")


def test_bias_that_config_does_not_know(folder: Path) -> None:
    rewrite(folder, {"model.layers.3.self_attn.q_proj.bias": torch.zeros(128)})
    refused(folder, "left over", "model.layers.3.self_attn.q_proj.bias")


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.linear_attn.conv1d.weight",
        "model.layers.3.self_attn.q_norm.weight",
        "mtp.fc.weight",
    ],
)
def test_wrong_shape(folder: Path, name: str) -> None:
    tensor = read_tensors(folder / WEIGHTS)[name]
    rewrite(folder, {name: torch.cat((tensor, tensor))})
    refused(folder, "wrong shape", name, str(list(tensor.shape)), str([2 * len(tensor), *tensor.shape[1:]]))


def test_transposed(folder: Path) -> None:
    name = "model.layers.0.linear_attn.out_proj.weight"
    rewrite(folder, {name: read_tensors(folder / WEIGHTS)[name].t().contiguous()})
    refused(folder, "wrong shape", name)


def test_experts_of_wrong_shape_or_number(copy_of: MakeFolder) -> None:
    folder = copy_of("next_per_expert")
    edit_config(folder, num_experts=5)
    refused(folder, "model.layers.0.mlp.experts.gate_up_proj", "[6, 32, 32]", "[5, 32, 32]")


def test_one_expert_of_another_shape(copy_of: MakeFolder) -> None:
    """The other experts fit: the odd one must be seen before a stack of them is made."""
    folder = copy_of("next_per_expert")
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    rewrite(folder, {name: torch.zeros(32, 15)})
    refused(folder, "model.layers.0.mlp.experts")


@pytest.mark.parametrize("keep", [0, 3, 7, 8, 100, 0.5, 0.99])
def test_truncated_file(folder: Path, keep: float) -> None:
    file = folder / WEIGHTS
    os.truncate(file, int(file.stat().st_size * keep) if 0 < keep < 1 else int(keep))
    refused(folder, WEIGHTS)


@pytest.mark.parametrize(
    "content",
    [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", b"\xff" * 64, b"PK\3\4" * 9],
)
def test_file_of_another_kind(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    refused(folder, WEIGHTS)


def test_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    refused(folder, "safetensors", str(folder))


def test_missing_shard(copy_of: MakeFolder) -> None:
    folder = copy_of("dense_sharded")
    load(folder)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    refused(folder, "missing", shard.name)


def test_truncated_shard(copy_of: MakeFolder) -> None:
    folder = copy_of("dense_sharded")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1)
    refused(folder, shard.name)


def test_shard_that_lacks_what_the_index_promises(copy_of: MakeFolder) -> None:
    folder = copy_of("dense_sharded")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    tensors = read_tensors(shard)
    name, _ = tensors.popitem()
    save_file(tensors, shard)
    refused(folder, "missing", name)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"null",
        b"{}",
        b'{"weight_map": null}',
        b'{"weight_map": []}',
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": ["b"]}}',
        b'{"weight_map": {"a": "b", "c": 1}}',
        b'{"weight_map": {"a": ""}}',
        b"\xff\xfe",
    ],
)
def test_broken_index(copy_of: MakeFolder, content: bytes) -> None:
    folder = copy_of("dense_sharded")
    (folder / INDEX).write_bytes(content)
    refused(folder, str(folder))


def test_the_same_tensor_twice(folder: Path) -> None:
    """Two files that both hold a tensor leave open which one counts."""
    save_file({"model.norm.weight": torch.ones(32)}, folder / "consolidated.safetensors")
    refused(folder, "model.norm.weight")


def test_the_same_tensor_under_both_prefixes(folder: Path) -> None:
    rewrite(folder, {"model.language_model.norm.weight": torch.ones(32)})
    refused(folder, "norm.weight")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.down_proj.weight", "model.layers.0.linear_attn.A_log", "mtp.norm.weight"]
)
def test_not_finite(folder: Path, name: str, value: float) -> None:
    tensor = read_tensors(folder / WEIGHTS)[name]
    tensor.view(-1)[-1] = value
    rewrite(folder, {name: tensor})
    refused(folder, WEIGHTS, name, "NaN")


def test_not_finite_in_one_expert(copy_of: MakeFolder) -> None:
    folder = copy_of("moe_per_expert")
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    rewrite(folder, {name: torch.full((16, 32), torch.nan)})
    refused(folder, name)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_other_kinds_of_numbers(folder: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, {name: torch.ones(48, 32).to(dtype)})
    refused(folder, name, str(dtype))


def target(folder: Path, drafts: int) -> EngineTarget:
    config = ExperimentConfig(
        model=ModelSpec(name="checkpoint", path=str(folder)), route=Route(draft_tokens=drafts)
    )
    config.workload.prompts = [PromptSpec(text="w3 w4")]
    return EngineTarget(config)


def test_drafts_without_a_draft_head(originals: MakeFolder) -> None:
    folder = originals("dense_without_mtp")
    with pytest.raises(UsageError, match=r"route\.draft_tokens=2.*MTP.*mtp_num_hidden_layers") as caught:
        target(folder, 2)
    assert "\n" not in str(caught.value)
    target(folder, 0).load()
    target(originals("dense"), 2).load()


def digest(folder: Path) -> str:
    return model_hash(ModelSpec(name="checkpoint", path=str(folder)))


def test_digest_follows_the_weights(originals: MakeFolder, copy_of: MakeFolder, tmp_path: Path) -> None:
    folder = copy_of("dense")
    before = digest(folder)
    assert before == digest(originals("dense"))
    tensor = read_tensors(folder / WEIGHTS)["mtp.norm.weight"]
    tensor[-1] = torch.nextafter(tensor[-1], torch.tensor(9.0))
    rewrite(folder, {"mtp.norm.weight": tensor})
    one_bit = digest(folder)
    edit_config(folder, rms_norm_eps=1e-5)
    other_config = digest(folder)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text(encoding="utf-8") + " ", encoding="utf-8")
    other_tokenizer = digest(folder)
    assert len({before, one_bit, other_config, other_tokenizer}) == 4
    shutil.copytree(folder, tmp_path / "moved")
    assert digest(tmp_path / "moved") == other_tokenizer


def test_digest_follows_every_shard(copy_of: MakeFolder) -> None:
    folder = copy_of("dense_sharded")
    digests = {digest(folder)}
    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards:
        tensors = read_tensors(shard)
        max(tensors.values(), key=torch.numel).view(-1)[-1] += 1
        save_file(tensors, shard, metadata={"format": "pt"})
        digests.add(digest(folder))
    assert len(digests) == len(shards) + 1


def test_digest_follows_the_chat_template(folder: Path) -> None:
    """The template shapes every prompt with a user message."""
    digests = {digest(folder)}
    (folder / "tokenizer_config.json").write_text('{"chat_template": "a"}', encoding="utf-8")
    digests.add(digest(folder))
    (folder / "chat_template.jinja").write_text("b", encoding="utf-8")
    digests.add(digest(folder))
    (folder / "chat_template.jinja").write_text("c", encoding="utf-8")
    digests.add(digest(folder))
    assert len(digests) == 4


def test_digest_of_no_folder(tmp_path: Path) -> None:
    """Nothing there is not a model of its own."""
    with pytest.raises(UsageError, match="nowhere"):
        digest(tmp_path / "nowhere")


def test_digest_of_random_weights() -> None:
    shape: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "linear_conv_kernel_dim": 4,
    }

    def of(seed: int, **changes: Any) -> str:
        return model_hash(ModelSpec(name="random", shape=shape | changes, seed=seed))

    digests = [of(0), of(1), of(0, vocab_size=17), of(0)]
    assert digests[0] == digests[-1]
    assert len(set(digests)) == 3


def test_index_is_valid_json_after_adding_the_draft_head(originals: MakeFolder) -> None:
    """The sharded recipe is what real checkpoints look like: the draft head in a shard of its own."""
    index = json.loads((originals("dense_sharded") / INDEX).read_text(encoding="utf-8"))
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert index["weight_map"]["mtp.fc.weight"] == "mtp.safetensors"
