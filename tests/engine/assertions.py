"""The one comparison of tensors in these tests."""

from __future__ import annotations

import torch


def assert_close(found: torch.Tensor, wanted: torch.Tensor, limit: float, what: str = "") -> None:
    """Relative root-mean-square error at most ``limit``; NaN never passes."""
    found, wanted = found.double(), wanted.double()
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    scale = max(float(wanted.square().mean().sqrt()), 1e-30)
    error = float((found - wanted).square().mean().sqrt()) / scale
    assert error <= limit, f"{what}: relative RMS error {error:.3g}, allowed {limit:.3g}"


def assert_states(found, wanted, limit: float, what: str = "") -> None:  # type: ignore[no-untyped-def]
    """Conv windows and SSM states of every layer, compared apart."""
    assert len(found) == len(wanted)
    for layer, ((conv, ssm), (wanted_conv, wanted_ssm)) in enumerate(zip(found, wanted, strict=True)):
        assert_close(conv, wanted_conv, limit, f"{what} GDN layer {layer} conv")
        assert_close(ssm, wanted_ssm, limit, f"{what} GDN layer {layer} SSM")
