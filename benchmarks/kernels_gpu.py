"""The GPU's kernels beside their best peer in the same run, at the 9B shape.

    python -m benchmarks.kernels_gpu [--rows 1 3 5] [--out FILE.json]

Each time is the median over replays of one CUDA graph that holds many calls, each with the next of as
many copies of its weights or states as fill 3 GB, so that they stream as they do in a model. GB/s counts
the bytes that the operation must read and write; its floor is their time at the faster of the two
ceilings measured first. Prompts are timed as they run, launches and all. Peers: torch (cuBLAS), and
flash-linear-attention where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.testing
from rich.console import Console
from rich.table import Table

from sm70lab.kernels.gated_delta import gated_delta_chunk, l2_normalise
from sm70lab.kernels.gpu import gdn, int4, linear, norm
from sm70lab.kernels.gpu.gdn import GDNPools, GDNWeights, Heads, Place
from sm70lab.kernels.gpu.gdn_prefill import gated_delta_prefill
from sm70lab.kernels.gpu.int4 import BLOCK, GROUP, Int4Weight, packed_pairs

DEVICE = torch.device("cuda")
HIDDEN, INNER, VOCABULARY, LAYERS = 4096, 12288, 248320, 32
HEADS = Heads(16, 32, 128, 128)
ATTENTION_IN = 10240  # q with its gate, k and v: 16 heads and 4 key heads of 256
PROMPTS = (64, 500, 1500, 8000)  # tokens
STREAM = 3 * 2**30  # bytes that the calls of one graph go through
EPS = 1e-6

Call = Callable[[], object]


@dataclass
class Measured:
    """One line of the table."""

    operation: str
    shape: str
    rows: int
    bytes: int
    microseconds: float
    peer: str = ""
    peer_microseconds: float = 0.0

    @property
    def rate(self) -> float:
        """GB/s of the bytes that must move."""
        return self.bytes / self.microseconds / 1e3


def seconds(calls: list[Call], replays: int = 9) -> float:
    """Median time of the calls, one after another in one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiled and loaded before the capture
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for replay in range(replays + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 2:
            times.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(times))


class Memory:
    """Random float16 weights, cut from one block that is filled once."""

    def __init__(self, size: int) -> None:
        self.block = torch.empty(size // 2, dtype=torch.float16, device=DEVICE)
        for part in self.block.split(2**29):
            part.normal_(0, 0.02)

    def matrices(self, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
        """One matrix a shape, none overlapping another."""
        sizes = [n * k for n, k in shapes]
        parts = self.block[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def copies(self, n: int, k: int) -> list[torch.Tensor]:
        return self.matrices([(n, k)] * max(2, STREAM // (2 * n * k)))


def ceilings(memory: Memory) -> dict[str, float]:
    """TB/s of an elementwise copy (read and written) and of the one-row product with the vocabulary."""
    source, target = memory.block[: 2**30], memory.block[2**30 : 2**31]
    copy = seconds([lambda: torch.abs(source, out=target)] * 2) / 2
    target.normal_(0, 0.02)
    x, out = rows_of(1, HIDDEN), torch.empty(1, VOCABULARY, dtype=torch.float16, device=DEVICE)
    heads = memory.copies(VOCABULARY, HIDDEN)
    gemv = seconds([partial(linear.linear, x, w, out, exact=False) for w in heads]) / len(heads)
    return {
        "device copy": 4 * source.numel() / copy / 1e12,
        "one-row product": 2 * heads[0].numel() / gemv / 1e12,
    }


def rows_of(rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, dtype=torch.float16, device=DEVICE)


# ---------------------------------------------------------------- products


def product(w: torch.Tensor, x: torch.Tensor, kind: str, exact: bool) -> Call:
    """One product as a round makes it: parts of K where the reader adds them, SwiGLU for gate and up."""
    n, k = w.shape
    if kind == "swiglu":
        return partial(linear.swiglu, x, w, x.new_empty(len(x), n // 2), exact)
    if kind == "parts":
        parts = linear.parts_of(n, k, len(x), x, exact)
        return partial(linear.linear_parts, x, w, torch.empty(parts, len(x), n, device=DEVICE), exact)
    return partial(linear.linear, x, w, x.new_empty(len(x), n), None, exact)


SHAPES = (
    ("GDN in", HEADS.projected, HIDDEN, "plain"),
    ("attention in", ATTENTION_IN, HIDDEN, "plain"),
    ("out", HIDDEN, HIDDEN, "parts"),
    ("gate, up and SwiGLU", 2 * INNER, HIDDEN, "swiglu"),
    ("down", HIDDEN, INNER, "parts"),
    ("head", VOCABULARY, HIDDEN, "plain"),
)


def products(memory: Memory, rows: int) -> Iterator[Measured]:
    """Every matrix shape of the model, exact, and for one row also without that promise."""
    for name, n, k, kind in SHAPES:
        x, weights = rows_of(rows, k), memory.copies(n, k)
        peer = seconds([partial(F.linear, x, w) for w in weights]) / len(weights)
        for exact in (True, False) if rows == 1 else (True,):
            own = seconds([product(w, x, kind, exact) for w in weights]) / len(weights)
            moved = 2 * (n * k + rows * (k + n))
            label = f"{name}, {'exact' if exact else 'fast'}"
            yield Measured(label, f"{n}×{k}", rows, moved, own * 1e6, "torch linear", peer * 1e6)


def whole_set(memory: Memory, rows: int) -> Iterator[Measured]:
    """The 129 products of one target step, in one graph with nothing else in it."""
    kinds: list[str] = []
    shapes: list[tuple[int, int]] = []
    for layer in range(LAYERS):
        into = ATTENTION_IN if (layer + 1) % 4 == 0 else HEADS.projected
        shapes += [(into, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
        kinds += ["plain", "parts", "swiglu", "parts"]
    shapes.append((VOCABULARY, HIDDEN))
    weights = memory.matrices(shapes)
    inputs = {k: rows_of(rows, k) for k in (HIDDEN, INNER)}
    peer = seconds([partial(F.linear, inputs[w.shape[1]], w) for w in weights])
    for exact in (True, False) if rows == 1 else (True,):
        pairs = zip(weights, [*kinds, "plain"], strict=True)
        own = seconds([product(w, inputs[w.shape[1]], kind, exact) for w, kind in pairs])
        name = f"129 products, {'exact' if exact else 'fast'}"
        moved = sum(2 * n * k for n, k in shapes)
        yield Measured(name, "one step", rows, moved, own * 1e6, "torch linear", peer * 1e6)


# ---------------------------------------------------------------- 4-bit weights

INT4_SHAPES = (  # of the 27B model
    ("GDN in", 16480, 5120, "plain"),
    ("out", 5120, 6144, "parts"),
    ("gate, up and SwiGLU", 34816, 5120, "swiglu"),
    ("down", 5120, 17408, "parts"),
)


def int4_product(w: Int4Weight, x: torch.Tensor, kind: str) -> Call:
    n, k = w.outputs, x.shape[1]
    if kind == "swiglu":
        return partial(int4.swiglu, x, w, x.new_empty(len(x), n // 2))
    if kind == "parts":
        parts = torch.empty(int4.parts_of(n, k, DEVICE), len(x), n, device=DEVICE)
        return partial(int4.linear_parts, x, w, parts)
    return partial(int4.linear, x, w, x.new_empty(len(x), n))


def int4_products(memory: Memory, rows: int) -> Iterator[Measured]:
    """The 27B model's shapes in 4 bits, beside the same product in float16."""
    for name, n, k, kind in INT4_SHAPES:
        x, half = rows_of(rows, k), memory.copies(n, k)
        peer = seconds([product(w, x, kind, True) for w in half]) / len(half)
        words = memory.block.view(torch.int32)[: STREAM // 4].split(n * k // 8)
        shape = (n // BLOCK, k // GROUP)
        scales = torch.rand(n, k // GROUP, device=DEVICE)
        pairs = packed_pairs(scales, torch.randint_like(scales, 16))
        weights = [Int4Weight(w.view(*shape, 2, 32, 4), pairs) for w in words if len(w) == n * k // 8]
        own = seconds([int4_product(w, x, kind) for w in weights]) / len(weights)
        moved = n * k // 2 + 4 * n * k // GROUP + 2 * rows * (k + n)
        label = f"int4 {name}"
        yield Measured(label, f"{n}×{k}", rows, moved, own * 1e6, "own float16", peer * 1e6)


# ---------------------------------------------------------------- GDN


def random_layer(batch: int, rows: int) -> tuple[GDNWeights, GDNPools]:
    hv, k, v = HEADS.value_heads, HEADS.key_dim, HEADS.value_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE)

    weights = GDNWeights(random(4, HEADS.conv_dim).half(), -random(hv).exp(), random(hv), 1 + 0.1 * random(v))
    pools = GDNPools(
        random(batch, 3 + rows, HEADS.conv_dim).half(),
        0.1 * random(batch, hv, k, v),
        F.normalize(random(batch, rows, hv, k), dim=-1),
        random(batch, rows, hv, v),
        -random(batch, rows, hv).exp(),
        random(batch, rows, hv).sigmoid(),
    )
    return weights, pools


def gdn_bytes(batch: int, rows: int) -> int:
    """What a round must move: state, accepted and new rows, window, projection and weights, output."""
    hv, k, v, c = HEADS.value_heads, HEADS.key_dim, HEADS.value_dim, HEADS.conv_dim
    state = 2 * hv * k * v * 4
    pending = 2 * rows * hv * (k + v + 2) * 4
    conv = 2 * c * (3 + 3 + rows)
    return batch * (state + pending + conv + rows * (2 * HEADS.projected + 2 * hv * v)) + 8 * c


def recurrence_bytes(batch: int, rows: int) -> int:
    """State, accepted rows, new rows and outputs."""
    hk, hv, k, v = HEADS.key_heads, HEADS.value_heads, HEADS.key_dim, HEADS.value_dim
    new = 2 * hk * k + hk + hv * (v + 2) + hv * v
    return 4 * batch * (2 * hv * k * v + rows * (hv * (k + v + 2) + new))


def gdn_rounds(rows: int) -> Iterator[Measured]:
    """The whole round of a layer after its projection, for one sequence and for sixteen."""
    for batch in (1, 16):
        layers = [random_layer(batch, rows) for _ in range(max(8, 96 // batch))]
        projected = torch.randn(batch, rows, HEADS.projected, dtype=torch.float16, device=DEVICE)
        count = torch.full((batch,), rows, device=DEVICE)
        place = Place(torch.arange(batch, device=DEVICE), count, count)
        room = gdn.scratch(batch, rows, HEADS, torch.float16, DEVICE)
        out = projected.new_empty(batch, rows, HEADS.value_heads * HEADS.value_dim)
        calls: list[Call] = [
            partial(gdn.gdn_round, projected, w, p, place, HEADS, EPS, room, out, True) for w, p in layers
        ]
        own = seconds(calls) / len(calls)
        alone: list[Call] = [partial(gdn.recurrence, p, place, HEADS, room, True) for _, p in layers]
        recurrence = seconds(alone) / len(alone)
        shape = f"{batch} × {HEADS.value_heads} states of {HEADS.key_dim}×{HEADS.value_dim}"
        moved = gdn_bytes(batch, rows)
        yield Measured("GDN round", shape, rows, moved, own * 1e6)
        found = importlib.util.find_spec("fla") is not None
        peer = fla_recurrence(batch, rows, layers) if found else 0.0
        name = "fla fused recurrent" if found else ""
        moved = recurrence_bytes(batch, rows)
        yield Measured("GDN recurrence alone", shape, rows, moved, recurrence * 1e6, name, peer * 1e6)


def fla_recurrence(batch: int, rows: int, layers: list[tuple[GDNWeights, GDNPools]]) -> float:
    """flash-linear-attention's recurrence: no convolution, gating, rollback or gated norm."""
    from fla.ops.gated_delta_rule import (  # type: ignore[import-not-found]
        fused_recurrent_gated_delta_rule,
    )

    hk, hv, k, v = HEADS.key_heads, HEADS.value_heads, HEADS.key_dim, HEADS.value_dim
    q = torch.randn(batch, rows, hk, k, dtype=torch.float16, device=DEVICE)
    values = torch.randn(batch, rows, hv, v, dtype=torch.float16, device=DEVICE)
    g = -torch.rand(batch, rows, hv, device=DEVICE)
    calls: list[Call] = [
        partial(
            fused_recurrent_gated_delta_rule, q, q, values, g, g.sigmoid(), initial_state=pools.state,
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )
        for _, pools in layers
    ]  # fmt: skip
    with torch.inference_mode():
        return seconds(calls) / len(calls)


def prompts() -> Iterator[Measured]:
    """The gated delta rule of one layer over a prompt: beside PyTorch's chunks, and fla's in float16."""
    heads, k, v = HEADS.value_heads, HEADS.key_dim, HEADS.value_dim
    shape = f"{heads} heads of {k}×{v}"
    state = torch.randn(1, heads, k, v, device=DEVICE)
    for tokens in PROMPTS:
        q, keys, values = (torch.randn(1, tokens, heads, size, device=DEVICE) for size in (k, k, v))
        g = -torch.rand(1, tokens, heads, device=DEVICE)
        data = (l2_normalise(q) * k**-0.5, l2_normalise(keys), values, g, g.sigmoid(), state)
        with torch.inference_mode():
            own = microseconds(partial(gated_delta_prefill, *data))
            torchs = microseconds(partial(gated_delta_chunk, *data))
            moved = 4 * (heads * tokens * (2 * k + 2 * v + 2) + 2 * state.numel())
            yield Measured("GDN prompt", shape, tokens, moved, own, "torch chunks", torchs)
            if importlib.util.find_spec("fla") is not None:
                peer = microseconds(fla_prompt(data))
                yield Measured("GDN prompt", shape, tokens, moved, own, "fla chunks, float16", peer)


def microseconds(call: Call) -> float:
    """Median time of a call, launches and all."""
    return float(triton.testing.do_bench(call, warmup=5, rep=50, return_mode="median")) * 1e3


def fla_prompt(data: tuple[torch.Tensor, ...]) -> Call:
    """flash-linear-attention's chunks over the same rows and state, in float16."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    *qkv, g, beta, state = data
    half = (x.half() for x in qkv)
    options = {"scale": 1.0, "initial_state": state, "output_final_state": True}
    return partial(chunk_gated_delta_rule, *half, g, beta, **options)


# ---------------------------------------------------------------- norms


def norms(rows: int) -> Iterator[Measured]:
    """The norm after a product in two parts, with its residual."""
    sets = [
        (
            rows_of(rows, HIDDEN),
            torch.randn(2, rows, HIDDEN, device=DEVICE),
            torch.rand(HIDDEN, device=DEVICE),
        )
        for _ in range(200)
    ]
    x, y = rows_of(rows, HIDDEN), rows_of(rows, HIDDEN)
    own = seconds([partial(norm.add_rms_norm, r, p, w, EPS, x, y) for r, p, w in sets]) / len(sets)

    def torch_norm(residual: torch.Tensor, parts: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return norm.add_rms_norm_reference(residual, parts, weight, EPS)[1]

    peer = seconds([partial(torch_norm, *one) for one in sets]) / len(sets)
    moved = rows * HIDDEN * (2 + 2 * 4 + 2 + 2) + 4 * HIDDEN
    yield Measured("residual, parts, norm", f"{HIDDEN}", rows, moved, own * 1e6, "torch, eager", peer * 1e6)


# ---------------------------------------------------------------- report


def show(console: Console, lines: list[Measured], ceiling: float) -> None:
    table = Table(
        "operation", "shape", "rows", "µs", "GB/s", "share of floor", "peer", "peer µs", "peer / own"
    )
    for line in lines:
        ratio = line.peer_microseconds / line.microseconds
        table.add_row(
            line.operation, line.shape, str(line.rows), f"{line.microseconds:.2f}", f"{line.rate:.0f}",
            f"{line.rate / ceiling / 1e3:.2f}", line.peer,
            f"{line.peer_microseconds:.2f}" if line.peer else "", f"{ratio:.2f}" if line.peer else "",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--out", type=Path, help="also as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    console = Console(width=150)
    name = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    console.print(f"{name}; " + ", ".join(f"{key} {value}" for key, value in versions.items()))
    memory = Memory(16 * 2**30)
    found = ceilings(memory)
    ceiling = max(found.values())
    console.print("ceilings: " + ", ".join(f"{key} {value:.2f} TB/s" for key, value in found.items()))
    lines: list[Measured] = []
    for rows in options.rows:
        lines += whole_set(memory, rows)
    for rows in options.rows:
        lines += products(memory, rows)
    for rows in options.rows:
        lines += [*int4_products(memory, rows), *gdn_rounds(rows), *norms(rows)]
    lines += prompts()
    show(console, lines, ceiling)
    if options.out:
        record = {
            "device": name,
            "versions": versions,
            "ceilings": found,
            "lines": [asdict(x) for x in lines],
        }
        options.out.write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
