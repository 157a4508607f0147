"""Every route with what is expected of its boundary, and the model that the tests of routes share."""

from __future__ import annotations

from typing import Any

import pytest

from sm70lab.engine.loading import find
from sm70lab.engine.model import HybridModel
from sm70lab.kernels import native
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.schema import (
    KernelSet,
    ModelDtype,
    ModelSpec,
    Numerics,
)
from tests.engine import tiny

HAS_NATIVE = native.available() is None
ARITHMETICS = [
    Arithmetic.plain,
    Arithmetic.by_row,
    pytest.param(Arithmetic.native, marks=pytest.mark.skipif(not HAS_NATIVE, reason=str(native.available()))),
]

# flag: (opaque operators of a GDN layer, stages that the compiler traces, state passed explicitly)
ROUTES = {
    "split": (["gdn_core"], {"in_proj", "out_proj"}, True),
    "context_core": (["gdn_core_in_context"], {"in_proj", "out_proj"}, False),
    "input_projection": (["gdn_input_projection", "gdn_core"], {"out_proj"}, True),
    "output_projection": (["gdn_core", "gdn_output_projection"], {"in_proj"}, True),
    "input_core": (["gdn_input_core"], {"out_proj"}, True),
    "full_forward": (["gdn_layer"], set(), True),
    "spec_core_003": (["gdn_core_in_context"], {"in_proj", "out_proj"}, False),
}


def flags(name: str) -> dict[str, Any]:
    return {} if name == "split" else {name: True}


GDN_LAYERS = 2
LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}


def build(arithmetic: Arithmetic, **shape: Any) -> HybridModel:
    """The tiny model with one GDN layer less: tracing is most of a test's time."""
    kernels = KernelSet.native if arithmetic is Arithmetic.native else KernelSet.plain
    spec = ModelSpec(name="random", shape={**tiny.SHAPE, **LAYERS, **shape})
    return find(spec).build(ModelDtype.float32, tiny.CPU, kernels)


def numerics(arithmetic: Arithmetic) -> Numerics:
    return Numerics.exact if arithmetic is Arithmetic.by_row else Numerics.fast
