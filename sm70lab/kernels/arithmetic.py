"""Which twin of an operation runs."""

from __future__ import annotations

from enum import Enum


class Arithmetic(str, Enum):
    """``plain`` is the reference. ``by_row`` and ``native`` give each row the bits that it has alone."""

    plain = "plain"  # PyTorch, all rows in one product: a row's last bits depend on their number
    by_row = "by_row"  # PyTorch, one product a row
    native = "native"  # C++ on the CPU (``kernels.native``)
    captured = "captured"  # as plain, but nothing waits for the host: what a CUDA graph can hold

    @property
    def whole(self) -> bool:
        """Whether all rows are in one product."""
        return self in (Arithmetic.plain, Arithmetic.captured)
