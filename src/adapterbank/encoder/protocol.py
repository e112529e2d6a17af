"""What the pass asks for: tensors by name, and what slots add at a site. Knows no arithmetic.

`forward.Frozen` answers with the frozen encoder's tensors; `slots.routing` and `slots.static_routing` answer for
batches whose rows belong to slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from adapterbank.encoder.dropout import Mask


@dataclass(frozen=True)
class Ending:
    """How a sub-layer ends."""

    read: Tensor
    """What the sub-layer read."""
    mask: Mask | None
    """The dropout of its output."""
    epsilon: float | None
    """Of the LayerNorm after the residual sum; None where there is none."""


class Modules(Protocol):
    """The modules of the encoder or of a part of it, by name. Any may lack a bias."""

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Return `x W' + b` with the weight and bias of the module `name`."""

    def attention(self, x: Tensor, name: str) -> Tensor:
        """Return query, key and value of the attention `name`, side by side: `[T, 3 hidden]`."""

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """Normalise the last dimension, then apply the gain and bias of the module `name`."""

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """Look up rows of the table `name`."""

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        """Return what slots make of the output `y` at a site, whose input was `x`; `y` itself where they add nothing.

        A layer has three such sites: `attention` and `feedforward` at the outputs of the two sub-layers, and
        `feedforward.inner` at the activations between the two linear layers of the feed-forward.
        """


class Layer(Modules, Protocol):
    """One part of the encoder, a layer or the embeddings."""

    def activated(self, x: Tensor, name: str, activation: str) -> Tensor:
        """Return the activation (`blocks.ACTIVATIONS`) of the output of the linear layer `name`."""

    def finish(self, y: Tensor, x: Tensor, site: str, ending: Ending) -> Tensor:
        """Return what follows a sub-layer with the output `y` and the residual `x`: `blocks.finish`, or the same."""


class Slots(Modules, Protocol):
    """The whole encoder."""

    def table(self, name: str) -> Tensor:
        """Return the whole table `name`, which all rows of the batch must share."""

    def layer(self, weights: str, site: str) -> Layer:
        """Return one part by short names: its tensors have the prefix `weights`, its sites the prefix `site`."""
