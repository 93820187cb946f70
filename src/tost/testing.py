"""Numerical comparisons for tests, for the benchmark gate, and for new backends.

The measure is the relative root mean square, ``rms(actual - expected) / rms(expected)``: unlike a pair of absolute and
relative tolerances it does not depend on the scale of the tensor and is not decided by its smallest entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_close", "relative_rms"]


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Return ``rms(actual - expected) / rms(expected)``, computed in float64.

    Two empty tensors differ by 0. Where `expected` is exactly zero the plain rms of `actual` is returned. A NaN or
    infinity on either side gives infinity, so that no bound can accept it.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: got {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if expected.numel() == 0:
        return 0.0
    a, e = actual.detach().double().cpu(), expected.detach().double().cpu()
    if not (torch.isfinite(a).all() and torch.isfinite(e).all()):
        return float("inf")
    scale = e.square().mean().sqrt().item()
    error = (a - e).square().mean().sqrt().item()
    return error / scale if scale > 0 else error


def assert_close(name: str, actual: Tensor, expected: Tensor, bound: float) -> None:
    """Fail unless `actual` is within `bound` of `expected` in relative rms.

    Args:
        name: What is compared; it opens the failure message.
        actual: Tensor under test.
        expected: Trusted tensor of the same shape.
        bound: Largest accepted `relative_rms`.

    Raises:
        AssertionError: The shapes differ, a value is not finite, or the bound is exceeded.
    """
    error = relative_rms(actual, expected)
    if not error <= bound:
        finite = bool(torch.isfinite(actual).all())
        raise AssertionError(
            f"{name}: relative rms {error:.3g} exceeds {bound:.3g} "
            f"(shape {tuple(actual.shape)}, {actual.dtype}, {'finite' if finite else 'NOT finite'})"
        )
