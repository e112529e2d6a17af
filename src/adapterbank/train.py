"""The one training loop, for any number of slots at once. Knows no files, configs or banks.

Each step takes the next batch of every run that is not done, sends all their rows through the encoder together, each
through its own slot, and takes one optimiser step per slot. Nothing of a run depends on the others: its order comes
from (seed, epoch), its dropout from (seed, step, row), its gradient from its own rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adapterbank.batches import Rows, epoch_order
from adapterbank.eager import Eager, Work, token_limit
from adapterbank.encoder.anatomy import Anatomy
from adapterbank.encoder.checkpoint import Backbone
from adapterbank.encoder.packed import room
from adapterbank.encoder.prefix import Prefixes
from adapterbank.errors import TrainingError
from adapterbank.evaluate import outputs, place
from adapterbank.methods import Plan, first_trained_layer
from adapterbank.optimizer import Schedule, Settings, StackedAdam
from adapterbank.program import Programs
from adapterbank.slots import heads
from adapterbank.slots.stack import LARGEST, Stacks
from adapterbank.steady import Data, Steady, Turn, form

AT_ONCE = 8
"""Runs that share a batch unless somebody says otherwise."""
_WORTH = 500
"""Steps a run from which on a program pays for its compilation."""
_READ_EVERY = 0.2
"""Seconds after which a program's losses are read, at the latest."""


@dataclass(frozen=True)
class Lesson:
    """What one run trains on, and how."""

    plan: Plan
    initial: Mapping[str, Tensor] = field(repr=False)
    """The trained tensors' first values."""
    train: Rows = field(repr=False)
    dev: Rows = field(repr=False)
    score: Callable[[list[np.ndarray]], float]
    """Head outputs of the dev rows -> a number; higher is better."""
    rate: float
    """Learning rate at its peak."""
    epochs: int
    batch: int = 32
    warmup: float = 0.1
    settings: Settings = field(default_factory=Settings)
    seed: int = 0
    patience: int = 0
    """Stop after this many epochs without a better dev score; 0 for never."""
    class_weights: tuple[float, ...] | None = None
    """Weight of each class in the loss."""


@dataclass
class State:
    """Where a run stands after an epoch: enough to go on as if it had never stopped."""

    epoch: int = 0
    """Finished epochs."""
    step: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    """Loss, dev score and seconds of each epoch."""
    best_epoch: int = 0
    """The epoch, from 1, whose weights are kept; 0 before the first."""
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False)
    """`weights`, `best`, and the optimiser's `first` and `second` moments, each by tensor name."""
    failure: str = ""
    """Why the run cannot go on, in a sentence."""

    def copy(self) -> State:
        """Give a state that later epochs leave as it is; tensors are replaced, never written."""
        return replace(self, history=list(self.history), tensors=dict(self.tensors))

    @property
    def best_score(self) -> float:
        """The kept epoch's dev score."""
        return self.history[self.best_epoch - 1]["score"] if self.best_epoch else float("-inf")


@dataclass(frozen=True)
class Progress:
    """What a watcher is told after each step (on a GPU after a few), and after each epoch with its dev score."""

    run: int
    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    rows_per_second: float
    score: float | None = None


class _Learner:
    """One run on its way."""

    def __init__(self, number: int, lesson: Lesson, state: State) -> None:
        self.number, self.lesson, self.state = number, lesson, state
        self.slot = -1  # until it is admitted
        self.lengths = [len(row) for row in lesson.train.tokens]
        self.per_epoch = -(-len(lesson.train) // lesson.batch)
        self.schedule = Schedule(lesson.rate, self.per_epoch * lesson.epochs, lesson.warmup)
        self.losses: list[float] = []
        self.targets: Tensor | None = None  # on the device, from the first step on
        self.began = time.perf_counter()
        self.order: list[np.ndarray] = []

    @property
    def done(self) -> bool:
        stale = self.state.epoch - self.state.best_epoch
        stopped = 0 < self.lesson.patience <= stale and self.state.epoch > 0
        return bool(self.state.failure) or stopped or self.state.epoch >= self.lesson.epochs

    def next_batch(self) -> np.ndarray:
        if not self.order:
            self.order = epoch_order(self.lengths, self.lesson.batch, seed=self.lesson.seed, epoch=self.state.epoch)
            self.losses, self.began = [], time.perf_counter()
        return self.order[self.state.step % self.per_epoch]

    def weigh(self, batch: np.ndarray) -> np.ndarray:
        """Give the weight of each row of a batch in its loss; they sum to 1."""
        lesson = self.lesson
        if lesson.class_weights is None:
            return np.full(len(batch), 1 / len(batch))
        assert lesson.train.targets is not None
        found = np.array([lesson.class_weights[lesson.train.targets[row]] for row in batch])
        return np.asarray(found / found.sum())

    def work(self, batch: np.ndarray, device: torch.device) -> Work:
        """Say what is to be computed for a batch."""
        lesson = self.lesson
        if self.targets is None:
            head = lesson.plan.head
            self.targets = heads.KINDS[head.kind].targets(lesson.train.targets or [], head).to(device)
        weights, clock = self.weigh(batch), (lesson.seed, self.state.step)
        return Work(self.slot, lesson.plan, lesson.train, batch, weights, self.targets, *clock)

    def progress(self, score: float | None = None) -> Progress:
        seen = min(len(self.losses) * self.lesson.batch, len(self.lesson.train))
        speed = seen / max(1e-9, time.perf_counter() - self.began)
        loss = float(np.mean(self.losses[-50:]))
        steps = self.per_epoch * self.lesson.epochs
        epoch = self.state.epoch + (score is None)
        return Progress(self.number, epoch, self.lesson.epochs, self.state.step, steps, loss, speed, score)


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
        school = _School(backbone.anatomy, frozen, prefixes, dtype, dropout, first, programs)
        coming = [_Learner(i, lessons[i], states[i]) for i in group]
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


def _leave(learner: _Learner, end: Callable[[int, State], None] | None) -> None:
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


class _School:
    """The encoder, the stacks and the optimiser that all learners of one time share."""

    def __init__(
        self,
        anatomy: Anatomy,
        frozen: Mapping[str, Tensor],
        prefixes: Prefixes,
        dtype: torch.dtype,
        dropout: float | None,
        first: int,
        programs: Programs,
    ) -> None:
        self.anatomy, self.dtype, self.first, self.programs = anatomy, dtype, first, programs
        self.rates = (anatomy.dropout, anatomy.attention_dropout) if dropout is None else (dropout, dropout)
        self.prefixes = prefixes
        self.stacks = Stacks(frozen)
        self.adam = StackedAdam(self.stacks, compute=dtype)
        self.limit = token_limit(anatomy, self.stacks.device)
        self.eager = Eager(anatomy, prefixes, first=first, rates=self.rates, limit=self.limit)
        self.learners: list[_Learner] = []
        self.places = 1
        self.data: Data | None = None
        self.steady: Steady | None = None
        self.unread: list[tuple[Tensor, list[tuple[_Learner, int, int]]]] = []
        self.read_at = 0.0

    def prepare(self, coming: Sequence[_Learner], places: int) -> None:
        """Decide how many learn at once, and whether their steps are worth a program."""
        self.places = max(1, min(places, len(coming)))
        if self.stacks.device.type != "cuda" or not coming:
            return
        steps = sum(c.per_epoch * c.lesson.epochs - c.state.step for c in coming)
        largest = max(c.lesson.batch * room(max(c.lengths), self.anatomy.max_length) for c in coming)
        if steps < _WORTH * self.places or largest > self.limit:
            return
        self.places = min(self.places, self.limit // largest, LARGEST)
        self.data = Data.of([c.lesson.train for c in coming], coming[0].lesson.plan.head, self.stacks.device)

    def fill(self, waiting: deque[_Learner]) -> bool:
        """Let those go who are done and take in who waits; say whether there is anyone to teach."""
        for learner in [learner for learner in self.learners if learner.done]:
            self.learners.remove(learner)
            self.stacks.remove(learner.slot)
            self.adam.release(learner.slot)
        while waiting and len(self.learners) < self.places:
            self._admit(waiting.popleft())
        if self.data and self.learners and 2 * len(self.learners) <= self.places:
            self._move_together()
        if self.data and self.learners and not self.steady:
            self.steady = self._make_steady(self.data)
        return bool(self.learners)

    def _make_steady(self, data: Data) -> Steady:
        lesson = self.learners[0].lesson
        prefix = self.prefixes.get(lesson.train.tokens, self.first) if self.first else None
        return Steady(
            self.anatomy,
            self.stacks,
            self.adam,
            data,
            lesson.plan,
            batch=lesson.batch,
            rates=self.rates,
            first=self.first,
            prefix=prefix,
            programs=self.programs,
        )

    def _move_together(self) -> None:
        """Leave no empty places: the last few of a queue should not pay for all."""
        held = [
            [self.stacks.take(learner.slot, of) for of in (None, self.adam.first, self.adam.second)]
            for learner in self.learners
        ]
        learners, self.learners, self.steady, self.places = self.learners, [], None, len(self.learners)
        self.stacks = Stacks(self.stacks.frozen)
        self.adam = StackedAdam(self.stacks, compute=self.dtype)
        for learner, tensors in zip(learners, held, strict=True):
            self._admit(learner, dict(zip(("weights", "first", "second"), tensors, strict=True)))

    def _admit(self, learner: _Learner, tensors: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
        """Take a learner in, with the tensors it left off with where there are any."""
        learner.slot = self.stacks.put(learner.lesson.plan, learner.lesson.initial)
        self.adam.admit(learner.slot, learner.lesson.settings)
        self.learners.append(learner)
        if found := tensors or learner.state.tensors:
            self.stacks.write(learner.slot, found["weights"])
            self.stacks.write(learner.slot, found["first"], self.adam.first)
            self.stacks.write(learner.slot, found["second"], self.adam.second)
            self.adam.steps[learner.slot] = learner.state.step

    def step(self) -> bool:
        """Take one step for every learner; say whether their losses have been read."""
        chosen = [(learner, learner.next_batch()) for learner in self.learners]
        rates = {learner.slot: learner.schedule.at(learner.state.step) for learner in self.learners}
        losses = self._steady_step(chosen, rates) if self.steady else None
        if losses is None:
            losses = self._eager_step(chosen)
            self.adam.step(rates)
        else:
            self.adam.count(rates)
        places = self._places()
        self.unread.append((losses, [(learner, places[learner.slot], learner.state.step) for learner in self.learners]))
        for learner in self.learners:
            learner.state.step += 1
        due = any(learner.state.step % learner.per_epoch == 0 for learner in self.learners)
        if due or not self.steady or time.perf_counter() - self.read_at > _READ_EVERY:
            self._read_losses()
            return True
        return False

    def _places(self) -> dict[int, int]:
        """Say where each slot's loss stands among a step's losses."""
        if self.steady:
            return {learner.slot: self.stacks.slot(learner.slot).rows[0][1] for learner in self.learners}
        return {learner.slot: k for k, learner in enumerate(self.learners)}

    def _read_losses(self) -> None:
        """Bring losses to the host and look whether they are numbers; until then nobody had to wait for the device."""
        unread, self.unread, self.read_at = self.unread, [], time.perf_counter()
        if not unread:
            return
        for (_, who), losses in zip(unread, torch.stack([found for found, _ in unread]).tolist(), strict=True):
            for learner, k, step in who:
                if learner.state.failure:
                    continue
                if not np.isfinite(losses[k]):
                    learner.state.failure = _diverged(learner, f"the loss became {losses[k]}", step)
                learner.losses.append(losses[k])

    def _steady_step(self, chosen: Sequence[tuple[_Learner, np.ndarray]], rates: Mapping[int, float]) -> Tensor | None:
        """Take the step as a program; None, once and for all, where the device has no room for it."""
        assert self.steady is not None
        assert self.data is not None
        places, turns = self._places(), []
        for learner, batch in chosen:
            longest = max(learner.lengths[row] for row in batch)
            rows = batch + self.data.first[id(learner.lesson.train)]
            clock = learner.lesson.seed, learner.state.step
            turns.append(Turn(places[learner.slot], rows, learner.weigh(batch), longest, *clock))
        try:
            return self.steady.step(turns, self.adam.table(rates))
        except torch.OutOfMemoryError:
            self._read_losses()
            self.steady = self.data = None
        torch.cuda.empty_cache()
        return None

    def _eager_step(self, chosen: Sequence[tuple[_Learner, np.ndarray]]) -> Tensor:
        """Compute every learner's gradients, operation by operation; give the losses."""
        works = [learner.work(batch, self.stacks.device) for learner, batch in chosen]
        return self.eager.step(self.stacks, self.adam, works)

    def end_epoch(self, learner: _Learner) -> float | None:
        """Score the dev rows, keep the weights if they are the best so far, and note where the run stands.

        None, and the run has failed, where there is nothing to score.
        """
        lesson, state = learner.lesson, learner.state
        prefix = self.prefixes.get(lesson.dev.tokens, self.first) if self.first else None
        slots = [learner.slot] * len(lesson.dev)
        given = outputs(self.anatomy, self.stacks, lesson.dev.tokens, slots, prefix)
        if not all(np.isfinite(out).all() for out in given):
            what = "the outputs on the dev rows are not finite"
            state.failure = _diverged(learner, what, learner.state.step)
            return None
        score = lesson.score(given)
        better = not state.best_epoch or score > state.best_score
        state.epoch += 1
        seconds = time.perf_counter() - learner.began
        state.history.append({"loss": float(np.mean(learner.losses)), "score": score, "seconds": seconds})
        learner.order = []
        state.tensors["weights"] = self.stacks.take(learner.slot)
        state.tensors["first"] = self.stacks.take(learner.slot, self.adam.first)
        state.tensors["second"] = self.stacks.take(learner.slot, self.adam.second)
        if better:
            state.best_epoch, state.tensors["best"] = state.epoch, state.tensors["weights"]
        return score


def _diverged(learner: _Learner, what: str, step: int) -> str:
    rate = learner.lesson.rate
    return (
        f"At step {step + 1}, epoch {learner.state.epoch + 1}, {what}. The learning rate {rate:g} is "
        f"most likely too high: try --lr {rate / 10:g}. Nothing was written to the bank."
    )
