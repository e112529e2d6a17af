"""The one training loop, for any number of slots at once. Knows no files, configs or banks.

Each step takes the next batch of every run that is not done, sends all their rows through the encoder together, each
through its own slot, and takes one optimiser step per slot. Nothing of a run depends on the others: its order comes
from (seed, epoch), its dropout from (seed, step, row), its gradient from its own rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from adapterbank.encoder.anatomy import Anatomy
from adapterbank.encoder.checkpoint import Backbone
from adapterbank.encoder.prefix import Prefixes
from adapterbank.errors import TrainingError
from adapterbank.evaluate import place
from adapterbank.lesson import Learner, Lesson, Progress, State
from adapterbank.methods import first_trained_layer
from adapterbank.program import Programs
from adapterbank.school import School
from adapterbank.steady import form

AT_ONCE = 8
"""Runs that share a batch unless somebody says otherwise."""


def train(
    backbone: Backbone,
    lessons: Sequence[Lesson],
    *,
    device: torch.device,
    dtype: torch.dtype,
    dropout: float | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
    keep: Callable[[int, State], None] = lambda run, state: None,
    resume: Mapping[int, State] | None = None,
    at_once: int = AT_ONCE,
    end: Callable[[int, State], None] | None = None,
) -> list[State]:
    """Train all lessons and give each one's end state, the best epoch's weights among its tensors.

    At most `at_once` share a batch; when one ends, the next of the queue takes its place. `watch` hears of each step
    and epoch, `keep` gets each run's state after an epoch, `resume` has such states. `end` gets each run's end state
    as soon as there is one, a failed run's with its `failure` while its neighbours go on, and the tensors are let go
    after that; without `end` the first failure is raised.
    """
    states = {i: (resume or {}).get(i, State()).copy() for i in range(len(lessons))}
    frozen = place(backbone, device, dtype)
    prefixes = Prefixes(backbone.anatomy, frozen)
    programs = Programs(device)
    for (first, alone, *_), group in _groups(backbone.anatomy, lessons, device).items():
        school = School(backbone.anatomy, frozen, prefixes, dtype, dropout, first, programs)
        coming = [Learner(i, lessons[i], states[i]) for i in group]
        for learner in coming:
            if learner.done:  # resumed after its last epoch
                _leave(learner, end)
        waiting = deque(learner for learner in coming if not learner.done)
        school.prepare(waiting, 1 if alone else at_once)
        while school.fill(waiting):
            try:
                if not school.step():
                    continue
            except TrainingError as error:  # not even one row fits
                if not end:
                    raise
                for learner in school.learners:
                    learner.state.failure = str(error)
            for learner in list(school.learners):
                if not learner.state.failure:
                    watch(learner.progress())
                if not learner.state.failure and learner.state.step % learner.per_epoch == 0:
                    score = school.end_epoch(learner)
                    if score is not None:
                        watch(learner.progress(score))
                        keep(learner.number, learner.state.copy())
                if learner.done:
                    _leave(learner, end)
    return list(states.values())


def _leave(learner: Learner, end: Callable[[int, State], None] | None) -> None:
    """Hand a run's end state over; what has been handed over need not stay in memory."""
    if end:
        end(learner.number, learner.state.copy())
        learner.state.tensors = {}
    elif learner.state.failure:
        raise TrainingError(learner.state.failure)


def _groups(anatomy: Anatomy, lessons: Sequence[Lesson], device: torch.device) -> dict[tuple[Any, ...], list[int]]:
    """Group lessons that may share a batch: the same frozen part below them, and not so large as to go alone.

    On a GPU they are also of one form, so that their steps can be one program (`steady`).
    """
    found: dict[tuple[Any, ...], list[int]] = {}
    for i, lesson in enumerate(lessons):
        first = first_trained_layer(lesson.initial, anatomy.layers)
        key: tuple[Any, ...] = (first, lesson.plan.alone)
        if device.type == "cuda":
            key += (form(lesson.plan), lesson.batch, id(lesson.train) if first else 0)
        found.setdefault(key, []).append(i)
    return found
