"""A batch's choice of tensors: each row finds its own slot's, or the frozen ones. Knows nothing of tasks and losses.

The only place that knows a batch may hold rows of several slots. It answers the encoder's look-ups
(`encoder.forward.Slots`). Rows stand sorted by slot, in *segments*. Where only some segments differ the work is shared:
frozen tensors are used on all tokens at once, LayerNorms look their gains up by token, and adapters of one shape run as
one batched product over segments laid out side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.forward import PROJECTIONS, Frozen, Within
from adapterbank.encoder.packed import Grid
from adapterbank.methods import Adapter, Plan, roles
from adapterbank.slots.bottleneck import Each, bottleneck, parts
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
        self._parties: dict[frozenset[int], list[_Party]] = {}
        self._segment_of_token: Tensor | None = None

    def rows(self) -> Route:
        """Give the same choice for one vector a row instead of one a token."""
        other = Route(self._stacks, self.segments)
        other._entries, other._sizes = self._entries, [s.rows for s in self.segments]
        return other

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        return self._by_slot(F.linear, x, (f"{name}.weight", f"{name}.bias"))

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        if self._touched.isdisjoint(f"{name}.{part}.{leaf}" for part in PROJECTIONS for leaf in ("weight", "bias")):
            return Frozen(self._stacks.frozen).attention(x, name)
        return torch.cat([self.linear(x, f"{name}.{part}") for part in PROJECTIONS], -1)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.forward.Slots`."""
        weight, bias = f"{name}.weight", f"{name}.bias"

        def normalise(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
            return F.layer_norm(x, x.shape[-1:], gain, shift, epsilon)

        if torch.is_grad_enabled():  # a looked-up gain's gradient would be summed in bf16, and in any order
            return self._by_slot(normalise, x, (weight, bias))
        if len(self._held) > 1 and not self._touched.isdisjoint((weight, bias)):
            whose = self._tokens_segments(x.device)
            gains, shifts = (torch.stack([self.tensor(held, n) for held in self._held]) for n in (weight, bias))
            plain = F.layer_norm(x, x.shape[-1:], None, None, epsilon)
            return torch.addcmul(shifts.index_select(0, whose), plain, gains.index_select(0, whose))
        return self._by_slot(normalise, x, (weight, bias))

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
        members = frozenset(i for i, held in enumerate(self._held) if held and site in held.sites)
        if members not in self._parties:
            self._parties[members] = self._make_parties(sorted(members), y.device)
        split = list(y.split(self._sizes)) if len(self._held) > 1 else [y]
        inputs = list(x.split(self._sizes)) if len(self._held) > 1 else [x]
        for party in self._parties[members]:
            if party.grid is None:
                (i,) = party.members
                split[i] = bottleneck(split[i], inputs[i], party.adapter, self._parts(i, site, party.adapter))
            elif len(party.members) == len(self._held):  # everybody: no need to take the batch apart
                return self._together(y, x, site, party)
            else:
                mine_y, mine_x = (torch.cat([t[i] for i in party.members]) for t in (split, inputs))
                mine = self._together(mine_y, mine_x, site, party)
                for i, part in zip(party.members, mine.split([self._sizes[i] for i in party.members]), strict=True):
                    split[i] = part
        return torch.cat(split) if len(split) > 1 else split[0]

    def layer(self, weights: str, site: str) -> Within:
        """See `encoder.forward.Slots`."""
        return Within(self, weights, site)

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

    def _parts(self, segment: int, site: str, adapter: Adapter) -> dict[str, Tensor]:
        return {part: self.tensor(self._held[segment], f"{site}.adapter.{part}") for part in parts(adapter)}

    def _together(self, y: Tensor, x: Tensor, site: str, party: _Party) -> Tensor:
        """Run the adapters of several segments as one batched product."""
        assert party.grid is not None
        each = [self._parts(i, site, party.adapter) for i in party.members]
        if not (y.is_cuda or torch.is_grad_enabled() or party.adapter.inner_norm):
            sizes = [self._sizes[i] for i in party.members]
            ragged = {part: Each([one[part] for one in each], sizes) for part in each[0]}
            return bottleneck(y, x, party.adapter, ragged)
        tensors = {part: torch.stack([one[part] for one in each]) for part in each[0]}
        return party.grid.to_packed(bottleneck(party.grid.to_grid(y), party.grid.to_grid(x), party.adapter, tensors))

    def _make_parties(self, members: Sequence[int], device: torch.device) -> list[_Party]:
        """Find which segments' adapters can run together: same arithmetic, same size class, little padding."""
        alike: dict[Adapter, list[int]] = {}
        for i in members:
            held = self._held[i]
            assert held is not None
            assert held.plan.adapter is not None
            alike.setdefault(_form(held.plan.adapter), []).append(i)
        found = []
        for adapter, chosen in alike.items():
            sizes = [self._sizes[i] for i in chosen]
            if len(chosen) > 1 and len(sizes) * max(sizes) <= _WASTE * sum(sizes):
                found.append(_Party(chosen, adapter, Grid.of(np.array(sizes), device)))
            else:
                found += [_Party([i], adapter, None) for i in chosen]
        return found

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
class _Party:
    """Segments whose adapters run together, laid out as a grid; one alone without a grid."""

    members: list[int]
    adapter: Adapter
    grid: Grid | None


def _form(adapter: Adapter) -> Adapter:
    """Give what two adapters must share to run together: the arithmetic, not where they stand or their true size."""
    return replace(adapter, size=size_class(adapter.size), layers=(), sites=())
