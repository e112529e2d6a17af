"""A pool of daemon threads: one that hangs does not keep the process from ending. Does not know what it runs.

Python waits at its end for the threads of a `ThreadPoolExecutor`, so a read from a disk that does not answer would
keep a stopped server alive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class DaemonPool(Executor):
    """Runs calls in at most `size` threads, in order; the threads are created as they are needed."""

    def __init__(self, size: int, name: str) -> None:
        """Take the number of threads and their name."""
        self._size, self._name = size, name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._open = True

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Run a call in a thread."""
        future: Future[Result] = Future()
        with self._lock:
            if not self._open:
                raise RuntimeError("the pool has been shut down")
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._size:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)
        self._calls.put(lambda: run_into(future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, patience: float | None = None) -> None:
        """Accept no more calls, and wait for those in progress, at most `patience` seconds."""
        with self._lock:
            self._open = False
        for _ in self._threads:
            self._calls.put(None)
        end = None if patience is None else time.monotonic() + patience
        for thread in self._threads if wait else ():
            thread.join(None if end is None else max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while call := self._calls.get():
            call()
            del call  # what it refers to must not live until the next one
            self._idle.release()


def run_into(future: Future[Result], work: Callable[[], Result]) -> None:
    """Run a call, and set its result or its error."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
