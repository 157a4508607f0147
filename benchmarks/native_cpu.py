"""The C++ kernels beside the PyTorch operations they stand for, on the embedded model's shapes.

    python -m benchmarks.native_cpu [--threads 1] [--repeats 60] [--context 6000] [--out FILE.json]

Each call takes the next of as many copies of its weights as fill 48 MB, so that they stream as they do
in a model. Both sides are interleaved over the repeats and the best of each is printed: time of the
calling thread with one thread, else of the clock on the wall. GB/s counts the weights, states or cache
bytes that the operation must read. Compare ratios within one run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from sm70lab.kernels import attention, gated_delta, native, norm
from sm70lab.kernels.causal_conv1d import causal_conv1d
from sm70lab.tracking.environment import cpu_name

STREAM = 48_000_000  # bytes of weights in turn: more than the caches of one core hold
Call = Callable[[], object]
Case = tuple[
    str, str, int, int, Sequence[Call], Sequence[Call]
]  # operation, shape, rows, bytes, native's, PyTorch's


def copies(size: int) -> int:
    return max(1, STREAM // size)


def products(rows: int) -> Iterator[Case]:
    """Projections, head and feed-forward layer."""
    for name, n, k in (
        ("GDN in", 1032, 320),
        ("attention in", 768, 320),
        ("out", 320, 256),
        ("head", 4096, 320),
    ):
        x, weights = torch.randn(rows, k), [torch.randn(n, k) for _ in range(copies(4 * n * k))]
        yield (
            f"linear, {name}", f"{n}×{k}", rows, 4 * n * k,
            [partial(native.linear, x, w) for w in weights],
            [partial(F.linear, x, w) for w in weights],
        )  # fmt: skip
    n, k = 4096, 320
    x, scale = torch.randn(rows, k), torch.rand(n)
    bytes_ = [torch.randint(-127, 128, (n, k), dtype=torch.int8) for _ in range(copies(n * k))]
    yield (
        "int8_linear, head (torch: float32)", f"{n}×{k}", rows, n * k,
        [partial(native.int8_linear, x, w, scale) for w in bytes_],
        [partial(F.linear, x, torch.randn(n, k)) for _ in range(copies(4 * n * k))],
    )  # fmt: skip
    inner, hidden = 768, 320
    x = torch.randn(rows, hidden)
    pairs = [
        (torch.randn(2 * inner, hidden), torch.randn(hidden, inner))
        for _ in range(copies(12 * inner * hidden))
    ]

    def swiglu(gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, down)

    yield (
        "swiglu + residual", f"{inner}×{hidden}", rows, 12 * inner * hidden,
        [partial(native.swiglu, x, *p, x) for p in pairs], [partial(swiglu, *p) for p in pairs],
    )  # fmt: skip


def small(rows: int) -> Iterator[Case]:
    """Norms and top k: no weights to speak of."""
    x, weight = torch.randn(1, rows, 320), torch.rand(320)
    yield (
        "rms_norm", "320", rows, 0,
        [partial(native.rms_norm, x, weight, 1e-6)], [partial(norm.rms_norm, x, weight, 1e-6)],
    )  # fmt: skip
    o, gate, w = torch.randn(1, rows, 4, 64), torch.randn(1, rows, 1032)[..., 768:1024], torch.rand(64)
    yield (
        "gated_rms_norm", "4×64", rows, 0,
        [partial(native.gated_rms_norm, o, gate, w, 1e-6)],
        [lambda: norm.gated_rms_norm(o, gate.reshape(o.shape), w, 1e-6)],
    )  # fmt: skip
    logits = torch.randn(rows, 4096)
    yield (
        "top_k",
        "20 of 4096",
        rows,
        0,
        [partial(native.top_k, logits, 20)],
        [partial(torch.topk, logits, 20)],
    )


def delta(rows: int) -> Iterator[Case]:
    """The GDN core: 4 heads of 64 × 64."""
    conv, weight, ab = torch.randn(1, 3 + rows, 768), torch.randn(4, 768), torch.randn(1, rows, 8)
    a, b = ab.split(4, dim=-1)
    rate, bias = -torch.rand(4), torch.rand(4)

    def plain() -> tuple[torch.Tensor, ...]:
        qk, v = causal_conv1d(conv, weight).tensor_split([512], dim=-1)
        q, k = gated_delta.l2_normalise(qk.reshape(1, rows, 8, 64)).chunk(2, dim=2)
        return q * 0.125, k, v.reshape(1, rows, 4, 64), *gated_delta.gating(a, b, rate, bias)

    yield (
        "gdn_rows", "768 channels", rows, 0,
        [partial(native.gdn_rows, conv, weight, a, b, rate, bias, 4, 4, 64, 64)], [plain],
    )  # fmt: skip
    inputs, size = native.gdn_rows(conv, weight, a, b, rate, bias, 4, 4, 64, 64), 4 * 64 * 64
    states = [torch.randn(1, 4, 64, 64) for _ in range(copies(4 * size))]
    reference: list[Call] = [partial(gated_delta.gated_delta_recurrent, *inputs, s) for s in states]
    for run in (native.gated_delta_recurrent, native.gated_delta_outputs):
        calls: list[Call] = [partial(run, *inputs, s) for s in states]
        yield run.__name__, "4×64×64", rows, 4 * size, calls, reference
    yield (
        "gated_delta_fold", "4×64×64", rows, 4 * size,
        [partial(native.gated_delta_fold, *inputs[1:], s) for s in states],
        [partial(gated_delta.gated_delta_states, *inputs[1:], s) for s in states],
    )  # fmt: skip


def attend(rows: int, context: int) -> Iterator[Case]:
    """One attention layer from its projection on: 4 query heads, 2 key heads, 64 channels."""
    q_gate, k, v = torch.randn(1, rows, 768).split([512, 128, 128], dim=-1)
    norm_weight = torch.ones(64)
    positions = context + torch.arange(rows)[None]
    cos, sin = attention.rotary_table(positions, attention.inverse_frequencies(16, 10000.0))
    slots, start = torch.tensor([0]), torch.tensor([context])
    size = 2 * 4 * 2 * 64 * (context + rows)
    one = (1, 2, context + 16, 64)
    caches = [(torch.randn(one), torch.randn(one)) for _ in range(copies(size))]

    def plain(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        turn = (cos[:, :, None], sin[:, :, None])
        q, gate = q_gate.view(1, rows, 4, 128).chunk(2, dim=-1)
        q = attention.apply_rotary(norm.rms_norm(q, norm_weight, 1e-6), *turn)
        key = attention.apply_rotary(norm.rms_norm(k.view(1, rows, 2, 64), norm_weight, 1e-6), *turn)
        end = context + rows
        keys[:, :, context:end] = key.transpose(1, 2)
        values[:, :, context:end] = v.view(1, rows, 2, 64).transpose(1, 2)
        o = attention.causal_attention(q, keys[:, :, :end], values[:, :, :end])
        return o * torch.sigmoid(gate.reshape(o.shape))

    shared = (q_gate, k, v, norm_weight, norm_weight, 1e-6, cos, sin)
    yield (
        "gated_attention", f"{context} positions", rows, size,
        [partial(native.gated_attention, *shared, *c, slots, start) for c in caches],
        [partial(plain, *c) for c in caches],
    )  # fmt: skip


def best_of(sides: Sequence[Sequence[Call]], repeats: int, clock: Callable[[], float]) -> list[float]:
    """Seconds a call, the best of ``repeats`` rounds of each side, taken in turn."""
    best = [float("inf")] * len(sides)
    for repeat in range(repeats):
        for i, calls in enumerate(sides):
            # A few calls at a time, so that some round falls between a neighbour's.
            turn = [calls[(repeat * 8 + j) % len(calls)] for j in range(8)]
            started = clock()
            for call in turn:
                call()
            best[i] = min(best[i], (clock() - started) / len(turn))
    return best


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--context", type=int, default=6000, help="positions of the long attention")
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    native.load()
    native.set_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    torch.manual_seed(0)
    title = f"{cpu_name()}, {options.threads} thread(s), torch {torch.__version__}, float32"
    table = Table(
        "operation", "shape", "rows", "µs", "GB/s", "torch µs", "torch GB/s", "× torch", title=title
    )
    lines = []
    with torch.inference_mode():
        for build in (products, small, delta, lambda r: attend(r, 300), lambda r: attend(r, options.context)):
            for cases in zip(build(1), build(5), strict=True):
                for operation, shape, rows, size, ours, theirs in cases:
                    fast, slow = (1e6 * s for s in best_of([ours, theirs], options.repeats, clock))
                    speeds = [f"{size / us / 1e3:.1f}" if size else "" for us in (fast, slow)]
                    table.add_row(
                        operation, shape, str(rows), f"{fast:.1f}", speeds[0], f"{slow:.1f}", speeds[1],
                        f"{slow / fast:.2f}",
                    )  # fmt: skip
                    lines.append(
                        {
                            "operation": operation,
                            "shape": shape,
                            "rows": rows,
                            "bytes": size,
                            "us": fast,
                            "torch_us": slow,
                        }
                    )
    Console(width=120).print(table)
    if options.out:
        options.out.write_text(json.dumps({"title": title, "rows": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
