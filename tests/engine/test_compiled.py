"""The boundary in the graph that the compiler really gets, and equal tokens from compiled rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sm70lab.engine.decoder import Decoder
from sm70lab.engine.kv_cache import KVCache
from sm70lab.engine.model import HybridModel
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.routes import resolve
from sm70lab.engine.sequence import Request
from sm70lab.engine.state import StateStore
from sm70lab.kernels import native
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.schema import (
    DraftSampling,
    Route,
    Sampling,
)
from tests.engine import tiny
from tests.engine.route_cases import ARITHMETICS, GDN_LAYERS, HAS_NATIVE, ROUTES, build, flags, numerics

# What a stage is made of differs with the arithmetic, where the layer is cut does not: the default run
# has each route once, and those that trace the most (or nothing) with the others.
GRAPHS = [
    *((name, Arithmetic.plain) for name in ROUTES),
    ("split", Arithmetic.by_row),
    *(
        pytest.param(name, Arithmetic.native, marks=[*ARITHMETICS[2].marks, *marks])
        for name, marks in [(n, [] if n in ("split", "full_forward") else [pytest.mark.long]) for n in ROUTES]
    ),
]


# ---------------------------------------------------------------------- the graph


@dataclass
class Recorder:
    """A backend that keeps what it is given and runs it as it is."""

    graphs: list[torch.fx.Graph] = field(default_factory=list)

    def __call__(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs.append(module.graph)
        return module.forward

    @property
    def rounds(self) -> list[torch.fx.Graph]:
        """Graphs of verify or one-row steps; those of drafts read the MTP layer."""
        return [g for g in self.graphs if not any("_mtp_" in name for name in inputs_of(g))]


def inputs_of(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "placeholder"]


def targets(graph: torch.fx.Graph) -> Counter[str]:
    """How often each operator of ours stands in the graph."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return Counter(name.split(".")[-1] for name in names if "sm70lab" in name)


def traced_weights(graph: torch.fx.Graph) -> set[str]:
    """GDN weights that a product in the graph itself reads, not an opaque stage."""
    found = set()
    for node in graph.nodes:
        if node.op == "call_function" and ("linear" in str(node.target)):
            for argument in node.all_input_nodes:
                name = str(argument.target)
                if "_gdn_" in name:
                    found |= {weight for weight in ("in_proj", "out_proj") if weight in name}
    return found


def compiled_run(
    m: HybridModel, route: Route, tokens: int, backend: Any, sampling: Sampling = tiny.GREEDY
) -> list[int]:
    torch._dynamo.reset()
    m.compile_rounds(backend)
    return tiny.decode(tiny.decoder(m, route, tiny.prompt(9), sampling), tokens)


@pytest.mark.parametrize(("name", "arithmetic"), GRAPHS)
def test_the_graph_of_a_compiled_round(name: str, arithmetic: Arithmetic) -> None:
    """Opaque and traced stages, explicit state, one graph without breaks, and the eager tokens."""
    m, recorder = build(arithmetic), Recorder()
    setting = {"numerics": numerics(arithmetic), **flags(name)}
    scheme = "slots" if name == "spec_core_003" else "replay"
    wanted = tiny.decode(tiny.decoder(m, tiny.route(2, scheme, **setting), tiny.prompt(9)), 12)
    found = compiled_run(m, tiny.route(2, scheme, **setting, compile=True), 12, recorder)
    assert found == wanted

    (graph,) = recorder.rounds  # fullgraph: a break would have raised
    operators, traced, explicit = ROUTES[name]
    ours = targets(graph)
    assert {op: n for op, n in ours.items() if op.startswith("gdn_")} == dict.fromkeys(operators, GDN_LAYERS)
    assert ours["gated_attention"] == 1
    assert traced_weights(graph) == traced
    # conv rows, then the scheme's pools, of each GDN layer
    pools = GDN_LAYERS * (2 if scheme == "slots" else 6)
    states = [name for name in inputs_of(graph) if name.startswith("L_states_")]
    assert len(states) == (pools if explicit else 0)
    returned = graph.output_node().all_input_nodes
    assert len(returned) == 1 + (pools if explicit else 0)
    accepted = [name for name in inputs_of(graph) if "accepted" in name]
    assert bool(accepted) == explicit
    copies = [n for n in graph.nodes if n.op == "call_method" and n.target == "contiguous"]
    assert len(copies) == (GDN_LAYERS if name == "spec_core_003" else 0)


def test_the_graph_with_experts_keeps_them_opaque() -> None:
    shape = {
        "model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    }  # fmt: skip
    m, recorder = build(Arithmetic.plain, **shape), Recorder()
    wanted = tiny.decode(tiny.decoder(m, tiny.route(2, "replay"), tiny.prompt(9)), 12)
    assert compiled_run(m, tiny.route(2, "replay", compile=True), 12, recorder) == wanted
    (graph,) = recorder.rounds
    assert targets(graph)["sparse_moe"] == 3


def test_drafts_are_compiled_and_prefills_are_not() -> None:
    m, recorder = build(Arithmetic.plain), Recorder()
    compiled_run(m, tiny.route(2, "replay", compile=True), 12, recorder)
    drafts = [g for g in recorder.graphs if g not in recorder.rounds]
    assert len(drafts) == 2  # k + 1 rows of the catch-up, and one row
    assert all(targets(g) == Counter(gated_attention=1) for g in drafts)


def test_a_round_of_fewer_rows_than_the_store_has_room_for() -> None:
    """A step without drafts between rounds of k + 1 rows is a second graph, and gives the same tokens."""
    m, recorder = build(Arithmetic.plain), Recorder()
    outputs = []
    torch._dynamo.reset()
    m.compile_rounds(recorder)
    for compiled in (False, True):
        d = tiny.decoder(m, tiny.route(2, "replay", compile=compiled), tiny.prompt(9))
        next(d.steps())
        for draft in (True, False, True, False):
            d.decoder.round([d.sequence], draft)
        outputs.append(d.output)
    assert outputs[0] == outputs[1]
    assert len(recorder.rounds) == 2


@pytest.mark.parametrize("name", ["split", "context_core"])
def test_several_sequences_share_the_graphs(name: str) -> None:
    """However many of them run: rounds and drafts are padded to the batch's width."""
    m, recorder = build(Arithmetic.plain), Recorder()
    torch._dynamo.reset()
    m.compile_rounds(recorder)
    outputs = []
    for compiled in (False, True):
        decoder = Decoder(m, tiny.route(1, "replay", **flags(name), compile=compiled), 60, max_num_seqs=3)
        requests = [Request(tiny.prompt(n), tiny.GREEDY, KeyedNoise(0, n, 0), frozenset()) for n in (5, 8, 6)]
        running = [decoder.admit(request) for request in requests]
        for sequence in running:
            while sequence.in_prefill:
                decoder.prefill(sequence)
        for count in (3, 2, 1):
            decoder.round(running[:count])
            decoder.round(running[:count])
        outputs.append([sequence.output for sequence in running])
    assert outputs[0] == outputs[1]
    assert len(recorder.graphs) == 2  # the round, and a draft step of two rows: k = 1 needs no other


@pytest.mark.parametrize("name", ["split", "context_core"])
def test_the_graph_of_a_packed_round(name: str) -> None:
    m, recorder = build(Arithmetic.plain), Recorder()
    setting = {"packed_recurrent": True, **flags(name)}
    wanted = tiny.decode(tiny.decoder(m, tiny.route(0, "slots", **setting), tiny.prompt(9)), 12)
    assert compiled_run(m, tiny.route(0, "slots", **setting, compile=True), 12, recorder) == wanted
    (graph,) = recorder.graphs
    cores = [n for n in graph.nodes if n.op == "call_function" and "sm70lab.gdn_" in str(n.target)]
    assert len(cores) == GDN_LAYERS and all(node.args[-1] is True for node in cores)  # ``packed``


# ---------------------------------------------------------------------- equal tokens, really compiled

SAMPLED = Sampling(temperature=1.0, top_p=0.95, top_k=20)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", ROUTES)
def test_inductor_gives_the_eager_tokens(name: str, arithmetic: Arithmetic) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False  # inductor has its own allocations
    m = build(arithmetic)
    setting = {"numerics": numerics(arithmetic), "sampling": DraftSampling.coupled, **flags(name)}
    for scheme in tiny.SCHEMES if name in ("split", "context_core") else ("replay",):
        route = tiny.route(3, scheme, **setting)
        wanted = tiny.decode(tiny.decoder(m, route, tiny.prompt(9), SAMPLED), 60)
        route = tiny.route(3, scheme, **setting, compile=True)
        assert compiled_run(m, route, 60, "inductor", SAMPLED) == wanted


@pytest.mark.parametrize("name", ["full_forward", "context_core"])
def test_a_functionalised_graph_gives_the_eager_tokens(name: str) -> None:
    """As inductor gets it: without writes in place, and with every operator's promises relied on."""
    m = build(Arithmetic.plain)
    route = tiny.route(0, "replay", **flags(name))
    wanted = tiny.decode(tiny.decoder(m, route, tiny.prompt(9)), 12)
    route = tiny.route(0, "replay", **flags(name), compile=True)
    assert compiled_run(m, route, 12, "aot_eager") == wanted


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_NATIVE, reason=str(native.available()))
@pytest.mark.parametrize("name", ["split", "full_forward"])
def test_a_compiled_verify_row_has_the_bits_of_the_one_row_step(name: str) -> None:
    """With native kernels the compiler's own part is embedding and additions."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    m = build(Arithmetic.native)
    torch._dynamo.reset()
    m.compile_rounds()
    boundary = resolve(Route(**flags(name), compile=True), native=True)
    tokens, hidden = torch.tensor([tiny.prompt(12)]), {}
    for rows in (1, 4):
        store = StateStore(m.arch, "slots", torch.float32, torch.float32, tiny.CPU, rows)
        kv = KVCache(m.arch, 1, 12, torch.float32, tiny.CPU)
        with torch.inference_mode():
            parts = []
            for part in tokens.split(rows, dim=1):
                parts.append(m.run(part, [0], store, kv, prefill=False, boundary=boundary))
                store.commit([rows])
        hidden[rows] = torch.cat(parts, dim=1)
    assert torch.equal(hidden[1], hidden[4])
