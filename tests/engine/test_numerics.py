"""Overflow and NaN: named, never delivered."""

from __future__ import annotations

import pytest
import torch

from sm70lab.engine.loading import find
from sm70lab.engine.model import HybridModel
from sm70lab.errors import NonFiniteError
from sm70lab.schema import ModelDtype, ModelSpec
from tests.engine import tiny


def fresh(dtype: ModelDtype = ModelDtype.float64) -> HybridModel:
    return find(ModelSpec(name="random", shape=tiny.SHAPE)).build(dtype, tiny.CPU)


@pytest.mark.parametrize("layer", [1, 3])
def test_the_first_non_finite_layer_is_named_and_nothing_is_delivered(layer: int) -> None:
    """A bf16-trained weight that overflows float16: one layer scaled until its output does."""
    m = fresh(ModelDtype.float16)
    with torch.inference_mode():
        m.layers[layer].mlp.down.mul_(300.0).mul_(400.0)
    d = tiny.decoder(m, tiny.route(3), tiny.prompt(9))
    kind = "linear_attention" if layer == 1 else "full_attention"
    with pytest.raises(NonFiniteError, match=rf"first in layer {layer} \({kind}\)"):
        tiny.decode(d, 5)
    assert d.output == []


def test_nan_in_a_late_round_raises_there_and_keeps_what_was_good() -> None:
    m = fresh()
    d = tiny.decoder(m, tiny.route(3), tiny.prompt(9))
    wanted = tiny.decode(tiny.decoder(m, tiny.route(3), tiny.prompt(9)), 40)
    delivered: list[int] = []
    steps = d.steps()
    while d.rounds < 9:
        delivered += next(steps).tokens
    with torch.inference_mode():
        d.store.layers[0][1][:] = torch.nan
    with pytest.raises(NonFiniteError, match=r"round 9 .*the kept state is damaged"):
        next(steps)
    assert delivered == d.output == wanted[: len(delivered)]


def test_large_readouts_stay_finite() -> None:
    """state·q near 7e4 does not fit float16; the readout stays float32 until the norm brought it down."""
    m = fresh(ModelDtype.float16)
    d = tiny.decoder(m, tiny.route(3), tiny.prompt(9))
    steps = d.steps()
    next(steps)
    with torch.inference_mode():
        for layer in d.store.layers:
            layer[1][:] = 7e4
    assert all(0 <= t < 64 for t in next(steps).tokens)
