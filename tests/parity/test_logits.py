"""The engine's logits equal transformers' for every form of checkpoint and every way to feed tokens."""

from __future__ import annotations

import pytest
import torch
from closeness import assert_close
from engine_runs import ABSOLUTE, RMS, Run, Step, branches, load, plan
from tiny_checkpoints import COMPUTE, RECIPES, VOCABULARY, Checkpoints

from sm70lab.engine.routes import Boundary, Opaque
from sm70lab.kernels.attention import inverse_frequencies, rotary_table

SCHEMES = ("slots", "replay")
DTYPES = (torch.float32, torch.float64)
LENGTH = 140  # over two chunks of the delta rule

every_checkpoint = pytest.mark.parametrize("name", RECIPES)
every_computation = pytest.mark.parametrize("name", COMPUTE)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "float64"))
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)

_expected: dict[object, list[torch.Tensor]] = {}  # the oracle's logits, which both schemes must give


def check(
    checkpoints: Checkpoints,
    name: str,
    dtype: torch.dtype,
    scheme: str,
    steps: list[Step],
    room: int,
    boundary: Boundary | None = None,
) -> Run:
    """Every row of every step, kept or rejected, has the logits of the sequence that it ends."""
    checkpoint = checkpoints(name)
    run = Run(load(checkpoint.folder, dtype), scheme, room)
    key = (name, dtype, tuple(steps))
    if key not in _expected:
        _expected[key] = checkpoint.oracle.logits(branches(steps), dtype)
    for number, (step, wanted) in enumerate(zip(steps, _expected[key], strict=True)):
        (logits,) = run.step([step], *([boundary] if boundary else []))
        what = f"step {number} at {run.store.position[0] - step.keep}"
        assert_close(logits, wanted[-len(step.rows) :], RMS[dtype], ABSOLUTE[dtype], what)
    return run


@every_checkpoint
@every_dtype
def test_one_prefill(checkpoints: Checkpoints, name: str, dtype: torch.dtype) -> None:
    check(checkpoints, name, dtype, "slots", plan(1, VOCABULARY, [LENGTH], 1), room=1)


@every_checkpoint
@every_dtype
@every_scheme
def test_chunked_prefill(checkpoints: Checkpoints, name: str, dtype: torch.dtype, scheme: str) -> None:
    """Chunks shorter than the convolution window, of one chunk of the delta rule, and beyond it."""
    check(checkpoints, name, dtype, scheme, plan(2, VOCABULARY, [2, 1, 64, 5, 68], 1), room=4)


@every_computation
@every_dtype
@every_scheme
def test_one_row_steps(checkpoints: Checkpoints, name: str, dtype: torch.dtype, scheme: str) -> None:
    check(checkpoints, name, dtype, scheme, plan(3, VOCABULARY, [5, -12], 1), room=1)


@every_computation
@every_dtype
@every_scheme
def test_verify_rounds(checkpoints: Checkpoints, name: str, dtype: torch.dtype, scheme: str) -> None:
    """T = 2..6 rows with rejections, from an empty state, after a prefill, and around a second one."""
    for room in range(2, 7) if dtype is torch.float64 else (2, 5):
        check(checkpoints, name, dtype, scheme, plan(room, VOCABULARY, [-2, 3, -3, 2, -2], room), room)


@every_scheme
@pytest.mark.parametrize("room", [2, 6])
@pytest.mark.parametrize("keep", ["none", "all"])
def test_rounds_that_keep_the_least_or_the_most(
    checkpoints: Checkpoints, scheme: str, room: int, keep: str
) -> None:
    steps = [
        Step(s.rows, s.keep if s.prefill else 1 if keep == "none" else room, s.prefill)
        for s in plan(7, VOCABULARY, [4, -8], room)
    ]
    check(checkpoints, "next_per_expert", torch.float64, scheme, steps, room)


@every_scheme
@pytest.mark.parametrize(
    "boundary",
    [Boundary(Opaque.core, False), Boundary(Opaque.core, True), Boundary(Opaque.layer, False)],
    ids=("core", "core_contiguous", "layer"),
)
def test_boundaries(checkpoints: Checkpoints, scheme: str, boundary: Boundary) -> None:
    steps = plan(8, VOCABULARY, [7, -4, 3, -3], 4)
    for name in ("dense", "next_stacked_sharded_gva3"):
        check(checkpoints, name, torch.float64, scheme, steps, 4, boundary)


@every_scheme
def test_sequences_in_one_batch(checkpoints: Checkpoints, scheme: str) -> None:
    """Each sequence commits its own count, so positions drift apart; each equals its own oracle."""
    checkpoint = checkpoints("moe_stacked_gva3")
    plans = [plan(20 + i, VOCABULARY, [6, -6], 4) for i in range(3)]
    assert len({sum(s.keep for s in steps) for steps in plans}) == 3
    run = Run(load(checkpoint.folder, torch.float64), scheme, 4, batch=3)
    expected = [checkpoint.oracle.logits(branches(steps), torch.float64) for steps in plans]
    for number, steps in enumerate(zip(*plans, strict=True)):
        for row, logits in enumerate(run.step(steps)):
            wanted = expected[row][number][-len(steps[row].rows) :]
            assert_close(logits, wanted, RMS[torch.float64], 1e-9, f"sequence {row}, step {number}")


@every_scheme
@pytest.mark.parametrize("name", ["dense", "dense_no_gva_other_order", "next_stacked_sharded_gva3"])
def test_state_after_rejections(checkpoints: Checkpoints, scheme: str, name: str) -> None:
    """Convolution window and SSM state, apart, equal transformers' cache of the committed tokens."""
    steps = plan(9, VOCABULARY, [5, -5], 4)
    run = check(checkpoints, name, torch.float64, scheme, steps, 4)
    committed = [token for s in steps for token in s.rows[: s.keep]]
    cache = checkpoints(name).oracle.run(torch.tensor([committed]), torch.float64, use_cache=True).cache
    kept = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    assert len(kept) == len(run.store.layers)
    for layer, (window, state) in zip(kept, run.store.snapshot(range(run.store.live)), strict=True):
        (conv,), (ssm,) = (
            list(s.values() if isinstance(s, dict) else s)
            for s in (layer.conv_states, layer.recurrent_states)
        )
        assert_close(window, conv[:, :, 1:].transpose(1, 2), 1e-11, what="convolution window")
        assert_close(state, ssm, 1e-11, what="SSM state")


def test_rotary_positions_to_the_end_of_the_context(checkpoints: Checkpoints) -> None:
    """cos and sin equal transformers' bit for bit where float32 angles are large."""
    target = checkpoints("dense").oracle.models[torch.float32]
    rotary = next(m for n, m in target.named_modules() if n.endswith("rotary_emb"))
    positions = torch.tensor([[0, 1, 815, 1632, 8191, 32767, 131072, 262143]])
    cos, sin = rotary(torch.zeros(1), positions)
    frequencies = inverse_frequencies(cos.shape[-1], rotary.config.rope_parameters["rope_theta"])
    ours = rotary_table(positions, frequencies)
    assert torch.equal(ours[0], cos)
    assert torch.equal(ours[1], sin)
