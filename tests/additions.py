"""Initial tensors of one addition by full name, for tests that need no whole plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from adapterbank.draws import RandomStream


def draw(addition: Any, size: Any, sigma: float, seed: int = 0) -> dict[str, Tensor]:
    """Return an addition's initial tensors; `size` is an encoder's config, or its hidden size alone."""
    config = SimpleNamespace(hidden=size, feedforward=4 * size) if isinstance(size, int) else size
    found = {}
    for (site, part), shape in addition.shapes(config).items():
        name = f"{site}.{addition.name}.{part}"
        found[name] = torch.zeros(shape)
        addition.fill(part, found[name], sigma, RandomStream(seed, name))
    return found
