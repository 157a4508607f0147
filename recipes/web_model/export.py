"""Export trained weights as a Hugging Face folder (float16, Qwen3.5 text layout with mtp.*).

    python -m recipes.web_model.export --weights OUT/weights.pt --data DATA --out DIR \\
        --tau-main 1.1 --tau-mtp 1.1 --end-row-scale 0.9

Copies tokenizer.json from DATA, folds the temperatures into the last norms and scales the row of
<|im_end|> in the embedding. `--weights` may also be an exported folder, to fold factors found later
into it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import checkpoint
from .model import Config, WebModel
from .tokenizer import END_OF_TEXT, IM_END

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config_json(cfg: Config, max_length: int) -> dict[str, object]:
    """config.json; no `mrope_*` keys (equal for text, and some engines trip over them)."""
    kinds = ["linear_attention", "full_attention"]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.hidden,
        "intermediate_size": cfg.ffn,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.eps,
        "linear_num_key_heads": cfg.gdn_heads,
        "linear_num_value_heads": cfg.gdn_heads,
        "linear_key_head_dim": cfg.gdn_dim,
        "linear_value_head_dim": cfg.gdn_dim,
        "linear_conv_kernel_dim": cfg.conv,
        "layer_types": [kinds[cfg.full_attention(i)] for i in range(cfg.layers)],
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "max_position_embeddings": max_length,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": cfg.theta,
            "partial_rotary_factor": cfg.rotary / cfg.head_dim,
        },
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT,
        "pad_token_id": END_OF_TEXT,
        "dtype": "float16",
    }


def export(model: WebModel, tokenizer: Path, out: Path, max_length: int = 8192) -> None:
    """Write every file of a checkpoint folder except the model card."""
    out.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().half().contiguous().cpu() for k, v in model.state_dict().items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    generation = {
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
        "eos_token_id": [END_OF_TEXT, IM_END],
        "pad_token_id": END_OF_TEXT,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, value in (
        ("config.json", config_json(model.cfg, max_length)),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (out / name).write_text(json.dumps(value, indent=1) + "\n")
    if tokenizer.resolve() != (out / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer, out / "tokenizer.json")


def main() -> int:
    parser = argparse.ArgumentParser(description="Export trained weights.")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tau-main", type=float, default=1.0)
    parser.add_argument("--tau-mtp", type=float, default=1.0)
    parser.add_argument("--end-row-scale", type=float, default=1.0, help="of the logit of <|im_end|>")
    args = parser.parse_args()
    try:
        if args.weights.is_dir():
            model, _ = checkpoint.load(args.weights)
        else:
            model = WebModel(Config())
            model.load_state_dict(torch.load(args.weights, map_location="cpu", weights_only=True))
        checkpoint.fold_temperature(model, args.tau_main, args.tau_mtp)
        # A temperature that keeps long runs from looping also lifts <|im_end|>, and one document in
        # sixty ends early by itself. Its logit is linear in this row of the tied embedding.
        with torch.no_grad():
            model.model.embed_tokens.weight[IM_END] *= args.end_row_scale
        export(model, args.data / "tokenizer.json", args.out)
    except (OSError, RuntimeError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    print(sum(f.stat().st_size for f in args.out.iterdir()), "bytes in", args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
