"""Mixed batches of 32 tasks of which half stand on others or fuse them, beside plain ones, taking turns.

    PYTHONPATH=src python bench/helped.py --out bench/results/helped_cpu.json
    PYTHONPATH=src python bench/helped.py --device cuda --shape base --out bench/results/helped_cuda.json
    PYTHONPATH=src python bench/helped.py --tiny --out rehearsal.json

All tasks have adapters of size 64. `stacked`: every second task stands on one base. `fused`: every second task fuses
the same three tasks. `fused, others`: every second task fuses three tasks of its own. Weights are random.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from contest import write
from machine import machine
from shapes import SHAPES, save

from adapterbank.encoder.backbone import Backbone, load
from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.placed import place
from adapterbank.inference.graph_runner import make_graph_runner
from adapterbank.inference.runner import outputs
from adapterbank.methods import Options
from adapterbank.runtime import find_dtype
from adapterbank.slots.plan import Head, Plan, make_plan
from adapterbank.slots.stack import Stacks
from adapterbank.training.builder import initial_tensors

TASKS, MEMBERS = 32, 3
SPREAD = 0.05


class Tasks:
    """Tasks in memory, and the slots of each mixed batch."""

    def __init__(self, backbone: Backbone, device: torch.device, size: int) -> None:
        """Add all tasks."""
        self.backbone, self.made = backbone, 0
        self.placed = place(backbone, device, find_dtype("auto", device))
        self.stacks = Stacks(self.placed.tensors, dtype=self.placed.dtype)
        self.runner = make_graph_runner(backbone.config, self.stacks)
        adapter, fusion = (self._plan(Options(size=size)), self._plan(Options("fusion")))
        plain = [self._put(adapter) for _ in range(TASKS)]
        base, *members = [self._put(adapter) for _ in range(1 + MEMBERS * TASKS // 2)]
        half = range(TASKS // 2)
        helped = {
            "plain": plain[: TASKS // 2],
            "stacked": [self._put(adapter, base) for _ in half],
            "fused": [self._put(fusion, *members[:MEMBERS]) for _ in half],
            "fused, others": [self._put(fusion, *members[MEMBERS * k : MEMBERS * (k + 1)]) for k in half],
        }
        rest = plain[TASKS // 2 :]
        self.slots = {
            name: [one for pair in zip(own, rest, strict=True) for one in pair] for name, own in helped.items()
        }

    def _plan(self, options: Options) -> Plan:
        return make_plan(options, depth=self.backbone.config.layers, head=Head("classification", 2))

    def _put(self, plan: Plan, *below: int) -> int:
        self.made += 1
        tensors = initial_tensors(plan, self.backbone, sigma=SPREAD, seed=self.made)
        return self.stacks.put(plan, tensors, *below)

    def run(self, name: str, rows: list[Tokens]) -> float:
        """Return the seconds of one batch."""
        began = time.perf_counter()
        outputs(self.backbone.config, self.stacks, rows, self.slots[name], graph_runner=self.runner)
        return time.perf_counter() - began


def measure(tasks: Tasks, length: int, rounds: int) -> dict[str, Any]:
    """Return the median milliseconds of each batch, and its multiple of the plain one."""
    draw = np.random.default_rng(0)
    ids = draw.integers(5, tasks.backbone.config.vocabulary, (TASKS, length))
    rows = [Tokens(one, np.zeros(length, np.int64)) for one in ids]
    found: dict[str, list[float]] = {name: [] for name in tasks.slots}
    for turn in range(rounds + 3):
        for name in found:
            seconds = tasks.run(name, rows)
            found[name] += [seconds] if turn >= 3 else []  # the first batches compile
    medians = {name: 1000 * median(times) for name, times in found.items()}
    return {name: {"ms": ms, "of plain": ms / medians["plain"]} for name, ms in medians.items()}


def main() -> None:
    """Measure short and long rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="minilm")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="a small test run")
    options = parser.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as work:
        shape = "tiny" if options.tiny else options.shape
        tasks = Tasks(load(save(SHAPES[shape], Path(work) / "encoder")), device, 8 if options.tiny else 64)
        lengths, rounds = ((8,), 2) if options.tiny else ((16, 128), options.rounds)
        found = {str(length): measure(tasks, length, rounds) for length in lengths}
    write(options.out, {**machine(device), "shape": shape, "tokens": found})
    for length, batches in found.items():
        print(f"\n{length} tokens a row, {TASKS} rows of {TASKS} tasks")
        for name, one in batches.items():
            print(f"  {name:<16} {one['ms']:9.2f} ms  {one['of plain']:5.2f} x plain", flush=True)


if __name__ == "__main__":
    main()
