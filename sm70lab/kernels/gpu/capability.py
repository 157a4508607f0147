"""What a device's compute capability decides about these kernels, in one place."""

from __future__ import annotations

from functools import cache

import torch


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (0, 0) for a CPU, where only Triton's interpreter runs."""
    return _of_index(device.index or 0) if device.type == "cuda" else (0, 0)


@cache
def _of_index(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def has_tensor_core_dots(device: torch.device) -> bool:
    """Whether ``tl.dot`` in float16 compiles to tensor-core code: sm_80 and later.

    Triton 3.4 and later lower it to plain FMAs for sm_70, slower than kernels written that way.
    """
    return capability(device) >= (8, 0)


def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start before the one ahead of it has ended and wait inside (sm_90)."""
    return capability(device) >= (9, 0)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take."""
    return _shared_of_index(device.index or 0) if device.type == "cuda" else 98_304


@cache
def _shared_of_index(index: int) -> int:
    properties = torch.cuda.get_device_properties(index)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
