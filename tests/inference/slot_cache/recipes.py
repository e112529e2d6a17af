"""Tasks with their answers, to be put into an engine and dropped from it, and what must hold meanwhile."""

from __future__ import annotations

import numpy as np

from adapterbank.encoder.batch import Tokens
from adapterbank.inference.engine import Engine
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.tasks.spec import Task

LABELS = tuple("abcdefgh")
PATIENCE = 120.0
"""Seconds that a thread may take for what takes milliseconds."""


def rows_of(count, seed=0):
    numbers = np.random.default_rng(seed)
    sizes = numbers.integers(2, 9, count)
    return [Tokens(numbers.integers(5, 100, n), np.zeros(n, np.int64)) for n in sizes]


ROWS = rows_of(4)


class Recipe:
    """A task's plan, tensors and answers; `reads` counts how often its tensors were asked for again."""

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
    """Ask all tasks for all rows in one call; gives the outputs by task."""
    given = engine.outputs(ROWS * len(names), [name for name in names for _ in ROWS])
    return {name: given[k * len(ROWS) : (k + 1) * len(ROWS)] for k, name in enumerate(names)}


def assert_right(found, recipe):
    """Within rounding: what else is in a batch may change the last digit."""
    for mine, wanted in zip(found, recipe.answers, strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-5, rtol=1e-5)


def assert_at_rest(engine):
    """Check what must hold whenever no call is running."""
    slots = engine.slots
    handles = {name: slots.find(name) for name in engine.residents}
    assert all(handle.users == 0 for handle in handles.values())
    loaded = {name: handle for name, handle in handles.items() if handle.slot is not None}
    assert slots.bytes == sum(handle.bytes for handle in loaded.values())
    assert len(engine.stacks) == len(loaded)  # nothing is left of what was removed or replaced
    if slots.budget is not None:
        assert slots.bytes <= slots.budget
    assert sorted(slots.resident) == sorted(loaded)
