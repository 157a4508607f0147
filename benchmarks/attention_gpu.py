"""The attention and sampling kernels of a round on a GPU: time, and bytes read against it.

    python -m benchmarks.attention_gpu [--heads 16] [--kv-heads 4] [--dim 256] [--out FILE.json]

Attention: norm, rotary positions, cache write, split attention and output gate, float16, with the
kernel that this device gets and with the one for every device, beside PyTorch's
scaled_dot_product_attention alone. GB/s counts the keys and values up to the newest row. Every call
takes the next of as many caches as fill 400 MB, in one CUDA graph, so that they stream as they do in a
model. Sampling: from logits of T rows over 248,320 ids to committed tokens. Best of the replays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from sm70lab.kernels.attention import inverse_frequencies, rotary_table
from sm70lab.kernels.gpu import attention, sampling

STREAM = 400_000_000  # bytes of caches in turn: more than a level-2 cache holds
ROWS = (1, 3, 5)
CONTEXTS = (1500, 4096, 131_072)
VOCABULARY = 248_320
CUDA = torch.device("cuda")


def microseconds(calls: Sequence[Callable[[], object]], replays: int = 30) -> float:
    """Time of one call: all captured in one graph, the best of its replays."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(max(1, 40 // len(calls))):
            for call in calls:
                call()
    count = max(1, 40 // len(calls)) * len(calls)
    best = float("inf")
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1000 / count)
    return best


def attention_times(rows: int, context: int, heads: int, kv_heads: int, dim: int) -> dict[str, Any]:
    """The three kernels and PyTorch's attention at one size."""
    capacity, half = context + 64, torch.float16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=CUDA).to(half)

    size = 2 * kv_heads * (context + rows) * dim * 2
    caches = [
        (random(1, kv_heads, capacity, dim), random(1, kv_heads, capacity, dim))
        for _ in range(max(2, -(-STREAM // size)))
    ]
    q_gate, k, v = (
        random(1, rows, 2 * heads * dim),
        random(1, rows, kv_heads * dim),
        random(1, rows, kv_heads * dim),
    )
    norms = [torch.ones(dim, device=CUDA) for _ in range(2)]
    positions = torch.arange(context, context + rows, device=CUDA)[None]
    frequencies = inverse_frequencies(dim // 4, 10_000.0).to(CUDA)
    cos, sin = (table.to(half) for table in rotary_table(positions, frequencies))
    slots, start = torch.zeros(1, dtype=torch.int64, device=CUDA), torch.tensor([context], device=CUDA)
    space = attention.workspace(1, rows, heads, caches[0][0])
    out = torch.empty(1, rows, heads * dim, dtype=half, device=CUDA)

    def ours(cache: tuple[torch.Tensor, torch.Tensor], tile: attention.Tile) -> Callable[[], object]:
        data = (q_gate, k, v, *norms, cos, sin, *cache, slots, start, 1e-6, space, out, tile)
        return lambda: attention.gated_attention(*data)

    q = random(1, heads, rows, dim)
    seen = torch.ones(rows, context + rows, dtype=torch.bool, device=CUDA).tril(context)

    def torchs(cache: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], object]:
        keys, values = (part[:, :, : context + rows] for part in cache)
        mask = None if rows == 1 else seen
        return lambda: F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

    default = microseconds([ours(cache, attention.tile_for(dim, half, CUDA)) for cache in caches])
    plain = microseconds([ours(cache, attention.fma_tile(dim)) for cache in caches])
    peer = microseconds([torchs(cache) for cache in caches])
    times = {"us": default, "fma_us": plain, "sdpa_us": peer}
    return {"rows": rows, "context": context, "bytes": size, **times}


def sampling_times(rows: int) -> dict[str, Any]:
    """Truncation and draws of the rows, then acceptance; k = rows − 1 drafts."""
    logits = [torch.randn(rows, VOCABULARY, device=CUDA) * 3 for _ in range(16)]
    settings = torch.tensor([[1.0, 20, 0.95, 0]], device=CUDA)
    keys = torch.arange(5, device=CUDA)[None].contiguous()
    position = torch.zeros(1, dtype=torch.int64, device=CUDA)
    width = sampling.width_for(20)
    space = sampling.lists(rows, width, VOCABULARY, CUDA)
    target, q = (sampling.rows(rows, width, CUDA) for _ in range(2))
    data = (settings, keys, position)
    sampling.truncate_and_draw(logits[0], *data, 1, space, q)
    drafts = q.drawn[None, : rows - 1].contiguous()
    out, counts = torch.zeros(1, rows, dtype=torch.int64, device=CUDA), torch.zeros_like(position)

    def one(x: torch.Tensor) -> Callable[[], object]:
        def call() -> None:
            sampling.truncate_and_draw(x, *data, 1, space, target)
            sampling.accept(False, target, drafts, q, keys, position, out, counts)

        return call

    def torchs(x: torch.Tensor) -> Callable[[], object]:
        return lambda: x.topk(20, dim=-1)

    time, peer = microseconds([one(x) for x in logits]), microseconds([torchs(x) for x in logits])
    return {"rows": rows, "bytes": rows * VOCABULARY * 4, "us": time, "topk_us": peer}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape = (options.heads, options.kv_heads, options.dim)
    attended = [attention_times(rows, context, *shape) for context in CONTEXTS for rows in ROWS]
    sampled = [sampling_times(rows) for rows in ROWS]
    name = torch.cuda.get_device_name()
    words = f"{options.heads} heads, {options.kv_heads} of keys and values, {options.dim} dimensions"
    table = Table(
        "context", "rows", "µs", "GB/s", "plain FMA µs", "torch µs", title=f"attention, {words}, {name}"
    )
    for found in attended:
        speed = found["bytes"] / found["us"] / 1000
        times = [f"{found[name]:.1f}" for name in ("us", "fma_us", "sdpa_us")]
        table.add_row(f"{found['context']:,}", str(found["rows"]), times[0], f"{speed:,.0f}", *times[1:])
    other = Table(
        "rows", "µs", "GB/s", "torch.topk alone µs", title=f"logits → committed tokens, {VOCABULARY:,} ids"
    )
    for found in sampled:
        speed = found["bytes"] / found["us"] / 1000
        other.add_row(str(found["rows"]), f"{found['us']:.1f}", f"{speed:,.0f}", f"{found['topk_us']:.1f}")
    console = Console(width=100)
    console.print(table)
    console.print(other)
    if options.out:
        options.out.write_text(
            json.dumps({"device": name, "shape": words, "attention": attended, "sampling": sampled}, indent=1)
        )


if __name__ == "__main__":
    main()
