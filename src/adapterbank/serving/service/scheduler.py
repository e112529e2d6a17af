"""Chooses the rows of the next batch: a queue bounded in tokens, fair between tasks. Knows no tasks, threads or HTTP.

The rows of one request for one task are a `RowGroup`. It counts from its arrival, with an estimate of its tokens, and
can be taken once its rows are tokenised and their true sizes known. Batches are taken by deficit round robin (Shreedhar
and Varghese 1995): each task in turn may send its share of the batch, so a task that floods the queue delays a row of
another by no more than the batches in progress. A task may queue as many tokens as are still free (the dynamic
threshold of Choudhury and Hahne 1998): one task alone gets half of the queue, and there is space left for the next.

Times are seconds of any clock the caller chooses. Nothing here locks; the caller does.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

LONGEST_WAIT = 60
"""The longest pause, in seconds, that a refused caller is asked for."""
_MEMORY = 0.8
"""The weight of the earlier measurements when a new batch is measured."""


class QueueFull(Exception):
    """The queue has no space; `retry_after` is an estimate of the seconds until it has."""

    def __init__(self, why: str, retry_after: int) -> None:
        super().__init__(f"{why}; try again in {retry_after} s.")
        self.retry_after = retry_after


@dataclass(eq=False)
class RowGroup:
    """Rows of one task from one request."""

    task: Hashable
    value: Any
    """The owner's data."""
    counted: int
    """Tokens that it counts for; an estimate at first."""
    arrived: float = 0.0
    """When it arrived."""
    sizes: Sequence[int] = ()
    """Tokens of each row, once they are known."""
    taken: int = 0
    """Number of rows that have been taken, in order."""
    queued: bool = False
    """Whether it is queued: it has entered and was not cancelled."""
    first: bool = False
    """Whether it entered an empty queue, which accepts any size."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of a group, taken for a batch."""

    group: RowGroup
    start: int
    stop: int
    tokens: int

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.stop - self.start


@dataclass(eq=False)
class _TaskQueue:
    """The groups of one task that are ready, and the tokens it may still send in this turn."""

    groups: deque[RowGroup] = field(default_factory=deque)
    credit: int = 0


class Scheduler:
    """Takes groups of rows and returns batches."""

    def __init__(self, *, budget: int, bound: int, wait: float, lanes: int = 1) -> None:
        """Limit a batch to `budget` tokens, the queue to `bound` tokens, and the wait of a ready row to `wait` seconds.

        Rows wait so that others can join their batch: a batch is due when it is full or its oldest row has waited that
        long. `lanes` is the number of batches computed at once, from which the time to drain the queue follows.
        """
        if budget < 1 or bound < 1 or wait < 0 or lanes < 1:
            raise ValueError(
                f"budget {budget}, bound {bound}, lanes {lanes} must be positive, wait {wait} not negative"
            )
        self.budget, self.bound, self.wait, self.lanes = budget, bound, wait, lanes
        self.waiting = 0
        """Tokens in the queue."""
        self.ready = 0
        """Tokens of rows that can be taken."""
        self.pace = 0.0
        """Recent tokens per second of one lane; 0 before the first batch."""
        self.counts: dict[Hashable, int] = {}
        """Tokens in the queue by task."""
        self._queues: OrderedDict[Hashable, _TaskQueue] = OrderedDict()  # the first has the next turn

    def enter(self, groups: Sequence[RowGroup], now: float) -> None:
        """Queue the groups of a request, all or none; raise `QueueFull`. An empty queue accepts any size."""
        first = not self.waiting
        if not first:
            self._check(groups)
        for group in groups:
            group.arrived, group.queued, group.first = now, True, first
            self._count(group.task, group.counted)

    def make_ready(self, group: RowGroup, sizes: Sequence[int]) -> None:
        """Make a group available now that the sizes of its rows are known; raise `QueueFull` if they do not fit."""
        if not group.queued:
            return
        self._count(group.task, -group.counted)
        total, group.counted = sum(sizes), 0
        if self.waiting and self.waiting + total > self.bound and not group.first:
            group.queued = False
            raise self._full()
        group.sizes, group.counted = sizes, total
        self._count(group.task, total)
        if sizes:
            self.ready += total
            self._queues.setdefault(group.task, _TaskQueue()).groups.append(group)

    def cancel(self, group: RowGroup) -> None:
        """Remove a group if it is queued; rows that are already in a batch are not affected."""
        if not group.queued:
            return
        group.queued = False
        self._count(group.task, -group.counted)
        queue = self._queues.get(group.task)
        if queue and group in queue.groups:
            queue.groups.remove(group)
            self.ready -= group.counted
            if not queue.groups:
                del self._queues[group.task]
        group.counted = 0

    @property
    def tasks(self) -> list[Hashable]:
        """The tasks that have rows to take, in the order of their turns."""
        return list(self._queues)

    @property
    def full(self) -> bool:
        """Whether there are enough rows for a full batch."""
        return self.ready >= self.budget

    def due_in(self, now: float) -> float | None:
        """Return the seconds until a batch is due: 0 for now, None if no row is ready."""
        if not self._queues:
            return None
        if self.full:
            return 0.0
        oldest = min(queue.groups[0].arrived for queue in self._queues.values())
        return max(0.0, oldest + self.wait - now)

    def take(self) -> list[Part]:
        """Return the next batch, whether it is due or not."""
        batch: list[Part] = []
        space, passed = self.budget, 0
        while self._queues:
            task, queue = next(iter(self._queues.items()))
            share = max(1, self.budget // len(self._queues))
            if passed >= len(self._queues):
                self._skip_turns(share)
                passed = 0
            if queue.credit <= 0:
                queue.credit += share
            passed = passed + 1 if queue.credit <= 0 else 0
            while queue.groups and queue.credit > 0:
                part = self._part(queue.groups[0], queue.credit, space, at_least_one=not batch)
                if not part:
                    return batch  # it is still this task's turn: the next batch begins with it
                batch.append(part)
                space -= part.tokens
                queue.credit -= part.tokens
                self._sent(part)
                if part.stop == len(part.group.sizes):
                    queue.groups.popleft()
            if not queue.groups:
                del self._queues[task]
            else:
                self._queues.move_to_end(task)
            if space <= 0:
                break
        return batch

    def _skip_turns(self, share: int) -> None:
        """Credit all tasks at once for the turns in which none of them could send."""
        turns = min(-queue.credit // share for queue in self._queues.values())
        for queue in self._queues.values():
            queue.credit += max(0, turns) * share

    def computed(self, tokens: int, seconds: float) -> None:
        """Record how fast a batch was computed."""
        if seconds > 0:
            pace = tokens / seconds
            self.pace = _MEMORY * self.pace + (1 - _MEMORY) * pace if self.pace else pace

    def _check(self, groups: Sequence[RowGroup]) -> None:
        free = self.bound - self.waiting
        wanted: Counter[Hashable] = Counter()
        for group in groups:
            wanted[group.task] += group.counted
        if wanted.total() > free:
            raise self._full()
        for task, tokens in wanted.items():
            if (own := self.counts.get(task, 0)) and own + tokens > free:
                raise self._full(own)

    def _full(self, own: int = 0) -> QueueFull:
        """Return the error; `own` is the tokens of one task if those are the reason."""
        seconds = self.waiting / (self.pace * self.lanes) if self.pace else 1.0
        why = f"{self.waiting} of {self.bound} tokens in the queue are taken"
        if own:
            why += f", {own} of them by this task, which may take as many as are free"
        return QueueFull(why, min(LONGEST_WAIT, max(1, math.ceil(seconds))))

    def _count(self, task: Hashable, tokens: int) -> None:
        self.waiting += tokens
        self.counts[task] = self.counts.get(task, 0) + tokens
        if not self.counts[task]:
            del self.counts[task]

    @staticmethod
    def _part(group: RowGroup, credit: int, space: int, *, at_least_one: bool) -> Part:
        """Take as many of a group's next rows as credit and space allow; if none fits, one if `at_least_one`."""
        stop, tokens = group.taken, 0
        for size in islice(group.sizes, group.taken, None):
            if tokens >= credit or (tokens + size > space and (tokens or not at_least_one)):
                break
            stop, tokens = stop + 1, tokens + size
        return Part(group, group.taken, stop, tokens)

    def _sent(self, part: Part) -> None:
        group = part.group
        group.taken = part.stop
        group.counted -= part.tokens
        self.ready -= part.tokens
        self._count(group.task, -part.tokens)
