"""What all runs of one time share while they learn: the encoder, the stacks, the optimiser. Knows no queue of runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from adapterbank.eager import Eager, token_limit
from adapterbank.encoder.anatomy import Anatomy
from adapterbank.encoder.packed import room
from adapterbank.encoder.prefix import Prefixes
from adapterbank.evaluate import outputs
from adapterbank.lesson import Learner
from adapterbank.optimizer import StackedAdam
from adapterbank.program import Programs
from adapterbank.slots.stack import LARGEST, Stacks
from adapterbank.steady import Data, Steady, Turn

_WORTH = 500
"""Steps a run from which on a program pays for its compilation."""
_READ_EVERY = 0.2
"""Seconds after which a program's losses are read, at the latest."""


class School:
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
        self.learners: list[Learner] = []
        self.places = 1
        self.data: Data | None = None
        self.steady: Steady | None = None
        self.unread: list[tuple[Tensor, list[tuple[Learner, int, int]]]] = []
        self.read_at = 0.0

    def prepare(self, coming: Sequence[Learner], places: int) -> None:
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

    def fill(self, waiting: deque[Learner]) -> bool:
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

    def _admit(self, learner: Learner, tensors: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
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

    def _steady_step(self, chosen: Sequence[tuple[Learner, np.ndarray]], rates: Mapping[int, float]) -> Tensor | None:
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

    def _eager_step(self, chosen: Sequence[tuple[Learner, np.ndarray]]) -> Tensor:
        """Compute every learner's gradients, operation by operation; give the losses."""
        works = [learner.work(batch, self.stacks.device) for learner, batch in chosen]
        return self.eager.step(self.stacks, self.adam, works)

    def end_epoch(self, learner: Learner) -> float | None:
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


def _diverged(learner: Learner, what: str, step: int) -> str:
    rate = learner.lesson.rate
    return (
        f"At step {step + 1}, epoch {learner.state.epoch + 1}, {what}. The learning rate {rate:g} is "
        f"most likely too high: try --lr {rate / 10:g}. Nothing was written to the bank."
    )
