"""Which rows go through the encoder next: a queue bounded in tokens, fair between tasks. Knows no tasks, threads, HTTP.

A request's rows of one task are a `Parcel`. It is counted from the moment it comes, by a guess at its tokens, and may
be taken once its rows are tokenised and their true sizes known. Batches are taken by deficit round robin (Shreedhar and
Varghese 1995): each task in turn may send its share of the batch, so a task that floods the queue delays another's row
by no more than the batches under way. A task may hold as many tokens as are still free (the dynamic threshold of
Choudhury and Hahne 1998): one task alone gets half of the queue, and there is room left for the next.

Times are seconds of any clock that the caller likes. Nothing here locks: the caller does.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

LONGEST_WAIT = 60
"""Seconds after which a refused caller is asked to come again, at most."""
_MEMORY = 0.8
"""How much of the measured pace is kept when a new batch is measured."""


class Full(Exception):
    """The queue takes no more; `retry_after` is a guess at the seconds until it does."""

    def __init__(self, why: str, retry_after: int) -> None:
        super().__init__(f"{why}; come again in {retry_after} s.")
        self.retry_after = retry_after


@dataclass(eq=False)
class Parcel:
    """Rows of one task that came together."""

    task: Hashable
    value: Any
    """What the owner keeps with it."""
    counted: int
    """Tokens that it counts for: a guess at first."""
    since: float = 0.0
    """When it came."""
    sizes: Sequence[int] = ()
    """Tokens of each row, once they are known."""
    taken: int = 0
    """How many rows have been taken, in their order."""
    inside: bool = False
    """Whether it has come, and has not been cancelled."""
    first: bool = False
    """Whether it came into an empty queue, which takes any."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a parcel that follow each other, taken for a batch."""

    parcel: Parcel
    start: int
    stop: int
    tokens: int

    def __len__(self) -> int:
        """Count the rows."""
        return self.stop - self.start


@dataclass(eq=False)
class _Line:
    """The parcels of one task that are ready, and how many tokens it may still send in this turn."""

    parcels: deque[Parcel] = field(default_factory=deque)
    credit: int = 0


class Scheduler:
    """Parcels in, batches out."""

    def __init__(self, *, budget: int, bound: int, wait: float, lanes: int = 1) -> None:
        """Give batches of at most `budget` tokens, hold at most `bound`, let no ready row wait longer than `wait`.

        Waiting is for company: a batch that is full, or whose oldest row has waited that long, is due. `lanes` is how
        many batches are computed at once, which tells how fast the queue drains.
        """
        if budget < 1 or bound < 1 or wait < 0 or lanes < 1:
            raise ValueError(
                f"budget {budget}, bound {bound}, lanes {lanes} must be positive, wait {wait} not negative"
            )
        self.budget, self.bound, self.wait, self.lanes = budget, bound, wait, lanes
        self.waiting = 0
        """Tokens that are counted."""
        self.ready = 0
        """Tokens that could be taken."""
        self.pace = 0.0
        """Tokens a second that a lane has computed lately; 0 before the first batch."""
        self._counts: dict[Hashable, int] = {}
        self._lines: OrderedDict[Hashable, _Line] = OrderedDict()  # whose turn it is stands first

    def enter(self, parcels: Sequence[Parcel], now: float) -> None:
        """Count the parcels of a request in, all or none: else raise `Full`. An empty queue takes any."""
        first = not self.waiting
        if not first:
            self._check(parcels)
        for parcel in parcels:
            parcel.since, parcel.inside, parcel.first = now, True, first
            self._count(parcel.task, parcel.counted)

    def make_ready(self, parcel: Parcel, sizes: Sequence[int]) -> None:
        """Let a parcel be taken, now that its rows' sizes are known; `Full` when there is no room for them."""
        if not parcel.inside:
            return
        self._count(parcel.task, -parcel.counted)
        total, parcel.counted = sum(sizes), 0
        if self.waiting and self.waiting + total > self.bound and not parcel.first:
            parcel.inside = False
            raise self._full()
        parcel.sizes, parcel.counted = sizes, total
        self._count(parcel.task, total)
        if sizes:
            self.ready += total
            self._lines.setdefault(parcel.task, _Line()).parcels.append(parcel)

    def cancel(self, parcel: Parcel) -> None:
        """Take a parcel out, if it is in; rows that are in a batch already are nobody's business any more."""
        if not parcel.inside:
            return
        parcel.inside = False
        self._count(parcel.task, -parcel.counted)
        line = self._lines.get(parcel.task)
        if line and parcel in line.parcels:
            line.parcels.remove(parcel)
            self.ready -= parcel.counted
            if not line.parcels:
                del self._lines[parcel.task]
        parcel.counted = 0

    @property
    def full(self) -> bool:
        """Whether a batch would be full."""
        return self.ready >= self.budget

    def due_in(self, now: float) -> float | None:
        """Give the seconds until a batch should be taken: 0 for now, None when no row is ready."""
        if not self._lines:
            return None
        if self.full:
            return 0.0
        oldest = min(line.parcels[0].since for line in self._lines.values())
        return max(0.0, oldest + self.wait - now)

    def take(self) -> list[Part]:
        """Give the next batch, whether it is due or not."""
        batch: list[Part] = []
        room, passed = self.budget, 0
        while self._lines:
            task, line = next(iter(self._lines.items()))
            share = max(1, self.budget // len(self._lines))
            if passed >= len(self._lines):
                self._skip_turns(share)
                passed = 0
            if line.credit <= 0:
                line.credit += share
            passed = passed + 1 if line.credit <= 0 else 0
            while line.parcels and line.credit > 0:
                part = self._part(line.parcels[0], line.credit, room, whole=not batch)
                if not part:
                    return batch  # it is this task's turn still: the next batch begins with it
                batch.append(part)
                room -= part.tokens
                line.credit -= part.tokens
                self._sent(part)
                if part.stop == len(part.parcel.sizes):
                    line.parcels.popleft()
            if not line.parcels:
                del self._lines[task]
            else:
                self._lines.move_to_end(task)
            if room <= 0:
                break
        return batch

    def _skip_turns(self, share: int) -> None:
        """Give all tasks at once what they get in turns in which none of them may send."""
        turns = min(-line.credit // share for line in self._lines.values())
        for line in self._lines.values():
            line.credit += max(0, turns) * share

    def computed(self, tokens: int, seconds: float) -> None:
        """Learn how fast batches are computed."""
        if seconds > 0:
            pace = tokens / seconds
            self.pace = _MEMORY * self.pace + (1 - _MEMORY) * pace if self.pace else pace

    def _check(self, parcels: Sequence[Parcel]) -> None:
        free = self.bound - self.waiting
        wanted: Counter[Hashable] = Counter()
        for parcel in parcels:
            wanted[parcel.task] += parcel.counted
        if wanted.total() > free:
            raise self._full()
        for task, tokens in wanted.items():
            if (own := self._counts.get(task, 0)) and own + tokens > free:
                raise self._full(own)

    def _full(self, own: int = 0) -> Full:
        """Give the refusal; `own` is what a task holds where that is why."""
        seconds = self.waiting / (self.pace * self.lanes) if self.pace else 1.0
        why = f"{self.waiting} tokens wait in a queue of {self.bound}"
        if own:
            why += f", {own} of them this task's, which may hold as many as are free"
        return Full(why, min(LONGEST_WAIT, max(1, math.ceil(seconds))))

    def _count(self, task: Hashable, tokens: int) -> None:
        self.waiting += tokens
        self._counts[task] = self._counts.get(task, 0) + tokens
        if not self._counts[task]:
            del self._counts[task]

    @staticmethod
    def _part(parcel: Parcel, credit: int, room: int, *, whole: bool) -> Part:
        """Cut off as many of a parcel's next rows as there is credit and room for; where none fits, one if `whole`."""
        stop, tokens = parcel.taken, 0
        for size in islice(parcel.sizes, parcel.taken, None):
            if tokens >= credit or (tokens + size > room and (tokens or not whole)):
                break
            stop, tokens = stop + 1, tokens + size
        return Part(parcel, parcel.taken, stop, tokens)

    def _sent(self, part: Part) -> None:
        parcel = part.parcel
        parcel.taken = part.stop
        parcel.counted -= part.tokens
        self.ready -= part.tokens
        self._count(parcel.task, -part.tokens)
