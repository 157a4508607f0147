"""A dense checkpoint with something to say: two layers of attention, trained on this project's documents."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sm70lab.engine.loading import EMBEDDED

ROOT = Path(__file__).parents[2]
STEPS, ROWS, LENGTH = 250, 8, 128


def make(folder: Path) -> None:
    """Train and save: about half a minute on one core."""
    from tokenizers import Tokenizer

    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("*.md")))
    ids = torch.tensor(tokenizer.encode(text).ids)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=4096,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            eos_token_id=0,
            pad_token_id=0,
            bos_token_id=None,
        )
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        starts = torch.randint(len(ids) - LENGTH, (ROWS,))
        rows = torch.stack([ids[start : start + LENGTH] for start in starts.tolist()])
        model(input_ids=rows, labels=rows).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
