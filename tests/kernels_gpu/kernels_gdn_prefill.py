"""The gated delta rule over a prompt against its plain twin: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from sm70lab.kernels.gated_delta import gated_delta_chunk, gated_delta_recurrent, l2_normalise
from sm70lab.kernels.gpu import gdn_prefill
from tests.engine.assertions import assert_close

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LIMIT = 2e-6 if INTERPRETED else 1e-5  # three tf32 products are not quite float32


class Prompt:
    """Rows of [B, T, H, ...] and a state, float32."""

    def __init__(
        self, batch: int, tokens: int, heads: int, key: int, value: int, alike: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(tokens)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE)

        k = random(batch, 1 if alike else tokens, heads, key).expand(-1, tokens, -1, -1)
        q = l2_normalise(random(batch, tokens, heads, key)) * key**-0.5
        decay = 0.0 if alike else 0.1
        g = -decay * random(batch, tokens, heads).abs()
        beta = torch.full_like(g, 1.0) if alike else random(batch, tokens, heads).sigmoid()
        self.rows = (q, l2_normalise(k), random(batch, tokens, heads, value), g, beta)
        self.state = random(batch, heads, key, value)

    def check(self) -> None:
        o, state = gdn_prefill.gated_delta_prefill(*self.rows, self.state)
        wide = [x.double() for x in (*self.rows, self.state)]
        wanted_o, wanted_state = gated_delta_chunk(*wide)
        assert_close(o, wanted_o, LIMIT)
        assert_close(state, wanted_state, LIMIT)


@pytest.mark.parametrize("tokens", [1, 64, 100, 130])
def test_a_prompt_is_the_plain_chunks(tokens: int) -> None:
    Prompt(2, tokens, 2, 32, 16).check()


def test_keys_and_values_of_several_blocks() -> None:
    Prompt(1, 70, 1, 64, 32).check()


def test_one_key_for_all_tokens_does_not_blow_up() -> None:
    """β = 1 without decay: powers of the system's matrix would grow beyond float32."""
    Prompt(1, 128, 1, 32, 16, alike=True).check()


def test_it_is_the_recurrence() -> None:
    prompt = Prompt(1, 90, 1, 32, 16)
    wanted, states = gated_delta_recurrent(*prompt.rows, prompt.state)
    o, state = gdn_prefill.gated_delta_prefill(*prompt.rows, prompt.state)
    assert_close(o, wanted, LIMIT)
    assert_close(state, states[:, -1], LIMIT)


@pytest.mark.skipif(INTERPRETED, reason="a GPU's size")
def test_the_9b_shape() -> None:
    Prompt(1, 1500, 32, 128, 128).check()


def test_what_it_does_not_take_is_refused() -> None:
    prompt = Prompt(1, 4, 1, 32, 16)
    with pytest.raises(ValueError, match="a state of"):
        gdn_prefill.gated_delta_prefill(*prompt.rows, prompt.state.double())
    odd = Prompt(1, 4, 1, 24, 16)
    with pytest.raises(ValueError, match="keys of 24"):
        gdn_prefill.gated_delta_prefill(*odd.rows, odd.state)


def test_rows_of_any_strides() -> None:
    prompt = Prompt(2, 70, 1, 32, 16)
    wanted = gdn_prefill.gated_delta_prefill(*prompt.rows, prompt.state)
    apart = [torch.stack((x, x), dim=-1)[..., 0] for x in (*prompt.rows, prompt.state)]
    assert not any(x.is_contiguous() for x in apart)
    for found, expected in zip(gdn_prefill.gated_delta_prefill(*apart), wanted, strict=True):
        assert torch.equal(found, expected)


def test_fast_decay_leaves_the_last_rows_weights_alone() -> None:
    """The state is then the last rows' alone: their weight is 1, and not exp of two sums' difference."""
    prompt = Prompt(1, 64, 2, 32, 16)
    q, k, v, g, beta = prompt.rows
    data = (q, k, v, 500 * g, beta, prompt.state)
    wanted = gated_delta_chunk(*(x.double() for x in data))
    assert_close(gdn_prefill.gated_delta_prefill(*data)[1], wanted[1], LIMIT)
