"""A fixed choice of tensors: some slots of one form, each with an equal share of the rows. Knows no tasks and losses.

The counterpart of `route` for a device that replays a fixed sequence of kernels. Rows stand in the order of the slots,
`[slots * rows, longest, n]`, and each tensor is either shared by all (`[...]`) or the slots' own (`[slots, ...]`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.forward import PROJECTIONS
from adapterbank.methods import Adapter
from adapterbank.slots.bottleneck import bottleneck, linear, parts


@dataclass(frozen=True)
class UniformLayer:
    """One layer, by short names. Two layers differ in tensors alone, so that the pass through them is compiled once."""

    tensors: Mapping[str, Tensor]
    adapter: Adapter | None

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Layer`."""
        return apply_linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Layer`."""
        if f"{name}.joined.weight" in self.tensors:
            return self.linear(x, f"{name}.joined")
        return torch.cat([self.linear(x, f"{name}.{part}") for part in PROJECTIONS], -1)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.forward.Layer`."""
        return apply_norm(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], epsilon)

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Layer`."""
        table = self.tensors[f"{name}.weight"]
        if table.dim() == 2:
            return F.embedding(ids, table)
        each = ids.view(len(table), -1)
        return torch.cat([F.embedding(mine, one) for mine, one in zip(each, table, strict=True)])

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        """See `encoder.forward.Layer`."""
        if self.adapter is None or f"{site}.adapter.up.weight" not in self.tensors:
            return y
        mine = {part: self.tensors[f"{site}.adapter.{part}"] for part in parts(self.adapter)}
        if mine["up.weight"].dim() == 2:
            return bottleneck(y, x, self.adapter, mine)
        slots = mine["up.weight"].shape[0]
        return bottleneck(_by_slot(y, slots), _by_slot(x, slots), self.adapter, mine).view(y.shape)


class Uniform:
    """The whole pass."""

    def __init__(self, frozen: Mapping[str, Tensor], own: Mapping[str, Tensor], adapter: Adapter | None) -> None:
        """Take the frozen tensors, and the slots' own by name, each `[slots, *shape]`."""
        # One slot's tensors are used without their first dimension: a plain product is quicker than a batch of one.
        self.own = {name: tensor.squeeze(0) if len(tensor) == 1 else tensor for name, tensor in own.items()}
        self._adapter = adapter
        touched = {name.rsplit(".", 2)[0] for name in own if name.rsplit(".", 2)[-2] in PROJECTIONS}
        self._tensors = {
            name: tensor
            for name, tensor in {**frozen, **self.own}.items()
            if not any(name.startswith(f"{attention}.joined.") for attention in touched)
        }
        self._layers: dict[tuple[str, str], UniformLayer] = {}

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        return apply_linear(x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        return UniformLayer(self._tensors, self._adapter).attention(x, name)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.forward.Slots`."""
        return apply_norm(x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"], epsilon)

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        return UniformLayer(self._tensors, self._adapter).embed(ids, name)

    def table(self, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        return self._tensors[f"{name}.weight"]

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        return UniformLayer(self._tensors, self._adapter).add(y, x, site)

    def layer(self, weights: str, site: str) -> UniformLayer:
        """See `encoder.forward.Slots`."""
        if (weights, site) not in self._layers:
            found = {}
            for name, tensor in self._tensors.items():
                prefix = site if ".adapter." in name else weights
                if name.startswith(f"{prefix}."):
                    found[name.removeprefix(f"{prefix}.")] = tensor
            self._layers[weights, site] = UniformLayer(found, self._adapter)
        return self._layers[weights, site]


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Give `x W' + b`, with the weight, the bias, both or neither the slots' own."""
    if weight.dim() == 2:
        if bias.dim() == 1:
            return F.linear(x, weight, bias)
        return (_by_slot(F.linear(x, weight), len(bias)) + bias[:, None]).view(*x.shape[:-1], -1)
    shift = bias if bias.dim() == 2 else bias.expand(len(weight), -1)
    return linear(_by_slot(x, len(weight)), weight, shift).view(*x.shape[:-1], -1)


def apply_norm(x: Tensor, gain: Tensor, shift: Tensor, epsilon: float) -> Tensor:
    """Normalise, then scale by the shared gain and bias or by each slot's own."""
    if gain.dim() == 1 and shift.dim() == 1:
        return F.layer_norm(x, x.shape[-1:], gain, shift, epsilon)
    slots = len(gain) if gain.dim() == 2 else len(shift)
    gain, shift = (t if t.dim() == 2 else t.expand(slots, -1) for t in (gain, shift))
    plain = _by_slot(F.layer_norm(x, x.shape[-1:], None, None, epsilon), slots)
    scaled: Tensor = _Scale.apply(plain, gain, shift)  # type: ignore[no-untyped-call]
    return scaled.view(x.shape)


class _Scale(torch.autograd.Function):
    """`x * gain + shift` for `[slots, n, width]` and `[slots, width]`.

    The gradients of gain and shift are sums over many tokens of few slots: as products with ones they use the whole
    device, which the general sum does not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain[:, None] + shift[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        ones = x.new_ones(x.shape[0], 1, x.shape[1])
        summed = (torch.bmm(ones, part).squeeze(1) for part in (grads[0] * x, grads[0]))
        return grads[0] * gain[:, None], *summed


def _by_slot(x: Tensor, slots: int) -> Tensor:
    """Lay `[slots * rows, ..., n]` out as `[slots, rows * ..., n]`."""
    return x.reshape(slots, -1, x.shape[-1])
