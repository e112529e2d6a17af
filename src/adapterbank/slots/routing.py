"""A batch's choice of tensors: each row finds its own slot's, or the frozen ones. Knows nothing of tasks and losses.

The only place that knows a batch may hold rows of several slots. It answers the encoder's look-ups
(`encoder.forward.Slots`). Rows stand sorted by slot, in *segments*. Where only some segments differ the work is shared:
frozen tensors are used on all tokens at once, LayerNorms and biases are looked up by token, and adapters or low-rank
parts of one shape run as one batched product over segments laid out side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.batch import Grid
from adapterbank.encoder.forward import PROJECTIONS, Frozen
from adapterbank.methods import roles
from adapterbank.slots.addition import Addition
from adapterbank.slots.plan import Plan
from adapterbank.slots.sharing import product_form
from adapterbank.slots.stack import Block, Slot, Stacks
from adapterbank.slots.stacked import Each

_WASTE = 2.0
"""Segments share a product as long as padding them to the longest does not more than double the tokens."""


@dataclass(frozen=True)
class Segment:
    """Adjacent rows of a batch that go through one slot; None is the bare backbone."""

    slot: int | None
    rows: int
    tokens: int


class Route:
    """One batch's choice of tensors, on the level of tokens or of rows."""

    def __init__(self, stacks: Stacks, segments: Sequence[Segment]) -> None:
        """Take the batch's segments, in the order of its rows."""
        self._stacks, self.segments = stacks, list(segments)
        self._held = [stacks.slot(s.slot) if s.slot is not None else None for s in segments]
        self._touched = frozenset().union(*(held.places for held in self._held if held))
        self._sites = frozenset().union(*(held.added for held in self._held if held))
        self._entries: dict[tuple[Block, str], Sequence[Tensor]] = {}
        self._sizes = [s.tokens for s in segments]
        self._groups: dict[tuple[int | None, ...], list[_SlotGroup]] = {}
        self._segment_of_token: Tensor | None = None

    def rows(self) -> Route:
        """Return the same choice for one vector a row instead of one a token."""
        other = Route(self._stacks, self.segments)
        other._entries, other._sizes = self._entries, [s.rows for s in self.segments]
        return other

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        weight, bias = f"{name}.weight", f"{name}.bias"
        if bias in self._touched and weight not in self._touched:
            return self._shifted(x, self._stacks.frozen[weight], [bias])
        return self._by_slot(F.linear, x, self._module(name))

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        weights, biases = ([f"{name}.{part}.{leaf}" for part in PROJECTIONS] for leaf in ("weight", "bias"))
        if self._touched.isdisjoint((*weights, *biases)):
            return Frozen(self._stacks.frozen).attention(x, name)
        joined = self._stacks.frozen.get(f"{name}.joined.weight")
        if joined is not None and self._touched.isdisjoint(weights):
            return self._shifted(x, joined, biases)
        return torch.cat([self.linear(x, f"{name}.{part}") for part in PROJECTIONS], -1)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.forward.Slots`."""
        names = self._module(name)
        if not names:
            return x

        def normalise(x: Tensor, gain: Tensor, shift: Tensor | None = None) -> Tensor:
            return F.layer_norm(x, x.shape[-1:], gain, shift, epsilon)

        if torch.is_grad_enabled():  # a looked-up gain's gradient would be summed in bf16, and in any order
            return self._by_slot(normalise, x, names)
        if len(self._held) > 1 and not self._touched.isdisjoint(names):
            whose = self._tokens_segments(x.device)
            gain, *shift = (
                torch.stack([self.tensor(held, n) for held in self._held]).index_select(0, whose) for n in names
            )
            plain = F.layer_norm(x, x.shape[-1:], None, None, epsilon)
            return torch.addcmul(shift[0], plain, gain) if shift else plain * gain
        return self._by_slot(normalise, x, names)

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        return self._by_slot(F.embedding, ids, (f"{name}.weight",))

    def table(self, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        found = {id(tensor): tensor for held in self._held for tensor in [self.tensor(held, f"{name}.weight")]}
        if len(found) != 1:
            raise ValueError(f"rows with different tables {name!r} stand in one batch")
        return next(iter(found.values()))

    def add(self, y: Tensor, x: Tensor, *sites: str) -> Tensor:
        """See `encoder.forward.Slots`; several sites stand side by side in `y` and read the same `x`."""
        if self._sites.isdisjoint(sites):
            return y
        acting = [held.acting(sites) if held else () for held in self._held]
        for step in range(max(map(len, acting))):
            chosen = tuple(mine[step] if step < len(mine) else None for mine in acting)
            y = self._add_chosen(y, x, sites, chosen)
        return y

    def layer(self, weights: str, site: str) -> RouteLayer:
        """See `encoder.forward.Slots`."""
        return RouteLayer(self, weights, site)

    def tensor(self, held: Slot | None, name: str) -> Tensor:
        """Return one slot's tensor of a name, padded, or the frozen one."""
        if held is None or name not in held.places:
            return self._stacks.frozen[name]
        block, row = held.places[name]
        view = block.views[name]
        if not view.requires_grad or len(view) == 1 or not torch.is_grad_enabled():
            # A view of one is reshaped: the backward of an index would copy the whole gradient once more.
            return view.squeeze(0) if len(view) == 1 else view[row]
        if (block, name) not in self._entries:
            # unbind's backward is one stack of all rows; indexing's would be a zero-filled whole per row.
            self._entries[block, name] = view.unbind(0)
        return self._entries[block, name][row]

    def heads(self) -> list[tuple[Plan, dict[str, Tensor]] | None]:
        """Return each segment's plan and head tensors."""
        return [
            (held.plan, {n: self.tensor(held, n) for n in held.places if "head" in roles(n)}) if held else None
            for held in self._held
        ]

    def _add_chosen(self, y: Tensor, x: Tensor, sites: Sequence[str], chosen: tuple[int | None, ...]) -> Tensor:
        """Apply one addition of each segment, by its number in the segment's plan; None leaves a segment as it is.

        Segments of one form run together where that pays, laid out side by side as `[members, n, width]`, or end to
        end where neither weights nor rows need to be copied for it.
        """
        if chosen not in self._groups:
            self._groups[chosen] = self._make_groups(chosen, y.device)
        split = list(y.split(self._sizes)) if len(self._held) > 1 else [y]
        inputs = list(x.split(self._sizes)) if len(self._held) > 1 else [x]
        for group in self._groups[chosen]:
            if group.grid is None:
                ((i, _),) = group.members
                split[i] = self._apply(split[i], inputs[i], group, sites)
            elif len(group.members) == len(self._held):  # all of them: no need to take the batch apart
                return self._together(y, x, group, sites)
            else:
                own_y, own_x = (torch.cat([t[i] for i, _ in group.members]) for t in (split, inputs))
                parts = self._together(own_y, own_x, group, sites).split([self._sizes[i] for i, _ in group.members])
                for (i, _), part in zip(group.members, parts, strict=True):
                    split[i] = part
        return torch.cat(split) if len(split) > 1 else split[0]

    def _make_groups(self, chosen: Sequence[int | None], device: torch.device) -> list[_SlotGroup]:
        """Find which segments can run together: same arithmetic, same size class, little padding."""
        alike: dict[Addition, list[tuple[int, int]]] = {}
        for i, (held, number) in enumerate(zip(self._held, chosen, strict=True)):
            if held is not None and number is not None:
                alike.setdefault(product_form(held.plan.additions[number]), []).append((i, number))
        found = []
        for form, members in alike.items():
            sizes = [self._sizes[i] for i, _ in members]
            if len(members) > 1 and len(sizes) * max(sizes) <= _WASTE * sum(sizes):
                found.append(_SlotGroup(members, form, Grid.of(np.array(sizes), device)))
            else:
                found += [_SlotGroup([member], form, None) for member in members]
        return found

    def _together(self, y: Tensor, x: Tensor, group: _SlotGroup, sites: Sequence[str]) -> Tensor:
        """Apply a group's additions to its rows, which stand end to end."""
        assert group.grid is not None
        if group.form.in_place and not (y.is_cuda or torch.is_grad_enabled()):
            return self._apply(y, x, group, sites)
        return group.grid.to_packed(self._apply(group.grid.to_grid(y), group.grid.to_grid(x), group, sites))

    def _apply(self, y: Tensor, x: Tensor, group: _SlotGroup, sites: Sequence[str]) -> Tensor:
        """Apply a group's additions: one slot's, or several, stacked or each on its own rows."""
        own: list[dict[str, Any]] = []
        first, number = self._held[group.members[0][0]], group.members[0][1]
        assert first is not None
        for site in sites:
            each = {part: self._each(group, site, part) for part in first.added.get(site, {}).get(number, ())}
            if group.grid is None:
                own.append({part: tensors[0] for part, tensors in each.items()})
            elif y.dim() == 2:
                sizes = [self._sizes[i] for i, _ in group.members]
                own.append({part: Each(tensors, sizes) for part, tensors in each.items()})
            else:
                own.append({part: torch.stack(tensors) for part, tensors in each.items()})
        return group.form.apply(y, x, own)

    def _each(self, group: _SlotGroup, site: str, part: str) -> list[Tensor]:
        """Return a part of each member's addition at a site."""
        found = []
        for i, number in group.members:
            held = self._held[i]
            assert held is not None
            found.append(self.tensor(held, f"{site}.{held.plan.keys[number]}.{part}"))
        return found

    def _shifted(self, x: Tensor, weight: Tensor, biases: Sequence[str]) -> Tensor:
        """Return `x W' + b` with one product for all segments and each one's own biases, side by side."""
        each = [torch.cat([self.tensor(held, name) for name in biases]) for held in self._held]
        if len(each) == 1:
            return F.linear(x, weight, each[0])
        y = F.linear(x, weight)
        if torch.is_grad_enabled():  # as in `norm`
            return torch.cat([part + bias for part, bias in zip(y.split(self._sizes), each, strict=True)])
        return y + torch.stack(each).index_select(0, self._tokens_segments(x.device))

    def _module(self, name: str) -> list[str]:
        """Name the tensors of a module that the encoder has: weight and bias, weight alone, or none."""
        return [found for leaf in ("weight", "bias") if (found := f"{name}.{leaf}") in self._stacks.frozen]

    def _tokens_segments(self, device: torch.device) -> Tensor:
        if self._segment_of_token is None:
            self._segment_of_token = torch.from_numpy(np.repeat(np.arange(len(self._sizes)), self._sizes)).to(device)
        return self._segment_of_token

    def _by_slot(self, f: Callable[..., Tensor], x: Tensor, names: Sequence[str]) -> Tensor:
        """Apply `f(part, *tensors)` to each segment with its own tensors, to all at once where nobody has any."""
        if self._touched.isdisjoint(names):
            return f(x, *(self._stacks.frozen[name] for name in names))
        if len(self._held) == 1:
            return f(x, *(self.tensor(self._held[0], name) for name in names))
        split = zip(self._held, x.split(self._sizes), strict=True)
        return torch.cat([f(part, *(self.tensor(held, name) for name in names)) for held, part in split])


@dataclass(frozen=True)
class RouteLayer:
    """One layer of a route, by short names: its tensors are under `weights`, what slots add to it under `site`."""

    route: Route
    weights: str
    site: str

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Layer`."""
        return self.route.add(self.route.linear(x, f"{self.weights}.{name}"), x, f"{self.site}.{name}")

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Layer`."""
        y = self.route.attention(x, f"{self.weights}.{name}")
        return self.route.add(y, x, *(f"{self.site}.{name}.{part}" for part in PROJECTIONS))

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.forward.Layer`."""
        return self.route.norm(x, f"{self.weights}.{name}", epsilon)

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Layer`."""
        return self.route.embed(ids, f"{self.weights}.{name}")

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        """See `encoder.forward.Layer`."""
        return self.route.add(y, x, f"{self.site}.{site}")


@dataclass(frozen=True)
class _SlotGroup:
    """Segments whose additions run together, laid out as a grid; one alone without a grid."""

    members: list[tuple[int, int]]
    """Number of the segment, and of the addition in its plan."""
    form: Addition
    """The arithmetic they share."""
    grid: Grid | None
