"""One training run: its job, its state, its progress. Knows no stacks and no optimiser."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from adapterbank.inference.rows import Rows, epoch_order
from adapterbank.kinds.table import KINDS
from adapterbank.slots.mixture import Mixture
from adapterbank.slots.plan import Plan
from adapterbank.training.bases import Base, Members
from adapterbank.training.optimizer import AdamSettings, Schedule
from adapterbank.training.step_input import StepInput


@dataclass(frozen=True)
class TrainingJob:
    """The data and settings of one run."""

    plan: Plan
    initial: Mapping[str, Tensor] = field(repr=False)
    """The initial values of the tensors that train; of a mixture, those of all copies."""
    train: Rows = field(repr=False)
    dev: Rows = field(repr=False)
    score: Callable[[list[np.ndarray]], float]
    """Turns the head outputs of the dev rows into a score; higher is better."""
    rate: float
    """Peak learning rate."""
    epochs: int
    batch: int = 32
    warmup: float = 0.1
    settings: AdamSettings = field(default_factory=AdamSettings)
    seed: int = 0
    patience: int = 0
    """Stop after this many epochs without a better dev score; 0 for never."""
    class_weights: tuple[float, ...] | None = None
    """Weight of each class in the loss."""
    collapsed: Callable[[list[np.ndarray], Sequence[float]], bool] = lambda outputs, losses: False
    """(head outputs of the dev rows, mean loss of each epoch) -> whether the run learns nothing but the prior."""
    chooses: bool = True
    """Whether the dev rows are enough to choose the best epoch; otherwise the last one is kept."""
    averages: bool = False
    """Whether the mean of the epochs' weights is scored at the end, and kept if it is better than the best epoch."""
    narrowing: Narrowing | None = None
    """Whether adapters are narrowed on the way, by `wide_first`; the loop itself does not."""
    pause: int = 0
    """Stop after this many epochs, in the middle of the schedule; 0 for at its end."""
    fitted: bool = False
    """Whether the head is fitted to all rows at the end, by `fitted`, instead of trained by the loop."""
    mix: int = 1
    """Copies of each addition, of which the mean is kept."""

    base: Base | Members | None = None
    """What the slot stands on; it does not train."""

    @cached_property
    def mixture(self) -> Mixture:
        """The plan and the copies of its additions."""
        return Mixture(self.plan, self.mix)

    @property
    def changed(self) -> list[str]:
        """The names of all tensors in which its pass differs from that of the bare encoder."""
        return [*self.initial, *(self.base.names if self.base else ())]


@dataclass(frozen=True)
class Narrowing:
    """When adapters that are wide at first lose units, and how many remain."""

    mean: int
    """The most units of a site, on average over all sites."""
    after: int
    """Epochs with wide adapters."""


@dataclass
class RunState:
    """A run's state after an epoch: enough to resume as if the run had never stopped."""

    epoch: int = 0
    """Finished epochs."""
    step: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    """Loss, dev score and seconds of each epoch; the last one has the score of the `average` if one was computed."""
    best_epoch: int = 0
    """The epoch, from 1, with the best score, whose weights are kept unless the average is; 0 before the first."""
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False)
    """`weights`, `best`, the optimiser's `first` and `second` moments, the `average` if there is one, each by name.

    Of a mixture, weights and moments are those of all copies; `best` and `average` are merged.
    """
    failure: str = ""
    """Why the run failed, in one sentence; empty if it did not."""
    restarts: list[dict[str, float]] = field(default_factory=list)
    """Peak learning rate, loss and dev score of each start that collapsed and was given up."""
    held_out: list[np.ndarray] | None = field(default=None, repr=False)
    """Without dev rows: the outputs for each training row of a head that was fitted to other rows."""
    narrowed: dict[str, Any] = field(default_factory=dict)
    """Once adapters have been narrowed: the `epoch`, the dev score `before` and `after`, the `units` of each site."""
    about: dict[str, Any] = field(default_factory=dict)
    """What the record says of the run besides its scores."""

    def copy(self) -> RunState:
        """Return a copy that later epochs do not change; tensors are replaced, never written."""
        return replace(self, history=list(self.history), tensors=dict(self.tensors), restarts=list(self.restarts))

    @property
    def best_score(self) -> float:
        """The dev score of the weights that are kept: the best epoch's, or the average's."""
        if not self.best_epoch:
            return float("-inf")
        return max(self.history[self.best_epoch - 1]["score"], self.history[-1].get("average", float("-inf")))

    @property
    def average(self) -> dict[str, Any]:
        """What the record says of the average: the score, and whether it is kept; empty without one."""
        if not self.history or "average" not in self.history[-1]:
            return {}
        score = self.history[-1]["average"]
        return {"score": score, "kept": score > self.history[self.best_epoch - 1]["score"]}

    @property
    def kept(self) -> dict[str, Tensor]:
        """The weights that the package gets: the best epoch's, or the average if it is better."""
        return self.tensors["average" if self.average.get("kept") else "best"]

    def without_average(self) -> RunState:
        """Return the state of the same training without an average, whose epochs are the same."""
        history = [{name: value for name, value in epoch.items() if name != "average"} for epoch in self.history]
        return replace(self.copy(), history=history)

    @property
    def _widths(self) -> str:
        counts = [len(kept) for kept in self.narrowed["units"].values()]
        return f"{min(counts)} to {max(counts)} units, {sum(counts) / len(counts):g} on average"

    def notes(self) -> list[str]:
        """Return what a user should know of the training: starts that were given up, and which weights are kept."""
        found = [
            f"After {one['epochs']} epochs at the learning rate {one['lr']:g} the run gave one answer to everything, "
            "or had learned no more than how frequent the answers are; it began again at "
            f"{one['lr'] / 3:.3g}."
            for one in self.restarts
        ]
        if self.narrowed:
            found.append(
                f"After epoch {self.narrowed['epoch']} the adapters were narrowed to {self._widths}; dev score "
                f"{self.narrowed['before']:.4f} before, {self.narrowed['after']:.4f} after."
            )
        if self.average:
            than, best = "better" if self.average["kept"] else "no better", self.history[self.best_epoch - 1]["score"]
            kept = "the average" if self.average["kept"] else "that epoch"
            found.append(
                f"The average of the epochs scores {self.average['score']:.4f} on dev, {than} than epoch "
                f"{self.best_epoch} ({best:.4f}); {kept} is kept."
            )
        return found


@dataclass(frozen=True)
class Begun:
    """What has been trained of a run before it is started."""

    state: RunState | None
    """The state from which it continues; None for the first epoch."""
    about: Mapping[str, Any]
    """What its record says of what went before."""


@dataclass(frozen=True)
class Progress:
    """The report after each step (on a GPU after a few), and after each epoch with its dev score."""

    run: int
    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    rows_per_second: float
    score: float | None = None


class ActiveRun:
    """A run in progress."""

    def __init__(self, number: int, job: TrainingJob, state: RunState) -> None:
        self.number, self.job, self.state = number, job, state
        self.slot = -1  # until it is admitted
        sizes = np.array([len(row) for row in job.train.tokens])
        self.longest = int(sizes.max(initial=0))
        self.lengths: list[int] = np.add.reduceat(sizes, job.train.starts[:-1]).tolist()
        self.per_epoch = -(-job.train.units // job.batch)
        self.losses: list[float] = []
        self.began = time.perf_counter()
        self.order: list[np.ndarray] = []

    @property
    def rate(self) -> float:
        """The peak learning rate, a third of what it was before each restart."""
        return self.job.rate / float(3 ** len(self.state.restarts))

    @property
    def schedule(self) -> Schedule:
        """The learning rate of each step."""
        return Schedule(self.rate, self.per_epoch * self.job.epochs, self.job.warmup)

    @property
    def done(self) -> bool:
        """Whether the run has ended: all epochs are done, patience is exhausted, or it has failed."""
        stale = self.state.epoch - self.state.best_epoch
        stopped = 0 < self.job.patience <= stale and self.state.epoch > 0
        return bool(self.state.failure) or stopped or self.state.epoch >= (self.job.pause or self.job.epochs)

    def next_batch(self) -> np.ndarray:
        """Return the indices of the units of the next step."""
        if not self.order:
            self.order = self.epoch_batches()
            self.losses, self.began = [], time.perf_counter()
        return self.order[self.state.step % self.per_epoch]

    def epoch_batches(self) -> list[np.ndarray]:
        """Return the batches of the epoch that follows."""
        return epoch_order(self.lengths, self.job.batch, seed=self.job.seed, epoch=self.state.epoch)

    def weigh(self, batch: np.ndarray) -> np.ndarray:
        """Return the weight of each unit of a batch in its loss; they sum to 1."""
        job, weight = self.job, KINDS[self.job.plan.head.kind].weight
        if job.class_weights is None and weight is None:
            return np.full(len(batch), 1 / len(batch))
        targets = [(job.train.targets or [])[unit] for unit in batch]
        if job.class_weights is None:
            assert weight is not None
            weights = np.array([weight(target) for target in targets])
        else:
            weights = np.array([job.class_weights[target] for target in targets])
        return np.asarray(weights / weights.sum()) if weights.any() else np.full(len(batch), 1 / len(batch))

    def step_input(self, batch: np.ndarray) -> StepInput:
        """Return the step input for a batch of this run."""
        job = self.job
        return StepInput(self.slot, job.mixture, job.train, batch, self.weigh(batch), job.seed, self.state.step)

    def progress(self, score: float | None = None) -> Progress:
        """Return the run's progress, with the epoch's score if an epoch has just ended."""
        seen = min(len(self.losses) * self.job.batch, self.job.train.units)
        speed = seen / max(1e-9, time.perf_counter() - self.began)
        loss = float(np.mean(self.losses[-50:]))
        steps = self.per_epoch * self.job.epochs
        epoch = self.state.epoch + (score is None)
        return Progress(self.number, epoch, self.job.epochs, self.state.step, steps, loss, speed, score)
