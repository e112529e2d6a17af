"""A CPU's threads for batches: each batch computes on one thread, several batches beside each other. Knows no batches.

Threads that share a product wait for the slowest of them after each product. With a few tokens the wait takes longer
than the work, and where another process takes one of two cores, both wait for it. So batches are handed out one at a
time to threads that share nothing: a core that another process slows down takes fewer of them.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

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
    if threads > 1 and len(batches) > 1:
        list(_pool(threads, os.getpid()).map(lambda run: run(), batches))
    elif threads > 1 and sum(tokens) <= _ALONE:
        _run_on(1, threads, batches)
    else:
        for run in batches:
            run()


def _run_on(threads: int, before: int, batches: Sequence[Callable[[], None]]) -> None:
    """Run functions with so many threads instead of those before, in this thread alone."""
    torch.set_num_threads(threads)  # threads that have computed before keep theirs
    try:
        for run in batches:
            run()
    finally:
        torch.set_num_threads(before)


@functools.cache
def _pool(threads: int, _process: int) -> ThreadPoolExecutor:
    """Return so many threads that compute with one thread each; a forked process has its own."""
    pool, ready = ThreadPoolExecutor(threads, "adapterbank-cpu"), threading.Barrier(threads + 1)

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # torch sets a thread's number when it is first asked; from then on it stays
        ready.wait()

    for _ in range(threads):
        pool.submit(begin)
    ready.wait()
    torch.set_num_threads(threads)  # threads that others start later begin with this
    return pool
