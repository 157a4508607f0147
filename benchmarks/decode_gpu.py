"""The round of a whole model on one GPU: tokens a second, and what stands between them and the bandwidth.

    python -m benchmarks.decode_gpu [--shapes 9b] [--weights fp16 int4] [--context 1500] [--out FILE.json]

Weights are random, made on the device. **Acceptance is forced** to ``--acceptance-length`` tokens a round
(or ``--acceptance`` rates per position): random weights would accept nothing. The accepting itself runs
all the same, and its result is then replaced. The floor of a line is the time to read each byte that its
round must read, once, at the rate of a ceiling measured in the same run: the one-row product of a 2 GB
matrix, which only reads, or the device copy, which writes as much.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.kernels_gpu import Memory, ceilings
from sm70lab.engine import captured, draft_head
from sm70lab.engine.architecture import Architecture, expected_tensors
from sm70lab.engine.captured import WholeRound
from sm70lab.engine.kv_cache import KVCache
from sm70lab.engine.model import DecoderLayer, HybridModel
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.sequence import Request
from sm70lab.engine.sequence import Sequence as Running
from sm70lab.engine.state import StateStore
from sm70lab.kernels.gpu import attention, gdn, norm, round_state, sampling
from sm70lab.kernels.gpu.int4 import BLOCK, GROUP, Int4Weight, packed_pairs
from sm70lab.kernels.gpu.launch import launch_options, let_next_kernel_start, wait_for_kernels_before
from sm70lab.kernels.gpu.products import Weight, weight_bytes
from sm70lab.schema import DraftHeadKind, GraphMode, Numerics, Route, Sampling

DEVICE = torch.device("cuda")
COMMON: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_conv_kernel_dim": 4,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
# hidden, layers, feed-forward, query and key heads, GDN value heads, tied head: of the published family.
SIZES = {
    "0.8b": (1024, 24, 3584, 8, 2, 16, True),
    "4b": (2560, 32, 9216, 16, 4, 32, True),
    "9b": (4096, 32, 12288, 16, 4, 32, False),
    "27b": (5120, 64, 17408, 24, 4, 48, False),
}
OFFICIAL = Sampling(temperature=1.0, top_k=20, top_p=0.95)
SHORTLIST = 32_768
ROUNDS, WARM = 200, 20


def architecture(size: str) -> Architecture:
    hidden, layers, inner, heads, kv_heads, values, tied = SIZES[size]
    shape = COMMON | {
        "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "linear_num_value_heads": values,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    return Architecture.from_dict(shape, f"shape {size}")


class DeviceWeights:
    """Random weights drawn where they will be used."""

    def __init__(self, arch: Architecture) -> None:
        self.shapes = expected_tensors(arch)

    def read(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        if name.endswith("A_log"):
            return torch.rand(shape, device=DEVICE)
        w = torch.empty(shape, dtype=torch.float16, device=DEVICE)
        return w.normal_(0, 0.1 if "norm" in name else 0.02)


def to_int4(model: HybridModel) -> None:
    """Replace the layers' matrices by random 4-bit ones; embedding and head keep float16, as AWQ's do."""
    assert model.mtp is not None
    for layer in [*model.decoder_layers(), model.mtp.layer]:
        mixer = layer.gdn or layer.attention
        assert mixer is not None
        for module, names in ((mixer, ("in_proj", "out_proj")), (layer.mlp, ("gate_up", "down"))):
            for name in names:
                _replace(module, name)


def _replace(module: nn.Module, name: str) -> None:
    n, k = getattr(module, name).shape
    delattr(module, name)  # a buffer can only hold a tensor
    words = torch.randint(
        -(2**31), 2**31, (n // BLOCK, k // GROUP, 2, 32, 4), dtype=torch.int32, device=DEVICE
    )
    scale = torch.full((n, k // GROUP), 0.005, dtype=torch.float16, device=DEVICE)
    zero = torch.randint_like(scale, 7, 9)  # 7.5 is the mean of a nibble: a bias would add up to infinity
    setattr(module, name, Int4Weight(words, packed_pairs(scale, zero)))


# ---------------------------------------------------------------- forced acceptance


@triton.jit
def _force(schedule, turn, counts, length, PDL: tl.constexpr):
    let_next_kernel_start(PDL)
    wait_for_kernels_before(PDL)
    at = tl.load(turn)
    tl.store(counts, tl.load(schedule + at % length))
    tl.store(turn, at + 1)


class ForcedRound(WholeRound):
    """A whole round whose acceptance is replaced by a schedule's next number of tokens."""

    schedule: torch.Tensor

    def _accept(self, match: bool, p: sampling.Rows, q: sampling.Rows) -> None:
        super()._accept(match, p, q)
        self.forced()
        _force[(1,)](self.schedule, self.turn, self.count, len(self.schedule), **launch_options(DEVICE))

    def forced(self) -> None:
        """Told before the count is replaced, for the log of launches."""

    def run_round(self, key: tuple[int, bool]) -> None:
        """One round, its kernels launched one by one."""
        self._round(*key)

    def force(self, counts: Sequence[int]) -> None:
        self.schedule = torch.tensor(counts, device=DEVICE)
        self.turn = torch.zeros(1, dtype=torch.int64, device=DEVICE)


def schedule(drafts: int, length: float, rates: Sequence[float] | None, rounds: int = 1000) -> list[int]:
    """Tokens of each round: of a mean ``length``, or drawn from cumulative rates per draft position."""
    if not drafts:
        return [1]
    if rates:
        u = np.random.default_rng(0).random(rounds)
        return [1 + sum(bool(x < rate) for rate in rates[:drafts]) for x in u]
    low = int(min(length, drafts + 1))
    share = min(length, drafts + 1) - low
    return [low + (int((i + 1) * share) - int(i * share)) for i in range(rounds)]


# ---------------------------------------------------------------- one route


@dataclass
class Line:
    """One route of the table."""

    shape: str
    route: str
    weights: str
    numerics: str
    tokens_per_second: float
    round_ms: float
    acceptance_length: float
    round_bytes: int
    floor_ms: float  # at the one-row product's rate
    copy_floor_ms: float  # at the device copy's
    host_ms: float  # of the thread that launches a round and reads what it tells, without waiting
    kernel_ms: float  # in which at least one kernel ran
    kernels: int
    memory_gib: float
    operations: list[dict[str, Any]] = field(default_factory=list)
    logits_deviation: float | None = None  # ‖Δ‖ / ‖logits‖ of the first row, fast against exact

    @property
    def share(self) -> float:
        return self.floor_ms / self.round_ms

    @property
    def between(self) -> float:
        """Share of a round in which no kernel ran."""
        return max(0.0, 1 - self.kernel_ms / self.round_ms)


def matrices(model: HybridModel, layers: Iterator[DecoderLayer] | Sequence[DecoderLayer]) -> int:
    """Bytes of the layers' matrices, each read once."""
    total = 0
    for layer in layers:
        mixer = layer.gdn or layer.attention
        weights: list[Weight] = [mixer.in_proj, mixer.out_proj, layer.mlp.gate_up, layer.mlp.down]  # type: ignore[union-attr, list-item]
        total += sum(weight_bytes(w) for w in weights)
    return total


def round_bytes(model: HybridModel, whole: WholeRound, context: int) -> int:
    """What a round must read: every weight once a pass, the states twice, the keys and values."""
    assert model.mtp is not None
    arch, k = model.arch, whole.k
    layers = list(model.decoder_layers())
    verify = matrices(model, layers) + model.head.nbytes
    drafts = k * (matrices(model, [model.mtp.layer]) + model.mtp.fc.nbytes + weight_bytes(whole.head_weight))
    state = sum(2 * held[1].nbytes for held in whole.store.layers)
    row = 2 * arch.num_kv_heads * arch.head_dim * 2
    caches = arch.layer_types.count("full_attention") + k
    return verify + drafts + state + caches * context * row


def measure(
    model: HybridModel,
    route: Route,
    context: int,
    counts: Sequence[int],
    ceilings: dict[str, float],
    shape: str,
    weights: str,
) -> tuple[Line, torch.Tensor]:
    """Run one route's captured rounds and time them; also the logits of the first row, float32 [V]."""
    torch.manual_seed(1)  # the same keys, values and hidden state for every route
    arch, rows = model.arch, route.draft_tokens + 1
    capacity = context + (ROUNDS + WARM + 8) * rows * 2
    with torch.inference_mode():
        store = StateStore(arch, "replay", torch.float32, model.dtype, DEVICE, rows)
        attention_layers = arch.layer_types.count("full_attention")
        kv = KVCache(arch, attention_layers, capacity, model.dtype, DEVICE)
        mtp_kv = KVCache(arch, 1 if route.draft_tokens else 0, capacity, model.dtype, DEVICE)
        for keys, values in (*kv.layers, *mtp_kv.layers):
            keys.normal_()
            values.normal_()
        head = draft_head.build(route.draft_head.value, model.head, route.shortlist_size, None)
        whole = ForcedRound(model, route, store, kv, mtp_kv, head)
        whole.force(counts)
        whole.prepare(OFFICIAL)
        store.reset(0)
        store.position[0] = context
        sequence = Running(Request([1], OFFICIAL, KeyedNoise(0, 0, 0)), 0, KeyedNoise(0, 0, 0), [1])
        sequence.deliver([1])
        sequence.hidden = torch.randn(1, arch.hidden_size, dtype=model.dtype, device=DEVICE)
        told = whole.rounds(sequence, ahead=False)
        next(told)
        first = whole.logits[0].clone()
        told = whole.rounds(sequence)
        for _ in range(WARM):
            next(told)
        began = time.perf_counter()
        tokens = sum(len(next(told).tokens) for _ in range(ROUNDS))
        seconds = time.perf_counter() - began
        torch.cuda.synchronize()
        graph = next(iter(whole.graphs.values()))
        host = statistics.median(host_seconds(whole, graph) for _ in range(20))
        busy, operations = profile(graph, launches(whole, next(iter(whole.graphs))))
    size = round_bytes(model, whole, context)
    floor, copy = (size / ceilings[name] / 1e9 for name in ("one-row product", "device copy"))
    line = Line(
        shape, name_of(route), weights, route.numerics.value, tokens / seconds, seconds / ROUNDS * 1e3,
        tokens / ROUNDS, size, floor, copy, host * 1e3, busy * 1e3, sum(o["calls"] for o in operations),
        torch.cuda.max_memory_allocated() / 2**30, operations,
    )  # fmt: skip
    return line, first


def name_of(route: Route) -> str:
    return f"MTP{route.draft_tokens}, {route.draft_head.value} head" if route.draft_tokens else "no drafts"


def host_seconds(whole: WholeRound, graph: torch.cuda.CUDAGraph) -> float:
    """Of one launch and one reading, with nothing to wait for."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    whole.launch(graph.replay, 0)
    launched = time.perf_counter() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    whole.told[0].tolist()
    return launched + time.perf_counter() - began


KERNELS = {  # that a function launches; one where it does not stand here
    "gdn_round": ("gdn rows", "gdn recurrence", "gdn finish"),
    "gated_attention": ("attention prepare", "attention", "attention combine"),
    "truncate_and_draw": ("sampling top", "sampling draw"),
}
LOGGED = (
    (captured, ("product", "product_parts", "swiglu")),
    (gdn, ("gdn_round",)),
    (attention, ("gated_attention",)),
    (norm, ("rms_norm", "add_rms_norm", "embed_rms_norm", "draft_input")),
    (sampling, ("truncate_and_draw", "accept")),
    (round_state, ("advance", "rotary_rows", "pick_row")),
)


def launches(whole: ForcedRound, key: tuple[int, bool]) -> list[tuple[str, int]]:
    """(operation, bytes of its weights) of each kernel of a round, in the order of their launches."""
    log: list[tuple[str, int]] = []

    def logged(name: str, run: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            size = 0
            label = name
            if name in ("product", "product_parts", "swiglu"):
                size = weight_bytes(arguments[1])
                label = f"{name} {len(arguments[0])} rows, {size / 1e6:.1f} MB"
            log.extend((each, size) for each in KERNELS.get(name, (label,)))
            return run(*arguments, **named)

        return call

    with contextlib.ExitStack() as patches:
        for module, names in LOGGED:
            for name in names:
                patched = mock.patch.object(module, name, logged(name, getattr(module, name)))
                patches.enter_context(patched)
        forced = logged("forced count", lambda: None)
        patches.enter_context(mock.patch.object(whole, "forced", forced))
        whole.run_round(key)
    return log


def profile(
    graph: torch.cuda.CUDAGraph, log: list[tuple[str, int]], replays: int = 10
) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of a replay in which a kernel ran, and the time of each operation.

    A kernel that starts early waits for the one before it. So each is charged what it adds to the time
    that is covered: the sum over a round is the time in which something ran.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        for _ in range(replays + 1):
            graph.replay()
            torch.cuda.synchronize()
    events = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    if len(spans) != (replays + 1) * len(log):
        raise RuntimeError(f"{len(spans)} kernels in {replays + 1} replays, and {len(log)} launched a round")
    spans = spans[len(log) :]  # the first replay warms the tracing up
    added: dict[str, float] = {}
    reached = spans[0][0]
    for number, (start, end) in enumerate(spans):
        label = log[number % len(log)][0]
        added[label] = added.get(label, 0.0) + max(0.0, end - max(start, reached))
        reached = max(reached, end)
    counts = Counter(label for label, _ in log)
    sizes = dict(log)
    operations: list[dict[str, Any]] = [
        {
            "operation": label,
            "calls": counts[label],
            "microseconds": microseconds / replays,
            "weight_bytes": counts[label] * sizes[label],
        }
        for label, microseconds in added.items()
    ]
    operations.sort(key=lambda o: -float(o["microseconds"]))
    return sum(added.values()) / replays / 1e6, operations


# ---------------------------------------------------------------- report


def routes(drafts: int) -> Iterator[Route]:
    base: dict[str, Any] = {"name": "whole_round", "graph": GraphMode.full}
    for numerics in (Numerics.exact, Numerics.fast):
        yield Route(**base, numerics=numerics, draft_tokens=0)
    for numerics in (Numerics.exact, Numerics.fast):
        yield Route(**base, numerics=numerics, draft_tokens=drafts)
    for head in (DraftHeadKind.shortlist, DraftHeadKind.int8):
        yield Route(
            **base, draft_tokens=drafts, draft_head=head, shortlist_size=SHORTLIST, numerics=Numerics.exact
        )


def lines_of(shape: str, options: argparse.Namespace, ceilings: dict[str, float]) -> Iterator[Line]:
    """Every route of one shape, with each kind of weights."""
    arch = architecture(shape)
    model = HybridModel(arch, DeviceWeights(arch), torch.float16).to(DEVICE)
    if arch.tie_word_embeddings:
        model.head = model.embedding
    for weights in options.weights:
        if weights == "int4":
            to_int4(model)
            torch.cuda.empty_cache()
        exact: dict[int, torch.Tensor] = {}
        for route in routes(options.drafts):
            gc.collect()  # a round and its closures refer to each other
            torch.cuda.empty_cache()
            counts = schedule(route.draft_tokens, options.acceptance_length, options.acceptance)
            torch.cuda.reset_peak_memory_stats()
            line, logits = measure(model, route, options.context, counts, ceilings, shape, weights)
            if route.numerics is Numerics.exact:
                exact.setdefault(route.draft_tokens, logits)
            else:
                other = exact[route.draft_tokens]
                line.logits_deviation = float((logits - other).norm() / other.norm())
            yield line


def show(console: Console, lines: list[Line]) -> None:
    table = Table("shape", "weights", "route", "numerics", "tok/s", "ms a round", "tokens", "GB a round",
                  "of the floor", "of the copy's", "between kernels", "host ms", "kernels", "GiB",
                  "fast − exact")  # fmt: skip
    for line in lines:
        deviation = line.logits_deviation
        table.add_row(
            line.shape, line.weights, line.route, line.numerics, f"{line.tokens_per_second:.1f}",
            f"{line.round_ms:.3f}", f"{line.acceptance_length:.2f}", f"{line.round_bytes / 1e9:.2f}",
            f"{line.share:.2f}", f"{line.copy_floor_ms / line.round_ms:.2f}", f"{line.between:.1%}",
            f"{line.host_ms:.3f}", str(line.kernels), f"{line.memory_gib:.1f}",
            "" if deviation is None else f"{deviation:.1e}",
        )  # fmt: skip
    console.print(table)
    for line in lines:
        title = f"{line.shape}, {line.weights}, {line.route}, {line.numerics}"
        inner = Table("operation", "calls", "µs a round", "share", "GB/s of weights", title=title)
        for o in line.operations[:16]:
            part, rate = o["microseconds"] / 1e3 / line.round_ms, o["weight_bytes"] / o["microseconds"] / 1e3
            inner.add_row(
                o["operation"], str(o["calls"]), f"{o['microseconds']:.1f}", f"{part:.1%}",
                f"{rate:.0f}" if rate else "",
            )  # fmt: skip
        console.print(inner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=SIZES, default=["9b"])
    parser.add_argument("--weights", nargs="+", choices=("fp16", "int4"), default=["fp16"])
    parser.add_argument("--context", type=int, default=1500)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--acceptance-length", type=float, default=3.5)
    parser.add_argument("--acceptance", type=float, nargs="+", help="cumulative rates per draft position")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    console = Console(width=190)
    memory = Memory(9 * 2**30)
    measured = ceilings(memory)
    del memory
    torch.cuda.empty_cache()
    console.print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}: "
        + ", ".join(f"{k} {v:.2f} TB/s" for k, v in measured.items())
    )
    console.print(f"forced acceptance: {options.acceptance or options.acceptance_length}; random weights")
    lines: list[Line] = []
    for shape in options.shapes:
        with torch.inference_mode():
            lines += lines_of(shape, options, measured)
        if options.out:
            options.out.write_text(json.dumps(record(options, measured, lines), indent=1) + "\n", "utf-8")
    show(console, lines)


def record(options: argparse.Namespace, measured: dict[str, float], lines: list[Line]) -> dict[str, Any]:
    """What the JSON file holds."""
    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "context": options.context, "ceilings_tb_s": measured,
        "forced_acceptance": options.acceptance or options.acceptance_length,
        "lines": [asdict(line) | {"share_of_floor": line.share} for line in lines],
    }  # fmt: skip


if __name__ == "__main__":
    main()
