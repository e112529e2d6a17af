"""Low-rank parts of linear layers: initial numbers and arithmetic. Knows nothing of tasks or batches.

    y = x W' + b + (x A') B' alpha / r        Hu et al. 2021, section 4.1;  A [r, in], B [out, r]

B is zero at the start, so that a new slot gives exactly what the frozen encoder gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.families import EncoderConfig
from adapterbank.methods import PROJECTIONS, Lora


def shapes(lora: Lora, config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Name every tensor of a slot's low-rank parts, with its shape."""
    found: dict[str, tuple[int, ...]] = {}
    for i in lora.layers:
        for target in lora.targets:
            outputs, inputs = config.layer_shapes[PROJECTIONS[target]]
            module = f"layers.{i}.{PROJECTIONS[target]}.lora"
            found |= {f"{module}.a": (lora.rank, inputs), f"{module}.b": (outputs, lora.rank)}
    return found


def initial(lora: Lora, config: EncoderConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Give new low-rank parts: A uniform within 1 / sqrt(in) as in the public code of LoRA, B zero."""
    found = {name: torch.zeros(shape) for name, shape in shapes(lora, config).items()}
    for name, tensor in found.items():
        if name.endswith(".a"):
            torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
    return found


def apply(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Give `y + scale (x A') B'` for `[n, in]` and `[n, out]`, or for each part of `[parts, n, in]`, A and B stacked.

    The rank may be filled up with zeros, which stay zero through the arithmetic.
    """
    if a.dim() == 2:
        return torch.addmm(y, F.linear(x, a), b.t(), alpha=scale)
    return torch.baddbmm(y, torch.bmm(x, a.transpose(1, 2)), b.transpose(1, 2), alpha=scale)


def joined(tensors: Mapping[str, Tensor], modules: Sequence[str]) -> tuple[Tensor, Tensor] | None:
    """Give A and B of linear layers that read the same and stand side by side, as one; None where nobody has any.

    With B's blocks on a diagonal two small products do for all of them; those without a part of their own get zeros.
    """
    held = [module for module in modules if f"{module}.lora.a" in tensors]
    if not held:
        return None
    a, b = ([tensors[f"{module}.lora.{leaf}"] for module in held] for leaf in ("a", "b"))
    if len(modules) == 1:
        return a[0], b[0]
    rows = [
        [part if other == module else torch.zeros_like(part) for other, part in zip(held, b, strict=True)]
        for module in modules
    ]
    return torch.cat(a, -2), torch.cat([torch.cat(row, -1) for row in rows], -2)
