"""The one training loop, for any number of slots at once. Knows no files, configs or banks.

Each step takes the next batch of every active run, sends all rows through the encoder together, each through its own
slot, and takes one optimiser step per slot. A run depends on the others only through rounding, as products of another
shape are rounded otherwise: its order comes from (seed, epoch), its dropout from (seed, step, row), its gradient from
its own rows.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.placed import PlacedEncoder
from adapterbank.encoder.prefix_cache import PrefixCache
from adapterbank.errors import TrainingError
from adapterbank.inference.graphs import GraphCompiler, runs_graphs
from adapterbank.slots.plan import first_trained_layer
from adapterbank.slots.sharing import step_form
from adapterbank.training.graph_rule import BY_THE_CLOCK, GraphRule
from adapterbank.training.job import ActiveRun, Progress, RunState, TrainingJob
from adapterbank.training.trainer import Trainer

AT_ONCE = 8
"""Runs that share a batch by default."""


@dataclass(frozen=True)
class Together:
    """How runs share steps."""

    at_once: int = AT_ONCE
    """The most runs that share a batch."""
    rule: GraphRule = BY_THE_CLOCK
    """Which steps run as graphs, on a GPU."""


TOGETHER = Together()


def train(
    encoder: PlacedEncoder,
    jobs: Sequence[TrainingJob],
    *,
    dropout: float | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
    keep: Callable[[int, RunState], None] = lambda run, state: None,
    resume: Mapping[int, RunState] | None = None,
    end: Callable[[int, RunState], None] | None = None,
    together: Together = TOGETHER,
) -> list[RunState]:
    """Train all jobs and return their final states, which include the weights of the best epoch.

    When a run ends, the next of the queue takes its place. `watch` is called after each step and epoch, `keep` with a
    run's state after each epoch; `resume` has such states. `end` is called with a run's final state as soon as the run
    ends, or fails with its `failure` set, while the others continue; its tensors are released after that. Without `end`
    the first failure is raised.
    """
    states = {i: (resume or {}).get(i, RunState()).copy() for i in range(len(jobs))}
    prefixes = PrefixCache(encoder.config, encoder.tensors)
    device = torch.cuda.device(encoder.device) if encoder.device.type == "cuda" else contextlib.nullcontext()
    with device, contextlib.closing(GraphCompiler(encoder.device)) as programs:
        for (first, alone, *_), group in group_jobs(encoder.config, jobs, encoder.device).items():
            trainer = Trainer(encoder, prefixes, dropout=dropout, first=first, programs=programs, rule=together.rule)
            coming = [ActiveRun(i, jobs[i], states[i]) for i in group]
            for run in coming:
                if run.done:  # resumed after its last epoch
                    _end_run(run, end)
            waiting = deque(run for run in coming if not run.done)
            trainer.prepare(waiting, 1 if alone else together.at_once)
            _train_group(trainer, waiting, watch, keep, end)
    return list(states.values())


def _train_group(
    trainer: Trainer,
    waiting: deque[ActiveRun],
    watch: Callable[[Progress], None],
    keep: Callable[[int, RunState], None],
    end: Callable[[int, RunState], None] | None,
) -> None:
    """Train the runs of a group to their ends; see `train`."""
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
                if score is not None and run.state.epoch:  # not where it begins again
                    watch(run.progress(score))
                    keep(run.number, run.state.copy())
            if run.done:
                _end_run(run, end)


def _end_run(run: ActiveRun, end: Callable[[int, RunState], None] | None) -> None:
    """Pass a run's final state to `end` and release its tensors; without `end`, raise its failure."""
    if end:
        end(run.number, run.state.copy())
        run.state.tensors = {}
    elif run.state.failure:
        raise TrainingError(run.state.failure)


def group_jobs(
    config: EncoderConfig, jobs: Sequence[TrainingJob], device: torch.device
) -> dict[tuple[Any, ...], list[int]]:
    """Group jobs that can share a batch: those with the same lowest trained layer, unless they change whole layers.

    On a GPU a group also has one form, so that its steps can be one captured graph (`graph_step`). Mixtures,
    whose steps cannot, have groups of their own.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, job in enumerate(jobs):
        first = first_trained_layer(job.changed, config.layers)
        key: tuple[Any, ...] = (first, job.plan.alone)
        if runs_graphs(device):
            key += (step_form(job.plan), job.mix > 1, job.batch, job.train.pooling, id(job.train) if first else 0)
            key += (job.base is None,)
        groups.setdefault(key, []).append(i)
    return groups
