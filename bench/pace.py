"""A worker's side of a contest: orders in, blocks of steps timed, answers out. Knows no library that is measured."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

BUSY = os.environ.get("BENCH_CLOCK") == "processor"
"""Count the process's own processor time instead: on a busy machine, with one thread, that is what can be compared."""


class Blocks:
    """Times blocks of steps, on either side: how many an order asks for, and seconds per step of each block.

    An order has `block` (steps of a block), `blocks` (how many at least) and `seconds` (how long at least).
    """

    def __init__(self, order: dict[str, Any], synchronize: Callable[[], None]) -> None:
        """Begin now; `synchronize` waits for the device, at the beginning and the end of a block."""
        self.block, self.blocks = order.get("block", 1), order.get("blocks", 1)
        self.until = time.perf_counter() + order.get("seconds", 0)
        self.synchronize, self.found, self.steps = synchronize, [], 0
        self.restart()

    @staticmethod
    def now() -> float:
        """Read the clock."""
        return time.process_time() if BUSY else time.perf_counter()

    def restart(self) -> None:
        """Begin the block anew."""
        self.synchronize()
        self.steps, self.began = 0, self.now()

    def add(self, steps: int) -> bool:
        """Count steps taken; say whether the order is done."""
        self.steps += steps
        if self.steps < self.block:
            return False
        self.synchronize()
        self.found.append((self.now() - self.began) / self.steps)
        self.restart()
        return len(self.found) >= self.blocks and time.perf_counter() >= self.until


def memory(device: str) -> dict[str, float]:
    """Give the process's peak: what the allocator gave out and what it held on a GPU, resident memory on a CPU."""
    if device == "cpu":
        import resource  # not on every system

        return {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000}
    return {
        "peak_mb": torch.cuda.max_memory_allocated() / 1e6,
        "reserved_mb": torch.cuda.max_memory_reserved() / 1e6,
    }


def answer(found: dict[str, Any]) -> None:
    """Answer the driver."""
    print(json.dumps(found), flush=True)


def next_order() -> dict[str, Any]:
    """Wait for the driver's next order; the end of the input ends the worker."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    order: dict[str, Any] = json.loads(line)
    return order


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Give what waits for the device."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None
