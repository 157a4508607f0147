"""The one comparison of tensors that parity tests use."""

from __future__ import annotations

import torch


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, rms: float, absolute: float | None = None, what: str = ""
) -> None:
    """Fail unless |actual − expected| is at most ``rms`` of |expected|, both as root mean squares.

    ``absolute``, where given, also bounds the largest single difference. Shapes must be equal and
    every number finite: a NaN never passes.
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    difference = (actual.double() - expected.double()).abs()
    worst = float(difference.max())
    relative = float(difference.square().mean().sqrt() / expected.double().square().mean().sqrt())
    assert relative <= rms, (
        f"{what}: relative RMS {relative:.3g} is over {rms:g} (largest difference {worst:.3g})"
    )
    if absolute is not None:
        assert worst <= absolute, f"{what}: largest difference {worst:.3g} is over {absolute:g}"
