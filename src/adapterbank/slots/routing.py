"""A batch's choice of tensors: each row finds its own slot's, or the frozen ones. Knows nothing of tasks and losses.

The only place that knows a batch may hold rows of several slots. It answers the encoder's look-ups
(`encoder.forward.Slots`). Rows stand sorted by slot, in *segments*. Where only some segments differ the work is shared:
frozen tensors are used on all tokens at once, LayerNorms and biases are looked up by token, and adapters or low-rank
parts of one shape run as one batched product over segments laid out side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.batch import Grid
from adapterbank.encoder.forward import PROJECTIONS, Frozen
from adapterbank.methods import Adapter, Lora, Plan, roles
from adapterbank.slots.additions import lora as low_rank
from adapterbank.slots.additions.bottleneck import Each, bottleneck, parts
from adapterbank.slots.stack import Block, Slot, Stacks, size_class

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
        self._sites = frozenset().union(*(held.sites for held in self._held if held))
        self._entries: dict[tuple[Block, str], Sequence[Tensor]] = {}
        self._sizes = [s.tokens for s in segments]
        self._parties: dict[tuple[Callable[[Plan], Any], frozenset[int]], list[_SlotGroup]] = {}
        self._segment_of_token: Tensor | None = None

    def rows(self) -> Route:
        """Give the same choice for one vector a row instead of one a token."""
        other = Route(self._stacks, self.segments)
        other._entries, other._sizes = self._entries, [s.rows for s in self.segments]
        return other

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        weight, bias = f"{name}.weight", f"{name}.bias"
        if bias in self._touched and weight not in self._touched:
            return self._shifted(x, self._stacks.frozen[weight], [bias])
        return self._by_slot(F.linear, x, (weight, bias) if bias in self._stacks.frozen else (weight,))

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
        weight, bias = f"{name}.weight", f"{name}.bias"
        if weight not in self._stacks.frozen:
            return x
        names = (weight, bias) if bias in self._stacks.frozen else (weight,)

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

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        if site not in self._sites:
            return y

        in_place = not (y.is_cuda or torch.is_grad_enabled())  # no weights need to be copied side by side

        def run(y: Tensor, x: Tensor, party: _SlotGroup) -> Tensor:
            names = {part: f"{site}.adapter.{part}" for part in parts(party.form)}
            if y.dim() == 2 and party.grid:
                sizes = [self._sizes[i] for i in party.members]
                each = {part: Each(self._each(party, name), sizes) for part, name in names.items()}
                return bottleneck(y, x, party.form, each)
            return bottleneck(y, x, party.form, {part: self._stacked(party, name) for part, name in names.items()})

        members = frozenset(i for i, held in enumerate(self._held) if held and site in held.sites)
        return self._in_parties(
            y, x, members, _adapter_form, run, in_place=lambda adapter: in_place and not adapter.inner_norm
        )

    def lift(self, y: Tensor, x: Tensor, modules: Sequence[str]) -> Tensor:
        """Add what slots' low-rank parts give to the outputs of linear layers, which stand side by side in `y`."""
        names = [f"{module}.lora.{leaf}" for module in modules for leaf in ("a", "b")]
        if self._touched.isdisjoint(names):
            return y

        def run(y: Tensor, x: Tensor, party: _SlotGroup) -> Tensor:
            held = self._held[party.members[0]]
            mine = {name: self._stacked(party, name) for name in names if held and name in held.places}
            found = low_rank.joined(mine, modules)
            return low_rank.apply(y, x, *found, party.form.scale) if found else y

        members = frozenset(i for i, held in enumerate(self._held) if held and not held.places.keys().isdisjoint(names))
        return self._in_parties(y, x, members, _lora_form, run)

    def layer(self, weights: str, site: str) -> RouteLayer:
        """See `encoder.forward.Slots`."""
        return RouteLayer(self, weights, site)

    def tensor(self, held: Slot | None, name: str) -> Tensor:
        """Give one slot's tensor of a name, padded, or the frozen one."""
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
        """Give each segment's plan and head tensors."""
        return [
            (held.plan, {n: self.tensor(held, n) for n in held.places if "head" in roles(n)}) if held else None
            for held in self._held
        ]

    def _stacked(self, party: _SlotGroup, name: str) -> Tensor:
        """Give a tensor of a party's one member, or of all of them, stacked."""
        each = self._each(party, name)
        return torch.stack(each) if party.grid else each[0]

    def _each(self, party: _SlotGroup, name: str) -> list[Tensor]:
        return [self.tensor(self._held[i], name) for i in party.members]

    def _in_parties(
        self,
        y: Tensor,
        x: Tensor,
        members: frozenset[int],
        form: Callable[[Plan], Any],
        run: Callable[[Tensor, Tensor, _SlotGroup], Tensor],
        in_place: Callable[[Any], bool] = lambda form: False,
    ) -> Tensor:
        """Give `run(y, x, party)` for these segments, `y` for the others; those of one form run together if it pays.

        A party is laid out side by side for that, `[members, n, hidden]`, but for forms that run `in_place`.
        """
        if (form, members) not in self._parties:
            self._parties[form, members] = self._make_parties(sorted(members), form, y.device)

        def together(y: Tensor, x: Tensor, party: _SlotGroup, grid: Grid) -> Tensor:
            if in_place(party.form):
                return run(y, x, party)
            return grid.to_packed(run(grid.to_grid(y), grid.to_grid(x), party))

        split = list(y.split(self._sizes)) if len(self._held) > 1 else [y]
        inputs = list(x.split(self._sizes)) if len(self._held) > 1 else [x]
        for party in self._parties[form, members]:
            if party.grid is None:
                (i,) = party.members
                split[i] = run(split[i], inputs[i], party)
            elif len(party.members) == len(self._held):  # everybody: no need to take the batch apart
                return together(y, x, party, party.grid)
            else:
                mine_y, mine_x = (torch.cat([t[i] for i in party.members]) for t in (split, inputs))
                mine = together(mine_y, mine_x, party, party.grid)
                for i, part in zip(party.members, mine.split([self._sizes[i] for i in party.members]), strict=True):
                    split[i] = part
        return torch.cat(split) if len(split) > 1 else split[0]

    def _make_parties(
        self, members: Sequence[int], form: Callable[[Plan], Any], device: torch.device
    ) -> list[_SlotGroup]:
        """Find which segments can run together: same arithmetic, same size class, little padding."""
        alike: dict[Any, list[int]] = {}
        for i in members:
            held = self._held[i]
            assert held is not None
            alike.setdefault(form(held.plan), []).append(i)
        found = []
        for one, chosen in alike.items():
            sizes = [self._sizes[i] for i in chosen]
            if len(chosen) > 1 and len(sizes) * max(sizes) <= _WASTE * sum(sizes):
                found.append(_SlotGroup(chosen, one, Grid.of(np.array(sizes), device)))
            else:
                found += [_SlotGroup([i], one, None) for i in chosen]
        return found

    def _shifted(self, x: Tensor, weight: Tensor, biases: Sequence[str]) -> Tensor:
        """Give `x W' + b` with one product for all segments and each one's own biases, side by side."""
        each = [torch.cat([self.tensor(held, name) for name in biases]) for held in self._held]
        if len(each) == 1:
            return F.linear(x, weight, each[0])
        y = F.linear(x, weight)
        if torch.is_grad_enabled():  # as in `norm`
            return torch.cat([part + bias for part, bias in zip(y.split(self._sizes), each, strict=True)])
        return y + torch.stack(each).index_select(0, self._tokens_segments(x.device))

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
        return self.route.lift(self.route.linear(x, f"{self.weights}.{name}"), x, [f"{self.site}.{name}"])

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Layer`."""
        y = self.route.attention(x, f"{self.weights}.{name}")
        return self.route.lift(y, x, [f"{self.site}.{name}.{part}" for part in PROJECTIONS])

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
    """Segments that run together, laid out as a grid; one alone without a grid."""

    members: list[int]
    form: Any
    """The shape of what they add: an `Adapter` or a `Lora`."""
    grid: Grid | None


def _adapter_form(plan: Plan) -> Adapter | None:
    """Give what two adapters must share to run together: the arithmetic, not where they stand or their true size."""
    return replace(plan.adapter, size=size_class(plan.adapter.size), layers=(), sites=()) if plan.adapter else None


def _lora_form(plan: Plan) -> Lora | None:
    """Give what two slots' low-rank parts must share to run together: their scale and which linear layers have any."""
    return replace(plan.lora.widened(size_class(plan.lora.rank)), layers=()) if plan.lora else None
