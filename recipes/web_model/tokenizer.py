"""Train the byte-level BPE tokenizer and encode the corpus.

    python -m recipes.web_model.tokenizer --corpus CORPUS --out DATA

Writes DATA/tokenizer.json, DATA/train.u16.xz, DATA/heldout.u16.xz (token ids, little-endian
uint16, xz) and DATA/tokens.json (counts).
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
END_OF_TEXT, IM_START, IM_END = 0, 1, 2
# Qwen's split pattern: single digits, one leading non-letter joined to a word, line ends apart.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Bundles of a corpus file."""
    with path.open() as handle:
        for line in handle:
            yield json.loads(line)


def train(path: Path, vocab: int, sample: int) -> Tokenizer:
    """A tokenizer trained on every `sample`-th 20 000-character piece of the corpus."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def pieces() -> Iterator[str]:
        count = 0
        for row in rows(path):
            text = row["text"]
            for start in range(0, len(text), 20_000):
                count += 1
                if count % sample == 0:
                    yield text[start : start + 20_000]

    tokenizer.train_from_iterator(pieces(), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, path: Path, pieces: int = 16) -> tuple[np.ndarray, int]:
    """(token ids uint16 of all bundles, bytes): raw bundles end with the end-of-text token only.

    A chat bundle is prompt, text and <|im_end|>; a line end and the next bundle follow it.
    """
    out: list[np.ndarray] = []
    batch: list[str] = []
    size = 0

    def flush() -> None:
        for item in tokenizer.encode_batch(batch):
            out.append(np.array(item.ids, dtype="<u2"))
        batch.clear()

    for row in rows(path):
        end = "<|im_end|>\n" if row["chat"] else "<|endoftext|>"
        text = row["chat"] + row["text"] + end
        size += len(text.encode())
        batch.append(text)
        if len(batch) == pieces:
            flush()
    flush()
    return np.concatenate(out), size


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the tokenizer and encode the corpus.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--sample", type=int, default=4, help="train on every N-th piece")
    args = parser.parse_args()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        tokenizer = train(args.corpus / "train.jsonl", args.vocab, args.sample)
        tokenizer.save(str(args.out / "tokenizer.json"))
        counts: dict[str, float] = {}
        for split in ("train", "heldout"):
            ids, size = encode(tokenizer, args.corpus / f"{split}.jsonl")
            with lzma.open(args.out / f"{split}.u16.xz", "wb", preset=6) as handle:
                handle.write(ids.tobytes())
            counts |= {f"{split}_tokens": len(ids), f"{split}_bytes": size}
            counts[f"{split}_bytes_per_token"] = round(size / len(ids), 4)
        (args.out / "tokens.json").write_text(json.dumps(counts, indent=1) + "\n")
        print(json.dumps(counts))
    except OSError as error:
        print(f"tokenizer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
