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

from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.placed import PlacedEncoder
from adapterbank.encoder.prefix_cache import PrefixCache
from adapterbank.errors import TrainingError
from adapterbank.inference.graphs import GraphCompiler, runs_graphs
from adapterbank.slots.plan import first_trained_layer
from adapterbank.slots.sharing import step_form
from adapterbank.training.job import ActiveRun, Progress, RunState, TrainingJob
from adapterbank.training.trainer import Trainer

AT_ONCE = 8
"""Runs that share a batch unless somebody says otherwise."""


def train(
    encoder: PlacedEncoder,
    jobs: Sequence[TrainingJob],
    *,
    dropout: float | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
    keep: Callable[[int, RunState], None] = lambda run, state: None,
    resume: Mapping[int, RunState] | None = None,
    at_once: int = AT_ONCE,
    end: Callable[[int, RunState], None] | None = None,
) -> list[RunState]:
    """Train all lessons and give each one's end state, the best epoch's weights among its tensors.

    At most `at_once` share a batch; when one ends, the next of the queue takes its place. `watch` hears of each step
    and epoch, `keep` gets each run's state after an epoch, `resume` has such states. `end` gets each run's end state
    as soon as there is one, a failed run's with its `failure` while its neighbours go on, and the tensors are let go
    after that; without `end` the first failure is raised.
    """
    states = {i: (resume or {}).get(i, RunState()).copy() for i in range(len(jobs))}
    prefixes = PrefixCache(encoder.config, encoder.tensors)
    programs = GraphCompiler(encoder.device, fixed_sizes=True)
    for (first, alone, *_), group in group_jobs(encoder.config, jobs, encoder.device).items():
        trainer = Trainer(encoder, prefixes, dropout=dropout, first=first, programs=programs)
        coming = [ActiveRun(i, jobs[i], states[i]) for i in group]
        for run in coming:
            if run.done:  # resumed after its last epoch
                _leave(run, end)
        waiting = deque(run for run in coming if not run.done)
        trainer.prepare(waiting, 1 if alone else at_once)
        while trainer.fill(waiting):
            try:
                if not trainer.step():
                    continue
            except TrainingError as error:  # not even one row fits
                if not end:
                    raise
                for run in trainer.runs:
                    run.state.failure = str(error)
            for run in list(trainer.runs):
                if not run.state.failure:
                    watch(run.progress())
                if not run.state.failure and run.state.step % run.per_epoch == 0:
                    score = trainer.end_epoch(run)
                    if score is not None:
                        watch(run.progress(score))
                        keep(run.number, run.state.copy())
                if run.done:
                    _leave(run, end)
    return list(states.values())


def _leave(run: ActiveRun, end: Callable[[int, RunState], None] | None) -> None:
    """Hand a run's end state over; what has been handed over need not stay in memory."""
    if end:
        end(run.number, run.state.copy())
        run.state.tensors = {}
    elif run.state.failure:
        raise TrainingError(run.state.failure)


def group_jobs(
    config: EncoderConfig, jobs: Sequence[TrainingJob], device: torch.device
) -> dict[tuple[Any, ...], list[int]]:
    """Group lessons that may share a batch: the same frozen part below them, and not so large as to go alone.

    On a GPU they are also of one form, so that their steps can be one program (`steady`).
    """
    found: dict[tuple[Any, ...], list[int]] = {}
    for i, job in enumerate(jobs):
        first = first_trained_layer(job.initial, config.layers)
        key: tuple[Any, ...] = (first, job.plan.alone)
        if runs_graphs(device):
            key += (step_form(job.plan), job.batch, id(job.train) if first else 0)
        found.setdefault(key, []).append(i)
    return found
