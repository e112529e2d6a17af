"""Tasks with their expected outputs, and checks of an engine that they are added to."""

from __future__ import annotations

import numpy as np

from adapterbank.encoder.batch import Tokens
from adapterbank.inference.engine import Engine
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.tasks.spec import Task

LABELS = tuple("abcdefgh")
PATIENCE = 120.0
"""Timeout in seconds for work that takes milliseconds."""


def rows_of(count, seed=0):
    numbers = np.random.default_rng(seed)
    sizes = numbers.integers(2, 9, count)
    return [Tokens(numbers.integers(5, 100, n), np.zeros(n, np.int64)) for n in sizes]


ROWS = rows_of(4)


class Recipe:
    """A task's plan, tensors and outputs; `reads` counts how often its tensors were loaded again."""

    def __init__(self, backbone, new_slot, seed, size=3, labels=3, method="adapter"):
        options = Options(method=method, size=size)
        self.plan = make_plan(options, depth=backbone.config.layers, head=Head("classification", labels))
        self.task = Task(f"t{seed}", "classification", ("text",), "label", LABELS[:labels], "accuracy")
        self.tensors = {name: t.numpy() for name, t in new_slot(backbone, self.plan, seed=seed).items()}
        self.reads = 0
        alone = Engine(backbone, device="cpu", precision="fp32")
        alone.put("x", self.task, self.plan, self.tensors, 64)
        self.answers = alone.outputs(ROWS, ["x"] * len(ROWS))
        self.bytes = alone.stacks.size(self.plan, {name: array.shape for name, array in self.tensors.items()})

    def source(self):
        self.reads += 1
        return self.tensors

    def put_into(self, engine, name, source=None):
        engine.put(name, self.task, self.plan, self.tensors, 64, source=source or self.source)


def ask(engine, *names):
    """Run all rows through all tasks in one call; return the outputs by task."""
    outputs = engine.outputs(ROWS * len(names), [name for name in names for _ in ROWS])
    return {name: outputs[k * len(ROWS) : (k + 1) * len(ROWS)] for k, name in enumerate(names)}


def assert_right(found, recipe):
    """Compare up to rounding: other rows of a batch may change the last digit."""
    for output, expected in zip(found, recipe.answers, strict=True):
        np.testing.assert_allclose(output, expected, atol=1e-5, rtol=1e-5)


def assert_at_rest(engine):
    """Check the invariants that hold while no call runs."""
    slots = engine.slots
    handles = {name: slots.find(name) for name in engine.residents}
    assert all(handle.users == 0 for handle in handles.values())
    loaded = {name: handle for name, handle in handles.items() if handle.slot is not None}
    assert slots.bytes == sum(handle.bytes for handle in loaded.values())
    assert len(engine.stacks) == len(loaded)  # no slot of a removed or replaced task is left
    if slots.budget is not None:
        assert slots.bytes <= slots.budget
    assert sorted(slots.resident) == sorted(loaded)
