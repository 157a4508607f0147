"""The opaque operators keep torch's contract: schema, aliasing, mutation and shapes, checked by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sm70lab.engine import forward_context, gdn, operators
from sm70lab.engine.forward_context import ForwardContext
from sm70lab.engine.gdn import CoreWeights, How, Place
from sm70lab.engine.model import HybridModel
from sm70lab.engine.state import StateStore
from sm70lab.kernels import native, native_operators
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.schema import ModelDtype
from tests.engine import tiny

ARITHMETICS = [Arithmetic.plain, Arithmetic.by_row] + [Arithmetic.native] * (native.available() is None)
TESTS = ("test_schema", "test_faketensor")


def model() -> HybridModel:
    return tiny.model(dtype=ModelDtype.float32)


def check(name: str, *arguments: Any) -> None:
    torch.library.opcheck(getattr(torch.ops.sm70lab, name), arguments, test_utils=TESTS)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("scheme", tiny.SCHEMES)
@pytest.mark.parametrize(("tokens", "prefill_room"), [(4, 0), (1, 0), (4, 4)])
def test_gdn_operators(scheme: str, tokens: int, prefill_room: int, arithmetic: Arithmetic) -> None:
    """Rounds as long as the store has room for, shorter ones and prefills."""
    m = model()
    layer = m.layers[0].gdn
    store = StateStore(m.arch, scheme, torch.float32, torch.float32, tiny.CPU, rows=4)
    metadata = store.begin([0], tokens, prefill=bool(prefill_room))
    where = (metadata.slots, metadata.conv_accepted, metadata.ssm_accepted)
    place = Place(store.layers[0], *where, scheme, prefill_room)
    how = How(layer.shape, arithmetic, packed=False)
    weights = CoreWeights(layer.conv_weight, layer.neg_decay_rate, layer.dt_bias)
    x = torch.randn(1, tokens, m.arch.hidden_size)
    mixed_qkv, _, b, a = gdn.input_projection(x, layer.in_proj, how)
    check_core(mixed_qkv, b, a, weights, place, how)
    check("gdn_input_core", x, layer.in_proj, *weights, *place, *operators._flat(how))
    output = (layer.norm_weight, layer.out_proj)
    check("gdn_layer", x, layer.in_proj, *weights, *output, *place, *operators._flat(how))
    with forward_context.entered(ForwardContext(store.layers, metadata, scheme, prefill_room)):
        check("gdn_core_in_context", mixed_qkv, b, a, *weights, 0, *operators._flat(how))


def check_core(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, weights: CoreWeights, place: Place, how: How
) -> None:
    """Views of one product as they come, and the contiguous copy of the published route."""
    for qkv in (mixed_qkv, mixed_qkv.contiguous()):
        check("gdn_core", qkv, b, a, *weights, *place, *operators._flat(how))


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_the_packed_core(arithmetic: Arithmetic) -> None:
    layer = model().layers[0].gdn
    store = StateStore(model().arch, "slots", torch.float32, torch.float32, tiny.CPU, slots=3)
    metadata = store.begin([2, 0], 1, prefill=False)
    where = (metadata.slots, metadata.conv_accepted, metadata.ssm_accepted)
    place = Place(store.layers[0], *where, "slots", 0)
    how = How(layer.shape, arithmetic, packed=True)
    weights = CoreWeights(layer.conv_weight, layer.neg_decay_rate, layer.dt_bias)
    x = torch.randn(2, 1, model().arch.hidden_size)
    mixed_qkv, _, b, a = gdn.input_projection(x, layer.in_proj, how)
    check_core(mixed_qkv, b, a, weights, place, how)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_projections(arithmetic: Arithmetic) -> None:
    layer = model().layers[0].gdn
    how = How(layer.shape, arithmetic, packed=False)
    x = torch.randn(2, 3, model().arch.hidden_size)
    check("gdn_input_projection", x, layer.in_proj, *operators._flat(how))
    _, z, _, _ = gdn.input_projection(x, layer.in_proj, how)
    o = torch.randn(2, 3, layer.shape.value_heads, layer.shape.value_dim)
    output = (layer.norm_weight, layer.out_proj)
    check("gdn_output_projection", o, z, *output, *operators._flat(how))


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_gated_attention(arithmetic: Arithmetic) -> None:
    kv = [torch.zeros(2, 2, 20, 8) for _ in range(2)]
    q_gate, k, v = torch.randn(1, 4, 64), torch.randn(1, 4, 16), torch.randn(1, 4, 16)
    norms, rotary = [torch.ones(8)] * 2, [torch.randn(1, 4, 4) for _ in range(2)]
    places = (torch.tensor([1]), torch.tensor([5]))
    check("gated_attention", q_gate, k, v, *norms, *rotary, *kv, *places, 1e-6, arithmetic.value)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_sparse_moe(arithmetic: Arithmetic) -> None:
    x, weights = torch.randn(2, 3, 8), [torch.randn(s) for s in ((4, 8), (4, 12, 8), (4, 8, 6))]
    shared = [torch.randn(s) for s in ((1, 8), (10, 8), (8, 5))]
    check("sparse_moe", x, *weights, *shared, 2, True, arithmetic.value)


@pytest.mark.skipif(native.available() is not None, reason=str(native.available()))
def test_native_kernels() -> None:
    x, weight, bias = torch.randn(2, 3, 20)[..., 2:18], torch.randn(5, 16), torch.randn(5)
    check("native_linear", x, weight, bias)
    check("native_linear", x, weight, None)
    check("native_swiglu", x, torch.randn(12, 16), torch.randn(16, 6))
    check("native_rms_norm", x, torch.randn(16), 1e-6)
    check(
        "native_gated_rms_norm",
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 3, 24)[..., :20],
        torch.randn(5),
        1e-6,
    )


def test_native_operators_are_for_traces_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager rounds call the kernels directly, which costs less than the dispatcher."""
    monkeypatch.setattr(native, "rms_norm", lambda *a: "direct")
    monkeypatch.setattr(torch.ops.sm70lab, "native_rms_norm", lambda *a: "dispatched")
    x = torch.zeros(1, 4)
    assert native_operators.rms_norm(x, x[0], 1e-6) == "direct"  # type: ignore[comparison-overlap]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert native_operators.rms_norm(x, x[0], 1e-6) == "dispatched"  # type: ignore[comparison-overlap]


def test_every_operator_was_checked() -> None:
    """A new operator has to be added above."""
    known = {"gdn_input_projection", "gdn_core", "gdn_core_in_context", "gdn_output_projection"}
    known |= {"gdn_input_core", "gdn_layer", "gated_attention", "sparse_moe"}
    assert set(operators.SCHEMAS) == known
