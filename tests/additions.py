"""Initial tensors of one addition by full name, for tests that need no whole plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def draw(addition: Any, size: Any, sigma: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Return an addition's initial tensors; `size` is an encoder's config, or its hidden size alone."""
    config = SimpleNamespace(hidden=size, feedforward=4 * size) if isinstance(size, int) else size
    found = {}
    for (site, part), shape in addition.shapes(config).items():
        found[f"{site}.{addition.name}.{part}"] = tensor = torch.zeros(shape)
        addition.fill(part, tensor, sigma, generator)
    return found
