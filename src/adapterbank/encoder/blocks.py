"""How a layer is composed: the order of LayerNorm and sub-layer, and the form of the feed-forward. Knows no families.

Two small tables of functions. A row of `families.FAMILIES` names one entry of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.dropout import Mask
from adapterbank.encoder.protocol import Ending, Layer

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class SubLayer(NamedTuple):
    """One of the two parts of a layer."""

    site: str
    run: Callable[[Tensor], Tensor]
    """Its output without dropout."""
    mask: Mask | None
    """The dropout of its output."""


BlockFn = Callable[[Layer, Tensor, SubLayer, float], Tensor]
"""(layer, x, sub-layer, epsilon) -> x after the sub-layer, its LayerNorm and the residual sum."""


def _post_norm(layer: Layer, x: Tensor, part: SubLayer, epsilon: float) -> Tensor:
    return layer.finish(part.run(x), x, part.site, Ending(x, part.mask, epsilon))


def _pre_norm(layer: Layer, x: Tensor, part: SubLayer, epsilon: float) -> Tensor:
    normal = layer.norm(x, f"{part.site}.norm", epsilon)
    return layer.finish(part.run(normal), x, part.site, Ending(normal, part.mask, None))


def activated(layer: Layer, x: Tensor, name: str, activation: str) -> Tensor:
    """Return the activation of the output of a linear layer."""
    return ACTIVATIONS[activation](layer.linear(x, name))


def finish(layer: Layer, y: Tensor, x: Tensor, site: str, ending: Ending) -> Tensor:
    """Drop elements of a sub-layer's output, let the slots add, then the residual sum and the LayerNorm."""
    y = ending.mask.drop(y) if ending.mask else y
    x = x + layer.add(y, ending.read, site)
    return x if ending.epsilon is None else layer.norm(x, f"{site}.norm", ending.epsilon)


BLOCKS: Mapping[str, BlockFn] = {
    "post_norm": _post_norm,  # x = LN(x + add(f(x)))           Devlin et al. 2018
    "pre_norm": _pre_norm,  # x = x + add(f(LN(x)))             Xiong et al. 2020
}


@dataclass(frozen=True)
class FeedForward:
    """One form of the feed-forward sub-layer."""

    factor: int
    """How many times the inner width the up-projection returns."""
    inner: Callable[[Layer, Tensor, str], Tensor]
    """(layer, x `[T, hidden]`, activation) -> inner activations `[T, f]`."""


def _plain(layer: Layer, x: Tensor, activation: str) -> Tensor:
    return layer.activated(x, "feedforward.up", activation)


def _gated(layer: Layer, x: Tensor, activation: str) -> Tensor:
    a, gate = layer.linear(x, "feedforward.up").chunk(2, -1)
    return ACTIVATIONS[activation](a) * gate


FEEDFORWARDS: Mapping[str, FeedForward] = {
    "plain": FeedForward(1, _plain),  # down(act(up(x)))
    "gated": FeedForward(2, _gated),  # down(act(a) g), with a, g the halves of up(x)     Shazeer 2020
}
