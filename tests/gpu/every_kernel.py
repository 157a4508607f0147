"""Every kernel once, at small sizes and with poisoned memory, for a tool that watches memory.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.gpu.every_kernel
    compute-sanitizer --tool racecheck python -m tests.gpu.every_kernel [linear int4 …]

Without PyTorch's cache each tensor is an allocation of its own, so that reading beyond one is seen. The
checks are those of ``tests/kernels_gpu``, one of each kernel's tiles and dtypes. A first run without the tool
fills Triton's cache. Two run only when they are named and are wrong on purpose: ``beyond`` writes beyond a
tensor, and memcheck must say so; ``race`` writes shared memory without a barrier, and racecheck must.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from sm70lab.engine.noise import Stream
from sm70lab.schema import DraftSampling
from tests.kernels_gpu import kernels_attention as attention
from tests.kernels_gpu import kernels_gdn as gdn
from tests.kernels_gpu import kernels_gdn_prefill as gdn_prefill
from tests.kernels_gpu import kernels_int4 as int4
from tests.kernels_gpu import kernels_linear as linear
from tests.kernels_gpu import kernels_norm as norm
from tests.kernels_gpu import kernels_round_state as round_state
from tests.kernels_gpu import kernels_sampling as sampling


@triton.jit
def _beyond(x, size):
    tl.store(x + size, 1.0)


def beyond() -> None:
    """One value beyond a tensor."""
    _beyond[(1,)](torch.empty(1024, device=linear.DEVICE), 1024)


@triton.jit
def _unordered(out):
    """Every thread of four warps writes its number to one word of shared memory."""
    thread = tl.arange(0, 128)
    word = tl.inline_asm_elementwise(
        "{ .shared .align 4 .b32 word; st.shared.b32 [word], $1; ld.shared.b32 $0, [word]; }",
        "=r,r", [thread], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out + thread, word)


def race() -> None:
    """Writes of several warps with no barrier between them."""
    _unordered[(1,)](torch.empty(128, dtype=torch.int32, device=linear.DEVICE), num_warps=4)


KERNELS: dict[str, list[Callable[[], object]]] = {
    "linear": [
        *(partial(linear.test_a_product_is_the_reference, 5, t) for t in linear.TILES.values()),
        *(partial(linear.test_parts_of_k_add_up_to_the_product, t) for t in linear.TILES.values()),
        linear.test_float32_keeps_its_precision,
    ],
    "int4": [
        *(partial(int4.test_a_product_is_the_reference, 5, t) for t in int4.TILES.values()),
        *(partial(int4.test_parts_of_k_add_up_to_the_product, t) for t in int4.TILES.values()),
        partial(int4.test_a_product_is_the_reference, 9, int4.TILES["dot"]),
        int4.test_the_chosen_tiles_compute_the_products,
    ],
    "gdn": [
        *(partial(gdn.test_a_round_is_the_reference, 5, heads) for heads in gdn.SHAPES),
        partial(gdn.test_rounds_with_rejected_rows_are_one_row_steps, gdn.SHAPES[-1], torch.float32),
        gdn.test_the_window_moves_within_its_own_rows,
        partial(gdn_prefill.test_a_prompt_is_the_plain_chunks, 100),
        gdn_prefill.test_keys_and_values_of_several_blocks,
    ],
    "attention": [
        *(partial(attention.test_it_is_the_reference, 5, *kind) for kind in attention.KINDS),
        partial(attention.test_heads_and_their_dimensions, 16, 2, 64, 32, True),
        partial(attention.test_heads_and_their_dimensions, 1, 1, 256, 64, False),
        attention.test_rows_beyond_the_capacity_are_not_written,
    ],
    "rest": [
        partial(norm.test_add_rms_norm, 2, 4, norm.SIZES[0]),
        partial(norm.test_embedding_and_draft_input, norm.SIZES[0]),
        partial(round_state.test_the_next_round_begins_where_this_one_delivered_to, 4, 2, None),
        partial(round_state.test_rotary_rows_of_a_round, 4),
        round_state.test_a_row_is_picked_by_its_number,
        partial(sampling.test_uniform_noise_is_the_engines_to_the_bit, Stream.target),
        *(partial(sampling.test_candidates_and_draws_are_the_engines, s) for s in sampling.SAMPLINGS),
        sampling.test_few_columns_and_a_shortlist,
        *(partial(sampling.test_rounds_deliver_the_engines_tokens, rule, 3) for rule in DraftSampling),
    ],
}
WRONG: dict[str, list[Callable[[], object]]] = {"beyond": [beyond], "race": [race]}


def main(names: list[str]) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for name in names or KERNELS:
        checks = (KERNELS | WRONG)[name]
        began = time.perf_counter()
        for check in checks:
            check()
        torch.cuda.synchronize()
        print(f"{name}: {len(checks)} checks in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
