"""Low-rank updates of linear layers (Hu et al. 2021, section 4.1). Knows nothing of tasks or batches.

    y = x W' + b + (x A') B' alpha / r        A [r, in], B [out, r]

B starts at zero, so that a new slot computes exactly what the frozen encoder computes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank import schema
from adapterbank.config import limited
from adapterbank.draws import RandomStream
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.kernels.forms import Form
from adapterbank.methods import PROJECTIONS, Options
from adapterbank.slots.addition import layer_numbers, size_class


@dataclass(frozen=True)
class Lora:
    """A slot's low-rank updates: `x W' + b + (x A') B' alpha / r` at each chosen linear layer."""

    name: ClassVar[str] = "lora"
    decays: ClassVar[bool] = True
    removable: ClassVar[bool] = False
    in_place: ClassVar[bool] = False
    by_site: ClassVar[bool] = False

    rank: int = limited("rank", 8)
    """r, the rows of A and columns of B."""
    alpha: float = limited("alpha", 16.0)
    layers: tuple[int, ...] = layer_numbers()
    """The layers with updates, counted from 0."""
    targets: tuple[str, ...] = schema.limited(("query", "value"), choices=PROJECTIONS)
    """The linear layers with updates in each of those, by their names in `PROJECTIONS`."""

    @classmethod
    def from_options(cls, options: Options, layers: tuple[int, ...]) -> Lora:
        """See `Addition`."""
        chosen = options.targets.split(",")
        return cls(options.rank, options.alpha, layers, tuple(name for name in PROJECTIONS if name in chosen))

    @property
    def size(self) -> int:
        """See `Addition`."""
        return self.rank

    @property
    def scale(self) -> float:
        """The factor alpha / r."""
        return self.alpha / self.rank

    @property
    def form(self) -> Form:
        """See `Addition`."""
        return Form(size_class(self.rank), True, parallel=True, biases=False, scale=self.scale)

    @property
    def acting_layers(self) -> tuple[int, ...]:
        """See `Addition`."""
        return self.layers

    def parts(self) -> list[str]:
        """See `Addition`."""
        return ["a", "b"]

    def resized(self, size: int) -> Lora:
        """Return the same arithmetic at another rank, with the same scale."""
        return replace(self, rank=size, alpha=self.scale * size)

    def rounded(self) -> Lora:
        """See `Addition`."""
        return self.resized(size_class(self.rank))

    def without(self, layers: Collection[int]) -> Lora:
        """See `Addition`."""
        return replace(self, layers=tuple(layer for layer in self.layers if layer not in layers))

    def at(self, site: str) -> Lora:
        """See `Addition`. Slots with different targets join different tensors, so the targets are kept."""
        return replace(self, layers=())

    def shapes(self, config: EncoderConfig) -> dict[tuple[str, str], tuple[int, ...]]:
        """See `Addition`."""
        shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        for i, module in ((i, PROJECTIONS[target]) for i in self.layers for target in self.targets):
            outputs, inputs = config.layer_shapes[module]
            shapes |= {(f"layers.{i}.{module}", "a"): (self.rank, inputs)}
            shapes |= {(f"layers.{i}.{module}", "b"): (outputs, self.rank)}
        return shapes

    def padded(self, part: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """See `Addition`."""
        return (size, shape[1]) if part == "a" else (shape[0], size)

    def fill(self, part: str, tensor: Tensor, sigma: float, draws: RandomStream) -> None:
        """Draw A uniformly within 1 / sqrt(in), as the public code of LoRA does; B stays zero."""
        if part == "a":
            tensor += torch.from_numpy(draws.uniform(tensor.shape, 1.0 / math.sqrt(tensor.shape[1])))

    def apply(self, y: Tensor, x: Tensor, tensors: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """See `Addition`. The rank may be padded with zeros, which stay zero through the arithmetic."""
        a, b = _joined(tensors)
        if a.dim() == 3:
            return torch.baddbmm(y, torch.bmm(x, a.transpose(1, 2)), b.transpose(1, 2), alpha=self.scale)
        flat_y, flat_x = (t.reshape(-1, t.shape[-1]) for t in (y, x))
        return torch.addmm(flat_y, F.linear(flat_x, a), b.t(), alpha=self.scale).view(y.shape)


ADDITION = Lora


def _joined(tensors: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join A and B of linear layers that read the same input and whose outputs are side by side.

    With the blocks of B on a diagonal, two small products serve all of them; layers without an update get zeros.
    """
    if len(tensors) == 1:
        return tensors[0]["a"], tensors[0]["b"]
    updated = [site for site in tensors if site]
    rows = [[other["b"] if other is site else torch.zeros_like(other["b"]) for other in updated] for site in tensors]
    return torch.cat([site["a"] for site in updated], -2), torch.cat([torch.cat(row, -1) for row in rows], -2)
