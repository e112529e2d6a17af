"""Memory of a training step on one GPU: its peak with outputs kept and computed again, and the largest batch that fits.

    PYTHONPATH=src python bench/memory.py --device cuda --out bench/results/memory.json
    PYTHONPATH=src python bench/memory.py --tiny --out rehearsal.json

Adapters of size 64 on rows of 128 tokens, with dropout, clipping and the optimiser, as a captured step. `kept` are the
bytes that a pass keeps for its gradients, by the shape of the tensors; `peak_mb` is what torch had allocated at most,
weights and optimiser included. The largest batch is searched for under a limit of a few GB, which makes it quick: it
is proportional to the memory that the weights leave. On a CPU, with `--tiny`, Triton interprets the kernels.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contest import write
from machine import machine
from shapes import SHAPES, batches, save
from torch import Tensor

from adapterbank.encoder import forward as passes
from adapterbank.encoder import kernels
from adapterbank.encoder.backbone import Backbone, load
from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.placed import PlacedEncoder, place
from adapterbank.encoder.prefix_cache import PrefixCache
from adapterbank.encoder.recompute import Again, Recompute, Recomputing
from adapterbank.inference.graphs import GraphCompiler
from adapterbank.inference.rows import Rows
from adapterbank.methods import Options
from adapterbank.runtime import find_dtype
from adapterbank.slots.mixture import Mixture
from adapterbank.slots.plan import Head, Plan, make_plan
from adapterbank.slots.stack import Stacks
from adapterbank.training import graph_step
from adapterbank.training.builder import initial_tensors
from adapterbank.training.graph_step import DeviceRows, GraphStep
from adapterbank.training.optimizer import AdamSettings, StackedAdam
from adapterbank.training.step_input import StepContext, StepInput

WHEN = ("never", "always")
BEFORE, TIMED = 30, 20
"""Steps before the time is taken, enough for a capture, and steps that are timed."""


class Counted(Recompute):
    """Counts what a pass keeps, each memory once."""

    def __init__(self, drops: bool) -> None:
        """Keep everything unless `drops`."""
        super().__init__()
        self._drops = drops
        self.kept: dict[int, Tensor] = {}

    def remember(self, out: Tensor, again: Again) -> None:
        """Forget again what is kept."""
        if self._drops:
            super().remember(out, again)

    def _pack(self, tensor: Tensor) -> Tensor | Again:
        packed = super()._pack(tensor)
        for held in tensors_of(packed):
            self.kept.setdefault(held.untyped_storage().data_ptr(), held)  # also keeps the address from being reused
        return packed


class Counting(Recomputing):
    """`Recomputing` whose passes are counted."""

    def __init__(self, when: str) -> None:
        """Count the next passes."""
        super().__init__(when)
        self.last = Counted(False)

    @contextmanager
    def of_a_pass(self) -> Iterator[Recompute | None]:
        """Yield what counts a pass."""
        self.last = Counted(self.on)
        with self.last.dropping():
            yield self.last


def tensors_of(packed: Any) -> Iterator[Tensor]:
    """Yield the tensors that something packed holds."""
    if isinstance(packed, Tensor):
        yield packed
    for part in (*getattr(packed, "args", ()), *getattr(packed, "keywords", {}).values()):
        yield from tensors_of(part)


Task = tuple[Plan, Mapping[str, Tensor]]
"""What is trained, and its initial tensors."""


def make_task(backbone: Backbone, size: int) -> Task:
    """Return adapters of a size at both sites of all layers."""
    plan = make_plan(Options(size=size), depth=backbone.config.layers, head=Head("classification", 2, "first"))
    return plan, initial_tensors(plan, backbone, sigma=1e-2, seed=0)


class Steps:
    """Training steps of one run with a batch of some rows, all of one length."""

    def __init__(self, encoder: PlacedEncoder, task: Task, rows: int, length: int) -> None:
        """Draw the rows; nothing is on the device yet but the encoder."""
        self.encoder, self.rows, self.length = encoder, rows, length
        self.plan, self.initial = task
        (batch,) = batches(rows, length, len(encoder.tensors["embeddings.word.weight"]), 1)
        tokens = [Tokens(np.array(row), np.zeros(len(row), np.int64)) for row in batch["rows"]]
        self.data = Rows(tokens, batch["labels"])

    def start(self, recomputing: Recomputing) -> Callable[[], object]:
        """Return a function that takes a step."""
        config, device = self.encoder.config, self.encoder.device
        stacks = Stacks(self.encoder.tensors)
        adam = StackedAdam(stacks, compute=self.encoder.dtype)
        slot = stacks.put(self.plan, self.initial)
        adam.admit(slot, AdamSettings())
        prefixes = PrefixCache(config, self.encoder.tensors)
        context = StepContext(config, prefixes, 0, (0.1, 0.1), recomputing)
        data, programs = DeviceRows.of([self.data], self.plan.head, device), GraphCompiler(device)
        step = GraphStep(context, stacks, adam, data, self.plan, batch=self.rows, programs=programs)
        units, weights = np.arange(self.rows), np.full(self.rows, 1 / self.rows, np.float32)
        inputs = [StepInput(slot, Mixture(self.plan), self.data, units, weights, seed=0, step=0)]
        return lambda: step.step(inputs, adam.table({slot: 1e-4}))


def kept(steps: Steps, when: str) -> dict[str, Any]:
    """Count the bytes that a pass keeps, the encoder's own tensors aside, in all and by shape."""
    counting, frozen = Counting(when), {t.untyped_storage().data_ptr() for t in steps.encoder.tensors.values()}
    steps.start(counting)()
    shapes: Counter[str] = Counter()
    for address, tensor in counting.last.kept.items():
        if address not in frozen and tensor.shape[:1] == (steps.rows * steps.length,):
            shapes[f"{list(tensor.shape)} {tensor.dtype}"] += tensor.untyped_storage().nbytes()
    return {"mb": sum(shapes.values()) / 1e6, "by_shape_mb": {name: size / 1e6 for name, size in shapes.items()}}


def peak_and_time(steps: Steps, when: str) -> dict[str, float]:
    """Return the peak memory of a step and its median duration."""
    step, gpu = steps.start(Recomputing(when)), steps.encoder.device.type == "cuda"
    wait = torch.cuda.synchronize if gpu else lambda: None
    if gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for k in range(BEFORE + TIMED if gpu else 2):
        began = time.perf_counter()
        step()
        wait()
        if k >= BEFORE:
            seconds.append(time.perf_counter() - began)
    if not gpu:
        return {}
    sizes = {"peak_mb": torch.cuda.max_memory_allocated() / 1e6, "reserved_mb": torch.cuda.max_memory_reserved() / 1e6}
    return {**sizes, "median_ms": 1000 * float(np.median(seconds))}


def fits(steps: Steps, when: str) -> bool:
    """Return whether a step fits into memory; its kernels run one by one."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        steps.start(Recomputing(when))()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return False
    return True


def largest(found: Callable[[int], bool], start: int) -> int:
    """Return the largest number of rows that fits, within a sixteenth: doubled until none fits, then bisected."""
    low = start
    while found(2 * low):
        low *= 2
    high = 2 * low
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if found(middle) else (low, middle)
    return low


def interpret() -> None:
    """Let Triton interpret the kernels on a CPU, as if it was a GPU; call it before they are imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    find, fuse, gpu = kernels.find_kernels, passes.fused_attention, torch.device("cuda")
    graph_step.find_kernels = lambda device: find(gpu)
    graph_step.fused_attention = lambda config, device: fuse(config, gpu)


def measure(folder: str, device: torch.device, options: Any) -> dict[str, Any]:
    """Measure a shape."""
    backbone = load(folder)
    encoder = place(backbone, device, find_dtype("auto", device))
    task = make_task(backbone, options.size)
    steps, result = Steps(encoder, task, options.rows, options.length), {}
    for when in WHEN:
        result[when] = {"kept": kept(steps, when), **peak_and_time(steps, when)}
        print(when, {name: value for name, value in result[when].items() if name != "kept"}, flush=True)
        print(f"  keeps {result[when]['kept']['mb']:.3f} MB:", result[when]["kept"]["by_shape_mb"], flush=True)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(options.memory * 1e9 / torch.cuda.mem_get_info()[1])
        for when in WHEN:
            began = time.perf_counter()
            most = largest(lambda rows, when=when: fits(Steps(encoder, task, rows, options.length), when), options.rows)
            result[when]["largest_batch"] = most
            print(
                f"{when}: largest batch in {options.memory} GB: {most} ({time.perf_counter() - began:.0f} s)",
                flush=True,
            )
        torch.cuda.set_per_process_memory_fraction(1.0)
    return result


def main() -> None:
    """Measure, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", choices=list(SHAPES), default="base")
    parser.add_argument("--memory", type=float, default=4.0, help="GB in which the largest batch is searched for")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU: what a pass keeps")
    options = parser.parse_args()
    options.rows, options.length, options.size = (2, 16, 16) if options.tiny else (32, 128, 64)
    device = torch.device("cpu" if options.tiny else options.device)
    if device.type == "cpu":
        interpret()
    shape = "tiny" if options.tiny else options.shape
    with tempfile.TemporaryDirectory() as work:
        found = measure(save(SHAPES[shape], Path(work)), device, options)
    settings = {name: getattr(options, name) for name in ("rows", "length", "size", "memory")}
    write(options.out, {**machine(device), "settings": {**settings, "shape": shape}, **found})


if __name__ == "__main__":
    main()
