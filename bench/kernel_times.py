"""The kernels of a training step and of mixed batches on one GPU: how long each takes, how often it runs.

    PYTHONPATH=src python bench/kernel_times.py --shape base --out bench/results/kernels_base.json

32 rows of 128 tokens, adapters of size 64, through the product's own `train` and `Engine`. `wall_ms` is the time of a
batch on the host, from tokens to outputs; what it exceeds the sum of the kernels by is the host's, and the gaps between
kernels.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from contest import write
from machine import machine
from shapes import SHAPES, batches, save
from torch.profiler import ProfilerActivity, profile
from worker_own import EPOCH, Worker, tokens

from adapterbank.encoder.placed import place
from adapterbank.inference.rows import Rows
from adapterbank.runtime import find_dtype
from adapterbank.training.graph_rule import ALWAYS
from adapterbank.training.job import Progress, TrainingJob
from adapterbank.training.loop import Together, train

WARM, CALLS = 60, 40
"""Steps before the first that is counted, and batches that are counted."""


class _DoneError(Exception):
    """Enough steps have been counted."""


def wait() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def recorder() -> Any:
    """Return a profiler of kernels."""
    on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return profile(activities=[ProfilerActivity.CPU, *on_gpu])


def kernels(recorded: Any, count: int) -> dict[str, Any]:
    """Return the milliseconds and the number of each kernel, by step or batch, the longest first."""
    found = [one for one in recorded.key_averages() if one.self_device_time_total > 0]
    found.sort(key=lambda one: -one.self_device_time_total)
    each = {one.key: [one.self_device_time_total / count / 1000, one.count / count] for one in found}
    return {"sum_ms": sum(ms for ms, _ in each.values()), "kernels": each}


class Watch:
    """Records the steps after the first ones; losses, and so reports, come a few times a second."""

    def __init__(self) -> None:
        """Nothing is recorded yet."""
        self.recorded: Any = None
        self.first = 0
        self.found: dict[str, Any] = {}

    def __call__(self, progress: Progress) -> None:
        """See `training.loop.train`."""
        if self.recorded is None and WARM <= progress.step < EPOCH - CALLS:
            wait()
            self.recorded, self.first = recorder(), progress.step
            self.recorded.__enter__()
        elif self.recorded is not None and progress.step > self.first:
            wait()
            self.recorded.__exit__(None, None, None)
            self.found = kernels(self.recorded, progress.step - self.first)
            raise _DoneError


def of_training(worker: Worker) -> dict[str, Any]:
    """Return the kernels of a training step."""
    case = worker.cases["full rows"]
    rows = [tokens(row) for batch in case for row in batch["rows"]]
    labels = [label for batch in case for label in batch["labels"]]
    times = -(-EPOCH * 32 // len(rows))
    data, watch = Rows(rows * times, labels * times), Watch()
    job = TrainingJob(worker.plan, worker.initial, data, Rows(rows[:1], None), lambda outputs: 0.0, 1e-4, 1000)
    placed = place(worker.backbone, worker.device, find_dtype("auto", worker.device))
    try:
        train(placed, [job], watch=watch, together=Together(1, ALWAYS))
    except _DoneError:
        return watch.found
    raise RuntimeError("training ended before its steps were counted")


def of_batch(worker: Worker, names: list[str]) -> dict[str, Any]:
    """Return the kernels of a batch whose rows have these tasks, and its time on the host."""
    rows = [tokens(row) for row in worker.cases["full rows"][0]["rows"]]
    engine = worker._engine(32)

    def call() -> float:
        began = time.perf_counter()
        engine.outputs(rows, names)
        return time.perf_counter() - began

    for _ in range(6):
        call()
    with recorder() as recorded:
        for _ in range(CALLS):
            call()
        wait()
    return {**kernels(recorded, CALLS), "wall_ms": 1000 * median(call() for _ in range(CALLS))}


def main() -> None:
    """Measure, print the longest kernels, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=list(SHAPES), default="base")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU, where no kernel is counted")
    options = parser.parse_args()
    options.shape = "tiny" if options.tiny else options.shape
    device = torch.device("cpu" if options.tiny else "cuda")
    with tempfile.TemporaryDirectory() as work:
        rows = batches(32, 8 if options.tiny else 128, SHAPES[options.shape].vocabulary)
        folder = save(SHAPES[options.shape], Path(work))
        worker = Worker(
            {"backbone": folder, "device": device.type, "cases": {"full rows": rows}, "options": {"size": 64}}
        )
        found = {
            "training step": of_training(worker),
            "batch of one task": of_batch(worker, ["task0"] * 32),
            "batch of 32 tasks": of_batch(worker, [f"task{i}" for i in range(32)]),
        }
    for what, one in found.items():
        print(f"{what}: {one['sum_ms']:.3f} ms of kernels; by the host's clock {one.get('wall_ms', float('nan')):.3f}")
        for name, (ms, count) in list(one["kernels"].items())[:14]:
            print(f"  {ms:8.4f} ms {count:6.1f} x  {name[:100]}")
    write(options.out, {**machine(device), "shape": options.shape, **found})


if __name__ == "__main__":
    main()
