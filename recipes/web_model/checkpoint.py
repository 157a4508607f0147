"""Reading and writing checkpoints in the Hugging Face Qwen3.5 text layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from .model import Config, WebModel


def load(folder: Path, device: str = "cpu") -> tuple[WebModel, Tokenizer]:
    """(model in float32, tokenizer) of an exported folder."""
    raw = json.loads((folder / "config.json").read_text())
    rope = raw["rope_parameters"]
    cfg = Config(
        vocab=raw["vocab_size"],
        hidden=raw["hidden_size"],
        ffn=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        gdn_heads=raw["linear_num_value_heads"],
        gdn_dim=raw["linear_value_head_dim"],
        conv=raw["linear_conv_kernel_dim"],
        rotary=int(raw["head_dim"] * rope["partial_rotary_factor"]),
        theta=rope["rope_theta"],
        eps=raw["rms_norm_eps"],
    )
    model = WebModel(cfg)
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model.to(device).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def fold_temperature(model: WebModel, main: float, mtp: float) -> None:
    """Divide the logits of target and drafts by temperatures, in the last norms' weights.

    Logits are linear in the norm's (1 + w): w <- (1 + w) / tau - 1.
    """
    with torch.no_grad():
        for norm, tau in ((model.model.norm, main), (model.mtp.norm, mtp)):
            norm.weight.copy_((1 + norm.weight) / tau - 1)
