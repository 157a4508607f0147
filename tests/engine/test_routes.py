"""Flags to boundaries, the packed step, and the forward context of eager routes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sm70lab.engine import forward_context, gdn
from sm70lab.engine.gdn import CoreWeights, How, Place
from sm70lab.engine.routes import CUTS, Boundary, Opaque, check_graph, resolve
from sm70lab.errors import UsageError
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.schema import (
    GraphMode,
    Numerics,
    Route,
)
from tests.engine import tiny
from tests.engine.route_cases import ARITHMETICS, ROUTES, build, flags, numerics

CONF = Path(__file__).parents[2] / "conf" / "route"

# ---------------------------------------------------------------------- flags


@pytest.mark.parametrize("name", ROUTES)
def test_each_flag_has_a_boundary_and_a_yaml(name: str) -> None:
    compiled, eager = (resolve(Route(**flags(name), compile=c)) for c in (True, False))
    in_context = not ROUTES[name][2]
    assert eager == Boundary(Opaque.nothing, name == "spec_core_003", in_context=in_context)
    assert compiled.opaque is not Opaque.nothing and compiled.in_context == in_context
    settings = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert settings["name"] == name
    assert {key for key in settings if key in CUTS} == set(flags(name))


@pytest.mark.parametrize("first", CUTS)
@pytest.mark.parametrize("second", CUTS)
@pytest.mark.parametrize("compiled", [False, True])
def test_two_flags_that_cut_differently_are_refused(first: str, second: str, compiled: bool) -> None:
    route = Route(**{first: True, second: True}, compile=compiled)
    if first == second or {first, second} == {"context_core", "spec_core_003"}:
        assert resolve(route).in_context == (first in ("context_core", "spec_core_003"))
        return
    with pytest.raises(UsageError) as refused:
        resolve(route)
    message = str(refused.value)
    assert f"route.{first}=true" in message and f"route.{second}=true" in message
    assert message.endswith("set one of them") and "\n" not in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"packed_recurrent": True, "draft_tokens": 4}, "rounds of one row, and these have 5"),
        ({"packed_recurrent": True, "draft_tokens": 0}, "use route.state.scheme=slots"),
        ({"graph": GraphMode.piecewise}, "route.graph=piecewise and route.compile=false contradict"),
        ({"graph": GraphMode.full_and_piecewise, "compile": True}, "prefills are not compiled"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        resolve(Route(**settings))


@pytest.mark.parametrize(
    ("device", "settings", "words"),
    [
        (
            "cpu",
            {"graph": GraphMode.full, "compile": True},
            "route.compile=true contradict each other: on a CPU",
        ),
        (
            "cpu",
            {"graph": GraphMode.full, "input_core": True},
            "route.graph=full and route.input_core=true contra",
        ),
        ("cpu", {"graph": GraphMode.piecewise, "compile": True}, "captured on a GPU, not on a cpu"),
        ("cuda", {"graph": GraphMode.full, "input_core": True, "numerics": Numerics.exact}, "numerics=fast"),
    ],
)
def test_graphs_that_a_device_does_not_have(device: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        check_graph(Route(**settings), device)
    if device == "cpu":
        check_graph(Route(**settings), "cuda")


# ---------------------------------------------------------------------- the packed step


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_packed_step_has_the_bits_of_the_core(
    arithmetic: Arithmetic, dtype: torch.dtype, batch: int
) -> None:
    g = torch.Generator().manual_seed(batch)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    shape = gdn.GDNShape(2, 6, 8, 16, 1e-6)
    pools = [rand(batch + 1, 4, shape.conv_dim), rand(batch + 1, 1, 6, 8, 16)]
    slots, ones = torch.arange(batch, 0, -1), torch.ones(batch, dtype=torch.int64)
    weights = CoreWeights(rand(4, shape.conv_dim), -rand(6).exp(), rand(6))
    mixed_qkv, b, a = rand(batch, 1, shape.conv_dim), rand(batch, 1, 6), rand(batch, 1, 6)
    place = Place(pools, slots, ones, ones, "slots", 0)
    wanted, found = (
        gdn.core(mixed_qkv, b, a, weights, place, How(shape, arithmetic, packed)) for packed in (False, True)
    )
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", ["split", "spec_core_003"])
def test_a_packed_run_gives_the_same_tokens(arithmetic: Arithmetic, name: str, monkeypatch: Any) -> None:
    m = build(arithmetic)
    calls = []
    step = gdn.packed_step
    monkeypatch.setattr(gdn, "packed_step", lambda *a: calls.append(1) or step(*a))
    runs = []
    for packed in (False, True):
        route = tiny.route(0, "slots", numerics=numerics(arithmetic), packed_recurrent=packed, **flags(name))
        runs.append(tiny.decode(tiny.decoder(m, route, tiny.prompt(9)), 20))
        assert bool(calls) == packed
    assert runs[0] == runs[1]


# ---------------------------------------------------------------------- the forward context


@pytest.mark.parametrize("scheme", tiny.SCHEMES)
@pytest.mark.parametrize("name", ["context_core", "spec_core_003"])
def test_eager_context_routes_look_their_state_up(name: str, scheme: str, monkeypatch: Any) -> None:
    """Same tokens; every layer goes through the context, and none gets its state passed."""
    looked_up = []
    place = forward_context.ForwardContext.place
    monkeypatch.setattr(
        forward_context.ForwardContext, "place", lambda c, layer: looked_up.append(layer) or place(c, layer)
    )
    wanted = tiny.decode(tiny.decoder(tiny.model(), tiny.route(3, scheme), tiny.prompt(9)), 30)
    assert not looked_up
    route = tiny.route(3, scheme, **flags(name))
    assert tiny.decode(tiny.decoder(tiny.model(), route, tiny.prompt(9)), 30) == wanted
    assert set(looked_up) == {0, 1, 2}


def test_a_core_outside_a_context_says_so() -> None:
    m = tiny.model()
    layer = m.layers[0].gdn
    x = torch.zeros(1, 1, 32, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="layer 0 ran outside a forward context"):
        layer(x, 0, None, resolve(Route(context_core=True)))
