"""What only a GPU can show: the captured round on the embedded model, and its bits at the 9B shape.

python -m pytest tests/gpu -m "long or not long" -o timeout=0
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sm70lab.engine.architecture import Architecture, expected_tensors
from sm70lab.engine.decoder import Decoder
from sm70lab.engine.loading import Source, find
from sm70lab.engine.model import HybridModel
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.sequence import Request
from sm70lab.schema import DraftSampling, GraphMode, ModelDtype, ModelSpec, Numerics, Route, Sampling
from tests.engine import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda")
GREEDY, OFFICIAL = Sampling(temperature=0.0), Sampling(temperature=1.0, top_k=20, top_p=0.95)
WHOLE = Route(name="whole_round", graph=GraphMode.full, numerics=Numerics.exact)
STARTS = (
    "<!DOCTYPE html>", "<style>", ".card {", "function ", "<script>", "/* theme */", "<table>", "<nav ",
    "@media (", ":root {", "<svg ", "<form ", "document.", "<ul>", "#main > ", "<h1>",
)  # fmt: skip


class DeviceWeights:
    """Random weights drawn on the GPU: at the 9B shape a CPU takes minutes."""

    def __init__(self, arch: Architecture) -> None:
        self.shapes = expected_tensors(arch)
        self.generator = torch.Generator(DEVICE).manual_seed(0)

    def read(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        if name.endswith("A_log"):
            return torch.empty(shape, device=DEVICE).uniform_(1, 16, generator=self.generator).log()
        drawn = torch.empty(shape, device=DEVICE).normal_(generator=self.generator)
        if name.endswith("dt_bias"):
            return drawn - 3
        return 0.1 * drawn if "norm" in name else drawn * shape[-1] ** -0.5


@pytest.fixture(scope="module")
def source() -> Source:
    return find(ModelSpec())


@pytest.fixture(scope="module")
def web(source: Source) -> HybridModel:
    return source.build(ModelDtype.float32, DEVICE)


def generate(
    model: HybridModel, route: Route, prompt: list[int], sampling: Sampling, tokens: int
) -> list[int]:
    decoder = Decoder(model, route, len(prompt) + tokens + 64)
    sequence = decoder.admit(Request(prompt, sampling, KeyedNoise(20260620, 0, 0)))
    while sequence.in_prefill:
        decoder.prefill(sequence)
    while len(sequence.output) < tokens:
        decoder.round([sequence])
    return sequence.output[:tokens]


@pytest.mark.long
@pytest.mark.parametrize("start", STARTS)
def test_greedy_drafts_change_no_token(source: Source, web: HybridModel, start: str) -> None:
    prompt = source.text.encode(start)
    plain = generate(web, replace(WHOLE, draft_tokens=0), prompt, GREEDY, 6000)
    assert generate(web, WHOLE, prompt, GREEDY, 6000) == plain


@pytest.mark.parametrize("rule", [DraftSampling.coupled, DraftSampling.token_matching])
def test_sampled_drafts_change_no_token(source: Source, web: HybridModel, rule: DraftSampling) -> None:
    prompt = source.text.encode(STARTS[0])
    plain = generate(web, replace(WHOLE, draft_tokens=0), prompt, OFFICIAL, 1000)
    assert generate(web, replace(WHOLE, draft_sampling=rule), prompt, OFFICIAL, 1000) == plain


@pytest.mark.parametrize("flags", [{}, {"input_core": True}, {"context_core": True}, {"full_forward": True}])
@pytest.mark.parametrize("graph", [GraphMode.none, GraphMode.piecewise, GraphMode.full])
def test_other_routes_run_in_every_graph_mode(
    source: Source, web: HybridModel, flags: dict[str, bool], graph: GraphMode
) -> None:
    """Rounding may turn a tie, so the beginning must be that of the run without graphs."""
    prompt = source.text.encode(STARTS[0])
    route = Route(compile=graph is not GraphMode.none, graph=graph, **flags)  # type: ignore[arg-type]
    if route.compile:
        torch.compiler.reset()
        web.compile_rounds(pieces=graph is GraphMode.piecewise)
    expected = generate(web, Route(), prompt, OFFICIAL, 40)
    assert generate(web, route, prompt, OFFICIAL, 40) == expected


@pytest.mark.parametrize("dtype", [ModelDtype.float16, ModelDtype.float32])
def test_verify_rows_have_the_bits_of_one_row_at_the_9b_shape(dtype: ModelDtype) -> None:
    """Four layers of it, three GDN and one attention, with random weights."""
    shape = tiny.SHAPE | {
        "vocab_size": 8192, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }  # fmt: skip
    arch = Architecture.from_dict(shape, "9B shape")
    model = HybridModel(arch, DeviceWeights(arch), getattr(torch, dtype.value)).to(DEVICE)
    prompt = tiny.prompt(100)
    plain = generate(model, replace(WHOLE, draft_tokens=0), prompt, OFFICIAL, 200)
    for k in (1, 4, 8):
        decoder = Decoder(model, replace(WHOLE, draft_tokens=k), 400)
        one = Decoder(model, replace(WHOLE, draft_tokens=0), 400)
        assert decoder.captured is not None and one.captured is not None
        sequences = []
        for each in (decoder, one):
            sequences.append(each.admit(Request(prompt, OFFICIAL, KeyedNoise(20260620, 0, 0))))
            each.prefill(sequences[-1])
        rows: list[torch.Tensor] = []
        told = decoder.captured.rounds(sequences[0], ahead=False)
        output = [plain[0]]
        with torch.inference_mode():
            while len(output) < 60:
                output += next(told).tokens
                rows += decoder.captured.logits[: int(decoder.captured.count)].clone()
            for row, token in zip(rows, output, strict=False):
                _, logits = one.captured.feed(token)
                assert torch.equal(logits[0], row)
        assert output == plain[: len(output)]
