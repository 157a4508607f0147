"""Half-precision checkpoints load, and half-precision models agree with float32 within their rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from closeness import assert_close
from engine_runs import Run, branches, plan
from refusal import MakeFolder, load
from safetensors.torch import save_file
from tiny_checkpoints import VOCABULARY, read_tensors

from sm70lab.engine.decoder import Decoder, decode
from sm70lab.engine.model import HybridModel
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.sequence import Request
from sm70lab.errors import NonFiniteError
from sm70lab.schema import ModelDtype, Route, Sampling

HALVES = [torch.float16, torch.bfloat16]
ROUNDING = {torch.float16: 1.5e-2, torch.bfloat16: 1e-1}  # relative RMS after four layers


def convert(folder: Path, dtype: torch.dtype) -> None:
    """Store the weights in ``dtype``, A_log and the gated norm in float32, as real checkpoints do."""
    for file in folder.glob("*.safetensors"):
        tensors = {
            name: t if name.endswith(("A_log", "linear_attn.norm.weight")) else t.to(dtype)
            for name, t in read_tensors(file).items()
        }
        save_file(tensors, file)


def logits(model: HybridModel, scheme: str) -> torch.Tensor:
    steps = plan(4, VOCABULARY, [30, -8], 4)
    run = Run(model, scheme, 4)
    assert len(branches(steps)) == 9
    return torch.cat([run.step([s])[0] for s in steps])


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("recipe", ["dense", "dense_sharded", "moe_per_expert", "next_stacked_sharded_gva3"])
def test_half_checkpoint_in_float32(copy_of: MakeFolder, recipe: str, stored: torch.dtype) -> None:
    """Widening is exact: equal to a float32 checkpoint of the rounded weights."""
    folder = copy_of(recipe)
    convert(folder, stored)
    ours = logits(load(folder), "replay")
    for file in folder.glob("*.safetensors"):
        save_file({name: t.float() for name, t in read_tensors(file).items()}, file)
    assert torch.equal(ours, logits(load(folder), "replay"))


@pytest.mark.parametrize("scheme", ["slots", "replay"])
@pytest.mark.parametrize("dtype", HALVES)
def test_half_model(copy_of: MakeFolder, dtype: torch.dtype, scheme: str) -> None:
    folder = copy_of("dense_tied_gva3")
    convert(folder, dtype)
    half = load(folder, ModelDtype(str(dtype).removeprefix("torch.")))
    assert half.dtype is dtype
    ours = logits(half, scheme)
    assert ours.dtype is torch.float32
    assert_close(ours, logits(load(folder), scheme), ROUNDING[dtype], what=str(dtype))


def test_weights_that_float16_cannot_hold(copy_of: MakeFolder) -> None:
    """A finite weight of 1e5 is infinite in float16: decoding names the layer and delivers nothing."""
    folder = copy_of("dense")
    (file,) = folder.glob("*.safetensors")
    tensors = read_tensors(file)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = 1e5
    save_file(tensors, file)
    for dtype in (ModelDtype.float32, ModelDtype.float16):
        decoder = Decoder(load(folder, dtype), Route(draft_tokens=2), 64)
        steps = decode(decoder, Request([3, 4, 5], Sampling(), KeyedNoise(0, 0, 0)))
        if dtype is ModelDtype.float32:
            assert next(steps)[1].tokens
        else:
            with pytest.raises(NonFiniteError, match=r"layer 1 \(linear_attention\)"):
                next(steps)
