"""adapterbank's worker: the product's own `train` and `Engine`, paused between orders of the driver.

Training is one call of `train`, as by a user. `watch` counts its steps, waits for the next order when the current one
is complete, and raises an exception if the next order is of another kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pace import Blocks, answer, memory, next_order, synchronizer

from adapterbank.encoder.backbone import Backbone, load
from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.placed import place
from adapterbank.inference.engine import Engine
from adapterbank.inference.rows import Rows
from adapterbank.methods import Options
from adapterbank.runtime import find_dtype
from adapterbank.slots.plan import Head, Plan, make_plan
from adapterbank.tasks.spec import Task
from adapterbank.training.builder import initial_tensors
from adapterbank.training.graph_rule import ALWAYS
from adapterbank.training.job import Progress, TrainingJob
from adapterbank.training.loop import Together, train

EPOCH = 400
"""Least steps per epoch, by repeating rows: the end of an epoch is not part of a step, and peers have none."""


class _OtherOrderError(Exception):
    """The driver's next order is not for this call of `train`."""


class Pace:
    """Lets training run the number of steps that the driver requests."""

    def __init__(self, order: dict[str, Any], device: torch.device) -> None:
        """Start the first order."""
        self.order, self.device = order, device
        self.seen = 0
        self.began, self.first_step = time.perf_counter(), 0.0
        self.blocks = Blocks(order, synchronizer(device))

    def watch(self, progress: Progress) -> None:
        """Count the steps since the last call; all runs advance together, so the first one is counted."""
        self.first_step = self.first_step or time.perf_counter() - self.began
        if progress.score is not None:  # an epoch's end
            self.blocks.restart()
        if progress.run != 0 or progress.score is not None:
            return
        steps, self.seen = progress.step - self.seen, progress.step
        if self.blocks.add(steps):
            answer({"seconds": self.blocks.found, "first_step_s": self.first_step, **memory(self.device.type)})
            last, self.order = self.order, next_order()
            if any(self.order.get(key) != last.get(key) for key in ("do", "case", "runs")):
                raise _OtherOrderError
            self.blocks = Blocks(self.order, synchronizer(self.device))


class Worker:
    """One backbone with the driver's setup."""

    def __init__(self, setup: dict[str, Any]) -> None:
        """Load the backbone and draw a task's initial tensors."""
        self.cases, self.device = setup["cases"], torch.device(setup["device"])
        self.backbone: Backbone = load(setup["backbone"])
        head = Head(setup.get("kind", "classification"), setup.get("outputs", 2), "first")
        self.plan: Plan = make_plan(Options(**setup["options"]), depth=self.backbone.config.layers, head=head)
        self.initial = initial_tensors(self.plan, self.backbone, sigma=1e-2, seed=0)
        self.engine: Engine | None = None
        self.calls = 0
        self.put_seconds: list[float] = []

    def train(self, order: dict[str, Any]) -> dict[str, Any]:
        """Train until an order of another kind arrives; return it."""
        batches = self.cases[order["case"]]
        rows = [tokens(row) for batch in batches for row in batch["rows"]]
        labels = [
            np.array(label) if isinstance(label, list) else label for batch in batches for label in batch["labels"]
        ]
        size = len(batches[0]["rows"])
        times = -(-EPOCH * size // len(rows))
        data = Rows(rows * times, labels * times)
        job = TrainingJob(
            self.plan, self.initial, data, Rows(rows[:1], None), lambda given: 0.0, 1e-4, 1000, batch=size
        )
        jobs = [replace(job, seed=seed) for seed in range(order.get("runs", 1))]
        pace = Pace(order, self.device)
        try:
            train(
                place(self.backbone, self.device, find_dtype("auto", self.device)),
                jobs,
                watch=pace.watch,
                together=Together(len(jobs), ALWAYS),
            )
        except _OtherOrderError:
            return pace.order
        raise RuntimeError("training ended before the driver was done")

    def infer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send batches through the engine, head outputs back to the host, until another order arrives; return it."""
        engine = self._engine(order["slots"])
        batches = [[tokens(row) for row in batch["rows"]] for batch in self.cases[order["case"]]]
        blocks = Blocks(order, synchronizer(self.device))
        done = False
        while not done:
            rows = batches[self.calls % len(batches)]
            engine.outputs(rows, self._names(order, len(rows)))
            self.calls += 1
            done = blocks.add(1)
        last = self.put_seconds[-64:]
        answer(
            {
                "seconds": blocks.found,
                "resident": len(engine.residents),
                "put_ms": 1000 * float(np.median(last)),
                **memory(self.device.type),
            }
        )
        return next_order()

    def _names(self, order: dict[str, Any], rows: int) -> list[str]:
        """Return the rows' tasks: one, or as many as there are rows, spread over all slots; others in every call."""
        slots = order["slots"]
        if order["tasks"] == "one":
            return [f"task{self.calls % slots}"] * rows
        apart = max(1, slots // rows)
        return [f"task{(i * apart + self.calls) % slots}" for i in range(rows)]

    def _engine(self, slots: int) -> Engine:
        """Make that many tasks resident. They reuse a few sets of random tensors in different places."""
        if self.engine is None or len(self.engine.residents) > slots:
            self.engine = None  # before the next one is created: both might not fit
            self.engine = Engine(self.backbone, device=str(self.device))
            self.engine.use_graphs()
        task = Task("bench", "classification", ("text",), "label", ("no", "yes"), "accuracy")
        random = np.random.RandomState(0)
        sets = [
            {name: t.numpy() + 0.01 * random.randn(*t.shape).astype(np.float32) for name, t in self.initial.items()}
            for _ in range(4)
        ]
        for i in range(len(self.engine.residents), slots):
            began = time.perf_counter()
            self.engine.put(f"task{i}", task, self.plan, sets[i % len(sets)], self.backbone.config.max_length)
            self.put_seconds.append(time.perf_counter() - began)
        return self.engine


def tokens(row: list[int]) -> Tokens:
    """Return a row as the tokenizer would."""
    return Tokens(np.array(row, dtype=np.int64), np.zeros(len(row), dtype=np.int64))


def main() -> None:
    """Serve one driver."""
    worker = Worker(next_order()["setup"])
    answer({"trained": sum(t.numel() for t in worker.initial.values()), "versions": {"torch": torch.__version__}})
    does: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"train": worker.train, "infer": worker.infer}
    order = next_order()
    while True:
        order = does[order["do"]](order)


if __name__ == "__main__":
    main()
