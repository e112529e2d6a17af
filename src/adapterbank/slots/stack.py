"""Slots, stacked: put in, take out, find again. Knows tensors by name and owner, and nothing of batches (`route`).

A slot's tensors stand end to end in a row of a *block*, beside the rows of all slots that bring the same tensors. So
one copy moves a slot, one fused operation updates all slots that train, and the tensors of one name in all rows of a
block are one view `[rows, *shape]`. A slot has up to four rows: its head's tensors are kept apart from the rest, which
may be computed in a lower precision, and what weight decay touches apart from what it spares. Adapters and low-rank
parts are widened with zeros to a power of two, so that near sizes share blocks and one wide task does not widen a
thousand narrow ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from adapterbank.methods import roles
from adapterbank.slots.plan import Plan, decays
from adapterbank.slots.sharing import program_form, size_class

LARGEST = 64
"""Rows of one block: enough to share a product, few enough that growing never copies much."""
_ALIGNED = 64
"""Tensors begin at multiples of this many numbers: matrix kernels want 16-byte borders, whatever the type."""


@dataclass(frozen=True, eq=False)
class RowLayout:
    """What a row of a block holds, and where."""

    shapes: Mapping[str, tuple[int, ...]]
    """(Padded) shape of each tensor, in the order they stand in."""
    head: bool
    decays: bool

    @cached_property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """First and last-plus-one number of each tensor."""
        found, start = {}, 0
        for name, shape in self.shapes.items():
            size = _size(shape)
            found[name] = (start, start + size)
            start += -(-size // _ALIGNED) * _ALIGNED
        return found

    @cached_property
    def width(self) -> int:
        """Numbers in a row, at least one more than its tensors have: the last is always 0."""
        return -(-(max(end for _, end in self.ranges.values()) + 1) // _ALIGNED) * _ALIGNED

    @cached_property
    def numbers(self) -> int:
        """Numbers that belong to tensors."""
        return sum(end - start for start, end in self.ranges.values())

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Return each tensor of `[n, width]` rows as a view `[n, *shape]`."""
        return {name: rows[:, start:end].unflatten(1, self.shapes[name]) for name, (start, end) in self.ranges.items()}

    def fill(self, row: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors of true size into an otherwise zero row `[width]`."""
        for name, (start, end) in self.ranges.items():
            found = tensors[name]
            row[start:end].view(self.shapes[name])[tuple(slice(n) for n in found.shape)] = found


@dataclass(eq=False)
class Block:
    """Rows of one layout."""

    layout: RowLayout
    tensor: Tensor
    """[capacity, width], the numbers themselves."""
    owners: list[int | None] = field(default_factory=list)
    """The slot of each row, None where it is free."""
    used: Tensor = field(init=False, repr=False)
    """What the pass reads: the numbers, or their copy in a lower precision while they train."""
    views: dict[str, Tensor] = field(init=False, repr=False)
    """Each tensor of `used`, `[capacity, *shape]`; leaves that take gradients while they train."""
    each: tuple[Tensor, ...] = field(init=False, repr=False)
    """The rows of `used`, one by one."""
    words: tuple[Tensor, ...] = field(init=False, repr=False)
    """The same memory as whole numbers of four bytes: so rows of any type are copied together, and fastest on a GPU."""

    def __post_init__(self) -> None:
        """Look at the numbers as they are."""
        self.show(self.tensor)

    def show(self, used: Tensor, *, leaves: bool = False) -> None:
        """Let the pass read `used`."""
        self.used, self.views, self.each = used, self.layout.views(used), used.unbind(0)
        self.words = used.detach().view(torch.int32).unbind(0)
        if leaves:
            self.views = {name: view.detach().requires_grad_() for name, view in self.views.items()}

    def refresh(self) -> None:
        """Bring the copy in a lower precision up to date."""
        if self.used is not self.tensor:
            self.used.copy_(self.tensor)


@dataclass(frozen=True)
class Slot:
    """What is resident of one task."""

    plan: Plan
    places: dict[str, tuple[Block, int]]
    """Tensor name -> its block and row."""
    shapes: dict[str, tuple[int, ...]]
    """True shapes, before padding."""
    added: Mapping[str, Mapping[int, tuple[str, ...]]]
    """Site -> number of each addition that acts there -> its parts."""
    rows: tuple[tuple[Block, int], ...]
    """Its rows, each once."""
    family: int
    """Slots of one number differ in sizes, label counts and numbers alone."""

    @cached_property
    def layouts(self) -> tuple[RowLayout, ...]:
        """The layouts of its rows."""
        return tuple(block.layout for block, _ in self.rows)

    def acting(self, sites: Sequence[str]) -> tuple[int, ...]:
        """Return the numbers of the additions that act at any of some sites, in the order of the plan."""
        if len(sites) == 1:
            return tuple(self.added.get(sites[0], ()))
        return tuple(sorted({number for site in sites for number in self.added.get(site, ())}))


class Stacks:
    """All resident slots over one set of frozen tensors."""

    def __init__(self, frozen: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32) -> None:
        """Take the frozen tensors in the type the pass computes in; `dtype` is what slots are kept in, heads apart."""
        self.frozen, self.dtype = frozen, dtype
        self._slots: dict[int, Slot] = {}
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
        """All resident slots."""
        return list(self._slots)

    def plan(self, slot: int) -> Plan:
        """Return the plan a slot was put in with."""
        return self._slots[slot].plan

    def slot(self, number: int) -> Slot:
        """Return what is resident of a slot."""
        return self._slots[number]

    def put(self, plan: Plan, tensors: Mapping[str, Tensor]) -> int:
        """Copy a slot's tensors in and give its number."""
        slot, self._next = self._next, self._next + 1
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        rows: list[tuple[Block, int]] = []
        try:
            for layout in self.layouts(plan, shapes):
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
        places = {name: place for place in rows for name in place[0].layout.shapes}
        family = self._families.setdefault(program_form(plan, tensors), len(self._families))
        own = {name: places[name] for name in tensors}
        self._slots[slot] = Slot(plan, own, shapes, _added(plan, tensors), tuple(rows), family)
        return slot

    def layouts(self, plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> list[RowLayout]:
        """Return the rows that tensors of these shapes are laid out in; equal ones are the same object."""
        parts: dict[tuple[bool, bool], dict[str, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            parts.setdefault(("head" in roles(name), decays(name)), {})[name] = _padded(name, shape, plan)
        found = []
        for (head, decaying), part in parts.items():
            key = (head, decaying, frozenset(part.items()))  # in whatever order they were given
            found.append(self._layouts.setdefault(key, RowLayout(part, head, decaying)))
        return found

    def size(self, plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the bytes that a slot with tensors of these shapes takes."""
        kept = torch.finfo(self.dtype).bits // 8
        return sum(layout.width * (4 if layout.head else kept) for layout in self.layouts(plan, shapes))

    def take(self, slot: int, of: Mapping[Block, Tensor] | None = None) -> dict[str, Tensor]:
        """Copy a slot's tensors out, at their true sizes; `of` are other rows laid out alike (an optimiser's)."""
        held, found = self._slots[slot], {}
        for block, entry in held.rows:
            row = (block.tensor if of is None else of[block])[entry].detach().float().cpu()
            for name, (start, end) in block.layout.ranges.items():
                view = row[start:end].view(block.layout.shapes[name])
                found[name] = view[tuple(slice(n) for n in held.shapes[name])].clone()
        return {name: found[name] for name in held.places}

    def write(self, slot: int, tensors: Mapping[str, Tensor], into: Mapping[Block, Tensor] | None = None) -> None:
        """Overwrite a resident slot's tensors in place; `into` as `of` in `take`."""
        held = self._slots[slot]
        with torch.no_grad():
            for name, tensor in tensors.items():
                block, entry = held.places[name]
                start, end = block.layout.ranges[name]
                row = (block.tensor if into is None else into[block])[entry]
                row[start:end].view(block.layout.shapes[name])[tuple(slice(n) for n in tensor.shape)] = tensor.to(
                    row.device, row.dtype
                )
            for block, _ in held.rows if into is None else ():
                block.refresh()

    def remove(self, slot: int) -> None:
        """Free a slot's rows for the next one."""
        self._release(self._slots.pop(slot).rows)

    def trim(self) -> None:
        """Return the memory of blocks back that nobody is in any more."""
        for layout, blocks in self._blocks.items():
            empty = [block for block in blocks if not any(owner is not None for owner in block.owners)]
            if empty:
                self._blocks[layout] = [block for block in blocks if block not in empty]
                self._free[layout] = [place for place in self._free.get(layout, []) if place[0] not in empty]

    def learn(self, compute: torch.dtype) -> None:
        """Let every block take gradients, seen by the pass in the type it computes in; call again after each `put`."""
        for block in self.blocks:
            if next(iter(block.views.values())).requires_grad and len(block.used) == len(block.owners):
                continue
            block.tensor = block.tensor[: len(block.owners)].clone()
            same = block.layout.head or compute == self.dtype
            block.show(block.tensor if same else block.tensor.to(compute), leaves=True)

    def _release(self, rows: Iterable[tuple[Block, int]]) -> None:
        for block, row in rows:
            block.owners[row] = None
            self._free.setdefault(block.layout, []).append((block, row))

    def _free_row(self, layout: RowLayout) -> tuple[Block, int]:
        """Find a free row, or make one: in the last block of the layout, which grows by doubling, or in a new one."""
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
        block.owners.append(None)
        return block, len(block.owners) - 1


def _added(plan: Plan, names: Iterable[str]) -> dict[str, dict[int, tuple[str, ...]]]:
    """Return which additions act at each site, with their parts, as the names of a slot's tensors say."""
    found: dict[str, dict[int, tuple[str, ...]]] = {}
    for name in names:
        if place := plan.split(name):
            site, number, part = place
            there = found.setdefault(site, {})
            there[number] = (*there.get(number, ()), part)
    return {site: dict(sorted(there.items())) for site, there in found.items()}


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _padded(name: str, shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Return the shape that a tensor is padded to: an addition's to its size class, all others as they are."""
    place = plan.split(name)
    if place is None:
        return shape
    addition = plan.additions[place[1]]
    return addition.padded(place[2], shape, size_class(addition.size))
