"""Measure checkpoints: held-out loss, degeneration of long sampled runs, acceptance.

    python -m recipes.web_model.evaluate --model DIR [--model DIR ...] --out OUT.json

Each DIR is an exported folder. Losses are on heldout.jsonl (packages never trained on), the same
text for every model, in bits per byte of UTF-8.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from . import checkpoint
from .generate import filtered, generate, speculate
from .loops import failures, judge
from .model import WebModel

HERE = Path(__file__).parent
DEPTHS = 4


def heldout_texts(path: Path) -> list[dict[str, str]]:
    with path.open() as handle:
        return [json.loads(line) for line in handle]


def accept_rates(
    model: WebModel, ids: torch.Tensor, hidden: torch.Tensor, pairs: list[tuple[float, float]]
) -> torch.Tensor:
    """Teacher-forced acceptance [pairs, depths]: mean sum(min(p, q)) of sampled distributions.

    pairs are temperatures of target and drafts.
    """
    length = ids.shape[1] - DEPTHS - 1
    embed = model.model.embed_tokens
    inputs = [embed(ids[:, d + 1 : d + 1 + length]) for d in range(DEPTHS)]
    target = model.logits(hidden)
    rates = torch.zeros(len(pairs), DEPTHS)
    for depth, out in enumerate(model.mtp.unroll(inputs, hidden[:, :length])):
        logits = model.logits(out)
        for row, (main, mtp) in enumerate(pairs):
            p, p_ids = filtered(target[:, depth + 1 : depth + 1 + length] / main)
            q, q_ids = filtered(logits / mtp)
            same = (p_ids[..., :, None] == q_ids[..., None, :]).float()
            rates[row, depth] = torch.minimum(p, (same * q[..., None, :]).sum(-1)).sum(-1).mean()
    return rates


@torch.no_grad()
def teacher_forced(
    model: WebModel, tokenizer: Tokenizer, texts: list[dict[str, str]], taus: list[float]
) -> dict[str, object]:
    """Bits per byte by kind and temperature, and acceptance by depth, on held-out texts."""
    device = model.model.embed_tokens.weight.device
    nats: Counter[tuple[str, float]] = Counter()
    size: Counter[str] = Counter()
    tokens = 0
    pairs = [(main, round(main * ratio, 3)) for main in taus for ratio in (0.8, 0.9, 1.0, 1.1)]
    rates = torch.zeros(len(pairs), DEPTHS)
    for row in texts:
        ids = torch.tensor([tokenizer.encode(row["text"]).ids], device=device)
        hidden = model.hidden(ids)
        logits = model.logits(hidden)[0, :-1].float()
        for tau in taus:
            loss = F.cross_entropy(logits / tau, ids[0, 1:], reduction="sum")
            nats[row["kind"], tau] += float(loss)
        first = len(tokenizer.decode([int(ids[0, 0])]).encode())
        size[row["kind"]] += len(row["text"].encode()) - first
        weight = ids.shape[1] - 1
        tokens += weight
        rates += accept_rates(model, ids, hidden, pairs) * weight
    total = sum(size.values())
    report: dict[str, object] = {"tokens": tokens, "bytes": total}
    for tau in taus:
        by_kind = {k: nats[k, tau] / size[k] / math.log(2) for k in size}
        overall = sum(nats[k, tau] for k in size) / math.log(2)
        report[f"bits_per_byte_tau_{tau}"] = {
            **{k: round(v, 4) for k, v in by_kind.items()},
            "all": round(overall / total, 4),
        }
    report["ce_per_token"] = round(sum(nats[k, taus[0]] for k in size) / tokens, 4)
    report["accept_teacher_forced"] = {
        f"tau {main}, drafts {mtp}": [round(rate, 4) for rate in (row / tokens).tolist()]
        for (main, mtp), row in zip(pairs, rates, strict=True)
    }
    return report


def _judge(job: tuple[str, list[int]]) -> list[str]:
    return failures(judge(*job))


def tally(jobs: list[tuple[str, list[int]]], wanted: int) -> dict[str, object]:
    """Failures by criterion of (text, tokens) runs that should have `wanted` tokens."""
    with ProcessPoolExecutor() as pool:
        broken = list(pool.map(_judge, jobs, chunksize=8))
    sound = [not names for names in broken]
    whole = [len(tokens) >= wanted for _, tokens in jobs]
    return {
        "runs": len(jobs),
        "passed": sum(sound),
        "reached": sum(whole),
        "whole_and_sound": sum(map(all, zip(whole, sound, strict=True))),
        "failures": dict(Counter(name for names in broken for name in names)),
    }


def long_runs(
    model: WebModel,
    tokenizer: Tokenizer,
    taus: list[float],
    per_prompt: int,
    count: int,
    seed: int,
    shares: tuple[float, ...] = (0.5, 1.0),
) -> dict[str, object]:
    """Sample every prompt `per_prompt` times at each temperature and judge prefixes of the runs."""
    prompts = json.loads((HERE / "prompts.json").read_text())
    plan = [
        (tau, kind, tokenizer.encode(prompt).ids)
        for tau in taus
        for kind, group in prompts.items()
        for prompt in group
        for _ in range(per_prompt)
    ]
    tau = torch.tensor([item[0] for item in plan])
    runs = generate(model, [item[2] for item in plan], tau, count, seed)
    report: dict[str, object] = {}
    for value in taus:
        for kind in prompts:
            for share in shares:
                wanted = int(count * share)
                chosen = [
                    run[:wanted]
                    for item, run in zip(plan, runs, strict=True)
                    if item[0] == value and item[1] == kind
                ]
                jobs = [(tokenizer.decode(run, skip_special_tokens=True), run) for run in chosen]
                report[f"tau {value} {kind} {wanted}"] = tally(jobs, wanted)
        report[f"sample tau {value}"] = tokenizer.decode(
            next(run for item, run in zip(plan, runs, strict=True) if item[0] == value)
        )
    return report


def acceptance(model: WebModel, tokenizer: Tokenizer, rows: int, rounds: int, seed: int) -> dict[str, object]:
    """Real speculative sampling with four drafts, per raw prompt kind."""
    prompts = json.loads((HERE / "prompts.json").read_text())
    report: dict[str, object] = {}
    for kind in ("html", "css"):
        encoded = [tokenizer.encode(prompt).ids for prompt in prompts[kind]]
        shortest = min(map(len, encoded))
        chosen = [ids[-shortest:] for ids in encoded] * (rows // len(encoded))
        found, runs = speculate(model, chosen, rounds, seed)
        report[kind] = {
            "rows": len(chosen),
            "rounds": found.rounds,
            "tokens": sum(map(len, runs)),
            "cumulative": found.cumulative,
            "length": found.length,
        }
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description="Evaluate exported checkpoints.")
    parser.add_argument("--model", type=Path, action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, default=HERE / "heldout.jsonl")
    parser.add_argument("--taus", type=float, nargs="+", default=[1.0])
    parser.add_argument("--per-prompt", type=int, default=16, help="runs a prompt, 12 prompts")
    parser.add_argument("--count", type=int, default=6000, help="tokens a run")
    parser.add_argument("--rows", type=int, default=64, help="rows of the speculative runs")
    parser.add_argument("--rounds", type=int, default=800, help="rounds of the speculative runs")
    parser.add_argument("--seed", type=int, default=20260620)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reports: dict[str, object] = {}
    try:
        texts = heldout_texts(args.heldout)
        for folder in args.model:
            start = time.time()
            model, tokenizer = checkpoint.load(folder, device)
            report: dict[str, object] = {
                "heldout": teacher_forced(model, tokenizer, texts, args.taus),
                "acceptance": acceptance(model, tokenizer, args.rows, args.rounds, args.seed),
                "runs": long_runs(model, tokenizer, args.taus, args.per_prompt, args.count, args.seed),
            }
            report["seconds"] = round(time.time() - start, 1)
            reports[str(folder)] = report
            args.out.write_text(json.dumps(reports, indent=1) + "\n")
            shown = {k: v for k, v in report["runs"].items() if "sample" not in k}  # type: ignore[attr-defined]
            print(json.dumps({str(folder): {**report, "runs": shown}}, indent=1), flush=True)
    except (OSError, ValueError, KeyError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
