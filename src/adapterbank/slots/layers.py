"""One layer of a route, by short names; `KernelLayer` is that of passes through our own kernels. Knows no slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from adapterbank.encoder.blocks import ACTIVATIONS
from adapterbank.encoder.forward import QKV
from adapterbank.encoder.kernels import Kernels
from adapterbank.encoder.protocol import Ending, Modules
from adapterbank.encoder.recompute import Recompute


class LayeredRoute(Modules, Protocol):
    """All layers of a pass, by full names."""

    recompute: Recompute | None
    """What computes outputs again; None if they are kept."""

    def add(self, y: Tensor, x: Tensor, *sites: str) -> Tensor:
        """See `Modules`; `y` may hold several sites side by side, which read the same `x`."""


class RoutedLayer(Protocol):
    """One layer of a route: its tensors are under `weights`, its additions under `site`."""

    @property
    def route(self) -> LayeredRoute:
        """The route."""

    @property
    def weights(self) -> str:
        """The prefix of its tensors."""

    @property
    def site(self) -> str:
        """The prefix of its sites."""


def linear(layer: RoutedLayer, x: Tensor, name: str) -> Tensor:
    """See `encoder.protocol.Layer`."""

    def run(x: Tensor) -> Tensor:
        return layer.route.add(layer.route.linear(x, f"{layer.weights}.{name}"), x, f"{layer.site}.{name}")

    return layer.route.recompute.widened(run, x) if layer.route.recompute else run(x)


def attention(layer: RoutedLayer, x: Tensor, name: str) -> Tensor:
    """See `encoder.protocol.Layer`."""

    def run(x: Tensor) -> Tensor:
        y = layer.route.attention(x, f"{layer.weights}.{name}")
        return layer.route.add(y, x, *(f"{layer.site}.{name}.{part}" for part in QKV))

    return layer.route.recompute.widened(run, x) if layer.route.recompute else run(x)


class KernelRoute(LayeredRoute, Protocol):
    """All layers of a pass through our own kernels."""

    kernels: Kernels

    def joined(self, x: Tensor, name: str, site: str, activation: str) -> Tensor | None:
        """Return the activation of a linear layer if it is part of its product."""

    def finish(self, y: Tensor, x: Tensor, site: str, norm: str, ending: Ending) -> Tensor:
        """Return what follows a sub-layer, whose LayerNorm is `norm`."""


@dataclass(frozen=True)
class KernelLayer:
    """One layer, with short names: its tensors are under `weights`, its additions under `site`."""

    route: KernelRoute
    weights: str
    site: str

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return linear(self, x, name)

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return attention(self, x, name)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return self.route.norm(x, f"{self.weights}.{name}", epsilon)

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return self.route.embed(ids, f"{self.weights}.{name}")

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return self.route.add(y, x, f"{self.site}.{site}")

    def activated(self, x: Tensor, name: str, activation: str) -> Tensor:
        """See `encoder.protocol.Layer`."""
        joined = self.route.joined(x, f"{self.weights}.{name}", f"{self.site}.{name}", activation)
        if joined is not None:
            return joined
        y = self.linear(x, name)
        return self.route.kernels.gelu(y) if activation == "gelu" else ACTIVATIONS[activation](y)

    def finish(self, y: Tensor, x: Tensor, site: str, ending: Ending) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return self.route.finish(y, x, f"{self.site}.{site}", f"{self.weights}.{site}.norm", ending)
