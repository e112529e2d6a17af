"""The bottleneck adapter and its variants (Houlsby et al. 2019). Knows nothing of tasks or batches.

    f(v) = up(act(down(v)))                                    figure 2 of the paper
    sequential:  y + f(y)          parallel:  y + f(x)         x, y: input and output of the sub-layer
    multiply:    y * (1 + f(.))                                the paper's multiplicative interaction

Every variant starts near the identity, and is exactly the identity if `up` is zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank import schema
from adapterbank.config import limited
from adapterbank.draws import RandomStream
from adapterbank.encoder.blocks import ACTIVATIONS
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.kernels.forms import Form
from adapterbank.errors import ConfigError
from adapterbank.methods import MAX_SIZE, SITES, Options, parse_size
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
    """m, the width of the bottleneck; of the widest where `widths` differ."""
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
    widths: tuple[Annotated[int, {"low": 0, "high": MAX_SIZE}], ...] = ()
    """The width at each site of each layer, 0 for no adapter; empty if all are `size` wide."""

    def __post_init__(self) -> None:
        """Refuse widths that do not fit the rest."""
        if self.widths and (len(self.widths) != len(self.places) or max(self.widths) != self.size):
            raise ValueError(
                f"widths are {len(self.widths)} up to {max(self.widths)}, but there are {len(self.places)} places and "
                f"the size is {self.size}"
            )

    @classmethod
    def from_options(cls, options: Options, layers: tuple[int, ...]) -> Adapter:
        """See `Addition`."""
        chosen = options.sites.split(",")
        sites = tuple(site for site in SITES if site in chosen)
        try:
            widths = parse_size(options.size).widths(len(layers), len(sites))
        except ValueError as error:
            raise ConfigError([f"size is {options.size!r}, which has {error}."]) from None
        made = cls(
            layers=layers,
            sites=sites,
            activation=options.activation,
            placement=options.placement,
            combine=options.combine,
            inner_norm=options.inner_norm,
            depth=options.depth,
        )
        return made.with_widths(widths)

    @property
    def places(self) -> tuple[tuple[int, str], ...]:
        """Each layer and site that `widths` has a number for, in their order."""
        return tuple((layer, site) for layer in self.layers for site in self.sites)

    @cached_property
    def width_at(self) -> Mapping[str, int]:
        """The width at each site that has an adapter."""
        return {f"layers.{layer}.{site}": width for (layer, site), width in self._chosen}

    @property
    def _chosen(self) -> list[tuple[tuple[int, str], int]]:
        """The places that have an adapter, with its width."""
        widths = self.widths or (self.size,) * len(self.places)
        return [(place, width) for place, width in zip(self.places, widths, strict=True) if width]

    @property
    def by_site(self) -> bool:
        """See `Addition`."""
        return bool(self.widths)

    def with_widths(self, widths: Sequence[int]) -> Adapter:
        """Return the same with another width at each place, in their order."""
        if not any(widths):
            return replace(self, layers=(), widths=())
        return replace(self, size=max(widths), widths=tuple(widths) if len({*widths}) > 1 else ())

    @property
    def acting_layers(self) -> tuple[int, ...]:
        """See `Addition`."""
        return tuple(dict.fromkeys(layer for (layer, _), _ in self._chosen))

    @property
    def in_place(self) -> bool:
        """See `Addition`: a LayerNorm cannot run on the rows of several adapters end to end."""
        return not self.inner_norm

    def resized(self, size: int) -> Adapter:
        """See `Addition`."""
        return replace(self, size=size, widths=())

    def rounded(self) -> Adapter:
        """See `Addition`."""
        widths = tuple(size_class(width) if width else 0 for width in self.widths)
        return replace(self, size=size_class(self.size), widths=widths if len({*widths}) > 1 else ())

    def without(self, layers: Collection[int]) -> Adapter:
        """See `Addition`."""
        kept = tuple(layer for layer in self.layers if layer not in layers)
        if not self.widths:
            return replace(self, layers=kept)
        widths = (0 if layer in layers else width for (layer, _), width in zip(self.places, self.widths, strict=True))
        return self.with_widths([*widths])

    def at(self, site: str) -> Adapter:
        """See `Addition`."""
        return replace(self, size=self.width_at[site], layers=(), sites=(), widths=())

    @property
    def form(self) -> Form:
        """See `Addition`."""
        return Form(
            size_class(self.size),
            len({size_class(width) for width in self.widths if width}) < 2,
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
        d, shapes = config.hidden, {}
        for site, m in self.width_at.items():
            modules = {"norm": (d,), "down": (m, d), "up": (d, m)}
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
        return y + self.change(y, x, own)

    def change(self, y: Tensor, x: Tensor, own: Mapping[str, Any]) -> Tensor:
        """Return what it adds to `y`; see `apply`."""
        v = x if self.placement == "parallel" else y
        if self.inner_norm:
            gain, shift = (own[f"norm.{leaf}"].unsqueeze(-2) for leaf in ("weight", "bias"))
            v = F.layer_norm(v, v.shape[-1:], None, None, _EPSILON) * gain + shift
        activate = ACTIVATIONS[self.activation]
        for module in ("down", *(f"middle.{k}" for k in range(1, self.depth))):
            v = activate(linear(v, own[f"{module}.weight"], own[f"{module}.bias"]))
        v = linear(v, own["up.weight"], own["up.bias"])
        return v if self.combine == "add" else y * v


ADDITION = Adapter
