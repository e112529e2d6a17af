"""The bottleneck adapter and its variants (Houlsby et al. 2019). Knows nothing of tasks or batches.

    f(v) = up(act(down(v)))                                    figure 2 of the paper
    sequential:  y + f(y)          parallel:  y + f(x)         x, y: input and output of the sub-layer
    multiply:    y * (1 + f(.))                                the paper's multiplicative interaction

Every variant starts near the identity, and is exactly the identity if `up` is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank import schema
from adapterbank.config import limited
from adapterbank.draws import RandomStream
from adapterbank.encoder.blocks import ACTIVATIONS
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.kernels.forms import Form
from adapterbank.methods import SITES, Options
from adapterbank.slots.addition import layer_numbers, size_class
from adapterbank.slots.stacked import linear

_EPSILON = 1e-5
"""Epsilon of the adapter's own LayerNorm: torch's default."""


@dataclass(frozen=True)
class Adapter:
    """A slot's adapters: `y + up(act(down(y)))` at each chosen site, 2md + d + m numbers each."""

    name: ClassVar[str] = "adapter"
    decays: ClassVar[bool] = True
    removable: ClassVar[bool] = True

    size: int = limited("size", 64)
    """m, the width of the bottleneck."""
    layers: tuple[int, ...] = layer_numbers()
    """The layers with adapters, counted from 0."""
    sites: tuple[str, ...] = schema.limited(SITES, choices=SITES)
    activation: str = limited("activation", "gelu_tanh")
    placement: str = limited("placement", "sequential")
    """Whether the adapter reads the sub-layer's output (sequential) or its input (parallel)."""
    combine: str = limited("combine", "add")
    """Whether the adapter's output is added to the sub-layer's output, or that is multiplied by one plus it."""
    inner_norm: bool = False
    """Whether the adapter has its own LayerNorm before the down-projection."""
    depth: int = limited("depth", 1)
    """Hidden layers of the bottleneck."""

    @classmethod
    def from_options(cls, options: Options, layers: tuple[int, ...]) -> Adapter:
        """See `Addition`."""
        chosen = options.sites.split(",")
        return cls(
            size=options.size,
            layers=layers,
            sites=tuple(site for site in SITES if site in chosen),
            activation=options.activation,
            placement=options.placement,
            combine=options.combine,
            inner_norm=options.inner_norm,
            depth=options.depth,
        )

    @property
    def in_place(self) -> bool:
        """See `Addition`: a LayerNorm cannot run on the rows of several adapters end to end."""
        return not self.inner_norm

    def resized(self, size: int) -> Adapter:
        """See `Addition`."""
        return replace(self, size=size)

    def placeless(self) -> Adapter:
        """See `Addition`."""
        return replace(self, layers=(), sites=())

    @property
    def form(self) -> Form:
        """See `Addition`."""
        return Form(
            size_class(self.size),
            True,
            activation=self.activation,
            parallel=self.placement == "parallel",
            multiply=self.combine == "multiply",
            inner_norm=self.inner_norm,
            depth=self.depth,
        )

    def parts(self) -> list[str]:
        """See `Addition`."""
        modules = ["norm"] if self.inner_norm else []
        modules += ["down", *(f"middle.{k}" for k in range(1, self.depth)), "up"]
        return [f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias")]

    def shapes(self, config: EncoderConfig) -> dict[tuple[str, str], tuple[int, ...]]:
        """See `Addition`."""
        m, d, shapes = self.size, config.hidden, {}
        modules = {"norm": (d,), "down": (m, d), "up": (d, m)}
        for site in (f"layers.{i}.{site}" for i in self.layers for site in self.sites):
            for part in self.parts():
                module, leaf = part.rsplit(".", 1)
                shape: tuple[int, ...] = modules.get(module, (m, m))
                shapes[site, part] = shape if leaf == "weight" else shape[:1]
        return shapes

    def padded(self, part: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """See `Addition`."""
        module = part.split(".")[0]
        if module == "norm" or part == "up.bias":
            return shape
        if module == "up":
            return shape[0], size
        return (size, shape[1] if module == "down" else size) if len(shape) == 2 else (size,)

    def fill(self, part: str, tensor: Tensor, sigma: float, draws: RandomStream) -> None:
        """Draw Gaussian weights with standard deviation `sigma`, truncated at two sigma; biases stay zero."""
        if part == "norm.weight":
            tensor += 1.0
        elif part.endswith(".weight") and sigma > 0:
            tensor += torch.from_numpy(draws.truncated_normal(tensor.shape, sigma))

    def apply(self, y: Tensor, x: Tensor, tensors: Sequence[Mapping[str, Any]]) -> Tensor:
        """See `Addition`. Widths may be padded with zeros, which stay zero through the arithmetic."""
        (own,) = tensors
        v = x if self.placement == "parallel" else y
        if self.inner_norm:
            gain, shift = (own[f"norm.{leaf}"].unsqueeze(-2) for leaf in ("weight", "bias"))
            v = F.layer_norm(v, v.shape[-1:], None, None, _EPSILON) * gain + shift
        activate = ACTIVATIONS[self.activation]
        for module in ("down", *(f"middle.{k}" for k in range(1, self.depth))):
            v = activate(linear(v, own[f"{module}.weight"], own[f"{module}.bias"]))
        v = linear(v, own["up.weight"], own["up.bias"])
        return y + v if self.combine == "add" else y + y * v


ADDITION = Adapter
