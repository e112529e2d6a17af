"""Compiles ahead what training and answers need on a GPU, into the compiler's own cache on disk. Knows no banks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.placed import PlacedEncoder
from adapterbank.errors import ConfigError, SlowerWarning, TrainingError
from adapterbank.inference.engine import Engine
from adapterbank.inference.graphs import runs_graphs
from adapterbank.inference.rows import Rows
from adapterbank.slots.plan import Head, Plan
from adapterbank.slots.sharing import step_form
from adapterbank.tasks.spec import Task
from adapterbank.training.builder import initial_tensors
from adapterbank.training.graph_rule import ALWAYS
from adapterbank.training.job import TrainingJob
from adapterbank.training.loop import Together, train

_BATCH = 32
_SHORTEST = 32
"""Kernels differ by the power of two that the longest row fits into, from this one on."""
_TASKS = (
    Task("label", "classification", ("text",), "label", ("a", "b"), "accuracy"),
    Task("tags", "tagging", ("text",), "tags", ("a", "b"), "tag_accuracy"),
)
"""A task with outputs for rows, and one with outputs for tokens."""


def check_device(device: torch.device) -> None:
    """Refuse a device for which nothing is compiled."""
    if not runs_graphs(device):
        raise ConfigError([f"device is {str(device)!r}, for which nothing is compiled; use a GPU: cuda."])


def warm(
    backbone: Backbone,
    placed: PlacedEncoder,
    plans: Sequence[Plan],
    max_length: int,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Train and ask made-up tasks of these forms, for which all kernels are compiled; return how many forms differ.

    `watch` is told how many of the forms are done. What cannot be compiled is an error.
    """
    check_device(placed.device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowerWarning)
        try:
            return _warm(backbone, placed, plans, max_length, watch)
        except SlowerWarning as warning:
            raise TrainingError(str(warning)) from None


def _warm(
    backbone: Backbone,
    placed: PlacedEncoder,
    plans: Sequence[Plan],
    max_length: int,
    watch: Callable[[int, int], None],
) -> int:
    different = list({step_form(plan): plan for plan in (_with_head(plan) for plan in plans)}.values())
    engine = Engine(backbone, placed=placed)
    for done, plan in enumerate(different):
        watch(done, len(different))
        for length in _lengths(max_length):
            train(placed, [_job(backbone, plan, length)], together=Together(rule=ALWAYS))
        train(replace(placed, recompute="always"), [_job(backbone, plan, max_length)], together=Together(rule=ALWAYS))
        for task in _TASKS:
            own = replace(plan, head=Head(task.kind, 2))
            tensors = {name: t.numpy() for name, t in initial_tensors(own, backbone, sigma=0.0, seed=0).items()}
            engine.put(f"{task.name} {done}", task, own, tensors, max_length)
    engine.use_graphs()
    engine.warm()
    watch(len(different), len(different))
    return len(different)


def _with_head(plan: Plan) -> Plan:
    return replace(plan, head=Head("classification", 2))


def _lengths(max_length: int) -> Iterator[int]:
    length = _SHORTEST
    while length < max_length:
        yield length
        length *= 2
    yield max_length


def _job(backbone: Backbone, plan: Plan, length: int) -> TrainingJob:
    """Return a run of one step, on rows of token 0."""
    rows = [Tokens(np.zeros(length, np.int64), np.zeros(length, np.int64))] * _BATCH
    data = Rows(rows, [0] * len(rows))
    initial = initial_tensors(plan, backbone, sigma=1e-2, seed=0)
    return TrainingJob(plan, initial, data, Rows(rows[:1], None), lambda outputs: 0.0, 0.0, 1, batch=_BATCH)
