"""One call a row, so that a row has the bits that it has alone.

Not only products depend on their company: a vectorised exp or sigmoid treats the last few elements
of a tensor with other code than the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def by_row(
    function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], leading: int = 2
) -> torch.Tensor:
    """``function`` of each row alone, put together again.

    The first ``leading`` dimensions of every input number the rows; the function sees them as ones.
    """
    shape = inputs[0].shape[:leading]
    ones = (1,) * leading
    flat = [x.reshape(-1, *ones, *x.shape[leading:]).unbind(0) for x in inputs]
    results = torch.stack([function(*row) for row in zip(*flat, strict=True)])
    return results.view(*shape, *results.shape[1 + leading :])
