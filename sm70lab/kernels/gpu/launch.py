"""Device-side pieces that several kernels share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sm70lab.kernels.gpu.capability import has_dependent_launch


def launch_options(device: torch.device) -> dict[str, bool]:
    """What every kernel of a round is launched with: dependent launches where the device has them."""
    pdl = has_dependent_launch(device)
    return {"PDL": pdl} | ({"launch_pdl": True} if pdl else {})


@triton.jit
def let_next_kernel_start(PDL: tl.constexpr):
    """Let the next kernel of the stream be scheduled while this one runs (programmatic dependent launch)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_kernels_before(PDL: tl.constexpr):
    """Wait until all that the stream's earlier kernels wrote can be read.

    Before this a kernel may read only what no kernel of this round writes: weights, and state that
    the last round left. Every kernel of a round must call it, or the order of the chain is lost.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
