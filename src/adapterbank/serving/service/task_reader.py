"""Reads tasks, one thread at a time for each, so that a disk that does not answer for one task holds up no other.

Nothing can interrupt a thread that waits for a disk. So such a thread is left behind: its task is refused with a
message and not read again until the thread returns, and another thread goes on with the others. Knows no banks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from adapterbank.errors import PackageDamaged
from adapterbank.serving.daemon_pool import run_into
from adapterbank.serving.heartbeat import BOUND, standing

PATIENCE = 5.0
"""Seconds that a task may take to read before others go on without it."""
_RATE = 20 << 20
"""Bytes per second that a slow disk reads: a large file has more time."""

Result = TypeVar("Result")


class NoAnswer(PackageDamaged):
    """The disk does not answer for a task."""

    def __init__(self, name: str, seconds: float) -> None:
        remedy = "check the disk or the network; the task is read again when it answers"
        super().__init__(f"{name} cannot be read: the disk has not answered for {seconds:.0f} s; {remedy}.")


class _Worker:
    """A thread that goes through a list of tasks."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.ended = self.left_behind = False


class TaskReader:
    """Runs work on tasks by name; no two threads work on the same task."""

    def __init__(self, threads: int = 1, patience: float = PATIENCE) -> None:
        """Take how many threads go through a list, and the seconds that a task may take."""
        self._threads, self.patience = threads, patience
        self._held: dict[str, tuple[float, float]] = {}  # tasks that a thread works on: since when, and until when
        lock = threading.Lock()
        self._released, self._ended = threading.Condition(lock), threading.Condition(lock)

    def stalled(self, bound: float = BOUND) -> list[str]:
        """Return what has been read for longer than `bound` seconds; never waits."""
        now = time.monotonic()
        held = sorted(self._held.copy().items())
        return [standing(f"reading {name}", now - since) for name, (since, _) in held if now - since > bound]

    def hung(self) -> dict[str, str]:
        """Return the tasks that were left behind, with a message; never waits."""
        now = time.monotonic()
        held = sorted(self._held.copy().items())
        return {name: str(NoAnswer(name, now - since)) for name, (since, until) in held if now > until}

    def one(self, name: str, work: Callable[[], Result], size: int = 0) -> Result:
        """Run work that reads `size` bytes; raise `NoAnswer` if it hangs, at once if the task hung before."""
        patience = self.patience + size / _RATE
        self._hold(name, patience)
        found: Future[Result] = Future()

        def run() -> None:
            done: Future[Result] = Future()
            run_into(done, work)
            self._release(name)
            run_into(found, done.result)

        try:
            threading.Thread(target=run, name="reader", daemon=True).start()
        except BaseException:
            self._release(name)
            raise
        try:
            return found.result(patience)
        except TimeoutError:
            if found.done():  # the error is that of the work
                raise
            raise NoAnswer(name, patience) from None

    def each(self, names: Iterable[str], work: Callable[[str], Any]) -> None:
        """Run work on every task; return when all are done or left behind. Raises the first error after that.

        A task that another thread works on is skipped.
        """
        todo, errors = deque(names), list[Exception]()
        crew: list[_Worker] = []
        with self._ended:
            while True:
                now = time.monotonic()
                for worker in crew:
                    worker.left_behind = worker.left_behind or now - worker.since >= self.patience
                crew = [worker for worker in crew if not (worker.ended or worker.left_behind)]
                while len(crew) < min(self._threads, len(todo)):
                    crew.append(worker := _Worker())
                    given = (worker, todo, work, errors)
                    threading.Thread(target=self._go_through, args=given, name="reader", daemon=True).start()
                if not crew:
                    break
                self._ended.wait(min(worker.since for worker in crew) + self.patience - now)
        for error in errors:
            raise error

    def _go_through(self, worker: _Worker, todo: deque[str], work: Callable[[str], Any], errors: list[Any]) -> None:
        while name := self._next(worker, todo):
            try:
                work(name)
            except Exception as error:
                errors.append(error)
            finally:
                self._release(name)

    def _next(self, worker: _Worker, todo: deque[str]) -> str:
        """Take the next task that no thread works on; empty if there is none, or if this thread was replaced."""
        with self._ended:
            while todo and not worker.left_behind:
                name = todo.popleft()
                if name not in self._held:
                    worker.since = time.monotonic()
                    self._held[name] = worker.since, worker.since + self.patience
                    return name
            worker.ended = True
            self._ended.notify_all()
            return ""

    def _hold(self, name: str, patience: float) -> None:
        """Wait until no other thread works on a task, and hold it."""
        with self._released:
            while name in self._held:
                (since, until), now = self._held[name], time.monotonic()
                if now >= until:
                    raise NoAnswer(name, now - since)
                self._released.wait(until - now)
            now = time.monotonic()
            self._held[name] = now, now + patience

    def _release(self, name: str) -> None:
        with self._released:
            del self._held[name]
            self._released.notify_all()
