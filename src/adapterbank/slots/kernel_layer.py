"""One layer of a pass through our own kernels, for answers and for training alike. Knows no slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from adapterbank.encoder.blocks import ACTIVATIONS
from adapterbank.encoder.forward import QKV
from adapterbank.encoder.kernels import Kernels
from adapterbank.encoder.protocol import Ending, Modules
from adapterbank.encoder.recompute import Recompute


class KernelRoute(Modules, Protocol):
    """All layers of such a pass, by full names."""

    kernels: Kernels
    recompute: Recompute | None

    def add(self, y: Tensor, x: Tensor, *sites: str) -> Tensor:
        """See `Modules`; `y` may hold several sites side by side, which read the same `x`."""

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

        def run(x: Tensor) -> Tensor:
            return self.route.add(self.route.linear(x, f"{self.weights}.{name}"), x, f"{self.site}.{name}")

        return self.route.recompute.widened(run, x) if self.route.recompute else run(x)

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Layer`."""

        def run(x: Tensor) -> Tensor:
            y = self.route.attention(x, f"{self.weights}.{name}")
            return self.route.add(y, x, *(f"{self.site}.{name}.{part}" for part in QKV))

        return self.route.recompute.widened(run, x) if self.route.recompute else run(x)

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
