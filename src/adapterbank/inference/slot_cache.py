"""The slot cache: keeps the slots of tasks in memory within a byte budget (LRU). Knows no rows and no files.

A task stays known after it is added. Its slot is resident while it fits into the budget, and is loaded again from its
source when it is needed. Loading happens outside the lock, so users of other slots do not wait for it. A slot can also
be loaded ahead of use.

A slot in use is never evicted. To keep the budget, a caller acquires all slots it needs at once and waits, first come
first served, until they fit beside those that other callers use. Slots that exceed the budget by themselves are used
alone.

A slot may stand on others, its bases, whose tensors it reads where they are. They are acquired with it, and stay in
memory as long as it does.
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
    """A task as it was added; a handle stays valid when its task is replaced or removed."""

    plan: Plan
    about: Any
    """Data of the owner, such as the engine's `Resident`."""
    source: Callable[[], Tensors] = field(repr=False)
    """Loads its tensors again."""
    bases: tuple[TaskHandle, ...] = field(default=(), repr=False)
    """What it stands on."""
    slot: int | None = None
    bytes: int = 0
    """Without its bases."""
    carries: int = 0
    """The slots in memory that stand on it."""
    users: int = 0
    removed: bool = False
    """Whether it was removed or replaced; its slot is freed after its last use."""

    @property
    def idle(self) -> bool:
        """Whether its slot may be freed."""
        return not self.users and not self.carries


class SlotCache:
    """The slots of tasks by name, over one `Stacks`."""

    def __init__(self, stacks: Stacks, budget: int | None = None) -> None:
        """Create a cache over `stacks`; `budget` is the most bytes of its slots, None for no limit."""
        self.stacks, self.budget = stacks, budget
        self.lock = threading.RLock()
        """Protects the cache and the stacks."""
        self.loads = self.evictions = 0
        self.bytes = 0
        """Bytes of all slots in memory, including removed ones that are still in use."""
        self._handles: OrderedDict[str, TaskHandle] = OrderedDict()  # least recently used first
        self._names: dict[TaskHandle, str] = {}
        self._ahead: dict[TaskHandle, None] = {}  # loaded ahead, and not used yet
        self._used = 0  # bytes of all handles in use, loaded or not
        self._queue: deque[object] = deque()  # callers that wait for memory, in order
        self._released = threading.Condition(self.lock)
        self._thread = threading.local()

    @property
    def resident(self) -> list[str]:
        """The names of the tasks whose slots are in memory; with a budget, least recently used first."""
        with self.lock:
            return [name for name, handle in self._handles.items() if handle.slot is not None]

    def find(self, name: str) -> TaskHandle | None:
        """Return the handle of a task, None if there is no such task."""
        return self._handles.get(name)

    def put(
        self,
        name: str,
        plan: Plan,
        tensors: Tensors,
        source: Callable[[], Tensors] | None = None,
        about: Any = None,
        bases: Sequence[TaskHandle] = (),
    ) -> None:
        """Add or replace a task that stands on `bases`; `source` loads its tensors again, by default from memory."""
        handle = TaskHandle(plan, about, source or (lambda: tensors), tuple(bases))
        with self.lock:
            handle.bytes = self.stacks.size(plan, {key: array.shape for key, array in tensors.items()})
            if self._could_fit(handle.bytes) and _are_loaded(handle.bases):  # otherwise it is loaded on use
                self._enter(handle, tensors)
            old, self._handles[name] = self._handles.get(name), handle
            self._names[handle] = name
            self._handles.move_to_end(name)
            if old:
                self._retire(old)
            self._make_room(0)

    def remove(self, name: str) -> None:
        """Remove a task; calls that use it now still complete."""
        with self.lock:
            self._retire(self._handles.pop(name))

    @contextmanager
    def using(self, tasks: Iterable[TaskHandle]) -> Iterator[dict[TaskHandle, int]]:
        """Keep the slots of these tasks in memory and return their numbers; wait until they fit into the budget.

        A thread that already uses slots does not wait, to avoid a deadlock; the budget may be exceeded then.
        """
        handles = with_bases(tasks)
        self._acquire(handles)
        try:
            for handle in handles:
                if handle.slot is None:
                    self._load(handle)
            yield {handle: handle.slot for handle in handles if handle.slot is not None}
        finally:
            self._release(handles)

    def within_budget(self, tasks: Iterable[TaskHandle]) -> Iterator[list[TaskHandle]]:
        """Split a list of tasks into parts that each fit into the budget."""
        if self.budget is None:
            yield list(tasks)
            return
        part: list[TaskHandle] = []
        size, held = 0, set[TaskHandle]()
        for handle in tasks:
            needed = {*with_bases([handle])}
            if part and size + _bytes_of(needed - held) > self.budget:
                yield part
                part, size, held = [], 0, set()
            part.append(handle)
            size += _bytes_of(needed - held)
            held |= needed
        if part:
            yield part

    def wants_loading(self, handle: TaskHandle) -> bool:
        """Return whether to load a slot ahead: it is not in memory, unlike its bases, and its task was not removed."""
        return handle.slot is None and not handle.removed and _are_loaded(handle.bases)

    def load_ahead(self, handle: TaskHandle) -> None:
        """Load a slot before it is used, and keep it until it is used, its memory is needed, or `leave` is called.

        Slots loaded ahead take at most half the budget, or are a single one. A slot that does not fit is loaded on use.
        """
        with self.lock:
            ahead = list(self._ahead)
            full = self.budget is not None and handle.bytes + sum(other.bytes for other in ahead) > self.budget // 2
            wanted = self.wants_loading(handle) and handle not in ahead
            if not wanted or (ahead and full) or not self._could_fit(handle.bytes):
                return
            self._ahead[handle] = None
            self._handles.move_to_end(self._names[handle])
        try:
            self._load(handle, ahead=True)
        except BaseException:
            self.leave(handle)
            raise

    def leave(self, handle: TaskHandle) -> None:
        """Allow a slot that was loaded ahead to be evicted like any other; never waits."""
        self._ahead.pop(handle, None)

    def _acquire(self, handles: Sequence[TaskHandle]) -> None:
        with self.lock:
            depth = getattr(self._thread, "depth", 0)
            if self.budget is not None and not depth and (self._queue or not self._fit(handles)):
                self._wait_for(handles)
            self._thread.depth = depth + 1
            if self._ahead:
                for handle in handles:
                    self._ahead.pop(handle, None)
            if self.budget is not None:  # otherwise nothing is evicted, and a call with many tasks starts sooner
                for handle in handles:
                    self._used += 0 if handle.users else handle.bytes
                    if not handle.removed:
                        self._handles.move_to_end(self._names[handle])
            for handle in handles:
                handle.users += 1

    def _release(self, handles: Sequence[TaskHandle]) -> None:
        with self.lock:
            self._thread.depth -= 1
            for handle in handles:
                handle.users -= 1
                if self.budget is not None and not handle.users:
                    self._used -= handle.bytes
                if handle.removed and handle.idle:
                    self._free(handle)
            self._make_room(0)
            if self._queue:
                self._released.notify_all()

    def _wait_for(self, handles: Sequence[TaskHandle]) -> None:
        """Wait until slots fit and no earlier caller waits; the first caller waits only for slots in use now."""
        ticket = object()
        self._queue.append(ticket)
        try:
            while self._queue[0] is not ticket or not self._fit(handles):
                self._released.wait()
        finally:
            self._queue.remove(ticket)
            self._released.notify_all()

    def _fit(self, handles: Iterable[TaskHandle]) -> bool:
        """Return whether slots fit beside those in use; slots of any size may be used alone."""
        if self.budget is None or not self._used:
            return True
        return self._used + sum(handle.bytes for handle in handles if not handle.users) <= self.budget

    def _load(self, handle: TaskHandle, ahead: bool = False) -> None:
        tensors = handle.source()
        with self.lock:
            if ahead and (handle.removed or not self._could_fit(0) or not _are_loaded(handle.bases)):
                self.leave(handle)
            elif handle.slot is None:  # otherwise another thread has loaded it
                self._enter(handle, tensors)
                self.loads += 1

    def _enter(self, handle: TaskHandle, tensors: Tensors) -> None:
        """Copy a slot into the stacks, after making room for it."""
        for base in handle.bases:
            base.carries += 1
        try:
            self._make_room(handle.bytes)
            under = [base.slot for base in handle.bases if base.slot is not None]
            arrays = {name: torch.from_numpy(array) for name, array in tensors.items()}
            handle.slot = self.stacks.put(handle.plan, arrays, *under)
        except BaseException:
            self._let_go(handle.bases)
            raise
        self.bytes += handle.bytes

    def _could_fit(self, need: int) -> bool:
        """Return whether `need` bytes fit beside the slots that are in use or loaded ahead."""
        if self.budget is None:
            return True
        return self._used + sum(handle.bytes for handle in list(self._ahead) if not handle.users) + need <= self.budget

    def _make_room(self, need: int) -> None:
        """Evict unused slots until `need` more bytes fit; slots that were loaded ahead are evicted last."""
        freed = True
        while freed and self.budget is not None and self.bytes + need > self.budget:
            freed = False  # another round only for what a slot stood on that this round evicted
            idle = (handle for handle in self._handles.values() if handle not in self._ahead)
            for handle in itertools.chain(idle, list(self._ahead)):
                if self.bytes + need <= self.budget:
                    break
                if handle.slot is not None and handle.idle:
                    freed = freed or bool(handle.bases)
                    self.leave(handle)
                    self._free(handle)
                    self.evictions += 1

    def _retire(self, handle: TaskHandle) -> None:
        """Mark a task as removed, and free its slot unless it is in use."""
        handle.removed = True
        self.leave(handle)
        self._names.pop(handle, None)
        if handle.idle:
            self._free(handle)

    def _free(self, handle: TaskHandle) -> None:
        if handle.slot is not None:
            self.stacks.remove(handle.slot)
            handle.slot = None
            self.bytes -= handle.bytes
            self._let_go(handle.bases)
            self.stacks.trim()

    def _let_go(self, bases: Iterable[TaskHandle]) -> None:
        """Release what a slot stood on that has left the memory."""
        for base in bases:
            base.carries -= 1
            if base.removed and base.idle:
                self._free(base)


def with_bases(tasks: Iterable[TaskHandle]) -> list[TaskHandle]:
    """Return tasks and all that they stand on, each once; a base comes before what stands on it."""
    found: dict[TaskHandle, None] = {}
    for task in tasks:
        found |= dict.fromkeys([*(with_bases(task.bases) if task.bases else ()), task])
    return list(found)


def _are_loaded(handles: Iterable[TaskHandle]) -> bool:
    return all(handle.slot is not None for handle in handles)


def _bytes_of(handles: Iterable[TaskHandle]) -> int:
    return sum(handle.bytes for handle in handles)
