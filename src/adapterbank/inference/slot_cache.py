"""Which tasks' slots are in memory: a byte budget, least recently used out first. Knows no rows and no files.

A task is known from the moment it is put in; its slot is resident while there is room, and is loaded again from its
source when it is next needed. Loading happens outside the lock: who reads other slots does not wait for it. A slot can
also be loaded ahead of use.

A slot that is in use is never taken away. So that the budget holds all the same, whoever wants slots gets them all at
once and waits, first come first served, until they fit beside those that others use. Slots that take more than the
budget by themselves are used alone.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from adapterbank.slots.plan import Plan
from adapterbank.slots.stack import Stacks

Tensors = Mapping[str, np.ndarray]


@dataclass(eq=False)
class TaskHandle:
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


class SlotCache:
    """The slots of tasks by name, over one `Stacks`."""

    def __init__(self, stacks: Stacks, budget: int | None = None) -> None:
        """Take the stacks that slots are put into, and how many bytes they may take; None for any number."""
        self.stacks, self.budget = stacks, budget
        self.lock = threading.RLock()
        """Held while stacks are changed or read."""
        self.loads = self.evictions = 0
        self.bytes = 0
        """Of all slots in memory, those that are gone but still used among them."""
        self._known: OrderedDict[str, TaskHandle] = OrderedDict()  # least recently used first
        self._names: dict[TaskHandle, str] = {}
        self._ahead: dict[TaskHandle, None] = {}  # loaded before they are used, and kept until they are
        self._used = 0  # bytes of all that have users, in memory or about to be
        self._line: deque[object] = deque()  # who waits for room, the first first
        self._left = threading.Condition(self.lock)
        self._mine = threading.local()

    @property
    def resident(self) -> list[str]:
        """Name the tasks whose slots are in memory, least recently used first."""
        with self.lock:
            return [name for name, known in self._known.items() if known.slot is not None]

    def find(self, name: str) -> TaskHandle | None:
        """Return the task of a name."""
        return self._known.get(name)

    def put(
        self, name: str, plan: Plan, tensors: Tensors, source: Callable[[], Tensors] | None = None, about: Any = None
    ) -> None:
        """Add a task, or replace the one of that name; `source` gives its tensors again, else they are kept."""
        known = TaskHandle(plan, about, source or (lambda: tensors))
        with self.lock:
            known.bytes = self.stacks.size(plan, {key: array.shape for key, array in tensors.items()})
            if self._could_fit(known.bytes):  # else it is loaded when it is used
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
    def using(self, tasks: Iterable[TaskHandle]) -> Iterator[dict[TaskHandle, int]]:
        """Hold the slots of these tasks in memory, and give their numbers; waits while others use too much.

        A thread that holds some already does not wait for more, which could be for ever; then the budget is overrun.
        """
        held = list(dict.fromkeys(tasks))
        self._take(held)
        try:
            for known in held:
                if known.slot is None:
                    self._load(known)
            yield {known: known.slot for known in held if known.slot is not None}
        finally:
            self._give_back(held)

    def within_budget(self, tasks: Iterable[TaskHandle]) -> Iterator[list[TaskHandle]]:
        """Cut a list of tasks into parts that fit into memory together."""
        part: list[TaskHandle] = []
        size = 0
        for known in tasks:
            if part and self.budget is not None and size + known.bytes > self.budget:
                yield part
                part, size = [], 0
            part.append(known)
            size += known.bytes
        if part:
            yield part

    def wants_loading(self, known: TaskHandle) -> bool:
        """Whether a slot is to be loaded ahead: not in memory, and not gone, when who uses it loads and drops it."""
        return known.slot is None and not known.gone

    def load_ahead(self, known: TaskHandle) -> None:
        """Load a slot before it is used, and keep it until it is, or its room is needed, or `leave` is said.

        All that is kept so takes half the budget at most, or is one; what finds no room is loaded by who uses it.
        """
        with self.lock:
            ahead = list(self._ahead)
            full = self.budget is not None and known.bytes + sum(one.bytes for one in ahead) > self.budget // 2
            wanted = self.wants_loading(known) and known not in ahead
            if not wanted or (ahead and full) or not self._could_fit(known.bytes):
                return
            self._ahead[known] = None
            self._known.move_to_end(self._names[known])
        try:
            self._load(known, ahead=True)
        except BaseException:
            self.leave(known)
            raise

    def leave(self, known: TaskHandle) -> None:
        """Let a slot that was loaded ahead be dropped like any other; never waits."""
        self._ahead.pop(known, None)

    def _take(self, held: Sequence[TaskHandle]) -> None:
        with self.lock:
            depth = getattr(self._mine, "depth", 0)
            if self.budget is not None and not depth and (self._line or not self._fit(held)):
                self._wait_for(held)
            self._mine.depth = depth + 1
            for known in held:
                self._used += 0 if known.users else known.bytes
                known.users += 1
                self._ahead.pop(known, None)
                if not known.gone:
                    self._known.move_to_end(self._names[known])

    def _give_back(self, held: Sequence[TaskHandle]) -> None:
        with self.lock:
            self._mine.depth -= 1
            for known in held:
                known.users -= 1
                self._used -= 0 if known.users else known.bytes
                if known.gone and not known.users:
                    self._free(known)
            self._make_room(0)
            if self._line:
                self._left.notify_all()

    def _wait_for(self, held: Sequence[TaskHandle]) -> None:
        """Wait until slots fit and nobody is before us: whoever is first waits for what is in use now, no longer."""
        me = object()
        self._line.append(me)
        try:
            while self._line[0] is not me or not self._fit(held):
                self._left.wait()
        finally:
            self._line.remove(me)
            self._left.notify_all()

    def _fit(self, held: Iterable[TaskHandle]) -> bool:
        """Whether slots may be used beside those that are; whatever it takes may be used alone."""
        if self.budget is None or not self._used:
            return True
        return self._used + sum(known.bytes for known in held if not known.users) <= self.budget

    def _load(self, known: TaskHandle, ahead: bool = False) -> None:
        tensors = known.source()
        with self.lock:
            if ahead and (known.gone or not self._could_fit(0)):
                self.leave(known)
            elif known.slot is None:  # else another thread was quicker
                self._enter(known, tensors)
                self.loads += 1

    def _enter(self, known: TaskHandle, tensors: Tensors) -> None:
        """Copy a slot in, after making room for it."""
        self._make_room(known.bytes)
        known.slot = self.stacks.put(known.plan, {name: torch.from_numpy(array) for name, array in tensors.items()})
        self.bytes += known.bytes

    def _could_fit(self, need: int) -> bool:
        """Whether `need` bytes could fit beside what is used, and what was loaded ahead."""
        if self.budget is None:
            return True
        return self._used + sum(one.bytes for one in list(self._ahead) if not one.users) + need <= self.budget

    def _make_room(self, need: int) -> None:
        """Take slots out that nobody uses until `need` more bytes fit; those that were loaded ahead go last."""
        if self.budget is None or self.bytes + need <= self.budget:
            return
        idle = (known for known in self._known.values() if known not in self._ahead)
        for known in itertools.chain(idle, list(self._ahead)):
            if self.bytes + need <= self.budget:
                break
            if known.slot is not None and not known.users:
                self.leave(known)
                self._free(known)
                self.evictions += 1

    def _let_go(self, known: TaskHandle) -> None:
        known.gone = True
        self.leave(known)
        self._names.pop(known, None)
        if not known.users:
            self._free(known)

    def _free(self, known: TaskHandle) -> None:
        if known.slot is not None:
            self.stacks.remove(known.slot)
            known.slot = None
            self.bytes -= known.bytes
            self.stacks.trim()
