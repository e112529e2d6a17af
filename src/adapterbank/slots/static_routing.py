"""A fixed choice of tensors: some slots of one form, each with an equal share of the rows. Knows no tasks and losses.

The counterpart of `route` for a device that replays a fixed sequence of kernels. Rows stand in the order of the slots,
`[slots * rows, longest, n]`, and each tensor is either shared by all (`[...]`) or the slots' own (`[slots, ...]`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.forward import PROJECTIONS
from adapterbank.methods import Adapter, Lora, roles
from adapterbank.slots.additions import lora as low_rank
from adapterbank.slots.additions.bottleneck import bottleneck, linear, parts


@dataclass(frozen=True)
class StaticRouteLayer:
    """One layer, by short names. Two layers differ in tensors alone, so that the pass through them is compiled once."""

    tensors: Mapping[str, Tensor]
    adapter: Adapter | None
    lora: Lora | None = None

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Layer`."""
        return self._lifted(self._plain_linear(x, name), x, [name])

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Layer`."""
        parts = [f"{name}.{part}" for part in PROJECTIONS]
        if f"{name}.joined.weight" in self.tensors:
            y = self._plain_linear(x, f"{name}.joined")
        else:
            y = torch.cat([self._plain_linear(x, part) for part in parts], -1)
        return self._lifted(y, x, parts)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.forward.Layer`."""
        if f"{name}.weight" not in self.tensors:
            return x
        return apply_norm(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"), epsilon)

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

    def _plain_linear(self, x: Tensor, name: str) -> Tensor:
        return apply_linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _lifted(self, y: Tensor, x: Tensor, modules: Sequence[str]) -> Tensor:
        """Add what low-rank parts give to the outputs of linear layers, side by side in `y`."""
        found = low_rank.joined(self.tensors, modules) if self.lora else None
        if self.lora is None or found is None:
            return y
        a, b = found
        flat_y, flat_x = (_by_slot(t, len(a)) if a.dim() == 3 else t.reshape(-1, t.shape[-1]) for t in (y, x))
        return low_rank.apply(flat_y, flat_x, a, b, self.lora.scale).view(y.shape)


class StaticRoute:
    """The whole pass."""

    def __init__(
        self,
        frozen: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        adapter: Adapter | None,
        lora: Lora | None = None,
    ) -> None:
        """Take the frozen tensors, and the slots' own by name, each `[slots, *shape]`."""
        # One slot's tensors are used without their first dimension: a plain product is quicker than a batch of one.
        self.own = {name: tensor.squeeze(0) if len(tensor) == 1 else tensor for name, tensor in own.items()}
        self._tensors = {**frozen, **self.own}
        touched = {tuple(name.rsplit(".", 2)[::2]) for name in own if name.rsplit(".", 2)[-2] in PROJECTIONS}
        for attention, leaf in sorted(touched, reverse=True):  # weights first
            if leaf == "weight":
                for gone in ("weight", "bias"):
                    self._tensors.pop(f"{attention}.joined.{gone}", None)
            elif f"{attention}.joined.weight" in self._tensors:
                self._tensors[f"{attention}.joined.bias"] = self._biases(attention)
        self._whole = StaticRouteLayer(self._tensors, adapter, lora)
        self._layers: dict[tuple[str, str], StaticRouteLayer] = {}

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        return self._whole.linear(x, name)

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        return self._whole.attention(x, name)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.forward.Slots`."""
        return self._whole.norm(x, name, epsilon)

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        return self._whole.embed(ids, name)

    def table(self, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        return self._tensors[f"{name}.weight"]

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        return self._whole.add(y, x, site)

    def layer(self, weights: str, site: str) -> StaticRouteLayer:
        """See `encoder.forward.Slots`."""
        if (weights, site) not in self._layers:
            found = {}
            for name, tensor in self._tensors.items():
                prefix = site if roles(name) & {"adapter", "lora"} else weights
                if name.startswith(f"{prefix}."):
                    found[name.removeprefix(f"{prefix}.")] = tensor
            self._layers[weights, site] = replace(self._whole, tensors=found)
        return self._layers[weights, site]

    def _biases(self, attention: str) -> Tensor:
        """Give the biases of query, key and value side by side, for a product that all slots share."""
        found = [self._tensors[f"{attention}.{part}.bias"] for part in PROJECTIONS]
        return torch.cat(torch.broadcast_tensors(*found), -1)


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x W' + b`, with the weight, the bias, both or neither the slots' own; the bias may be missing."""
    if weight.dim() == 2:
        if bias is None or bias.dim() == 1:
            return F.linear(x, weight, bias)
        return (_by_slot(F.linear(x, weight), len(bias)) + bias[:, None]).view(*x.shape[:-1], -1)
    if bias is None:
        return torch.bmm(_by_slot(x, len(weight)), weight.transpose(1, 2)).view(*x.shape[:-1], -1)
    shift = bias if bias.dim() == 2 else bias.expand(len(weight), -1)
    return linear(_by_slot(x, len(weight)), weight, shift).view(*x.shape[:-1], -1)


def apply_norm(x: Tensor, gain: Tensor, shift: Tensor | None, epsilon: float) -> Tensor:
    """Normalise, then scale by the shared gain and bias or by each slot's own; the bias may be missing."""
    if gain.dim() == 1 and (shift is None or shift.dim() == 1):
        return F.layer_norm(x, x.shape[-1:], gain, shift, epsilon)
    if shift is None:
        shift = gain.new_zeros(gain.shape[-1])
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
