"""(IA)³: learned scales of keys, values and the feed-forward's inner activations (Liu et al. 2022, section 3.3).

    k ⊙ l_k        v ⊙ l_v        W_down (l_ff ⊙ act(W_up x))

All scales start at one, so that a new slot computes exactly what the frozen encoder computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from adapterbank.draws import RandomStream
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.kernels.forms import Scales
from adapterbank.methods import Options
from adapterbank.slots.addition import layer_numbers

_SITES = ("attention.key", "attention.value", "feedforward.inner")


@dataclass(frozen=True)
class Ia3:
    """A slot's scales: one vector for each of three sites per layer."""

    name: ClassVar[str] = "ia3"
    decays: ClassVar[bool] = False  # decayed towards zero, a scale would switch the encoder off
    removable: ClassVar[bool] = False
    in_place: ClassVar[bool] = False
    by_site: ClassVar[bool] = False
    size: ClassVar[int] = 1

    layers: tuple[int, ...] = layer_numbers()
    """The layers with scales, counted from 0."""

    @classmethod
    def from_options(cls, options: Options, layers: tuple[int, ...]) -> Ia3:
        """See `Addition`."""
        return cls(layers)

    @property
    def form(self) -> Scales:
        """See `Addition`."""
        return Scales()

    @property
    def acting_layers(self) -> tuple[int, ...]:
        """See `Addition`."""
        return self.layers

    def parts(self) -> list[str]:
        """See `Addition`."""
        return ["scale"]

    def resized(self, size: int) -> Ia3:
        """See `Addition`: scales have no size to choose."""
        return self

    def rounded(self) -> Ia3:
        """See `Addition`."""
        return self

    def without(self, layers: Collection[int]) -> Ia3:
        """See `Addition`."""
        return replace(self, layers=tuple(layer for layer in self.layers if layer not in layers))

    def at(self, site: str) -> Ia3:
        """See `Addition`."""
        return replace(self, layers=())

    def shapes(self, config: EncoderConfig) -> dict[tuple[str, str], tuple[int, ...]]:
        """See `Addition`."""
        outputs = {name: shape[0] for name, shape in config.layer_shapes.items()}
        outputs["feedforward.inner"] = config.layer_shapes["feedforward.down"][1]
        return {(f"layers.{i}.{site}", "scale"): (outputs[site],) for i in self.layers for site in _SITES}

    def padded(self, part: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """See `Addition`."""
        return shape

    def fill(self, part: str, tensor: Tensor, sigma: float, draws: RandomStream) -> None:
        """Start every scale at one."""
        tensor += 1.0

    def apply(self, y: Tensor, x: Tensor, tensors: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """See `Addition`. Queries, beside scaled keys and values, are multiplied by one."""
        like = next(site["scale"] for site in tensors if site)
        scales = [site["scale"] if site else torch.ones_like(like) for site in tensors]
        joined = torch.cat(scales, -1)
        return y * (joined if joined.dim() == 1 else joined.unsqueeze(-2))


ADDITION = Ia3
