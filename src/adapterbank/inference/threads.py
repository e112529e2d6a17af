"""A CPU's threads for batches: each batch computes on one thread, several batches beside each other. Knows no batches.

Threads that share a product wait for the slowest of them after each product. With a few tokens the wait takes longer
than the work, and where another process takes one of two cores, both wait for it. So batches are handed out one at a
time to threads that share nothing: a core that another process slows down takes fewer of them.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

_ALONE = 64
"""The most tokens of a single batch that one thread computes as fast as several."""
_SMALLEST, _LARGEST = 128, 4096
"""The fewest and the most padded tokens of a batch, where there are threads for several.

Products with 64 tokens take as long per token as larger ones; what a batch costs besides them is spread over more.
"""
_EACH = 2
"""Batches for each thread, so that a thread that is slowed down leaves some to the others."""


def batch_tokens(total: int) -> int:
    """Return the most padded tokens of a batch if `total` tokens are to be computed."""
    threads = torch.get_num_threads()
    return _LARGEST if threads == 1 else max(_SMALLEST, min(_LARGEST, -(-total // (_EACH * threads))))


def run_batches(batches: Sequence[Callable[[], None]], tokens: Sequence[int]) -> None:
    """Run functions that compute batches of so many tokens each.

    The threads of a batch depend on the sizes alone, so that equal calls round alike.
    """
    threads = torch.get_num_threads()
    if threads > 1 and (len(batches) > 1 or sum(tokens) <= _ALONE):
        _pool(threads).run(batches)
    else:
        for run in batches:
            run()


class _Pool:
    """Threads that compute with one thread of torch's each.

    They end with the process, also where it is ending already, unlike those of `concurrent.futures`. The number of
    torch's threads is set once in each, and never for a call: torch keeps it for all threads that start meanwhile.
    """

    def __init__(self, threads: int) -> None:
        """Start the threads and wait until each has its number."""
        self.threads, self.process = threads, os.getpid()
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        ready = threading.Barrier(threads + 1)
        for number in range(threads):
            threading.Thread(target=self._work, args=(ready,), name=f"adapterbank-cpu-{number}", daemon=True).start()
        ready.wait()
        torch.set_num_threads(threads)  # threads that others start later begin with this

    def _work(self, ready: threading.Barrier) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # torch sets a thread's number when it is first asked; from then on it stays
        ready.wait()
        while (run := self._waiting.get()) is not None:
            run()

    def run(self, batches: Sequence[Callable[[], None]]) -> None:
        """Run functions and wait for all; raise the first error."""
        futures: list[Future[None]] = [Future() for _ in batches]
        for future, batch in zip(futures, batches, strict=True):
            self._waiting.put(partial(_fulfil, future, batch))
        for future in futures:
            future.result()

    def end(self) -> None:
        """Let the threads end after what waits."""
        for _ in range(self.threads):
            self._waiting.put(None)


def _fulfil(future: Future[None], batch: Callable[[], None]) -> None:
    try:
        batch()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


_LOCK = threading.Lock()
_kept: list[_Pool] = []
"""The pool of this process, once there is one."""


def _pool(threads: int) -> _Pool:
    """Return the pool of so many threads; a forked process has its own."""
    with _LOCK:
        if not _kept or (_kept[0].threads, _kept[0].process) != (threads, os.getpid()):
            if _kept and _kept[0].process == os.getpid():
                _kept[0].end()
            _kept[:] = [_Pool(threads)]
        return _kept[0]


def _in_child() -> None:
    """After a fork, another thread may have held the lock."""
    global _LOCK
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
