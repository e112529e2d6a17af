"""Which tasks' slots are in memory: a byte budget, least recently used out first. Knows no rows and no files.

A task is known from the moment it is put in; its slot is resident while there is room, and is loaded again from its
source when it is next needed. Loading happens outside the lock: who reads other slots does not wait for it. A slot that
is in use is never taken away; then the budget is overrun for as long as that lasts.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from adapterbank.methods import Plan
from adapterbank.slots.stack import Stacks

Tensors = Mapping[str, np.ndarray]


@dataclass(eq=False)
class _Known:
    plan: Plan
    source: Callable[[], Tensors]
    slot: int | None = None
    bytes: int = 0
    users: int = 0
    gone: bool = False  # removed or replaced; its slot goes with its last user


class Residency:
    """The slots of tasks by name, over one `Stacks`."""

    def __init__(self, stacks: Stacks, budget: int | None = None) -> None:
        """Take the stacks that slots are put into, and how many bytes they may take; None for any number."""
        self.stacks, self.budget = stacks, budget
        self.lock = threading.RLock()
        """Held while stacks are changed or read."""
        self.loads = self.evictions = 0
        self._known: OrderedDict[str, _Known] = OrderedDict()  # least recently used first

    @property
    def bytes(self) -> int:
        """Give the bytes of all resident slots."""
        return sum(known.bytes for known in self._known.values())

    @property
    def resident(self) -> list[str]:
        """Name the tasks whose slots are in memory, least recently used first."""
        with self.lock:
            return [name for name, known in self._known.items() if known.slot is not None]

    def put(self, name: str, plan: Plan, tensors: Tensors, source: Callable[[], Tensors] | None = None) -> None:
        """Add a task, or replace the one of that name; `source` gives its tensors again, else they are kept."""
        known = _Known(plan, source or (lambda: tensors))
        with self.lock:
            self._enter(known, tensors)
            old, self._known[name] = self._known.get(name), known
            self._known.move_to_end(name)
            if old:
                self._let_go(old)
            self._make_room(0)

    def remove(self, name: str) -> None:
        """Drop a task; rows that use it now are still answered."""
        with self.lock:
            self._let_go(self._known.pop(name))

    @contextmanager
    def using(self, names: Iterable[str]) -> Iterator[dict[str, int]]:
        """Hold the slots of these tasks in memory, and give their numbers."""
        held: dict[str, _Known] = {}
        try:
            for name in dict.fromkeys(names):
                with self.lock:
                    held[name] = self._known[name]
                    held[name].users += 1
                    self._known.move_to_end(name)
                if held[name].slot is None:
                    self._load(held[name])
            yield {name: known.slot for name, known in held.items() if known.slot is not None}
        finally:
            with self.lock:
                for known in held.values():
                    known.users -= 1
                    if known.gone and not known.users:
                        self._free(known)
                self._make_room(0)

    def within_budget(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Cut a list of tasks into parts that fit into memory together."""
        part: list[str] = []
        size = 0
        for name in names:
            if part and self.budget is not None and size + self._known[name].bytes > self.budget:
                yield part
                part, size = [], 0
            part.append(name)
            size += self._known[name].bytes
        if part:
            yield part

    def _load(self, known: _Known) -> None:
        tensors = known.source()
        with self.lock:
            if known.slot is None:  # else another thread was quicker
                self._enter(known, tensors)
                self.loads += 1

    def _enter(self, known: _Known, tensors: Tensors) -> None:
        """Copy a slot in, after making room for it."""
        if not known.bytes:
            known.bytes = self.stacks.size(known.plan, {name: array.shape for name, array in tensors.items()})
        self._make_room(known.bytes)
        known.slot = self.stacks.put(known.plan, {name: torch.from_numpy(array) for name, array in tensors.items()})

    def _make_room(self, need: int) -> None:
        """Take slots out that nobody uses, until `need` more bytes fit."""
        if self.budget is None:
            return
        used = sum(known.bytes for known in self._known.values() if known.slot is not None)
        for known in self._known.values():
            if used + need <= self.budget:
                break
            if known.slot is not None and not known.users:
                self._free(known)
                used -= known.bytes
                self.evictions += 1

    def _let_go(self, known: _Known) -> None:
        known.gone = True
        if not known.users:
            self._free(known)

    def _free(self, known: _Known) -> None:
        if known.slot is not None:
            self.stacks.remove(known.slot)
            known.slot = None
            self.stacks.trim()
