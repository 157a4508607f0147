"""The norms of a round against plain PyTorch: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from sm70lab.kernels.gpu import norm
from tests.engine.assertions import assert_close

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
EPS = 1e-6
SIZES = (320, 4096)
LIMIT = 1e-3  # of float16


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (2, 4), (9, 2)])
def test_add_rms_norm(rows: int, parts: int, size: int) -> None:
    residual, weight = 30 * random(rows, size).half(), 1 + 0.1 * random(size)
    given = random(parts, rows, size)
    x, y = torch.empty_like(residual), torch.empty_like(residual)
    norm.add_rms_norm(residual, given, weight, EPS, x, y)
    wanted_x, wanted_y = norm.add_rms_norm_reference(residual, given, weight, EPS)
    assert torch.equal(x, wanted_x)  # the parts are added in the reference's order
    assert_close(y, wanted_y, LIMIT)
    alone = torch.empty_like(residual[:1]), torch.empty_like(residual[:1])
    last = given[:, -1:].contiguous()
    norm.add_rms_norm(residual[-1:], last, weight, EPS, *alone)
    assert torch.equal(alone[0], x[-1:]) and torch.equal(alone[1], y[-1:])
    norm.add_rms_norm(residual, given, weight, EPS, residual, y)  # in place
    assert torch.equal(residual, x)


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_of_large_values(size: int) -> None:
    x = (1000 * random(3, size)).half()
    weight = 1 + 0.1 * random(size)
    y = norm.rms_norm(x, weight, EPS, torch.empty_like(x))
    assert_close(y, norm.rms_norm_reference(x, weight, EPS), LIMIT)


@pytest.mark.parametrize("size", SIZES)
def test_embedding_and_draft_input(size: int) -> None:
    table, tokens = random(50, size).half(), torch.tensor([3, 49, 0], device=DEVICE)
    weights = 1 + 0.1 * random(size), 1 - 0.1 * random(size)
    hidden = random(3, size).half()
    x, y = torch.empty_like(hidden), torch.empty_like(hidden)
    norm.embed_rms_norm(tokens, table, weights[0], EPS, x, y)
    wanted_x, wanted_y = norm.embed_rms_norm_reference(tokens, table, weights[0], EPS)
    assert torch.equal(x, wanted_x)
    assert_close(y, wanted_y, LIMIT)
    out = norm.draft_input(tokens, table, hidden, *weights, EPS, hidden.new_empty(3, 2 * size))
    assert_close(out, norm.draft_input_reference(tokens, table, hidden, *weights, EPS), LIMIT)
