"""Tiny random checkpoints of every supported form, saved by transformers, with MTP tensors beside them."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from oracle import MTPOracle, Oracle, widened
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

VOCABULARY = 67
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,  # not the key size: a transposed state cannot pass
    "eos_token_id": 1,
}
DENSE = {"intermediate_size": 48}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
PER_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Recipe:
    """One form of checkpoint: the family, changes to its shape, and how its tensors are stored."""

    family: str  # dense, moe, next, multimodal
    changes: dict[str, Any] = field(default_factory=dict)
    around: dict[str, Any] = field(default_factory=dict)  # changes beside text_config
    stacked_experts: bool = False  # else one tensor an expert, as transformers writes them
    shards: bool = False
    mtp: bool = True


RECIPES: dict[str, Recipe] = {
    "dense": Recipe("dense"),
    "dense_tied_gva3": Recipe("dense", {"tie_word_embeddings": True, "linear_num_value_heads": 6}),
    "dense_bias": Recipe("dense", {"attention_bias": True}),
    "dense_no_gva_other_order": Recipe(
        "dense",
        {
            "linear_num_value_heads": 2,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 3,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 1.0},
        },
    ),
    "dense_sharded": Recipe("dense", shards=True),
    "dense_without_mtp": Recipe("dense", mtp=False),
    "moe_per_expert": Recipe("moe"),
    "moe_stacked_gva3": Recipe("moe", {"linear_num_value_heads": 6}, stacked_experts=True),
    "next_per_expert": Recipe("next"),
    "next_stacked_sharded_gva3": Recipe(
        "next", {"linear_num_value_heads": 6, "norm_topk_prob": False}, stacked_experts=True, shards=True
    ),
    "next_mixed_layers": Recipe("next", {"mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "next_dense_tied": Recipe("next", {"num_experts": 0, "tie_word_embeddings": True}),
    "next_bias": Recipe("next", {"attention_bias": True}),
    "multimodal": Recipe("multimodal"),
    "multimodal_tied": Recipe("multimodal", around={"tie_word_embeddings": True}),
    "multimodal_sharded": Recipe("multimodal", {"linear_num_value_heads": 6}, shards=True),
}


# Those that compute alike once they are loaded are stored in other ways: one of each suffices.
COMPUTE = [
    "dense",
    "dense_tied_gva3",
    "dense_bias",
    "dense_no_gva_other_order",
    "moe_stacked_gva3",
    "next_per_expert",
    "next_mixed_layers",
    "multimodal",
]


@dataclass
class Checkpoint:
    """A saved folder and what it must compute."""

    folder: Path
    oracle: Oracle
    mtp: MTPOracle | None


Checkpoints = Callable[[str], Checkpoint]  # by the name of a recipe


def build(recipe: Recipe, folder: Path, seed: int = 0) -> Checkpoint:
    """Save the checkpoint of ``recipe`` under ``folder`` and return it with its oracle."""
    if recipe.family == "multimodal":
        text: Any = Qwen3_5TextConfig(**(SHAPE | DENSE | recipe.changes), **EAGER)
        whole: Any = Qwen3_5Config(text_config=text, vision_config=VISION, **recipe.around, **EAGER)
        model: Any = Qwen3_5ForConditionalGeneration(whole)
    elif recipe.family == "moe":
        text = Qwen3_5MoeTextConfig(**(SHAPE | EXPERTS | recipe.changes), **EAGER)
        model = Qwen3_5MoeForCausalLM(text)
    elif recipe.family == "next":
        text = Qwen3NextConfig(**(SHAPE | DENSE | EXPERTS | recipe.changes), **EAGER)
        model = Qwen3NextForCausalLM(text)
    else:
        text = Qwen3_5TextConfig(**(SHAPE | DENSE | recipe.changes), **EAGER)
        model = Qwen3_5ForCausalLM(text)
    randomise(model, seed)
    model.save_pretrained(folder, max_shard_size="24KB" if recipe.shards else "1GB")
    oracle = Oracle(model)
    tensors: dict[str, torch.Tensor] = {}
    mtp = _mtp(recipe, text, oracle, tensors, seed) if recipe.mtp else None
    if mtp is not None:
        edit_config(folder, mtp_num_hidden_layers=1)
    _store(folder, recipe, tensors)
    save_tokenizer(folder, VOCABULARY)
    return Checkpoint(folder, oracle, mtp)


def randomise(module: torch.nn.Module, seed: int, prefix: str = "") -> None:
    """Weights under which every part of the model matters: nothing zero, one or nearly so."""
    for name, parameter in module.named_parameters():
        if ".visual." not in name:
            parameter.data.copy_(_draw(prefix + name, tuple(parameter.shape), seed))


def _draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    normal = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(1, 16, generator=generator).log()
    if name.endswith("dt_bias"):
        return normal - 3  # a memory of tens of tokens
    if "norm" in name:
        return 0.3 * normal + (1 if "linear_attn.norm" in name else 0)
    if name.endswith("bias"):
        return 0.3 * normal
    if "embed" in name:
        return normal
    return normal * 1.3 / shape[-1] ** 0.5


def _mtp(recipe: Recipe, text: Any, oracle: Oracle, tensors: dict[str, torch.Tensor], seed: int) -> MTPOracle:
    """Draw a draft head; its tensors go to ``tensors`` by their checkpoint names."""
    config = copy.deepcopy(text)
    config.layer_types, config.num_hidden_layers = ["full_attention"], 1
    if recipe.family == "next":
        config.mlp_only_layers, config.decoder_sparse_step = [], 1
    kind = {"moe": Qwen3_5MoeDecoderLayer, "next": Qwen3NextDecoderLayer}.get(
        recipe.family, Qwen3_5DecoderLayer
    )
    layer = kind(config, 0).eval()
    randomise(layer, seed, "mtp.layers.0.")
    tensors |= {f"mtp.layers.0.{name}": value for name, value in layer.state_dict().items()}
    size = config.hidden_size
    weights = {"fc": _draw("mtp.fc.weight", (size, 2 * size), seed)}
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        weights[name] = _draw(f"mtp.{name}.weight", (size,), seed)
    tensors |= {f"mtp.{name}.weight": value for name, value in weights.items()}
    target: Any = oracle.models[torch.float64]
    rotary = next(
        module
        for name, module in target.named_modules()
        if name.endswith("rotary_emb") and ".visual" not in name
    )
    embedding = target.get_input_embeddings().weight
    return MTPOracle(widened(layer), rotary, weights, embedding, config.rms_norm_eps)


def _store(folder: Path, recipe: Recipe, extra: dict[str, torch.Tensor]) -> None:
    """Put the draft head's tensors beside the saved ones, in the recipe's form."""
    files = sorted(folder.glob("*.safetensors"))
    arrange = stack_experts if recipe.stacked_experts else unstack_experts
    if recipe.shards and not recipe.stacked_experts:  # transformers' own shards, and one more
        assert len(files) > 1
        index_path = folder / "model.safetensors.index.json"
        index = json.loads(index_path.read_text(encoding="utf-8"))
        index["weight_map"] |= dict.fromkeys(extra, "mtp.safetensors")
        index_path.write_text(json.dumps(index), encoding="utf-8")
        save_file(extra, folder / "mtp.safetensors", metadata={"format": "pt"})
        return
    tensors = arrange({name: t for file in files for name, t in read_tensors(file).items()} | extra)
    if recipe.shards:
        write_shards(folder, tensors, len(files))
    else:
        save_file(tensors, files[0], metadata={"format": "pt"})


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], count: int) -> None:
    """Replace a folder's weights by ``count`` shards and an index."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    names = sorted(tensors)
    where = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(names)}
    shards: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, file in where.items():
        shards[file][name] = tensors[name].contiguous()
    for file, part in shards.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors file."""
    with safe_open(file, framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a dict


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """experts.N.{gate,up,down}_proj.weight → experts.gate_up_proj and experts.down_proj."""
    result = {name: t for name, t in tensors.items() if not PER_EXPERT.fullmatch(name)}
    groups: dict[str, dict[tuple[int, str], torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if match := PER_EXPERT.fullmatch(name):
            groups[match[1]][int(match[2]), match[3]] = tensor
    for prefix, parts in groups.items():
        experts = range(1 + max(expert for expert, _ in parts))
        result[f"{prefix}.gate_up_proj"] = torch.stack(
            [torch.cat((parts[e, "gate"], parts[e, "up"])) for e in experts]
        )
        result[f"{prefix}.down_proj"] = torch.stack([parts[e, "down"] for e in experts])
    return result


def unstack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of ``stack_experts``."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = STACKED.fullmatch(name)
        if not match:
            result[name] = tensor
            continue
        for expert, part in enumerate(tensor):
            halves = part.chunk(2) if match[2] == "gate_up_proj" else (part,)
            kinds = ("gate", "up") if match[2] == "gate_up_proj" else ("down",)
            for kind, half in zip(kinds, halves, strict=True):
                result[f"{match[1]}.{expert}.{kind}_proj.weight"] = half.contiguous()
    return result


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of the language part of config.json; ``None`` removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    for name, value in changes.items():
        text.pop(name, None)
        if value is not None:
            text[name] = value
    path.write_text(json.dumps(config), encoding="utf-8")


def save_tokenizer(folder: Path, size: int) -> None:
    """A word-level tokenizer of ``size`` tokens."""
    vocabulary = {f"w{i}": i for i in range(size)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
