"""A worker's side of a comparison: reads orders, times blocks of steps, writes answers. Imports no measured library."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

BUSY = os.environ.get("BENCH_CLOCK") == "processor"
"""Measure the process's own processor time instead: with one thread, it is comparable even on a busy machine."""


class Blocks:
    """Times blocks of steps, on either side: how many an order asks for, and seconds per step of each block.

    An order has `block` (steps of a block), `blocks` (how many at least) and `seconds` (how long at least).
    """

    def __init__(self, order: dict[str, Any], synchronize: Callable[[], None]) -> None:
        """Start the clock; `synchronize` waits for the device, at the start and the end of a block."""
        self.block, self.blocks = order.get("block", 1), order.get("blocks", 1)
        self.until = time.perf_counter() + order.get("seconds", 0)
        self.synchronize, self.found, self.steps = synchronize, [], 0
        self.restart()

    @staticmethod
    def now() -> float:
        """Read the clock."""
        return time.process_time() if BUSY else time.perf_counter()

    def restart(self) -> None:
        """Restart the block."""
        self.synchronize()
        self.steps, self.began = 0, self.now()

    def add(self, steps: int) -> bool:
        """Count steps; return whether the order is complete."""
        self.steps += steps
        if self.steps < self.block:
            return False
        self.synchronize()
        self.found.append((self.now() - self.began) / self.steps)
        self.restart()
        return len(self.found) >= self.blocks and time.perf_counter() >= self.until


def memory(device: str) -> dict[str, float]:
    """Return the process's peak memory: allocated and reserved on a GPU, resident on a CPU."""
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
    """Return a function that waits for the device."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None
