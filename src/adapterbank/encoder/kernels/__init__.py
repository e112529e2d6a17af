"""Kernels of our own for GPUs, in Triton: attention, sites, dropout, Adam. They know numbers and no layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from adapterbank.errors import SlowerWarning


class Kernels(NamedTuple):
    """The kernels that read slots in place."""

    site: Callable[..., Tensor]
    """See `site.site`."""
    trained_site: Callable[..., tuple[Tensor, Callable[[], Tensor]]]
    """See `site_gradient.trained_site`."""
    vectors: Callable[..., None]
    """See `slots.vectors`."""
    project: Callable[..., Tensor]
    """See `slots.project`."""
    drop: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """See `elementwise.drop`."""
    mix: Callable[[Tensor], Tensor]
    """See `elementwise.mix`."""
    gelu: Callable[[Tensor], Tensor]
    """See `elementwise.gelu`."""
    update: Callable[..., None]
    """See `elementwise.update`."""


def find_kernels(device: torch.device) -> Kernels | None:
    """Return the kernels, or None where there are none for this device."""
    if device.type != "cuda":
        return None
    try:
        from adapterbank.encoder.kernels import elementwise, site, site_gradient, slots
    except ImportError as error:
        warnings.warn(f"Tasks run slower without Triton ({error}).", SlowerWarning, 2)
        return None
    return Kernels(
        site.site,
        site_gradient.trained_site,
        slots.vectors,
        slots.project,
        elementwise.drop,
        elementwise.mix,
        elementwise.gelu,
        elementwise.update,
    )
