"""Rank the token ids of the embedded model by how often they occur, for a shortlist draft head.

    python -m recipes.web_model.frequency [--data DATA]

Counts DATA/train.u16.xz, the training corpus as `tokenizer` encoded it; without it the held-out
texts and prompts of this folder, in the tokenizer of the exported model. Writes token_frequency.json
beside that tokenizer: every id once, most frequent first, ties by id.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .evaluate import heldout_texts

HERE = Path(__file__).parent
MODEL = HERE.parent.parent / "sm70lab" / "models" / "web"


def corpus_ids(data: Path) -> np.ndarray:
    """Every id of the encoded training corpus."""
    with lzma.open(data / "train.u16.xz") as handle:
        return np.frombuffer(handle.read(), dtype="<u2")


def own_ids(tokenizer: Tokenizer) -> np.ndarray:
    """Ids of the held-out texts and the prompts."""
    texts = [row["text"] for row in heldout_texts(HERE / "heldout.jsonl")]
    texts += [text for group in json.loads((HERE / "prompts.json").read_text()).values() for text in group]
    return np.concatenate([np.array(item.ids) for item in tokenizer.encode_batch(texts)])


def ranked(ids: np.ndarray, vocab: int) -> tuple[list[int], np.ndarray]:
    """(ids by falling count, counts in that order)."""
    counts = np.bincount(ids, minlength=vocab)
    order = np.argsort(-counts, kind="stable")
    return order.tolist(), counts[order]


def main() -> int:
    parser = argparse.ArgumentParser(description="Rank token ids by frequency.")
    parser.add_argument("--data", type=Path, help="folder with train.u16.xz")
    parser.add_argument("--model", type=Path, default=MODEL, help="exported folder")
    args = parser.parse_args()
    try:
        tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
        ids = corpus_ids(args.data) if args.data else own_ids(tokenizer)
        order, counts = ranked(ids, tokenizer.get_vocab_size())
        (args.model / "token_frequency.json").write_text(json.dumps(order, separators=(",", ":")) + "\n")
    except (OSError, ValueError, lzma.LZMAError) as error:
        print(f"frequency: {error}", file=sys.stderr)
        return 1
    covered = np.cumsum(counts) / len(ids)
    shares = {
        size: round(float(covered[size - 1]), 4) for size in (256, 512, 1024, 2048) if size < len(order)
    }
    print(json.dumps({"tokens": len(ids), "ids": len(order), "share_of_the_first": shares}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
