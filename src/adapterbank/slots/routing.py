"""Routing: each row of a batch uses the tensors of its own slot, or the frozen ones. Knows no tasks and no losses.

This is the only module that knows that a batch may hold rows of several slots. It answers the encoder's look-ups
(`encoder.protocol.Slots`). Rows are sorted by slot into *segments*. Segments share as much work as they can: frozen
tensors apply to all tokens at once, a GPU looks LayerNorms and biases up by token, and adapters or low-rank parts of
one shape run as one batched product over segments laid out side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.batch import Grid
from adapterbank.encoder.blocks import activated, finish
from adapterbank.encoder.forward import QKV, Frozen
from adapterbank.encoder.products import frozen_linear, multiply
from adapterbank.encoder.protocol import Ending
from adapterbank.encoder.recompute import Recompute
from adapterbank.slots import layers
from adapterbank.slots.addition import Addition
from adapterbank.slots.plan import Plan
from adapterbank.slots.sharing import product_form
from adapterbank.slots.stack import Block, Slot, Stacks
from adapterbank.slots.stacked import Each

_MAX_PADDING = 2.0
"""Segments share a product only if padding them to the longest at most doubles the tokens."""


@dataclass(frozen=True)
class Segment:
    """Adjacent rows of a batch that use one slot; None is the bare backbone."""

    slot: int | None
    rows: int
    tokens: int


class Route:
    """The tensors that each segment of one batch uses, for one vector per token or per row."""

    def __init__(self, stacks: Stacks, segments: Sequence[Segment], recompute: Recompute | None = None) -> None:
        """Create a route for a batch's segments, in the order of its rows; `recompute` remembers outputs of layers."""
        self.recompute = recompute
        self._stacks, self.segments = stacks, list(segments)
        self._slots = [stacks.slot(s.slot) if s.slot is not None else None for s in segments]
        self._overridden = frozenset().union(*(slot.places for slot in self._slots if slot))
        self._sites = frozenset().union(*(slot.added for slot in self._slots if slot))
        self._entries: dict[tuple[Block, str], Sequence[Tensor]] = {}
        self._sizes = [s.tokens for s in segments]
        self._by_site = any(slot.by_site for slot in self._slots if slot)
        self._groups: dict[tuple[tuple[int | None, ...], str], list[_SlotGroup]] = {}
        self._segment_of_token: Tensor | None = None
        self._kept: dict[Any, Any] | None = None
        if len(self.segments) == 1 and self._slots[0] and not torch.is_grad_enabled():
            self._kept = stacks.kept(self.segments[0].slot or 0)

    def rows(self) -> Route:
        """Return the same route for one vector per row instead of one per token."""
        other = Route(self._stacks, self.segments)
        other._entries, other._sizes = self._entries, [s.rows for s in self.segments]
        return other

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        weight, bias = f"{name}.weight", f"{name}.bias"
        if bias in self._overridden and weight not in self._overridden:
            return self._linear_with_biases(x, weight, [bias])
        if weight not in self._overridden:
            return frozen_linear(self._stacks.frozen, x, name)
        return self._by_slot(F.linear, x, (weight, bias) if bias in self._stacks.frozen else (weight,))

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        weights, biases = ([f"{name}.{part}.{leaf}" for part in QKV] for leaf in ("weight", "bias"))
        if self._overridden.isdisjoint((*weights, *biases)):
            return Frozen(self._stacks.frozen).attention(x, name)
        joined = f"{name}.joined.weight"
        if joined in self._stacks.frozen and self._overridden.isdisjoint(weights):
            return self._linear_with_biases(x, joined, biases)
        return torch.cat([self.linear(x, f"{name}.{part}") for part in QKV], -1)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.protocol.Slots`."""
        weight, bias = f"{name}.weight", f"{name}.bias"
        if weight not in self._stacks.frozen:
            return x
        names = (weight, bias) if bias in self._stacks.frozen else (weight,)

        def normalise(x: Tensor, gain: Tensor, shift: Tensor | None = None) -> Tensor:
            return F.layer_norm(x, x.shape[-1:], gain, shift, epsilon)

        # The gradient of a looked-up gain would be summed in bf16, and in no fixed order. A CPU takes longer to look up
        # a gain for each token than to normalise.
        if torch.is_grad_enabled() or not x.is_cuda:
            return self._by_slot(normalise, x, names)
        if len(self._slots) > 1 and not self._overridden.isdisjoint(names):
            segment_of_token = self._segments_by_token(x.device)
            gain, *shift = (
                torch.stack([self.tensor(slot, n) for slot in self._slots]).index_select(0, segment_of_token)
                for n in names
            )
            plain = F.layer_norm(x, x.shape[-1:], None, None, epsilon)
            return torch.addcmul(shift[0], plain, gain) if shift else plain * gain
        return self._by_slot(normalise, x, names)

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        return self._by_slot(F.embedding, ids, (f"{name}.weight",))

    def table(self, name: str) -> Tensor:
        """See `encoder.protocol.Slots`."""
        tables = {id(tensor): tensor for slot in self._slots for tensor in [self.tensor(slot, f"{name}.weight")]}
        if len(tables) != 1:
            raise ValueError(f"the rows of one batch use different tables {name!r}")
        return next(iter(tables.values()))

    def add(self, y: Tensor, x: Tensor, *sites: str) -> Tensor:
        """See `encoder.protocol.Slots`; `y` may hold several sites side by side, which read the same `x`."""
        if self._sites.isdisjoint(sites):
            return y
        if self._kept is not None:
            return self._add_alone(y, x, sites, self._kept)
        acting = [slot.acting(sites) if slot else () for slot in self._slots]
        for step in range(max(map(len, acting))):
            chosen = tuple(numbers[step] if step < len(numbers) else None for numbers in acting)
            y = self._add_chosen(y, x, sites, chosen)
        return y

    def layer(self, weights: str, site: str) -> RouteLayer:
        """See `encoder.protocol.Slots`."""
        return RouteLayer(self, weights, site)

    def tensor(self, slot: Slot | None, name: str) -> Tensor:
        """Return a slot's tensor by name, padded, or the frozen one if the slot has none."""
        if slot is None or name not in slot.places:
            return self._stacks.frozen[name]
        if self._kept is not None and name in self._kept:
            return self._kept[name]  # type: ignore[no-any-return]
        (block, row), stored = slot.places[name], slot.stored.get(name, name)
        view = block.views[stored]
        if self._kept is not None:
            self._kept[name] = view[row]
            return view[row]
        if not view.requires_grad or len(view) == 1 or not torch.is_grad_enabled():
            # A view of one row is reshaped: the backward of indexing would copy the whole gradient once more.
            return view.squeeze(0) if len(view) == 1 else view[row]
        if (block, stored) not in self._entries:
            # The backward of unbind stacks all rows once; that of indexing would allocate a whole tensor per row.
            self._entries[block, stored] = view.unbind(0)
        return self._entries[block, stored][row]

    def heads(self) -> list[tuple[Plan, dict[str, Tensor]] | None]:
        """Return each segment's plan and head tensors."""
        return [
            (slot.plan, {name: self.tensor(slot, name) for name in slot.heads}) if slot else None
            for slot in self._slots
        ]

    def _add_alone(self, y: Tensor, x: Tensor, sites: tuple[str, ...], kept: dict[Any, Any]) -> Tensor:
        """Apply the additions of the batch's only slot, which are looked up once for each site."""
        if sites not in kept:
            slot = self._slots[0]
            assert slot is not None
            additions = [(slot.plan.additions[number], number) for number in slot.acting(sites)]
            kept[sites] = [
                (addition, self._tensors_of(_SlotGroup([(0, number)], addition, None), sites))
                for addition, number in additions
            ]
        for addition, own in kept[sites]:
            y = addition.apply(y, x, own)
        return y

    def _add_chosen(self, y: Tensor, x: Tensor, sites: Sequence[str], chosen: tuple[int | None, ...]) -> Tensor:
        """Apply one addition to each segment, by its index in the segment's plan; None leaves a segment unchanged.

        Segments of one form run together if that is faster: side by side as `[members, n, width]`, or end to end,
        which copies neither weights nor rows.
        """
        key = chosen, sites[0] if self._by_site else ""  # otherwise the groups are the same at every site
        if key not in self._groups:
            self._groups[key] = self._make_groups(chosen, sites[0], y.device)
        split = list(y.split(self._sizes)) if len(self._slots) > 1 else [y]
        inputs = list(x.split(self._sizes)) if len(self._slots) > 1 else [x]
        for group in self._groups[key]:
            if group.grid is None:
                ((i, _),) = group.members
                split[i] = self._apply(split[i], inputs[i], group, sites)
            elif len(group.members) == len(self._slots):  # every segment: the batch need not be split
                return self._apply_group(y, x, group, sites)
            else:
                own_y, own_x = (torch.cat([t[i] for i, _ in group.members]) for t in (split, inputs))
                parts = self._apply_group(own_y, own_x, group, sites).split([self._sizes[i] for i, _ in group.members])
                for (i, _), part in zip(group.members, parts, strict=True):
                    split[i] = part
        return torch.cat(split) if len(split) > 1 else split[0]

    def _make_groups(self, chosen: Sequence[int | None], site: str, device: torch.device) -> list[_SlotGroup]:
        """Group segments that can run together at a site: same arithmetic, same size class, little padding."""
        alike: dict[Addition, list[tuple[int, int]]] = {}
        for i, (slot, number) in enumerate(zip(self._slots, chosen, strict=True)):
            if slot is not None and number is not None:
                alike.setdefault(product_form(slot.plan.additions[number], site), []).append((i, number))
        groups = []
        for form, members in alike.items():
            sizes = [self._sizes[i] for i, _ in members]
            if len(members) > 1 and len(sizes) * max(sizes) <= _MAX_PADDING * sum(sizes):
                groups.append(_SlotGroup(members, form, Grid.of(np.array(sizes), device)))
            else:
                groups += [_SlotGroup([member], form, None) for member in members]
        return groups

    def _apply_group(self, y: Tensor, x: Tensor, group: _SlotGroup, sites: Sequence[str]) -> Tensor:
        """Apply a group's additions to its rows, which are laid out end to end."""
        assert group.grid is not None
        if group.form.in_place and not (y.is_cuda or torch.is_grad_enabled()):
            return self._apply(y, x, group, sites)
        return group.grid.to_packed(self._apply(group.grid.to_grid(y), group.grid.to_grid(x), group, sites))

    def _apply(self, y: Tensor, x: Tensor, group: _SlotGroup, sites: Sequence[str]) -> Tensor:
        """Apply the additions of one slot, or those of several slots, stacked or each on its own rows."""
        return group.form.apply(y, x, self._tensors_of(group, sites, apart=y.dim() == 2))

    def _tensors_of(self, group: _SlotGroup, sites: Sequence[str], *, apart: bool = False) -> list[dict[str, Any]]:
        """Return the tensors that `Addition.apply` reads: of one slot, stacked, or with `apart` each for its rows."""
        own: list[dict[str, Any]] = []
        first, number = self._slots[group.members[0][0]], group.members[0][1]
        assert first is not None
        for site in sites:
            parts = first.added.get(site, {}).get(number, ())
            if group.grid is not None and apart:
                own.append({part: self._each(group, site, part) for part in parts})
                continue
            each = {part: self._part_tensors(group, site, part) for part in parts}
            if group.grid is None:
                own.append({part: tensors[0] for part, tensors in each.items()})
            else:
                own.append({part: torch.stack(tensors) for part, tensors in each.items()})
        return own

    def _each(self, group: _SlotGroup, site: str, part: str) -> Each:
        """Return a part of each member's addition for its rows; members side by side that read one tensor share it."""
        tensors: list[Tensor] = []
        sizes: list[int] = []
        last: object = None
        for i, number in group.members:
            slot = self._slots[i]
            assert slot is not None
            name = f"{site}.{slot.plan.keys[number]}.{part}"
            place = slot.places[name], slot.stored.get(name, name)
            if place == last:
                sizes[-1] += self._sizes[i]
            else:
                tensors.append(self.tensor(slot, name))
                sizes.append(self._sizes[i])
            last = place
        return Each(tensors, sizes)

    def _part_tensors(self, group: _SlotGroup, site: str, part: str) -> list[Tensor]:
        """Return a part of each member's addition at a site."""
        tensors = []
        for i, number in group.members:
            slot = self._slots[i]
            assert slot is not None
            tensors.append(self.tensor(slot, f"{site}.{slot.plan.keys[number]}.{part}"))
        return tensors

    def _linear_with_biases(self, x: Tensor, weight: str, biases: Sequence[str]) -> Tensor:
        """Return `x W' + b`, with one product for all segments and the biases of each, side by side."""
        each = [torch.cat([self.tensor(slot, name) for name in biases]) for slot in self._slots]
        if len(each) == 1:
            return multiply(self._stacks.frozen, x, weight, each[0])
        y = multiply(self._stacks.frozen, x, weight, None)
        if torch.is_grad_enabled():  # as in `norm`
            return torch.cat([part + bias for part, bias in zip(y.split(self._sizes), each, strict=True)])
        if not x.is_cuda:
            for part, bias in zip(y.split(self._sizes), each, strict=True):
                part += bias
            return y
        return y + torch.stack(each).index_select(0, self._segments_by_token(x.device))

    def _segments_by_token(self, device: torch.device) -> Tensor:
        if self._segment_of_token is None:
            self._segment_of_token = torch.from_numpy(np.repeat(np.arange(len(self._sizes)), self._sizes)).to(device)
        return self._segment_of_token

    def _by_slot(self, f: Callable[..., Tensor], x: Tensor, names: Sequence[str]) -> Tensor:
        """Apply `f(part, *tensors)` to each segment with its own tensors, or once to all if they are frozen."""
        if self._overridden.isdisjoint(names):
            return f(x, *(self._stacks.frozen[name] for name in names))
        if len(self._slots) == 1:
            return f(x, *(self.tensor(self._slots[0], name) for name in names))
        split = zip(self._slots, x.split(self._sizes), strict=True)
        return torch.cat([f(part, *(self.tensor(slot, name) for name in names)) for slot, part in split])


@dataclass(frozen=True)
class RouteLayer:
    """One layer of a route, with short names: its tensors are under `weights`, its additions under `site`."""

    route: Route
    weights: str
    site: str

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return layers.linear(self, x, name)

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return layers.attention(self, x, name)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.protocol.Layer`."""
        run = partial(self.route.norm, name=f"{self.weights}.{name}", epsilon=epsilon)
        out = run(x)
        if self.route.recompute and out is not x:  # its gradient keeps `x` in any case
            self.route.recompute.remember(out, self.route.recompute.run_again(run, x))
        return out

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return self.route.embed(ids, f"{self.weights}.{name}")

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return self.route.add(y, x, f"{self.site}.{site}")

    def activated(self, x: Tensor, name: str, activation: str) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return activated(self, x, name, activation)

    def finish(self, y: Tensor, x: Tensor, site: str, ending: Ending) -> Tensor:
        """See `encoder.protocol.Layer`."""
        return finish(self, y, x, site, ending)


@dataclass(frozen=True)
class _SlotGroup:
    """Segments whose additions run together, laid out as a grid; a single segment has no grid."""

    members: list[tuple[int, int]]
    """Index of each segment, and of the addition in its plan."""
    form: Addition
    """The arithmetic they share."""
    grid: Grid | None
