"""What a whole round captured on a GPU cannot do, so that it is said before anything is loaded."""

from __future__ import annotations

import importlib.util

import torch

from sm70lab.engine.architecture import Architecture
from sm70lab.engine.sequence import Request
from sm70lab.schema import Route, Sampling

HEAD_DIMS = (64, 128, 256)  # of the attention kernels
CONV_WIDTH = 4  # of the GDN kernels
MAX_VOCABULARY = 262_144  # of the sampling kernels
MAX_TOP_K = 64
DTYPES = (torch.float16, torch.float32)


def no_capture(
    arch: Architecture, route: Route, dtype: torch.dtype, max_num_seqs: int, hazard: str
) -> str | None:
    """Why a round of this model along this route cannot be one CUDA graph; None where it can."""
    if reason := no_captured_steps(arch, dtype):
        return reason
    powers = (arch.gdn_key_dim, arch.gdn_value_dim)
    reasons = {
        "attention_bias: its products add none": arch.attention_bias,
        f"GDN heads of {powers}: its kernels take powers of two": any(d & (d - 1) for d in powers),
        f"a convolution of {arch.conv_kernel}: its kernels take {CONV_WIDTH}": arch.conv_kernel != CONV_WIDTH,
        f"a vocabulary of {arch.vocab_size:,}: its sampling takes {MAX_VOCABULARY:,}": (
            arch.vocab_size > MAX_VOCABULARY
        ),
        f"route.state.scheme={route.state.scheme}: it replays the last round's rows; use replay": (
            route.state.scheme != "replay"
        ),
        f"route.state.prefix_blocks={route.state.prefix_blocks}: the host sees no state between rounds": (
            route.state.prefix_blocks > 0
        ),
        f"target.max_num_seqs={max_num_seqs}: it runs one sequence": max_num_seqs > 1,
        f"hazard={hazard}: hazards act between a round's steps, where the host is not": hazard != "none",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def no_captured_steps(arch: Architecture, dtype: torch.dtype) -> str | None:
    """Why no step of this model can be a CUDA graph; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "its kernels need Triton, which is not installed"
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"model.dtype={name}: its kernels compute with float16 or float32 weights"
    if arch.num_experts:
        return "which experts run depends on the data, and a captured graph does not"
    if arch.head_dim not in HEAD_DIMS:
        return f"head_dim={arch.head_dim}: its attention takes {HEAD_DIMS}"
    return None


def no_captured_sampling(s: Sampling) -> str | None:
    """Which setting the sampling kernels do not have; None where they have them all."""
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "banned_ids"):
        if getattr(s, name) != getattr(Sampling(), name):
            return f"sampling.{name}={getattr(s, name)}: it changes no logits"
    if s.min_tokens:
        return f"sampling.min_tokens={s.min_tokens}: it changes no logits"
    if s.temperature > 0 and not 1 <= s.top_k <= MAX_TOP_K:
        return f"sampling.top_k={s.top_k}: it keeps 1 to {MAX_TOP_K} candidates"
    return None


def no_captured_request(request: Request, draft_tokens: int) -> str | None:
    """Why a captured round cannot serve this request; None where it can."""
    if request.keep_logits:
        return "logits stay on the device"
    if draft_tokens and not request.drafts:
        return "its number of drafts is fixed"
    return no_captured_sampling(request.sampling)
