"""Which tasks' slots are in memory: a byte budget, least recently used out first. Knows no rows and no files.

A task is known from the moment it is put in; its slot is resident while there is room, and is loaded again from its
source when it is next needed. Loading happens outside the lock: who reads other slots does not wait for it. A slot that
is in use is never taken away; then the budget is overrun for as long as that lasts. It can also be loaded ahead of use.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from adapterbank.methods import Plan
from adapterbank.slots.stack import Stacks

Tensors = Mapping[str, np.ndarray]


@dataclass(eq=False)
class Known:
    """A task as it was put in; who has found one keeps to it, whatever is put in or removed meanwhile."""

    plan: Plan
    about: Any
    """What the owner wants to know of it."""
    source: Callable[[], Tensors] = field(repr=False)
    """Gives its tensors again."""
    slot: int | None = None
    bytes: int = 0
    users: int = 0
    gone: bool = False
    """Removed or replaced: its slot goes with its last user."""


class Residency:
    """The slots of tasks by name, over one `Stacks`."""

    def __init__(self, stacks: Stacks, budget: int | None = None) -> None:
        """Take the stacks that slots are put into, and how many bytes they may take; None for any number."""
        self.stacks, self.budget = stacks, budget
        self.lock = threading.RLock()
        """Held while stacks are changed or read."""
        self.loads = self.evictions = 0
        self.bytes = 0
        """Of all slots in memory, those that are gone but still used among them."""
        self._known: OrderedDict[str, Known] = OrderedDict()  # least recently used first
        self._names: dict[Known, str] = {}
        self._ahead: dict[Known, None] = {}  # loaded before they are used, and kept until they are

    @property
    def resident(self) -> list[str]:
        """Name the tasks whose slots are in memory, least recently used first."""
        with self.lock:
            return [name for name, known in self._known.items() if known.slot is not None]

    def find(self, name: str) -> Known | None:
        """Give the task of a name."""
        return self._known.get(name)

    def put(
        self, name: str, plan: Plan, tensors: Tensors, source: Callable[[], Tensors] | None = None, about: Any = None
    ) -> None:
        """Add a task, or replace the one of that name; `source` gives its tensors again, else they are kept."""
        known = Known(plan, about, source or (lambda: tensors))
        with self.lock:
            self._enter(known, tensors)
            old, self._known[name] = self._known.get(name), known
            self._names[known] = name
            self._known.move_to_end(name)
            if old:
                self._let_go(old)
            self._make_room(0)

    def remove(self, name: str) -> None:
        """Drop a task; rows that use it now are still answered."""
        with self.lock:
            self._let_go(self._known.pop(name))

    @contextmanager
    def using(self, tasks: Iterable[Known]) -> Iterator[dict[Known, int]]:
        """Hold the slots of these tasks in memory, and give their numbers."""
        held: list[Known] = []
        try:
            with self.lock:
                for known in dict.fromkeys(tasks):
                    known.users += 1
                    held.append(known)
                    self._ahead.pop(known, None)
                    if not known.gone:
                        self._known.move_to_end(self._names[known])
            for known in held:
                if known.slot is None:
                    self._load(known)
            yield {known: known.slot for known in held if known.slot is not None}
        finally:
            with self.lock:
                for known in held:
                    known.users -= 1
                    if known.gone and not known.users:
                        self._free(known)
                self._make_room(0)

    def within_budget(self, tasks: Iterable[Known]) -> Iterator[list[Known]]:
        """Cut a list of tasks into parts that fit into memory together."""
        part: list[Known] = []
        size = 0
        for known in tasks:
            if part and self.budget is not None and size + known.bytes > self.budget:
                yield part
                part, size = [], 0
            part.append(known)
            size += known.bytes
        if part:
            yield part

    def wants_loading(self, known: Known) -> bool:
        """Whether a slot is to be loaded ahead: not in memory, and not gone, when who uses it loads and drops it."""
        return known.slot is None and not known.gone

    def load_ahead(self, known: Known) -> None:
        """Load a slot before it is used, and keep it until it is, or until who wanted it says `leave`.

        All that is kept so takes half the budget at most, or is one; what finds no room is loaded by who uses it.
        """
        with self.lock:
            ahead = list(self._ahead)
            full = self.budget is not None and known.bytes + sum(one.bytes for one in ahead) > self.budget // 2
            if not self.wants_loading(known) or known in ahead or (ahead and full):
                return
            self._ahead[known] = None
            self._known.move_to_end(self._names[known])
        try:
            self._load(known, ahead=True)
        except BaseException:
            self.leave(known)
            raise

    def leave(self, known: Known) -> None:
        """Let a slot that was loaded ahead be dropped like any other; never waits."""
        self._ahead.pop(known, None)

    def _load(self, known: Known, ahead: bool = False) -> None:
        tensors = known.source()
        with self.lock:
            if known.slot is None and not (ahead and known.gone):  # else another thread was quicker
                self._enter(known, tensors)
                self.loads += 1

    def _enter(self, known: Known, tensors: Tensors) -> None:
        """Copy a slot in, after making room for it."""
        if not known.bytes:
            known.bytes = self.stacks.size(known.plan, {name: array.shape for name, array in tensors.items()})
        self._make_room(known.bytes)
        known.slot = self.stacks.put(known.plan, {name: torch.from_numpy(array) for name, array in tensors.items()})
        self.bytes += known.bytes

    def _make_room(self, need: int) -> None:
        """Take slots out that nobody uses, until `need` more bytes fit."""
        if self.budget is None:
            return
        for known in self._known.values():
            if self.bytes + need <= self.budget:
                break
            if known.slot is not None and not known.users and known not in self._ahead:
                self._free(known)
                self.evictions += 1

    def _let_go(self, known: Known) -> None:
        known.gone = True
        self.leave(known)
        self._names.pop(known, None)
        if not known.users:
            self._free(known)

    def _free(self, known: Known) -> None:
        if known.slot is not None:
            self.stacks.remove(known.slot)
            known.slot = None
            self.bytes -= known.bytes
            self.stacks.trim()
