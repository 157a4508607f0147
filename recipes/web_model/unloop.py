"""Second training stage: unlearn loops.

    python -m recipes.web_model.unloop --model DIR --data DATA --out OUT --steps 480

A model of this size, sampled for thousands of tokens, falls into loops that its training text does
not hold: once a repeat is nearly certain, nucleus sampling never leaves it. Two kinds of rows:

- real text with planted repeats: the copies carry no cross-entropy, the third and later ones carry
  unlikelihood, and the true text after them is learned as usual, so that loops have an end;
- the model's own samples, made anew every `--refresh` steps: unlikelihood on tokens that complete
  an n-gram seen too often before (Welleck et al. 2020, arXiv:1908.04319), nothing on the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from . import checkpoint, optim
from .generate import generate
from .train import DEPTHS, heldout, load_tokens, losses, rate

NGRAM = 12
COPY, UNLIKE, STRESS = 1, 2, 3
STRESS_WEIGHT = 8.0


def earlier_counts(ids: np.ndarray, recent: int) -> tuple[np.ndarray, np.ndarray]:
    """For each token: how often the n-gram it completes came before, in all and within `recent`.

    ids [N]; returns two int arrays [N] (zeros for the first NGRAM - 1 tokens).
    """
    seen: dict[bytes, list[int]] = {}
    total = np.zeros(len(ids), dtype=np.int64)
    near = np.zeros(len(ids), dtype=np.int64)
    for end in range(NGRAM - 1, len(ids)):
        places = seen.setdefault(ids[end - NGRAM + 1 : end + 1].tobytes(), [])
        total[end] = len(places)
        near[end] = sum(1 for place in places[-4:] if place >= end - recent)
        places.append(end)
    return total, near


def low_copy_starts(tokens: torch.Tensor, span: int, share: float) -> np.ndarray:
    """Starts of the `share` of windows in which the fewest n-grams come back."""
    coefficients = torch.randint(1, 2**40, (NGRAM,), device=tokens.device) | 1
    keys = sum(tokens[i : len(tokens) - NGRAM + i + 1].long() * coefficients[i] for i in range(NGRAM))
    starts = torch.arange(0, len(tokens) - span - NGRAM, span // 2, device=tokens.device)
    copied = []
    for part in starts.split(256):
        ordered = keys[part[:, None] + torch.arange(span, device=tokens.device)].sort(-1).values
        copied.append((ordered[:, 1:] == ordered[:, :-1]).float().mean(-1))
    order = torch.cat(copied).argsort()
    return starts[order[: int(share * len(order))]].cpu().numpy()


def planted(
    ids: np.ndarray, length: int, line_end: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, marks), both [length]: real text `ids` with repeats put in at 2 to 5 places.

    Half of the repeats are whole lines, half any short run of tokens; a third of them come back
    scattered over the following lines, not in a row. Marks are 0, COPY or UNLIKE.
    """
    ends = np.flatnonzero(line_end[ids[: length - 400]]) + 1
    places = np.sort(rng.choice(np.arange(200, length - 600), rng.integers(2, 6), replace=False))
    pieces: list[np.ndarray] = []
    marks: list[np.ndarray] = []
    position = 0

    def put(part: np.ndarray, mark: int) -> None:
        pieces.append(part)
        marks.append(np.full(len(part), mark, dtype=np.int8))

    for place in places:
        if place <= position:
            continue
        near = ends[(ends > place - 160) & (ends <= place)]
        if rng.random() < 0.5 and len(near) >= 2:
            stop = int(near[-1])
            start = int(near[rng.integers(0, len(near) - 1)])
        else:
            stop, start = int(place), int(place) - int(np.exp(rng.uniform(0, np.log(30))))
        if stop <= position:
            continue
        unit = ids[start:stop]
        copies = int(rng.integers(2, 3 + min(10, 300 // len(unit))))
        put(ids[position:stop], 0)
        position = stop
        later = ends[ends > stop][:copies]
        if rng.random() < 0.33 and len(later) == copies:
            for copy, stop in enumerate(later):
                put(ids[position:stop], 0)
                put(unit, UNLIKE if copy else COPY)
                position = int(stop)
        else:
            for copy in range(copies):
                put(unit, UNLIKE if copy else COPY)
    put(ids[position:], 0)
    return np.concatenate(pieces)[:length], np.concatenate(marks)[:length]


class FileEnds:
    """Rows around the end of an HTML page, after which the next page follows.

    In the corpus "</html>" and two line ends part the pages of a bundle and one line end comes
    before its end token, so a lone line end alone would announce the end. Here half of the
    double line ends are single, and what follows them counts `STRESS_WEIGHT` times.
    """

    def __init__(self, source: np.ndarray, tokenizer: Tokenizer) -> None:
        # Line ends belong to the last token: "</", "html", ">" with its line ends.
        *close, self.single = tokenizer.encode("</html>\n").ids
        self.double = tokenizer.encode("</html>\n\n").ids[-1]
        found = source[len(close) :] == self.double
        for offset, token in enumerate(close):
            found &= source[offset : offset - len(close)] == token
        self.places = np.flatnonzero(found) + len(close)
        self.source = source

    def row(self, span: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, marks), both [span]."""
        place = int(rng.choice(self.places))
        start = max(0, min(place - int(rng.integers(100, span - 100)), len(self.source) - span))
        ids = self.source[start : start + span].copy()
        marks = np.zeros(span, dtype=np.int8)
        low, high = np.searchsorted(self.places, (start, start + span - 1))
        for index in self.places[low:high] - start:
            if rng.random() < 0.5:
                ids[index] = self.single
                marks[index + 1] = STRESS
        return ids, marks


def own_samples(
    model: checkpoint.WebModel, prompts: list[list[int]], count: int, seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, marks) of sampled runs; UNLIKE where an n-gram came too often before."""
    model.eval()
    tau = 1.0 + 0.2 * torch.rand(len(prompts), generator=torch.Generator().manual_seed(seed))
    runs = generate(model, prompts, tau, count, seed)
    model.train()
    out = []
    for run in runs:
        ids = np.array(run, dtype=np.int64)
        total, near = earlier_counts(ids, recent=300)
        marks = np.where((total >= 6) | (near >= 2), UNLIKE, COPY).astype(np.int8)
        out.append((ids, marks))
    return out


def unloop(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    rng = np.random.default_rng(args.seed)
    model, tokenizer = checkpoint.load(args.model, device)
    model.train()
    tokens = load_tokens(args.data / "train.u16.xz").to(device)
    unseen = load_tokens(args.data / "heldout.u16.xz").to(device)
    span = args.length + 1 + DEPTHS
    starts = low_copy_starts(tokens, span, 0.6)
    source = tokens.cpu().numpy().astype(np.int64)
    line_end = np.array(["\n" in tokenizer.decode([i]) for i in range(model.cfg.vocab)])
    file_ends = FileEnds(source, tokenizer)
    optimizers = optim.build(model, args.lr)
    samples: list[tuple[np.ndarray, np.ndarray]] = []
    log: list[dict[str, float]] = []
    begin = time.time()
    for step in range(args.steps):
        if step % args.refresh == 0:
            # Real text as prompts, none of the evaluation's: those stay unseen.
            picks = rng.choice(starts, args.samples)
            prompts = [source[pick : pick + 48].tolist() for pick in picks]
            samples = own_samples(model, prompts, args.sample_length, seed=1000 + step)
            samples = [item for item in samples if len(item[0]) >= span]
            share = float(np.mean([np.mean(marks == UNLIKE) for _, marks in samples] or [0.0]))
            made = {"step": step, "runs": len(samples), "marked": round(share, 4)}
            print(json.dumps(made), flush=True)
        own = min(args.own_rows, len(samples))
        rows = [file_ends.row(span, rng) for _ in range(args.end_rows)]
        rows += [
            planted(source[start : start + span], span, line_end, rng)
            for start in rng.choice(starts, args.rows - own - args.end_rows, replace=False)
        ]
        for index in rng.choice(len(samples), own, replace=False) if own else ():
            ids, marks = samples[index]
            start = rng.integers(0, len(ids) - span + 1)
            rows.append((ids[start : start + span], marks[start : start + span]))
        window = torch.from_numpy(np.stack([ids for ids, _ in rows])).to(device)
        marks = torch.from_numpy(np.stack([mark for _, mark in rows])).to(device)
        marks = marks[:, 1 : args.length + 1]
        ce = (marks == 0).float() + (marks == STRESS).float() * STRESS_WEIGHT
        ul = (marks == UNLIKE).float() * args.unlikelihood
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found = losses(model, window, args.mtp_weight, ce, ul)
        found["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * rate(step, args.steps, 20)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 40 == 0 or step == args.steps - 1:
            row = {name: round(value.item(), 4) for name, value in found.items()}
            unseen_now = heldout(model, unseen, min(2048, args.length), args.heldout_rows)
            row |= {f"heldout_{name}": value for name, value in unseen_now.items()}
            row |= {"step": step, "seconds": round(time.time() - begin, 1)}
            log.append(row)
            print(json.dumps(row), flush=True)
        if time.time() - begin > args.seconds:
            print(f"stopped at step {step} of {args.steps} after {args.seconds} s")
            break
    args.out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), args.out / "weights.pt")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    (args.out / "unloop.json").write_text(json.dumps({"settings": settings, "log": log}, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description="Second stage: unlearn loops.")
    parser.add_argument("--model", type=Path, required=True, help="exported first stage")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--own-rows", type=int, default=12)
    parser.add_argument("--end-rows", type=int, default=0, help="rows around page ends")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sample-length", type=int, default=6000)
    parser.add_argument("--refresh", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--unlikelihood", type=float, default=1.0)
    parser.add_argument("--mtp-weight", type=float, default=0.5)
    parser.add_argument("--heldout-rows", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this long")
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    try:
        unloop(args)
    except (OSError, ValueError) as error:
        print(f"unloop: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
