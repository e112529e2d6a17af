"""Static routing: slots of one form, each with the same number of rows. Knows no tasks and no losses.

The counterpart of `routing` for captured graphs, which replay a fixed sequence of kernels. Rows are in the order of the
slots, `[slots * rows, longest, n]`. Each tensor is either shared by all slots (`[...]`) or per slot (`[slots, ...]`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.blocks import activated, finish
from adapterbank.encoder.forward import QKV
from adapterbank.encoder.protocol import Ending
from adapterbank.methods import addition_in
from adapterbank.slots.addition import Addition
from adapterbank.slots.plan import Plan
from adapterbank.slots.stacked import linear


@dataclass(frozen=True)
class StaticRouteLayer:
    """One layer, with short names. Layers differ only in their tensors, so that the pass is compiled once for all."""

    tensors: Mapping[str, Tensor]
    additions: tuple[tuple[str, Addition], ...] = ()
    """The slots' additions, each with its key in tensor names."""
    added: Mapping[tuple[str, str], Mapping[str, Tensor]] = field(default_factory=dict)
    """The tensors of each addition by part, by (site, key)."""
    slots: int = 1

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return self.add(self.plain_linear(x, name), x, name)

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Layer`."""
        parts = [f"{name}.{part}" for part in QKV]
        if f"{name}.joined.weight" in self.tensors:
            y = self.plain_linear(x, f"{name}.joined")
        else:
            y = torch.cat([self.plain_linear(x, part) for part in parts], -1)
        return self.add(y, x, *parts)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.protocol.Layer`."""
        if f"{name}.weight" not in self.tensors:
            return x
        return apply_norm(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"), epsilon)

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Layer`."""
        table = self.tensors[f"{name}.weight"]
        if table.dim() == 2:
            return F.embedding(ids, table)
        each = ids.view(len(table), -1)
        return torch.cat([F.embedding(part, weight) for part, weight in zip(each, table, strict=True)])

    def add(self, y: Tensor, x: Tensor, *sites: str) -> Tensor:
        """See `encoder.protocol.Layer`; `y` may hold several sites side by side, which read the same `x`."""
        for key, addition in self.additions:
            own = [self.added.get((site, key), {}) for site in sites]
            if any(own):
                if self.slots == 1:
                    y = addition.apply(y, x, own)
                else:
                    y = addition.apply(_by_slot(y, self.slots), _by_slot(x, self.slots), own).view(y.shape)
        return y

    def activated(self, x: Tensor, name: str, activation: str) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return activated(self, x, name, activation)

    def finish(self, y: Tensor, x: Tensor, site: str, ending: Ending) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return finish(self, y, x, site, ending)

    def plain_linear(self, x: Tensor, name: str) -> Tensor:
        """Return the output of a linear layer without additions."""
        return apply_linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))


class StaticRoute:
    """All layers of the pass."""

    def __init__(
        self,
        frozen: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        plan: Plan | None = None,
    ) -> None:
        """Create a route from frozen tensors and the slots' own, each `[slots, *shape]`; `plan` has the additions."""
        self.own = without_places(own)
        self._tensors = {**frozen, **self.own}
        touched = {tuple(name.rsplit(".", 2)[::2]) for name in own if name.rsplit(".", 2)[-2] in QKV}
        for attention, leaf in sorted(touched, reverse=True):  # weights first
            if leaf == "weight":
                for unused in ("weight", "bias"):
                    self._tensors.pop(f"{attention}.joined.{unused}", None)
            elif f"{attention}.joined.weight" in self._tensors:
                self._tensors[f"{attention}.joined.bias"] = self._biases(attention)
        self._additions = tuple(zip(plan.keys, plan.additions, strict=True)) if plan else ()
        self._slots = max((len(tensor) for tensor in own.values()), default=1)
        self._whole = self._within("", "")
        self._layers: dict[tuple[str, str], StaticRouteLayer] = {}

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        return self._whole.linear(x, name)

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        return self._whole.attention(x, name)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.protocol.Slots`."""
        return self._whole.norm(x, name, epsilon)

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        return self._whole.embed(ids, name)

    def table(self, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        return self._tensors[f"{name}.weight"]

    def add(self, y: Tensor, x: Tensor, *sites: str) -> Tensor:
        """See `encoder.protocol.Slots`; `y` may hold several sites side by side, which read the same `x`."""
        return self._whole.add(y, x, *sites)

    def plain_linear(self, x: Tensor, name: str) -> Tensor:
        """Return the output of a linear layer without additions; `joined` layers have the slots' own biases, too."""
        return self._whole.plain_linear(x, name)

    def layer(self, weights: str, site: str) -> StaticRouteLayer:
        """See `encoder.protocol.Slots`."""
        if (weights, site) not in self._layers:
            self._layers[weights, site] = self._within(f"{weights}.", f"{site}.")
        return self._layers[weights, site]

    def _within(self, weights: str, site: str) -> StaticRouteLayer:
        """Return a layer: tensors whose names start with `weights`, and additions whose names start with `site`."""
        tensors: dict[str, Tensor] = {}
        added: dict[tuple[str, str], dict[str, Tensor]] = {}
        for name, tensor in self._tensors.items():
            key = addition_in(name)
            if key is None and name.startswith(weights):
                tensors[name.removeprefix(weights)] = tensor
            elif key is not None and name.startswith(site):
                place, part = name.removeprefix(site).split(f".{key}.", 1)
                added.setdefault((place, key), {})[part] = tensor
        return StaticRouteLayer(tensors, self._additions, added, self._slots)

    def _biases(self, attention: str) -> Tensor:
        """Return the biases of query, key and value side by side, for one product with a shared weight."""
        biases = [self._tensors[f"{attention}.{part}.bias"] for part in QKV]
        return torch.cat(torch.broadcast_tensors(*biases), -1)


def without_places(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a single slot's tensors without their first dimension: a plain product is faster than a batch of one."""
    return {name: tensor.squeeze(0) if len(tensor) == 1 else tensor for name, tensor in own.items()}


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x W' + b`; the weight and the bias may each be shared or per slot, and the bias may be missing."""
    if weight.dim() == 2:
        if bias is None or bias.dim() == 1:
            return F.linear(x, weight, bias)
        return (_by_slot(F.linear(x, weight), len(bias)) + bias[:, None]).view(*x.shape[:-1], -1)
    if bias is None:
        return torch.bmm(_by_slot(x, len(weight)), weight.transpose(1, 2)).view(*x.shape[:-1], -1)
    shift = bias if bias.dim() == 2 else bias.expand(len(weight), -1)
    return linear(_by_slot(x, len(weight)), weight, shift).view(*x.shape[:-1], -1)


def apply_norm(x: Tensor, gain: Tensor, shift: Tensor | None, epsilon: float) -> Tensor:
    """Normalise, then scale and shift by shared or per-slot tensors; the shift may be missing."""
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

    The gradients of gain and shift are sums over many tokens of few slots. As products with ones they use the whole
    GPU, which a plain sum does not.
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
    """Reshape `[slots * rows, ..., n]` to `[slots, rows * ..., n]`."""
    return x.reshape(slots, -1, x.shape[-1])
