"""Routing of a training step through our own kernels: runs of one form, each with the same number of rows.

The kernels compute what ends a sub-layer and its gradient: dropout, the adapter, the residual sum, the LayerNorm. They
add the gradients of adapters and LayerNorms to where the optimiser reads them. Other additions and a run's own biases
are few and small; they are torch's operations on tensors `[places, ...]` (`static_routing`), with torch's gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.dropout import Mask
from adapterbank.encoder.forward import QKV
from adapterbank.encoder.kernels import Kernels
from adapterbank.encoder.kernels.forms import Drop, Form, Into, Places, Scales, TrainedSite
from adapterbank.encoder.protocol import Ending
from adapterbank.encoder.recompute import Recompute
from adapterbank.slots.in_place import TableColumns, Widths
from adapterbank.slots.layers import KernelLayer
from adapterbank.slots.static_routing import StaticRoute


@dataclass(frozen=True)
class Trained:
    """What trains, `[places, ...]` each, by name."""

    own: Mapping[str, Tensor]
    """The tensors, of which torch computes gradients."""
    into: Mapping[str, Tensor]
    """Where the kernels add gradients, float32."""
    anchor: Tensor
    """Stands for what the kernels add to where gradients are asked for; its own is none."""
    _unused: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def gradients(self, norm: str, addition: str, parts: Sequence[str]) -> Into:
        """Return where those of a LayerNorm are added, if there is one and it trains, and those of an addition."""
        gain, shift = (self.into.get(f"{norm}.{leaf}") for leaf in ("weight", "bias"))
        adapter = tuple(self.into[f"{addition}.{part}"] for part in parts)
        norms = None
        if gain is not None or shift is not None:
            norms = self._or_unused(f"{norm}.weight", gain, shift), self._or_unused(f"{norm}.bias", shift, gain)
        return Into(norms, adapter or None)  # type: ignore[arg-type]

    def _or_unused(self, name: str, wanted: Tensor | None, other: Tensor | None) -> Tensor:
        """Return where a gradient is added; nobody reads that of a gain or shift that does not train or exist."""
        if wanted is not None:
            return wanted
        assert other is not None
        return self._unused.setdefault(name, torch.zeros_like(other))


class TrainedRoute:
    """All layers of the pass, for rows in the order of the places, each with as many."""

    def __init__(
        self,
        frozen: Mapping[str, Tensor],
        columns: TableColumns,
        kernels: Kernels,
        widths: Widths,
        table: Tensor,
        rows: Tensor,
        trained: Trained,
        recompute: Recompute | None = None,
    ) -> None:
        """Take the table `[places, columns]` and each row's line of it; `recompute` remembers outputs of layers."""
        self.frozen, self.columns, self.kernels, self._trained = frozen, columns, kernels, trained
        self.recompute = recompute
        self._places = Places(columns.bases[0], rows, table)
        self._forms = columns.forms(widths)
        self._composed = StaticRoute(frozen, trained.own, columns.plan)
        self._branch: tuple[Tensor, Tensor] | None = None  # what the first linear layer of a sub-layer read

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        if any(f"{name}.{leaf}" in self._trained.own for leaf in ("weight", "bias")):
            return self._composed.plain_linear(x, name)
        return self._frozen_linear(x, name)

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        if any(f"{name}.{part}.bias" in self._trained.own for part in QKV):
            return self._composed.plain_linear(x, f"{name}.joined")
        return self._frozen_linear(x, f"{name}.joined")

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.protocol.Slots`."""
        return self._end(None, x, name, Ending(x, None, epsilon)) if name in self.columns.at else x

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        return F.embedding(ids, self.frozen[f"{name}.weight"])

    def table(self, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        return self.frozen[f"{name}.weight"]

    def add(self, y: Tensor, x: Tensor, *sites: str) -> Tensor:
        """See `layers.KernelRoute`."""
        return self._composed.add(y, x, *sites) if any(site in self.columns.sites for site in sites) else y

    def joined(self, x: Tensor, name: str, site: str, activation: str) -> None:
        """See `layers.KernelRoute`: the gradient of an activation reads what is activated."""

    def finish(self, y: Tensor, x: Tensor, site: str, norm: str, ending: Ending) -> Tensor:
        """See `layers.KernelRoute`; what the kernels have no gradient for is added before them."""
        numbers = self.columns.sites.get(site, ())
        forms = [self._form(site, number) for number in numbers]
        if len(forms) == 1 and isinstance(forms[0], Form) and forms[0].trains:
            return self._end(y, x, norm, ending, (forms[0], self.columns.key(site, numbers[0])))
        if numbers:
            y = self.add(self._drop(y, ending.mask), ending.read, site)
            ending = replace(ending, mask=None)
        return self._end(y, x, norm, ending)

    def layer(self, weights: str, site: str) -> KernelLayer:
        """See `encoder.protocol.Slots`."""
        return KernelLayer(self, weights, site)

    def _form(self, site: str, number: int) -> Form | Scales | None:
        """Return how the kernels compute an addition at a site, where all places have one width."""
        form, weight = self._forms[number], f"{self.columns.key(site, number)}.down.weight"
        if not isinstance(form, Form) or weight not in self._trained.own:
            return form
        return replace(form, widest=self._trained.own[weight].shape[-2], equal=True)

    def _drop(self, y: Tensor, mask: Mask | None) -> Tensor:
        return self.kernels.drop(y, mask.keys.flatten(), mask.columns, mask.rate) if mask and mask.rate else y

    def _frozen_linear(self, x: Tensor, name: str) -> Tensor:
        """Return `x W' + b`; let the residual `x` have its gradient from here (`_Linear`)."""
        weight, bias = self.frozen[f"{name}.weight"], self.frozen.get(f"{name}.bias")
        if self._branch or not (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, weight, bias)
        y, alias = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        self._branch = x, alias
        return y  # type: ignore[no-any-return]

    def _end(
        self, y: Tensor | None, x: Tensor, norm: str, ending: Ending, adapter: tuple[Form, str] | None = None
    ) -> Tensor:
        """Return what ends a sub-layer; without `y`, of a LayerNorm alone. `adapter` is a form and its prefix."""
        if self._branch and self._branch[0] is x:
            x = self._branch[1]
        self._branch = None
        form, prefix = adapter or (None, "")
        drop, norms = ending.mask, ending.epsilon is not None
        parts = self.columns.plan.additions[0].parts() if form and self.columns.plan else []
        about = TrainedSite(
            self._places,
            form,
            self.columns.at[prefix] if form else 0,
            self.columns.at[norm] if norms else None,
            ending.epsilon or 0.0,
            Drop(drop.keys.flatten(), drop.columns, drop.rate) if drop and drop.rate else None,
            self._trained.gradients(norm if norms else "", prefix, parts),
        )
        out, again = self.kernels.trained_site(self._trained.anchor, y, x, about)
        if self.recompute and norms:
            self.recompute.remember(out, again)
        return out


class _Linear(torch.autograd.Function):
    """A frozen linear layer and its input again, as the residual: both gradients are added by the product itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight)
        ctx.set_materialize_grads(False)
        return F.linear(x, weight, bias), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, None, None]:
        (weight,), (dy, dx) = ctx.saved_tensors, douts
        if dy is None or dx is None:
            return dx if dy is None else dy @ weight, None, None
        return dx.addmm_(dy, weight), None, None  # nobody else holds `dx`: the residual is used once
