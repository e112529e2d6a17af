"""Stacks: the tensors of all resident slots, by slot and name. Knows nothing of batches (`routing`).

A slot's tensors are stored end to end in one row of a *block*, beside the rows of all slots that have the same tensors.
So one copy moves a slot, one fused operation updates all slots that train, and the tensors of one name in all rows of a
block form one view `[rows, *shape]`. A slot has up to four rows: the head is separate from the rest, which may be
computed in a lower precision, and tensors with weight decay are separate from those without. Adapters and low-rank
parts are padded with zeros to a power of two, so that similar sizes share blocks and one wide task does not widen a
thousand narrow ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adapterbank.encoder.kernels.forms import Form, Scales
from adapterbank.methods import MAX_LAYERS, roles
from adapterbank.slots.plan import Plan, decays, first_trained_layer
from adapterbank.slots.sharing import graph_form

LARGEST = 64
"""Most rows of one block: enough to share a product, few enough that growing a block copies little."""
_ALIGNED = 64
"""Tensors start at multiples of this many numbers: matrix kernels need 16-byte alignment, whatever the dtype."""


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The tensors of a block's row, and their positions."""

    shapes: Mapping[str, tuple[int, ...]]
    """Padded shape of each tensor, in the order in which they are stored."""
    head: bool
    decays: bool
    frozen: bool = False
    """Whether its slots only carry others, and never train."""

    @cached_property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """Start and end of each tensor within the row."""
        ranges, start = {}, 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            ranges[name] = (start, start + size)
            start += -(-size // _ALIGNED) * _ALIGNED
        return ranges

    @cached_property
    def width(self) -> int:
        """Numbers in a row, at least one more than its tensors need: the last is always 0."""
        return -(-(max(end for _, end in self.ranges.values()) + 1) // _ALIGNED) * _ALIGNED

    @cached_property
    def numbers(self) -> int:
        """Numbers that belong to tensors, without alignment."""
        return sum(end - start for start, end in self.ranges.values())

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Return each tensor of `[n, width]` rows as a view `[n, *shape]`."""
        return {name: rows[:, start:end].unflatten(1, self.shapes[name]) for name, (start, end) in self.ranges.items()}

    def fill(self, row: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors at their true sizes into a row of zeros, `[width]`."""
        for name, (start, end) in self.ranges.items():
            tensor = tensors[name]
            row[start:end].view(self.shapes[name])[tuple(slice(n) for n in tensor.shape)] = tensor


@dataclass(eq=False)
class Block:
    """Rows of one layout."""

    layout: RowLayout
    tensor: Tensor
    """`[capacity, width]`, the numbers at their stored precision."""
    owners: list[int | None] = field(default_factory=list)
    """The slot of each row; None if the row is free."""
    used: Tensor = field(init=False, repr=False)
    """What the pass reads: `tensor`, or its copy in a lower precision during training."""
    views: dict[str, Tensor] = field(init=False, repr=False)
    """Each tensor of `used`, `[capacity, *shape]`; leaves with gradients during training."""

    def __post_init__(self) -> None:
        """Let the pass read `tensor` itself."""
        self.show(self.tensor)

    def show(self, used: Tensor, *, leaves: bool = False) -> None:
        """Let the pass read `used`."""
        self.used, self.views = used, self.layout.views(used)
        if leaves:
            self.views = {name: view.detach().requires_grad_() for name, view in self.views.items()}

    def refresh(self) -> None:
        """Update the copy in a lower precision."""
        if self.used is not self.tensor:
            self.used.copy_(self.tensor)


@dataclass(frozen=True)
class Slot:
    """One resident slot."""

    plan: Plan
    """What acts on its rows: what the slot that it stands on adds, then its own additions."""
    places: dict[str, tuple[Block, int]]
    """Block and row of each tensor, by name; those of the slot that it stands on are not copied."""
    shapes: dict[str, tuple[int, ...]]
    """True shapes of its own tensors, before padding."""
    added: Mapping[str, Mapping[int, tuple[str, ...]]]
    """Parts of each addition, by site and by the addition's index in the plan."""
    rows: tuple[tuple[Block, int], ...]
    """Its own rows, without duplicates."""
    family: int
    """Number of the graph family: its slots differ only in sizes, label counts and numbers."""
    own: Plan
    """The plan as it was put."""
    names: Mapping[str, str]
    """The name in `places` of each of its own tensors."""
    under: tuple[tuple[Block, int], ...] = ()
    """The rows of what it stands on, without those of heads."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """The name that a tensor of `places` has in its block, where that is another one."""

    @cached_property
    def read(self) -> tuple[tuple[Block, int], ...]:
        """The rows that have its tensors; where two have one of the same name, the later one."""
        return self.under + self.rows

    @cached_property
    def layouts(self) -> tuple[RowLayout, ...]:
        """The layouts of these rows."""
        return tuple(block.layout for block, _ in self.read)

    @cached_property
    def forms(self) -> tuple[Form | Scales | None, ...]:
        """How the kernels compute each of its additions."""
        return tuple(addition.form for addition in self.plan.additions)

    @cached_property
    def in_place(self) -> bool:
        """Whether the kernels know everything that it adds and changes."""
        narrow = all(not isinstance(form, Form) or form.fits for form in self.forms)
        return not self.alone and None not in self.forms and narrow

    @cached_property
    def alone(self) -> bool:
        """See `Plan`."""
        return self.plan.alone

    @cached_property
    def by_site(self) -> bool:
        """Whether the width of an addition differs from site to site."""
        return any(addition.by_site for addition in self.plan.additions)

    @cached_property
    def heads(self) -> tuple[str, ...]:
        """The names of its head's tensors."""
        return tuple(name for name in self.places if "head" in roles(name))

    @cached_property
    def lowest(self) -> int:
        """The lowest layer that it changes; at least the number of layers if that is only the head."""
        return first_trained_layer(self.places, MAX_LAYERS)

    def acting(self, sites: Sequence[str]) -> tuple[int, ...]:
        """Return the indices of the additions that act at any of some sites, in the order of the plan."""
        if len(sites) == 1:
            return tuple(self.added.get(sites[0], ()))
        return tuple(sorted({number for site in sites for number in self.added.get(site, ())}))


class Stacks:
    """All resident slots over one set of frozen tensors."""

    def __init__(self, frozen: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32) -> None:
        """Create empty stacks; `frozen` has the pass's dtype, `dtype` is that of the slots except their heads."""
        self.frozen, self.dtype = frozen, dtype
        self._slots: dict[int, Slot] = {}
        self.moves = 0
        """Counts the blocks that moved in memory."""
        self._kept: OrderedDict[int, tuple[int, dict[Any, Any]]] = OrderedDict()
        self._next = 0
        self._families: dict[Hashable, int] = {}
        self._layouts: dict[tuple[object, ...], RowLayout] = {}
        self._blocks: dict[RowLayout, list[Block]] = {}
        self._free: dict[RowLayout, list[tuple[Block, int]]] = {}

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(iter(self.frozen.values())).device

    @property
    def blocks(self) -> list[Block]:
        """All blocks."""
        return [block for blocks in self._blocks.values() for block in blocks]

    def __len__(self) -> int:
        """Count the resident slots."""
        return len(self._slots)

    @property
    def numbers(self) -> list[int]:
        """The numbers of all resident slots."""
        return list(self._slots)

    def plan(self, slot: int) -> Plan:
        """Return a slot's plan, without what it stands on."""
        return self._slots[slot].own

    def slot(self, number: int) -> Slot:
        """Return a slot by its number."""
        return self._slots[number]

    def kept(self, number: int) -> dict[Any, Any]:
        """Return what was looked up for batches of one slot alone; it is kept for the slots used last."""
        moves, found = self._kept.pop(number, (self.moves, {}))
        found = found if moves == self.moves else {}
        self._kept[number] = self.moves, found
        if len(self._kept) > LARGEST:
            self._kept.popitem(last=False)
        return found

    def put(self, plan: Plan, tensors: Mapping[str, Tensor], *bases: int, frozen: bool = False) -> int:
        """Copy a slot's tensors into the stacks and return its number.

        It stands on the slots `bases`, which must stay as long. Of one, the additions act before its own, and all else
        but the head takes the place of the encoder's, unless the new slot has its own. If its plan fuses, there may be
        several, of which it reads only the additions that it fuses. A `frozen` slot never trains.
        """
        slot, self._next = self._next, self._next + 1
        unders = [self._slots[base] for base in bases]
        below, own = [under.plan for under in unders], plan
        names = {name: own.name_on(below, name) for name in tensors}
        tensors = {names[name]: tensor for name, tensor in tensors.items()}
        plan = own.on(*below) if below else own
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        rows: list[tuple[Block, int]] = []
        try:
            for layout in self.layouts(plan, shapes, frozen=frozen):
                numbers = torch.zeros(layout.width)
                layout.fill(numbers, tensors)
                block, row = self._free_row(layout)
                block.owners[row] = slot
                rows.append((block, row))
                with torch.no_grad():
                    block.tensor[row].copy_(numbers)
                    block.refresh()
        except BaseException:
            self._release(rows)
            raise
        places, stored = _carried(own, unders)
        found = {name: place for place in rows for name in place[0].layout.shapes}
        places |= {name: found[name] for name in tensors}
        family = self._families.setdefault(graph_form(plan, places), len(self._families))
        read = tuple(row for under in unders for row in under.read if not row[0].layout.head)
        added = _added(plan, places)
        self._slots[slot] = Slot(plan, places, shapes, added, tuple(rows), family, own, names, read, stored)
        return slot

    def view(self, slot: int, plan: Plan, names: Mapping[str, str]) -> int:
        """Number a slot whose tensors are some of another one's: `names` maps its names to those of the other.

        `remove` it before the other one.
        """
        source, number, self._next = self._slots[slot], self._next, self._next + 1
        places = {name: source.places[own] for name, own in names.items()}
        shapes = {name: source.shapes[own] for name, own in names.items()}
        same, added = {name: name for name in names}, _added(plan, names)
        found = {name: source.stored.get(own, own) for name, own in names.items()}
        stored = {name: other for name, other in found.items() if other != name}
        self._slots[number] = Slot(plan, places, shapes, added, (), source.family, plan, same, stored=stored)
        return number

    def layouts(self, plan: Plan, shapes: Mapping[str, tuple[int, ...]], *, frozen: bool = False) -> list[RowLayout]:
        """Return the row layouts for tensors of these shapes; equal layouts are the same object."""
        parts: dict[tuple[bool, bool], dict[str, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            parts.setdefault(("head" in roles(name), decays(name)), {})[name] = _padded(name, shape, plan)
        layouts = []
        for (head, decaying), part in parts.items():
            key = (head, decaying, frozen, frozenset(part.items()))  # whatever their order
            layouts.append(self._layouts.setdefault(key, RowLayout(part, head, decaying, frozen)))
        return layouts

    def size(self, plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the bytes that a slot with tensors of these shapes takes."""
        kept = torch.finfo(self.dtype).bits // 8
        return sum(layout.width * (4 if layout.head else kept) for layout in self.layouts(plan, shapes))

    def take(self, slot: int, of: Mapping[Block, Tensor] | None = None) -> dict[str, Tensor]:
        """Return copies of a slot's tensors at their true sizes; `of` has other rows of that layout (moments)."""
        source, tensors = self._slots[slot], {}
        for block, entry in source.rows:
            row = (block.tensor if of is None else of[block])[entry].detach().float().cpu()
            for name, (start, end) in block.layout.ranges.items():
                view = row[start:end].view(block.layout.shapes[name])
                tensors[name] = view[tuple(slice(n) for n in source.shapes[name])].clone()
        return {name: tensors[place] for name, place in source.names.items()}

    def write(self, slot: int, tensors: Mapping[str, Tensor], into: Mapping[Block, Tensor] | None = None) -> None:
        """Overwrite a resident slot's tensors in place; `into` is like `of` in `take`."""
        target = self._slots[slot]
        with torch.no_grad():
            for name, tensor in ((target.names[own], tensor) for own, tensor in tensors.items()):
                block, entry = target.places[name]
                start, end = block.layout.ranges[name]
                row = (block.tensor if into is None else into[block])[entry]
                row[start:end].view(block.layout.shapes[name])[tuple(slice(n) for n in tensor.shape)] = tensor.to(
                    row.device, row.dtype
                )
            for block, _ in target.rows if into is None else ():
                block.refresh()

    def remove(self, slot: int) -> None:
        """Free a slot's rows for the next one."""
        self._kept.pop(slot, None)
        self._release(self._slots.pop(slot).rows)

    def trim(self) -> None:
        """Free the memory of blocks that hold no slot."""
        for layout, blocks in self._blocks.items():
            empty = [block for block in blocks if not any(owner is not None for owner in block.owners)]
            if empty:
                self._blocks[layout] = [block for block in blocks if block not in empty]
                self._free[layout] = [place for place in self._free.get(layout, []) if place[0] not in empty]

    def require_gradients(self, compute: torch.dtype) -> None:
        """Make the tensors of all that trains leaves in the pass's dtype `compute`; call again after each `put`."""
        for block in self.blocks:
            if block.layout.frozen:
                block.show(block.tensor if block.layout.head or compute == self.dtype else block.tensor.to(compute))
                continue
            if next(iter(block.views.values())).requires_grad and len(block.used) == len(block.owners):
                continue
            block.tensor = block.tensor[: len(block.owners)].clone()
            same = block.layout.head or compute == self.dtype
            block.show(block.tensor if same else block.tensor.to(compute), leaves=True)
            self.moves += 1

    def _release(self, rows: Iterable[tuple[Block, int]]) -> None:
        for block, row in rows:
            block.owners[row] = None
            self._free.setdefault(block.layout, []).append((block, row))

    def _free_row(self, layout: RowLayout) -> tuple[Block, int]:
        """Return a free row, or add one to the layout's last block, which grows by doubling, or to a new block."""
        if free := self._free.get(layout):
            return free.pop()
        blocks = self._blocks.setdefault(layout, [])
        if not blocks or len(blocks[-1].owners) == LARGEST:
            dtype = torch.float32 if layout.head else self.dtype
            blocks.append(Block(layout, torch.zeros(1, layout.width, dtype=dtype, device=self.device)))
        block = blocks[-1]
        if len(block.owners) == len(block.tensor):
            block.tensor = torch.cat([block.tensor, torch.zeros_like(block.tensor)])
            block.show(block.tensor)
            self.moves += 1
        block.owners.append(None)
        return block, len(block.owners) - 1


def _carried(own: Plan, unders: Sequence[Slot]) -> tuple[dict[str, tuple[Block, int]], dict[str, str]]:
    """Return the places of what a slot reads of those that it stands on, and the names there where they differ."""
    places: dict[str, tuple[Block, int]] = {}
    stored: dict[str, str] = {}
    for number, under in enumerate(unders):
        for theirs, place in under.places.items():
            if name := own.name_of([one.plan for one in unders], number, theirs):
                places[name], kept = place, under.stored.get(theirs, theirs)
                stored |= {name: kept} if kept != name else {}
    return places, stored


def _added(plan: Plan, names: Iterable[str]) -> dict[str, dict[int, tuple[str, ...]]]:
    """Return the additions that act at each site, with their parts, from the names of a slot's tensors."""
    added: dict[str, dict[int, tuple[str, ...]]] = {}
    for name in names:
        if place := plan.split(name):
            site, number, part = place
            parts = added.setdefault(site, {})
            parts[number] = (*parts.get(number, ()), part)
    return {site: dict(sorted(parts.items())) for site, parts in added.items()}


def _padded(name: str, shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Return a tensor's padded shape: additions are padded to their size class, other tensors are not padded."""
    place = plan.split(name)
    if place is None:
        return shape
    addition = plan.additions[place[1]]
    return addition.padded(place[2], shape, addition.at(place[0]).rounded().size)
