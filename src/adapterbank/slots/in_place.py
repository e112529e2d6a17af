"""In-place routing: rows of any slots of one family, whose numbers the kernels read where they are. Knows no tasks.

The counterpart of `routing` for captured graphs, which replay a fixed sequence of kernels. A table says, for each slot
of the batch, where each of its tensors is; each row names its line of the table. So a graph does not depend on which
slots a batch has nor on how many, and no slot is copied. LayerNorms are read so whether a slot has its own or not. In
training the slots are the runs, and a graph has as many as there are places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.blocks import ACTIVATIONS
from adapterbank.encoder.forward import QKV
from adapterbank.encoder.kernels import Kernels
from adapterbank.encoder.kernels.forms import Drop, Form, Into, Places, Scales, TrainedSite
from adapterbank.encoder.protocol import Ending
from adapterbank.encoder.recompute import Recompute
from adapterbank.methods import roles
from adapterbank.slots.stack import RowLayout, Slot, Stacks

_NORM = ".norm.weight"


def trains_in_place(slot: Slot) -> bool:
    """Return whether the kernels also know the gradients of everything that trains."""
    known = len(slot.forms) <= 1 and all(isinstance(form, Form) and form.trains for form in slot.forms)
    others = (name for name in slot.places if not slot.plan.split(name) and "head" not in roles(name))
    return slot.in_place and known and all(name.rsplit(".", 2)[-2] == "norm" for name in others)


class TableColumns:
    """What each column of the table is, for the slots of one family; without a slot, for the bare encoder."""

    def __init__(self, stacks: Stacks, slot: Slot | None) -> None:
        """Number the tensors that rows look up; `slot` is any of the family."""
        self._stacks = stacks
        self._names: list[str] = []
        """The tensor of each column; a width is named after the tensor whose first dimension it is, after a space."""
        self._shared: dict[tuple[RowLayout, ...], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.at: dict[str, int] = {}
        """The first column of a LayerNorm, an addition at a site (`<site>.<key>`), a layer of the head, a bias."""
        self.sites: dict[str, tuple[int, ...]] = (
            {site: tuple(parts) for site, parts in slot.added.items()} if slot else {}
        )
        """The additions that act at each site, by their indices in the plan."""
        self.plan = slot.plan if slot else None
        for name in [name for name in stacks.frozen if name.endswith(_NORM)]:
            self._add(name.removesuffix(".weight"), [name, f"{name.removesuffix('.weight')}.bias"])
        if slot:
            self._add_own(slot)

    def _add_own(self, slot: Slot) -> None:
        for site, parts in slot.added.items():
            for number in parts:
                addition, prefix = slot.plan.additions[number], f"{site}.{slot.plan.keys[number]}"
                names = [f"{prefix}.{part}" for part in addition.parts()]
                first = next((name for name in names if not name.endswith(("norm.weight", "norm.bias"))), names[0])
                self._add(prefix, [f" {first}", *names])
        for name in slot.places:
            if "head" in roles(name):
                if name.endswith(".weight"):
                    prefix = name.removesuffix(".weight")
                    self._add(prefix, [f" {name}", name, f"{prefix}.bias"])
            elif name.endswith(".bias") and not slot.plan.split(name) and name not in self._names:
                self._add(name, [name])

    def _add(self, key: str, names: Sequence[str]) -> None:
        self.at[key] = len(self._names)
        self._names += names

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self._names)

    @cached_property
    def _nothing(self) -> Tensor:
        """Zeros, for a LayerNorm without a bias."""
        frozen = self._stacks.frozen
        widest = max(len(tensor) for name, tensor in frozen.items() if name.endswith(_NORM))
        return next(iter(frozen.values())).new_zeros(widest)

    @cached_property
    def bases(self) -> tuple[Tensor, Tensor]:
        """The tensors that offsets count from: of the slots' type, and of heads."""
        like = self._nothing
        return like, torch.zeros(16, dtype=torch.float32, device=like.device)

    def line(self, slot: Slot | None) -> np.ndarray:
        """Return a slot's line of the table."""
        layouts = slot.layouts if slot else ()
        if layouts not in self._shared:
            self._shared[layouts] = self._lay_out(slot)
        part, start, fixed = self._shared[layouts]
        starts = [0]
        for block, row in slot.rows if slot else ():
            item, base = block.used.element_size(), self.bases[block.layout.head].data_ptr()
            starts.append((block.used.data_ptr() + row * block.used.stride(0) * item - base) // item)
        return np.where(part > 0, np.array(starts)[part] + start, fixed)

    def _lay_out(self, slot: Slot | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for each column, the slot's row that has it, counted from 1, the start in that row, or the number."""
        part, start, fixed = np.zeros((3, len(self)), np.int64)
        frozen, base = self._stacks.frozen, self.bases[0]
        numbers = {name: i for i, layout in enumerate(slot.layouts, 1) for name in layout.shapes} if slot else {}
        for column, name in enumerate(self._names):
            own = numbers.get(name.strip())
            if name.startswith(" "):
                assert slot and own
                fixed[column] = slot.layouts[own - 1].shapes[name.strip()][0]
            elif slot and own:
                part[column], start[column] = own, slot.layouts[own - 1].ranges[name][0]
            else:
                tensor = frozen.get(name, self._nothing)
                fixed[column] = (tensor.data_ptr() - base.data_ptr()) // base.element_size()
        return part, start, fixed


@dataclass(frozen=True)
class Widths:
    """The widths of a batch: what its graph is specialised on."""

    additions: tuple[tuple[int, bool], ...] = ()
    """For each addition of the plan the widest of the batch, and whether all are as wide."""
    outputs: int = 0
    """Outputs of the widest head, rounded up to a power of two."""

    @classmethod
    def of(cls, slots: Sequence[Slot]) -> Widths:
        """Return the widths of some slots of one family."""
        by_addition = zip(*(slot.forms for slot in slots), strict=True)
        found = [{form.widest if isinstance(form, Form) else 1 for form in forms} for forms in by_addition]
        most = max(slot.plan.head.width for slot in slots)
        return cls(tuple((max(some), len(some) == 1) for some in found), 1 << (most - 1).bit_length())


@dataclass(frozen=True)
class Gradients:
    """Where the gradients of the tensors of a table are added."""

    into: Mapping[str, Tensor]
    """By name, float32 `[places, ...]`."""
    anchor: Tensor
    """Stands for all of them where gradients are asked for; its own is none."""
    _unused: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def of(self, norm: str, addition: str, parts: Sequence[str]) -> Into:
        """Return those of a LayerNorm, if there is one and it trains, and of an addition."""
        gain, shift = self.into.get(f"{norm}.weight"), self.into.get(f"{norm}.bias")
        if gain is not None and shift is None:  # a LayerNorm without a bias
            shift = self._unused.setdefault(norm, torch.zeros_like(gain))
        adapter = tuple(self.into[f"{addition}.{part}"] for part in parts)
        return Into(
            None if gain is None or shift is None else (gain, shift),
            adapter or None,  # type: ignore[arg-type]
        )


class InPlaceRoute:
    """All layers of the pass, for rows whose slots are in a table."""

    def __init__(
        self,
        frozen: Mapping[str, Tensor],
        columns: TableColumns,
        kernels: Kernels,
        widths: Widths,
        table: Tensor,
        rows: Tensor,
        gradients: Gradients | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        """Take the table `[places, columns]` and each row's line of it.

        With `gradients`, those of the table's tensors are added there; then the rows are in the order of the places,
        each with as many; `recompute` remembers the outputs of layers.
        """
        self.recompute = recompute
        self.frozen, self.columns, self.kernels, self._gradients = frozen, columns, kernels, gradients
        self.places, self._head_places = (Places(base, rows, table) for base in columns.bases)
        self._outputs = widths.outputs
        self._forms: list[Form | Scales | None] = []
        self._branch: tuple[Tensor, Tensor] | None = None  # what the first linear layer of a sub-layer read
        for addition, (widest, equal) in zip(
            columns.plan.additions if columns.plan else (), widths.additions, strict=True
        ):
            form = addition.form
            self._forms.append(replace(form, widest=widest, equal=equal) if isinstance(form, Form) else form)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        weight, bias = self.frozen[f"{name}.weight"], f"{name}.bias"
        if bias not in self.columns.at:
            return self._frozen_linear(x, weight, self.frozen.get(bias))
        y = F.linear(x, weight)
        self.kernels.vectors(y, self.places, shift_at=self.columns.at[bias])
        return y

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        joined = self.frozen[f"{name}.joined.weight"]
        if f"{name}.{QKV[0]}.bias" not in self.columns.at:
            return self._frozen_linear(x, joined, self.frozen.get(f"{name}.joined.bias"))
        y = F.linear(x, joined)
        for part, columns in zip(QKV, y.chunk(3, -1), strict=True):
            self.kernels.vectors(columns, self.places, shift_at=self.columns.at[f"{name}.{part}.bias"])
        return y

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.protocol.Slots`."""
        if name not in self.columns.at:
            return x
        if self._gradients and torch.is_grad_enabled():
            return self._trained_site(None, x, name, Ending(x, None, epsilon))
        return self.kernels.site(None, x, self.places, norm_at=self.columns.at[name], epsilon=epsilon)

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        return F.embedding(ids, self.frozen[f"{name}.weight"])

    def table(self, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        return self.frozen[f"{name}.weight"]

    def add(self, y: Tensor, x: Tensor, *sites: str) -> Tensor:
        """See `encoder.protocol.Slots`; `y` may hold several sites side by side, which read the same `x`."""
        for site, part in zip(sites, y.chunk(len(sites), -1), strict=True):
            for number in self.columns.sites.get(site, ()):
                self._act(part, x, site, number)
        return y

    def finish(self, y: Tensor, x: Tensor, site: str, norm: str, ending: Ending) -> Tensor:
        """Return what follows a sub-layer; its last addition, the residual sum and the LayerNorm are one kernel."""
        numbers = self.columns.sites.get(site, ())
        if self._gradients and torch.is_grad_enabled():
            return self._trained_site(y, x, norm, ending, site if numbers else None)
        last = self._forms[numbers[-1]] if numbers else None
        form = last if isinstance(last, Form) else None
        for number in numbers[:-1] if form else numbers:
            self._act(y, ending.read, site, number)
        return self.kernels.site(
            y,
            x,
            self.places,
            read=ending.read if form and form.parallel else None,
            form=form,
            adapter_at=self.columns.at[self._key(site, numbers[-1])] if form else 0,
            norm_at=None if ending.epsilon is None else self.columns.at[norm],
            epsilon=ending.epsilon or 0.0,
        )

    def project(self, x: Tensor, name: str) -> Tensor:
        """Return the outputs of a linear layer of the heads, `head` or `head.hidden`."""
        assert self.columns.plan
        outputs = self._outputs if name == "head" else self.columns.plan.head.hidden
        return self.kernels.project(x, self._head_places, outputs, self.columns.at[name])

    def joins(self, x: Tensor, name: str, activation: str) -> bool:
        """Return whether the activation of a frozen linear layer is part of its product.

        That is the approximation of GELU by tanh, which in 16 bits is as near as the exact one.
        """
        short = x.dtype in (torch.bfloat16, torch.float16) and activation in ("gelu", "gelu_tanh")
        frozen = f"{name}.bias" in self.frozen and f"{name}.bias" not in self.columns.at
        return short and frozen and not torch.is_grad_enabled()

    def layer(self, weights: str, site: str) -> InPlaceLayer:
        """See `encoder.protocol.Slots`."""
        return InPlaceLayer(self, weights, site)

    def _frozen_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x W' + b`; in training, let the residual `x` have its gradient from here (`_Linear`)."""
        if self._branch or not (self._gradients and torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, weight, bias)
        y, alias = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        self._branch = x, alias
        return y  # type: ignore[no-any-return]

    def _trained_site(self, y: Tensor | None, x: Tensor, norm: str, ending: Ending, site: str | None = None) -> Tensor:
        """Return `finish` with gradients; without `y`, of a LayerNorm alone."""
        assert self._gradients
        if self._branch and self._branch[0] is x:
            x = self._branch[1]
        self._branch = None
        form, prefix = self._forms[0] if site else None, self._key(site, 0) if site else ""
        assert form is None or isinstance(form, Form)
        drop, norms = ending.mask, ending.epsilon is not None
        parts = self.columns.plan.additions[0].parts() if site and self.columns.plan else []
        about = TrainedSite(
            self.places,
            form,
            self.columns.at[prefix] if site else 0,
            self.columns.at[norm] if norms else None,
            ending.epsilon or 0.0,
            Drop(drop.keys.flatten(), drop.columns, drop.rate) if drop and drop.rate else None,
            self._gradients.of(norm if norms else "", prefix, parts),
        )
        out, again = self.kernels.trained_site(self._gradients.anchor, y, x, about)
        if self.recompute and norms:
            self.recompute.remember(out, again)
        return out

    def _act(self, y: Tensor, x: Tensor, site: str, number: int) -> None:
        """Let one addition act at a site, in place."""
        form, at = self._forms[number], self.columns.at[self._key(site, number)]
        if isinstance(form, Form):
            self.kernels.site(
                y, x, self.places, read=x if form.parallel else None, out=y, form=form, adapter_at=at, residual=False
            )
        else:
            self.kernels.vectors(y, self.places, scale_at=at + 1)

    def _key(self, site: str, number: int) -> str:
        assert self.columns.plan
        return f"{site}.{self.columns.plan.keys[number]}"


@dataclass(frozen=True)
class InPlaceLayer:
    """One layer, with short names: its tensors are under `weights`, its additions under `site`."""

    route: InPlaceRoute
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
        own = f"{self.weights}.{name}"
        if f"{self.site}.{name}" not in self.route.columns.sites and self.route.joins(x, own, activation):
            return self.route.kernels.linear_gelu(
                x, self.route.frozen[f"{own}.weight"], self.route.frozen[f"{own}.bias"]
            )
        y = self.linear(x, name)
        return self.route.kernels.gelu(y) if activation == "gelu" else ACTIVATIONS[activation](y)

    def finish(self, y: Tensor, x: Tensor, site: str, ending: Ending) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return self.route.finish(y, x, f"{self.site}.{site}", f"{self.weights}.{site}.norm", ending)


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
