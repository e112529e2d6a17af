"""Trains runs whose adapters are wide at first: to the epoch at which they are narrowed, and then on. Knows no banks.

Both parts are the one loop's (`loop`): the second resumes from the state of the first, with weights and moments of the
kept units. Units are chosen by their effect on the loss of training rows (`narrowing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adapterbank.encoder.placed import PlacedEncoder
from adapterbank.encoder.prefix_cache import PrefixCache
from adapterbank.encoder.recompute import Recomputing
from adapterbank.inference.runner import outputs
from adapterbank.slots.stack import Stacks
from adapterbank.training import loop
from adapterbank.training.eager_step import EagerStep, token_limit
from adapterbank.training.job import ActiveRun, Progress, RunState, TrainingJob
from adapterbank.training.loop import Together
from adapterbank.training.narrowing import choose_units, narrow_job, narrow_tensors, unit_effects, wide_job
from adapterbank.training.optimizer import StackedAdam
from adapterbank.training.step_input import StepContext

BATCHES = 64
"""Effects are means over so many batches of the next epoch, or over all if it has fewer."""


def train(
    encoder: PlacedEncoder,
    jobs: Sequence[TrainingJob],
    *,
    dropout: float | None,
    watch: Callable[[Progress], None],
    keep: Callable[[int, RunState], None],
    resume: Mapping[int, RunState],
    end: Callable[[int, RunState], None],
    together: Together,
) -> None:
    """Train all jobs as `loop.train` does; those with a `narrowing` in two parts."""
    states = dict(resume)
    parts = {run: _second_part(job, states.get(run)) for run, job in enumerate(jobs)}

    def narrowed(run: int, state: RunState) -> None:
        if state.failure:
            end(run, state)
            del parts[run]
            return
        states[run] = narrow(encoder, jobs[run], state)
        parts[run] = narrow_job(jobs[run], states[run].narrowed["units"])
        keep(run, states[run].copy())

    def train_some(some: Mapping[int, TrainingJob], ended: Callable[[int, RunState], None]) -> None:
        runs = list(some)
        loop.train(
            encoder,
            list(some.values()),
            dropout=dropout,
            watch=lambda progress: watch(replace(progress, run=runs[progress.run])),
            keep=lambda place, state: keep(runs[place], state),
            resume={place: states[run] for place, run in enumerate(runs) if run in states},
            end=lambda place, state: ended(runs[place], state),
            together=together,
        )

    if wide := {run: wide_job(job) for run, job in parts.items() if job.narrowing}:
        train_some(wide, narrowed)
    train_some(dict(sorted(parts.items())), end)


def _second_part(job: TrainingJob, state: RunState | None) -> TrainingJob:
    """Return what is left of a job whose state has been narrowed; otherwise the job itself."""
    return narrow_job(job, state.narrowed["units"]) if state and state.narrowed else job


def narrow(encoder: PlacedEncoder, job: TrainingJob, state: RunState) -> RunState:
    """Return a wide run's state with the units of the largest effects; the epoch's dev score becomes theirs."""
    assert job.narrowing
    units = choose_units(effects_of(encoder, job, state), job.narrowing.mean)
    tensors = {part: narrow_tensors(job.plan, state.tensors[part], units) for part in ("weights", "first", "second")}
    kept = tensors["weights"]
    tensors["best"] = kept
    if job.averages:
        tensors["average"] = {name: tensor.clone() for name, tensor in kept.items()}  # a file stores each part apart
    after = _dev_score(encoder, narrow_job(job, units), kept)
    about: dict[str, Any] = {"epoch": state.epoch, "before": state.history[-1]["score"], "after": after}
    history = [*state.history[:-1], {**state.history[-1], "score": after}]
    return replace(
        state.copy(), tensors=tensors, history=history, best_epoch=state.epoch, narrowed={**about, "units": units}
    )


def effects_of(encoder: PlacedEncoder, job: TrainingJob, state: RunState) -> dict[str, Tensor]:
    """Return the mean effect of each unit over batches of the next epoch, without dropout, by site."""
    stacks, run = Stacks(encoder.tensors), ActiveRun(0, job, state)
    run.slot = stacks.put(job.plan, state.tensors["weights"])
    adam = StackedAdam(stacks, {run.slot: job.settings}, encoder.dtype)
    prefixes = PrefixCache(encoder.config, encoder.tensors)
    context = StepContext(encoder.config, prefixes, 0, (0.0, 0.0), Recomputing(encoder.recompute))
    eager = EagerStep(context, limit=token_limit(encoder.config, stacks.device))
    totals: dict[str, Tensor] = {}
    batches = run.epoch_batches()[:BATCHES]
    for batch in batches:
        eager.step(stacks, adam, [run.step_input(batch)])
        found = unit_effects(job.plan, state.tensors["weights"], stacks.take(run.slot, adam.gradients))
        totals = {site: totals.get(site, torch.zeros_like(effect)) + effect for site, effect in found.items()}
    return {site: total / len(batches) for site, total in totals.items()}


def _dev_score(encoder: PlacedEncoder, job: TrainingJob, weights: Mapping[str, Tensor]) -> float:
    stacks = Stacks(encoder.tensors, dtype=encoder.dtype)
    slot = stacks.put(job.plan, weights)
    found: list[np.ndarray] = outputs(encoder.config, stacks, job.dev.tokens, [slot] * len(job.dev))
    return job.score(found)
