"""How much memory a device has left."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes that can be taken now: of the card, or of the machine."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    import psutil

    return int(psutil.virtual_memory().available)
