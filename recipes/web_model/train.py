"""Train the model on one GPU.

    python -m recipes.web_model.train --data DATA --out OUT --tokens 165000000

DATA holds train.u16.xz and heldout.u16.xz (from the tokenizer command). Writes OUT/weights.pt
(float32 state dict) and OUT/train.json (settings, losses, throughput).
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import optim
from .loss import DraftLoss, MainLoss
from .model import Config, WebModel

DEPTHS = 4


def load_tokens(path: Path) -> Tensor:
    """Token ids of an xz-compressed little-endian uint16 file, int32 [N]."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; run the tokenizer command first")
    with lzma.open(path) as handle:
        return torch.from_numpy(np.frombuffer(handle.read(), dtype="<u2").astype(np.int32))


class Sampler:
    """Shuffled windows of a token stream; each pass over the stream starts at a new offset."""

    def __init__(self, tokens: Tensor, seed: int) -> None:
        self.tokens = tokens
        self.generator = torch.Generator().manual_seed(seed)
        self.starts: list[int] = []
        self.length = 0

    def batch(self, rows: int, length: int) -> Tensor:
        """Token ids int64 [rows, length + 1 + DEPTHS]."""
        span = length + 1 + DEPTHS
        if length != self.length:
            self.starts, self.length = [], length
        while len(self.starts) < rows:
            offset = int(torch.randint(length, (1,), generator=self.generator))
            starts = torch.arange(offset, len(self.tokens) - span, length)
            order = torch.randperm(len(starts), generator=self.generator)
            self.starts += starts[order].tolist()
        picked, self.starts = self.starts[:rows], self.starts[rows:]
        index = torch.tensor(picked, device=self.tokens.device)[:, None]
        return self.tokens[index + torch.arange(span, device=self.tokens.device)].long()


def losses(
    model: WebModel,
    window: Tensor,
    mtp_weight: float,
    ce: Tensor | None = None,
    ul: Tensor | None = None,
) -> dict[str, Tensor]:
    """Mean main loss, MTP loss and accepted share per depth of one batch [B, T + 1 + DEPTHS].

    ce and ul [B, T] weigh cross-entropy and unlikelihood of tokens 1..T (default: 1 and 0). MTP
    is trained on what speculative sampling rewards; see `DraftLoss`.
    """
    length = window.shape[1] - 1 - DEPTHS
    hidden = model.hidden(window[:, :length])
    ce = torch.ones(window.shape[0], length, device=window.device) if ce is None else ce
    ul = torch.zeros_like(ce) if ul is None else ul
    main, soft = MainLoss.apply(model.logits(hidden), window[:, 1 : length + 1], ce, ul)
    result = {"main": main, "loss": main}
    embed = model.model.embed_tokens
    inputs = [embed(window[:, d + 1 : d + 1 + length]) for d in range(DEPTHS)]
    total = torch.zeros((), device=window.device)
    for depth, out in enumerate(model.mtp.unroll(inputs, hidden)):
        # The draft at position t answers the target at t + depth + 1, which the window still holds.
        logits = model.logits(out[:, : length - depth - 1])
        truth = window[:, depth + 2 : length + 1]
        loss, overlap = DraftLoss.apply(logits, soft[:, depth + 1 :], truth)
        total = total + loss
        result[f"accept{depth + 1}"] = overlap
    result["mtp"] = total / DEPTHS
    result["loss"] = main + mtp_weight * result["mtp"]
    return result


@torch.no_grad()
def heldout(model: WebModel, tokens: Tensor, length: int, rows: int) -> dict[str, float]:
    """Losses over `rows` windows spread evenly over the held-out tokens."""
    span = length + 1 + DEPTHS
    starts = torch.linspace(0, len(tokens) - span, rows).long().tolist()
    window = torch.stack([tokens[start : start + span] for start in starts]).long()
    with torch.autocast(window.device.type, torch.bfloat16, enabled=window.is_cuda):
        found = losses(model, window, 1.0)
    return {name: round(value.item(), 4) for name, value in found.items() if name != "loss"}


def rate(step: int, steps: int, warmup: int = 60) -> float:
    """Share of the peak learning rate: short warm-up, then linear to zero."""
    return min(1.0, (step + 1) / warmup) * (1 - step / steps)


def train(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    tokens = load_tokens(args.data / "train.u16.xz").to(device)
    unseen = load_tokens(args.data / "heldout.u16.xz").to(device)
    model = WebModel(Config()).to(device)
    optimizers = optim.build(model, args.lr)
    sampler = Sampler(tokens, args.seed)
    steps = args.tokens // args.batch
    log: list[dict[str, float]] = []
    print(f"{len(tokens)} tokens, {steps} steps of {args.batch}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    for step in range(steps):
        long = step >= steps * (1 - args.long_share)
        length = args.long if long else args.short
        window = sampler.batch(args.batch // length, length)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found = losses(model, window, args.mtp_weight)
        found["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * rate(step, steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % args.log_every == 0 or step == steps - 1:
            row = {name: round(value.item(), 4) for name, value in found.items()}
            row |= {"step": step, "seconds": round(time.time() - start, 1)}
            if step % (args.log_every * 5) == 0 or step == steps - 1:
                unseen_now = heldout(model, unseen, args.short, args.heldout_rows)
                row |= {f"heldout_{name}": value for name, value in unseen_now.items()}
            log.append(row)
            print(json.dumps(row), flush=True)
    seconds = time.time() - start
    torch.save(model.state_dict(), args.out / "weights.pt")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    summary = {
        "settings": settings,
        "corpus_tokens": len(tokens),
        "trained_tokens": steps * args.batch,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(steps * args.batch / seconds),
        "log": log,
    }
    (args.out / "train.json").write_text(json.dumps(summary, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the web model on one GPU.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=165_000_000)
    parser.add_argument("--batch", type=int, default=131_072, help="tokens a step")
    parser.add_argument("--short", type=int, default=2048)
    parser.add_argument("--long", type=int, default=8192)
    parser.add_argument("--long-share", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=0.007)
    parser.add_argument("--mtp-weight", type=float, default=0.5)
    parser.add_argument("--heldout-rows", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=50)
    args = parser.parse_args()
    try:
        train(args)
    except (OSError, ValueError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
