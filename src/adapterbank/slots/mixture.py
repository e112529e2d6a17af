"""Mixtures: several copies of each addition while a run trains, their mean afterwards (AdaMix, Wang et al. 2022).

In memory the copies are further additions of one slot (`adapter`, `adapter-2`, …), so that optimiser and saved states
need not know of them. A step computes its rows twice. For each of the two passes, one copy of every module at every
site is drawn for all rows; an adapter's down- and up-projection are two modules and drawn independently, as in the
paper. The mean of the copies is a plain slot: it is scored on dev, and saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from adapterbank.draws import RandomStream
from adapterbank.slots.plan import Plan
from adapterbank.slots.stack import Stacks

PASSES = 2
"""How often a step computes each row; the outputs of two draws are compared."""


@dataclass(frozen=True)
class Mixture:
    """A plan and the number of copies of its additions; 1 for a run without a mixture."""

    plan: Plan
    """The plan of what is saved, with one copy."""
    copies: int = 1

    @cached_property
    def whole(self) -> Plan:
        """The plan of the slot in memory, with all copies, one after the other."""
        return replace(self.plan, additions=self.plan.additions * self.copies)

    @property
    def passes(self) -> int:
        """How often a step computes each row."""
        return PASSES if self.copies > 1 else 1

    def copies_of(self, name: str) -> list[str]:
        """Return the names of a tensor's copies, of which the first is its own; a shared tensor has no other."""
        place = self.plan.split(name)
        if place is None:
            return [name]
        site, addition, part = place
        return [f"{site}.{key}.{part}" for key in self.whole.keys[addition :: len(self.plan.additions)]]

    def names(self, whole: Iterable[str]) -> list[str]:
        """Return the names that remain of those of all copies: the shared ones, and those of the first copies."""
        first = len(self.plan.additions)
        return [name for name in whole if (place := self.whole.split(name)) is None or place[1] < first]

    def merge(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean of the copies of each tensor; without copies, the tensors themselves."""
        if self.copies == 1:
            return tensors
        merged = {}
        for name in self.names(tensors):
            each = [tensors[own] for own in self.copies_of(name)]
            merged[name] = torch.stack(each).mean(0) if len(each) > 1 else each[0]
        return merged

    def spread(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a plan with one copy as those of every copy."""
        return {own: tensor for name, tensor in tensors.items() for own in self.copies_of(name)}

    def draw(self, names: Iterable[str], seed: int, step: int) -> list[dict[str, str]]:
        """Return for each pass the copy that stands for each of `names`; a function of seed, step and site alone."""
        passes: list[dict[str, str]] = [{} for _ in range(PASSES)]
        drawn: dict[str, list[int]] = {}
        for name in names:
            copies, module = self.copies_of(name), name.removesuffix(".weight").removesuffix(".bias")
            if module not in drawn:
                drawn[module] = RandomStream(seed, "mix", step, module).integers(PASSES, len(copies)).tolist()
            for chosen, number in zip(passes, drawn[module], strict=True):
                chosen[name] = copies[number]
        return passes

    @contextmanager
    def slots(self, stacks: Stacks, slot: int, *, seed: int = 0, step: int | None = None) -> Iterator[tuple[int, ...]]:
        """Yield the slot of each pass of a step, or without a step one that uses the first copies alone."""
        if self.copies == 1:
            yield (slot,)
            return
        names = self.names(stacks.slot(slot).places)
        passes = [{name: name for name in names}] if step is None else self.draw(names, seed, step)
        views = tuple(stacks.view(slot, self.plan, chosen) for chosen in passes)
        try:
            yield views
        finally:
            for view in views:
                stacks.remove(view)
