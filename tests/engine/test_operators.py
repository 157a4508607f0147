"""The opaque operators keep torch's contract, and a compiled round gives the eager round's tokens."""

from __future__ import annotations

import pytest
import torch

from sm70lab.engine import operators
from sm70lab.engine.gdn import input_projection
from sm70lab.engine.loading import find
from sm70lab.engine.model import HybridModel
from sm70lab.engine.state import StateStore
from sm70lab.schema import ModelDtype, ModelSpec
from tests.engine import tiny


def fresh_model() -> HybridModel:
    return find(ModelSpec(name="random", shape=tiny.SHAPE)).build(ModelDtype.float32, tiny.CPU)


@pytest.mark.parametrize("scheme", tiny.SCHEMES)
@pytest.mark.parametrize("prefill_room", [0, 4])
def test_opcheck(scheme: str, prefill_room: int) -> None:
    """Schema, aliasing, mutation and shapes, checked by torch itself."""
    m = fresh_model()
    layer = m.layers[0].gdn
    store = StateStore(m.arch, scheme, torch.float32, torch.float32, tiny.CPU, rows=4)
    state, accepted = store.layers[0], store.accepted
    x = torch.randn(1, 4, m.arch.hidden_size)
    mixed_qkv, _, b, a = input_projection(x, layer.in_proj, layer.shape)
    weights = (layer.conv_weight, layer.neg_decay_rate, layer.dt_bias)
    tail = (state, accepted, scheme, prefill_room, *operators._flat(layer.shape))
    tests = ("test_schema", "test_faketensor")
    checks = [
        (
            torch.ops.sm70lab.gdn_core,
            (mixed_qkv.contiguous(), b.contiguous(), a.contiguous(), *weights, *tail),
        ),
        (torch.ops.sm70lab.gdn_layer, (x, layer.in_proj, *weights, layer.norm_weight, layer.out_proj, *tail)),
    ]
    kv = [torch.zeros(1, 2, 20, 8) for _ in range(2)]
    q, k, v = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8)
    checks.append((torch.ops.sm70lab.cached_attention, (q, k, v, *kv, torch.tensor([5]))))
    for operator, arguments in checks:
        torch.library.opcheck(operator, arguments, test_utils=tests)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", [{}, {"full_forward": True}, {"spec_core_003": True}])
def test_a_compiled_round_gives_the_eager_tokens(flags: dict[str, bool]) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False  # inductor has its own allocations
    wanted = tiny.decode(tiny.decoder(fresh_model(), tiny.route(3, "replay", **flags), tiny.prompt(9)), 60)
    compiled = fresh_model()
    compiled.compile_rounds()
    found = tiny.decode(
        tiny.decoder(compiled, tiny.route(3, "replay", **flags, compile=True), tiny.prompt(9)), 60
    )
    assert found == wanted
