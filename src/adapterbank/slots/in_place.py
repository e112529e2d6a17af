"""In-place routing: rows of any slots of one family, whose numbers the kernels read where they are. Knows no tasks.

The counterpart of `routing` for captured graphs, which replay a fixed sequence of kernels. A table says, for each slot
of the batch, where each of its tensors is; each row names its line of the table. So a graph does not depend on which
slots a batch has nor on how many, and no slot is copied. LayerNorms are read so whether a slot has its own or not.
Training reads slots in the same way (`trained_route`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.forward import QKV
from adapterbank.encoder.kernels import Kernels
from adapterbank.encoder.kernels.forms import Form, Places, Scales
from adapterbank.encoder.protocol import Ending
from adapterbank.encoder.recompute import Recompute
from adapterbank.methods import roles
from adapterbank.slots.layers import KernelLayer
from adapterbank.slots.stack import RowLayout, Slot, Stacks

_NORM = ".norm.weight"


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
                addition, prefix = slot.plan.additions[number], self.key(site, number)
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

    def key(self, site: str, number: int) -> str:
        """Return the prefix of the tensors that an addition has at a site."""
        assert self.plan
        return f"{site}.{self.plan.keys[number]}"

    def forms(self, widths: Widths) -> list[Form | Scales | None]:
        """Return how the kernels compute each addition of a batch with these widths."""
        forms = [addition.form for addition in self.plan.additions] if self.plan else []
        return [
            replace(form, widest=widest, equal=equal) if isinstance(form, Form) else form
            for form, (widest, equal) in zip(forms, widths.additions, strict=True)
        ]

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
        for block, row in slot.read if slot else ():
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
    """For each addition of the plan the widest of the batch, and whether all are as wide at every site."""
    outputs: int = 0
    """Outputs of the widest head, rounded up to a power of two."""

    @classmethod
    def of(cls, slots: Sequence[Slot]) -> Widths:
        """Return the widths of some slots of one family."""
        return cls.joined([cls._of_one(slot) for slot in slots])

    @classmethod
    def joined(cls, parts: Sequence[Widths]) -> Widths:
        """Return the widths of a batch that consists of batches with these widths."""
        by_addition = (set(found) for found in zip(*(part.additions for part in parts), strict=True))
        additions = tuple((max(some)[0], len(some) == 1 and max(some)[1]) for some in by_addition)
        return cls(additions, max(part.outputs for part in parts))

    @classmethod
    def _of_one(cls, slot: Slot) -> Widths:
        additions = tuple((form.widest, form.equal) if isinstance(form, Form) else (1, True) for form in slot.forms)
        return cls(additions, 1 << (slot.plan.head.width - 1).bit_length())


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
    ) -> None:
        """Take the table `[places, columns]` and each row's line of it."""
        self.frozen, self.columns, self.kernels = frozen, columns, kernels
        self.places, self._head_places = (Places(base, rows, table) for base in columns.bases)
        self._outputs = widths.outputs
        self._forms = columns.forms(widths)
        self.recompute: Recompute | None = None  # no gradient, nothing is kept

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        weight, bias = self.frozen[f"{name}.weight"], f"{name}.bias"
        if bias not in self.columns.at:
            return F.linear(x, weight, self.frozen.get(bias))
        y = F.linear(x, weight)
        self.kernels.vectors(y, self.places, shift_at=self.columns.at[bias])
        return y

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        joined = self.frozen[f"{name}.joined.weight"]
        if f"{name}.{QKV[0]}.bias" not in self.columns.at:
            return F.linear(x, joined, self.frozen.get(f"{name}.joined.bias"))
        y = F.linear(x, joined)
        for part, columns in zip(QKV, y.chunk(3, -1), strict=True):
            self.kernels.vectors(columns, self.places, shift_at=self.columns.at[f"{name}.{part}.bias"])
        return y

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.protocol.Slots`."""
        if name not in self.columns.at:
            return x
        return self.kernels.site(None, x, self.places, norm_at=self.columns.at[name], epsilon=epsilon)

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        return F.embedding(ids, self.frozen[f"{name}.weight"])

    def table(self, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        return self.frozen[f"{name}.weight"]

    def add(self, y: Tensor, x: Tensor, *sites: str) -> Tensor:
        """See `layers.KernelRoute`."""
        for site, part in zip(sites, y.chunk(len(sites), -1), strict=True):
            for number in self.columns.sites.get(site, ()):
                self._act(part, x, site, number)
        return y

    def finish(self, y: Tensor, x: Tensor, site: str, norm: str, ending: Ending) -> Tensor:
        """See `layers.KernelRoute`; the last addition, the residual sum and the LayerNorm are one kernel."""
        numbers = self.columns.sites.get(site, ())
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
            adapter_at=self.columns.at[self.columns.key(site, numbers[-1])] if form else 0,
            norm_at=None if ending.epsilon is None else self.columns.at[norm],
            epsilon=ending.epsilon or 0.0,
        )

    def project(self, x: Tensor, name: str) -> Tensor:
        """Return the outputs of a linear layer of the heads, `head` or `head.hidden`."""
        assert self.columns.plan
        outputs = self._outputs if name == "head" else self.columns.plan.head.hidden
        return self.kernels.project(x, self._head_places, outputs, self.columns.at[name])

    def joined(self, x: Tensor, name: str, site: str, activation: str) -> Tensor | None:
        """See `layers.KernelRoute`.

        GELU then is its approximation by tanh, which in 16 bits is as near as the exact one.
        """
        weight, bias = self.frozen[f"{name}.weight"], self.frozen.get(f"{name}.bias")
        short = x.dtype == torch.bfloat16 and activation in ("gelu", "gelu_tanh")
        if not short or bias is None or f"{name}.bias" in self.columns.at or site in self.columns.sites:
            return None
        return self.kernels.linear_gelu(x, weight, bias)

    def layer(self, weights: str, site: str) -> KernelLayer:
        """See `encoder.protocol.Slots`."""
        return KernelLayer(self, weights, site)

    def _act(self, y: Tensor, x: Tensor, site: str, number: int) -> None:
        """Let one addition act at a site, in place."""
        form, at = self._forms[number], self.columns.at[self.columns.key(site, number)]
        if isinstance(form, Form):
            self.kernels.site(
                y, x, self.places, read=x if form.parallel else None, out=y, form=form, adapter_at=at, residual=False
            )
        else:
            self.kernels.vectors(y, self.places, scale_at=at + 1)
