"""How much two sets of outputs for the same rows differ, as a loss. Knows no kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def between_softmaxes(x: Tensor, y: Tensor) -> Tensor:
    """Return (KL(p ‖ q) + KL(q ‖ p)) / 2 of the softmaxes p and q of the last dimension.

    This is Σ (p - q) (log p - log q) / 2, where `x` and `y` may replace the logarithms: they differ from these by
    constants, and p - q sums to zero. Outputs that both leave out must be finite and equal, such as the lowest number.
    """
    return ((x.softmax(-1) - y.softmax(-1)) * (x - y)).sum(-1) / 2


def between_sigmoids(x: Tensor, y: Tensor) -> Tensor:
    """Return the same of each pair of sigmoids."""
    return (x.sigmoid() - y.sigmoid()) * (x - y) / 2
