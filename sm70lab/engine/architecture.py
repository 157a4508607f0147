"""Model shape read from a Hugging Face ``config.json``, and the tensors such a model must have."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm70lab.errors import UsageError

QWEN3_5 = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
QWEN3_NEXT = ("qwen3_next",)


@dataclass(frozen=True)
class Architecture:
    """Shape of one hybrid Gated DeltaNet + attention model. Sizes are counts, not bytes."""

    layout: str  # "qwen3_5" or "qwen3_next": how the GDN input projections are stored
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]  # "linear_attention" (GDN) or "full_attention", one a layer
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int  # of one head
    gdn_value_dim: int  # of one head
    conv_kernel: int
    attention_bias: bool
    tie_word_embeddings: bool
    mtp_layers: int  # 0 or 1
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    num_experts: int = 0  # 0: dense
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()  # layers of an MoE model that have a dense MLP

    @property
    def gdn_conv_dim(self) -> int:
        """Channels that pass the convolution: q | k | v."""
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_value_heads * self.gdn_value_dim

    def is_moe_layer(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    @staticmethod
    def from_dict(raw: dict[str, Any], source: str, mtp_stored: bool = False) -> Architecture:
        """Build from the keys of a Hugging Face config; ``source`` names them in errors.

        ``mtp_stored`` stands in for ``mtp_num_hidden_layers`` where the config does not say it, as
        published Qwen3-Next configs do not. Raises ``UsageError``.
        """
        nested = raw.get("text_config", {})
        if not isinstance(nested, dict):
            raise UsageError(f"{source}: text_config must be an object, found {nested!r}")
        text = {**raw, **nested}
        # The head of a multimodal checkpoint is tied by the outer setting; inner ones say false.
        text["tie_word_embeddings"] = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        kind = text.get("model_type")
        if kind not in QWEN3_5 + QWEN3_NEXT:
            known = ", ".join(QWEN3_5 + QWEN3_NEXT)
            raise UsageError(f"{source}: model_type {kind!r} is not supported; supported: {known}")
        if text.get("quantization_config"):
            raise UsageError(
                f"{source}: quantised checkpoints are not supported yet; use float16/bfloat16/float32 weights"
            )
        if text.get("hidden_act", "silu") != "silu":
            raise UsageError(f"{source}: hidden_act {text['hidden_act']!r} is not supported; only 'silu'")
        text.setdefault("mtp_num_hidden_layers", int(mtp_stored))
        try:
            arch = _build(text, "qwen3_next" if kind in QWEN3_NEXT else "qwen3_5", source)
        except KeyError as missing:
            raise UsageError(f"{source}: {missing.args[0]} is missing") from missing
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UsageError(f"{source}: unusable value ({error})") from error
        _check(arch, source)
        return arch


def _build(text: dict[str, Any], layout: str, source: str) -> Architecture:
    layers = int(text["num_hidden_layers"])
    interval = int(text.get("full_attention_interval") or 4)
    types = text.get("layer_types") or [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)
    ]
    if len(types) != layers or not set(types) <= {"linear_attention", "full_attention"}:
        raise UsageError(
            f"{source}: layer_types must be {layers} of linear_attention/full_attention, "
            f"found {len(types)}: {sorted(set(types))}"
        )
    heads = int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or text["hidden_size"] // heads)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UsageError(f"{source}: rope_type {rope.get('rope_type')!r} is not supported; only 'default'")
    partial = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    experts = int(text.get("num_experts") or 0)
    step = int(text.get("decoder_sparse_step") or 1)
    dense = set(text.get("mlp_only_layers") or ()) | {i for i in range(layers) if (i + 1) % step}
    return Architecture(
        layout=layout,
        vocab_size=int(text["vocab_size"]),
        hidden_size=int(text["hidden_size"]),
        intermediate_size=int(text.get("intermediate_size") or 0),
        layer_types=tuple(types),
        num_heads=heads,
        num_kv_heads=int(text["num_key_value_heads"]),
        head_dim=head_dim,
        rotary_dim=int(head_dim * partial),
        rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 1e7))),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        gdn_key_heads=int(text["linear_num_key_heads"]),
        gdn_value_heads=int(text["linear_num_value_heads"]),
        gdn_key_dim=int(text["linear_key_head_dim"]),
        gdn_value_dim=int(text["linear_value_head_dim"]),
        conv_kernel=int(text["linear_conv_kernel_dim"]),
        attention_bias=bool(text.get("attention_bias", False)),
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
        mtp_layers=int(text.get("mtp_num_hidden_layers") or 0),
        max_position_embeddings=int(text.get("max_position_embeddings") or 32768),
        eos_token_ids=_eos_ids(text),
        num_experts=experts,
        experts_per_token=int(text.get("num_experts_per_tok") or 0),
        moe_intermediate_size=int(text.get("moe_intermediate_size") or 0),
        shared_expert_intermediate_size=int(text.get("shared_expert_intermediate_size") or 0),
        norm_topk_prob=bool(text.get("norm_topk_prob", True)),
        dense_layers=tuple(sorted(dense)) if experts else (),
    )


def _check(arch: Architecture, source: str) -> None:
    attention = ("num_heads", "num_kv_heads", "head_dim")
    gdn = ("gdn_key_heads", "gdn_value_heads", "gdn_key_dim", "gdn_value_dim")
    for name in ("vocab_size", "hidden_size", *attention, *gdn):
        if getattr(arch, name) < 1:
            raise UsageError(f"{source}: sizes must be positive; {name} is {getattr(arch, name)}")
    inside = all(isinstance(i, int) and 0 <= i < arch.vocab_size for i in arch.eos_token_ids)
    rules = (
        (bool(arch.layer_types), "num_hidden_layers must be positive"),
        (arch.vocab_size >= 2, "vocab_size must be at least 2"),
        (inside, f"eos_token_id must be ids below vocab_size, found {list(arch.eos_token_ids)}"),
        (0 < arch.rms_norm_eps < 1, "rms_norm_eps must be between 0 and 1"),
        (0 < arch.rope_theta < math.inf, "rope_theta must be positive"),
        (
            arch.num_heads % arch.num_kv_heads == 0,
            "num_attention_heads must be a multiple of num_key_value_heads",
        ),
        (
            arch.gdn_value_heads % arch.gdn_key_heads == 0,
            "linear_num_value_heads must be a multiple of linear_num_key_heads",
        ),
        (
            arch.rotary_dim % 2 == 0 and 0 < arch.rotary_dim <= arch.head_dim,
            "partial_rotary_factor must give an even rotary size within head_dim",
        ),
        (arch.conv_kernel >= 2, "linear_conv_kernel_dim must be at least 2"),
        (arch.mtp_layers in (0, 1), "mtp_num_hidden_layers must be 0 or 1"),
        (
            arch.num_experts == 0 or 0 < arch.experts_per_token <= arch.num_experts,
            "num_experts_per_tok must be within num_experts",
        ),
    )
    for holds, message in rules:
        if not holds:
            raise UsageError(f"{source}: {message}")


def _eos_ids(text: dict[str, Any]) -> tuple[int, ...]:
    """End tokens of config.json and generation_config.json together, as servers treat them."""
    ids: list[int] = []
    for value in (text.get("eos_token_id"), text.get("generation_eos_token_id")):
        ids += value if isinstance(value, list) else [value] if value is not None else []
    return tuple(sorted(set(ids), key=str))


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` with the end tokens of ``generation_config.json``. Raises ``UsageError``."""
    if not (folder / "config.json").exists():
        raise UsageError(f"{folder}: no config.json there; model.path must be a Hugging Face folder")
    raw = read_json_object(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.exists():
        raw["generation_eos_token_id"] = read_json_object(generation).get("eos_token_id")
    return raw


def read_json_object(path: Path) -> dict[str, Any]:
    """A file that must hold one JSON object. Raises ``UsageError``."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: must hold a JSON object")
    return value


def expected_tensors(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a model by canonical name (``model.`` for the language part) with its shape."""
    hidden, vocab = arch.hidden_size, arch.vocab_size
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i, kind in enumerate(arch.layer_types):
        prefix = f"model.layers.{i}."
        mixer = _gdn_tensors(arch) if kind == "linear_attention" else _attention_tensors(arch)
        mlp = _moe_tensors(arch) if arch.is_moe_layer(i) else _dense_tensors(arch)
        tensors |= {prefix + name: shape for name, shape in (mixer | mlp | _layer_norms(arch)).items()}
    tensors["model.norm.weight"] = (hidden,)
    if not arch.tie_word_embeddings:
        tensors["lm_head.weight"] = (vocab, hidden)
    if arch.mtp_layers:
        mlp = _moe_tensors(arch) if arch.num_experts else _dense_tensors(arch)
        layer = _attention_tensors(arch) | mlp | _layer_norms(arch)
        tensors |= {f"mtp.layers.0.{name}": shape for name, shape in layer.items()}
        tensors["mtp.fc.weight"] = (hidden, 2 * hidden)
        tensors |= {
            f"mtp.{n}.weight": (hidden,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        }
    return tensors


def _layer_norms(arch: Architecture) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (arch.hidden_size,) for name in ("input_layernorm", "post_attention_layernorm")}


def _gdn_tensors(arch: Architecture) -> dict[str, tuple[int, ...]]:
    hidden, value = arch.hidden_size, arch.gdn_value_heads * arch.gdn_value_dim
    if arch.layout == "qwen3_next":
        inputs = {"in_proj_qkvz": arch.gdn_conv_dim + value, "in_proj_ba": 2 * arch.gdn_value_heads}
    else:
        inputs = {
            "in_proj_qkv": arch.gdn_conv_dim,
            "in_proj_z": value,
            "in_proj_b": arch.gdn_value_heads,
            "in_proj_a": arch.gdn_value_heads,
        }
    tensors: dict[str, tuple[int, ...]] = {
        f"linear_attn.{n}.weight": (size, hidden) for n, size in inputs.items()
    }
    return tensors | {
        "linear_attn.conv1d.weight": (arch.gdn_conv_dim, 1, arch.conv_kernel),
        "linear_attn.A_log": (arch.gdn_value_heads,),
        "linear_attn.dt_bias": (arch.gdn_value_heads,),
        "linear_attn.norm.weight": (arch.gdn_value_dim,),
        "linear_attn.out_proj.weight": (hidden, value),
    }


def _attention_tensors(arch: Architecture) -> dict[str, tuple[int, ...]]:
    sizes = {
        "q_proj": 2 * arch.num_heads * arch.head_dim,  # query and output gate
        "k_proj": arch.num_kv_heads * arch.head_dim,
        "v_proj": arch.num_kv_heads * arch.head_dim,
    }
    tensors: dict[str, tuple[int, ...]] = {
        f"self_attn.{n}.weight": (s, arch.hidden_size) for n, s in sizes.items()
    }
    tensors["self_attn.o_proj.weight"] = (arch.hidden_size, arch.num_heads * arch.head_dim)
    if arch.attention_bias:
        tensors |= {f"self_attn.{n}.bias": (s,) for n, s in {**sizes, "o_proj": arch.hidden_size}.items()}
    return tensors | {f"self_attn.{n}.weight": (arch.head_dim,) for n in ("q_norm", "k_norm")}


def _dense_tensors(
    arch: Architecture, size: int | None = None, prefix: str = "mlp"
) -> dict[str, tuple[int, ...]]:
    inner = arch.intermediate_size if size is None else size
    shapes = {
        "gate_proj": (inner, arch.hidden_size),
        "up_proj": (inner, arch.hidden_size),
        "down_proj": (arch.hidden_size, inner),
    }
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def _moe_tensors(arch: Architecture) -> dict[str, tuple[int, ...]]:
    hidden, inner, experts = arch.hidden_size, arch.moe_intermediate_size, arch.num_experts
    return {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * inner, hidden),
        "mlp.experts.down_proj": (experts, hidden, inner),
        "mlp.shared_expert_gate.weight": (1, hidden),
        **_dense_tensors(arch, arch.shared_expert_intermediate_size, "mlp.shared_expert"),
    }
