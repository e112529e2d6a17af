"""Teaching together: one slot that several tasks train, each with a head of its own. Knows no files and no shell.

The slot is one row of the stacks, and each task's head is a slot that stands on it. A step takes a batch of one task,
drawn with a probability in proportion to the square root of its rows, so that a large task does not drown the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from adapterbank.draws import RandomStream
from adapterbank.encoder.placed import PlacedEncoder
from adapterbank.encoder.prefix_cache import PrefixCache
from adapterbank.encoder.recompute import Recomputing
from adapterbank.errors import TrainingError
from adapterbank.inference.runner import outputs
from adapterbank.methods import roles
from adapterbank.slots.plan import Plan, first_trained_layer
from adapterbank.slots.stack import Stacks
from adapterbank.training.eager_step import EagerStep, token_limit
from adapterbank.training.job import ActiveRun, Progress, RunState, TrainingJob
from adapterbank.training.optimizer import Schedule, StackedAdam
from adapterbank.training.step_input import StepContext, dropout_rates

SHARE = 0.5
"""A task is drawn with a probability in proportion to this power of its rows."""


@dataclass(frozen=True)
class Taught:
    """The result of teaching tasks together."""

    state: RunState
    """With the best weights of the slot and of the first task's head, and the mean dev score of each epoch."""
    scores: list[list[float]]
    """The dev score of each task after each epoch."""


def shares(rows: Sequence[int]) -> np.ndarray:
    """Return the probability of each task from its rows."""
    weights = np.asarray(rows, dtype=np.float64) ** SHARE
    return np.asarray(weights / weights.sum())


def order(rows: Sequence[int], steps: int, *, seed: int, epoch: int) -> list[int]:
    """Return the task of each step of an epoch."""
    drawn = RandomStream(seed, "together", epoch).uniform((steps,), 0.5) + 0.5
    return [min(int(task), len(rows) - 1) for task in np.searchsorted(np.cumsum(shares(rows)), drawn, side="right")]


class _Together:
    """The slot that the tasks train, their heads, and the optimiser of both."""

    def __init__(self, encoder: PlacedEncoder, jobs: Sequence[TrainingJob], dropout: float | None) -> None:
        config, first = encoder.config, jobs[0]
        self.config, self.prefixes = config, PrefixCache(config, encoder.tensors)
        self.first = first_trained_layer(first.changed, config.layers)
        self.stacks = Stacks(encoder.tensors)
        under = first.base.put(self.stacks, {}) if first.base else ()
        self.slot = self.stacks.put(first.plan, _parts(first.initial)[0], *under)
        self.runs = [self._with_head(number, job) for number, job in enumerate(jobs)]
        self.adam = StackedAdam(self.stacks, compute=encoder.dtype)
        for slot in (self.slot, *(run.slot for run in self.runs)):
            self.adam.admit(slot, first.settings)
        rates, again = dropout_rates(config, dropout), Recomputing(encoder.recompute)
        context = StepContext(config, self.prefixes, self.first, rates, again)
        self.step = EagerStep(context, limit=token_limit(config, self.stacks.device))

    def _with_head(self, number: int, job: TrainingJob) -> ActiveRun:
        own = _parts(job.initial)[1]
        plan = Plan("feature", job.plan.head, (), frozenset({"head"}))
        run = ActiveRun(number, replace(job, plan=plan, initial=own), RunState())
        run.slot = self.stacks.put(plan, own, self.slot)
        return run

    def train(self, task: int, rate: float) -> float:
        """Take a step on the next batch of a task; return its loss."""
        run = self.runs[task]
        losses = self.step.step(self.stacks, self.adam, [run.step_input(run.next_batch())])
        self.adam.step({self.slot: rate, run.slot: rate})
        run.state.step += 1
        if run.state.step % run.per_epoch == 0:  # its rows begin again, in another order
            run.state.epoch, run.order = run.state.epoch + 1, []
        return float(losses[0])

    def score(self, task: int) -> float:
        """Return a task's score on its dev rows."""
        run = self.runs[task]
        dev = run.job.dev
        prefix = self.prefixes.get(dev.tokens, self.first) if self.first else None
        found = outputs(self.config, self.stacks, dev.tokens, [run.slot] * len(dev), prefix)
        if not all(np.isfinite(out).all() for out in found):
            raise TrainingError(_diverged("the outputs on the dev rows are not finite", run.job.rate))
        return run.job.score(found)

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the slot's tensors and of those of the first task's head."""
        return self.stacks.take(self.slot) | self.stacks.take(self.runs[0].slot)


def teach(
    encoder: PlacedEncoder,
    jobs: Sequence[TrainingJob],
    *,
    dropout: float | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> Taught:
    """Train one slot on jobs of one form, which begin at the same tensors below their heads.

    An epoch has as many steps as the tasks have batches. The epoch with the best mean of the tasks' dev scores is kept.
    """
    together, first = _Together(encoder, jobs, dropout), jobs[0]
    rows, steps = [job.train.units for job in jobs], sum(run.per_epoch for run in together.runs)
    schedule, state, scores = Schedule(first.rate, steps * first.epochs, first.warmup), RunState(), []
    while state.epoch < first.epochs and not 0 < first.patience <= state.epoch - state.best_epoch:
        began, losses = time.perf_counter(), list[float]()
        for task in order(rows, steps, seed=first.seed, epoch=state.epoch):
            losses.append(together.train(task, schedule.at(state.step)))
            state.step += 1
            if not np.isfinite(losses[-1]):
                raise TrainingError(_diverged(f"the loss became {losses[-1]}", first.rate))
            speed = len(losses) * first.batch / max(1e-9, time.perf_counter() - began)
            mean = float(np.mean(losses[-50:]))
            watch(Progress(0, state.epoch + 1, first.epochs, state.step, steps * first.epochs, mean, speed))
        scores.append([together.score(task) for task in range(len(jobs))])
        score = float(np.mean(scores[-1]))
        better = not state.best_epoch or score > state.best_score or not any(job.chooses for job in jobs)
        state.epoch += 1
        seconds = time.perf_counter() - began
        state.history.append({"loss": float(np.mean(losses)), "score": score, "seconds": seconds})
        if better:
            state.best_epoch, state.tensors["best"] = state.epoch, together.weights()
        watch(Progress(0, state.epoch, first.epochs, state.step, steps * first.epochs, mean, speed, score))
    return Taught(state, scores)


def _parts(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors below the head, and those of the head."""
    below = {name: tensor for name, tensor in tensors.items() if "head" not in roles(name)}
    return below, {name: tensor for name, tensor in tensors.items() if name not in below}


def _diverged(what: str, rate: float) -> str:
    return (
        f"While teaching together, {what}. The learning rate {rate:g} is probably too high: try --lr {rate / 10:g}. "
        "Nothing was written to the bank."
    )
