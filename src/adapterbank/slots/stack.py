"""Slots, stacked: put in, take out, find again. Knows tensors by name and owner, and nothing of batches (`route`).

Each tensor that a slot brings lies in a *stack* of all slots' tensors of that name and shape. Adapters are stacked by
power-of-two size class, so that one wide task does not pad a thousand narrow ones; the padding is zeros and stays so.
A stack grows by doubling up to a limit, then another is begun: adding a task costs the same at any number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from adapterbank.methods import Plan, roles
from adapterbank.slots.bottleneck import site_names

Key = tuple[str, tuple[int, ...], int]
"""A stack: tensor name, (padded) shape, and a number where there are several."""

_LARGEST = 64
"""Entries of one stack: enough to share a product, few enough that growing never copies much."""


@dataclass
class _Stack:
    tensor: Tensor  # [capacity, *shape]
    owners: list[int | None]  # the slot of each entry, None where it is free


@dataclass(frozen=True)
class Slot:
    """What is resident of one task."""

    plan: Plan
    places: dict[str, tuple[Key, int]]
    """Tensor name -> its stack and entry."""
    shapes: dict[str, tuple[int, ...]]
    """True shapes, before padding."""
    sites: frozenset[str]
    """Where it has adapters."""


class Stacks:
    """All resident slots over one set of frozen tensors."""

    def __init__(self, frozen: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32) -> None:
        """Take the frozen tensors in the type the pass computes in; `dtype` is what slots are kept in, heads apart."""
        self.frozen, self.dtype = frozen, dtype
        self._stacks: dict[Key, _Stack] = {}
        self._slots: dict[int, Slot] = {}
        self._next = 0
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}  # of the stack that grows now
        self._free: dict[tuple[str, tuple[int, ...]], list[tuple[Key, int]]] = {}

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(iter(self.frozen.values())).device

    def __len__(self) -> int:
        """Count the resident slots."""
        return len(self._slots)

    def plan(self, slot: int) -> Plan:
        """Give the plan a slot was put in with."""
        return self._slots[slot].plan

    def put(self, plan: Plan, tensors: Mapping[str, Tensor]) -> int:
        """Copy a slot's tensors in and give its number."""
        slot, self._next = self._next, self._next + 1
        places: dict[str, tuple[Key, int]] = {}
        for name, tensor in tensors.items():
            places[name] = self._enter(name, _padded(name, tuple(tensor.shape), plan), slot, tensor)
        sites = frozenset(site_names(plan.adapter)) if plan.adapter else frozenset()
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._slots[slot] = Slot(plan, places, shapes, sites)
        return slot

    def take(self, slot: int, of: Mapping[Key, Tensor] | None = None) -> dict[str, Tensor]:
        """Copy a slot's tensors out, at their true sizes; `of` are other tensors stacked alike (an optimiser's)."""
        held = self._slots[slot]
        return {name: self._view(held, name, of).detach().float().cpu().clone() for name in held.places}

    def write(self, slot: int, tensors: Mapping[str, Tensor], into: Mapping[Key, Tensor] | None = None) -> None:
        """Overwrite a resident slot's tensors in place; `into` as `of` in `take`."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._view(self._slots[slot], name, into).copy_(tensor)

    def remove(self, slot: int) -> None:
        """Free a slot's entries for the next one."""
        for key, entry in self._slots.pop(slot).places.values():
            self._stacks[key].owners[entry] = None
            self._free.setdefault(key[:2], []).append((key, entry))

    def trainable(self) -> dict[Key, Tensor]:
        """Give every stack as a leaf that takes gradients; call again after each `put`."""
        for stack in self._stacks.values():
            if not stack.tensor.requires_grad:
                stack.tensor = stack.tensor[: len(stack.owners)].clone().requires_grad_()
        return {key: stack.tensor for key, stack in self._stacks.items()}

    def owners(self, key: Key) -> list[int | None]:
        """Say which slot each entry of a stack belongs to."""
        return self._stacks[key].owners

    def slot(self, number: int) -> Slot:
        """Give what is resident of a slot."""
        return self._slots[number]

    def stack(self, key: Key) -> Tensor:
        """Give a whole stack `[entries, *shape]`."""
        return self._stacks[key].tensor

    def _view(self, held: Slot, name: str, of: Mapping[Key, Tensor] | None = None) -> Tensor:
        key, entry = held.places[name]
        stack = self._stacks[key].tensor if of is None else of[key]
        return stack[entry][tuple(slice(n) for n in held.shapes[name])]

    def _enter(self, name: str, shape: tuple[int, ...], slot: int, tensor: Tensor) -> tuple[Key, int]:
        """Copy a tensor into a free entry of a stack of its name and shape."""
        key, entry = self._free_entry(name, shape)
        stack = self._stacks[key]
        with torch.no_grad():
            if entry >= len(stack.tensor):
                stack.tensor = torch.cat([stack.tensor, torch.zeros_like(stack.tensor)])
            stack.tensor[entry].zero_()
            stack.tensor[entry][tuple(slice(n) for n in tensor.shape)] = tensor.to(self.device, stack.tensor.dtype)
        stack.owners[entry] = slot
        return key, entry

    def _free_entry(self, name: str, shape: tuple[int, ...]) -> tuple[Key, int]:
        if free := self._free.get((name, shape)):
            return free.pop()
        number = self._numbers.setdefault((name, shape), 0)
        if (held := self._stacks.get((name, shape, number))) and len(held.owners) == _LARGEST:
            number = self._numbers[name, shape] = number + 1
        key = (name, shape, number)
        if key not in self._stacks:
            dtype = torch.float32 if "head" in roles(name) else self.dtype
            self._stacks[key] = _Stack(torch.zeros(1, *shape, dtype=dtype, device=self.device), [])
        self._stacks[key].owners.append(None)
        return key, len(self._stacks[key].owners) - 1


def size_class(size: int) -> int:
    """Give the width an adapter is padded to: the next power of two."""
    return 1 << (size - 1).bit_length()


def _padded(name: str, shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Widen an adapter tensor's bottleneck dimensions to its size class, the next power of two."""
    if plan.adapter is None or ".adapter." not in name or ".adapter.norm." in name:
        return shape
    wide = size_class(plan.adapter.size)
    if ".up." in name:
        return (shape[0], wide) if len(shape) == 2 else shape
    return (wide, shape[1] if ".down." in name else wide) if len(shape) == 2 else (wide,)
