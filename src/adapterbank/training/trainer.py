"""What all runs of one time share while they learn: the encoder, the stacks, the optimiser. Knows no queue of runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from adapterbank.encoder.batch import padded_length
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.prefix_cache import PrefixCache
from adapterbank.inference.graphs import GraphCompiler
from adapterbank.inference.runner import outputs
from adapterbank.slots.stack import LARGEST, Stacks
from adapterbank.training.eager_step import EagerStep, token_limit
from adapterbank.training.graph_step import DeviceRows, GraphStep, Turn
from adapterbank.training.job import ActiveRun
from adapterbank.training.optimizer import StackedAdam

_WORTH = 500
"""Steps a run from which on a program pays for its compilation."""
_READ_EVERY = 0.2
"""Seconds after which a program's losses are read, at the latest."""


class Trainer:
    """The encoder, the stacks and the optimiser that all learners of one time share."""

    def __init__(
        self,
        config: EncoderConfig,
        frozen: Mapping[str, Tensor],
        prefixes: PrefixCache,
        dtype: torch.dtype,
        dropout: float | None,
        first: int,
        programs: GraphCompiler,
    ) -> None:
        self.config, self.dtype, self.first, self.programs = config, dtype, first, programs
        self.rates = (config.dropout, config.attention_dropout) if dropout is None else (dropout, dropout)
        self.prefixes = prefixes
        self.stacks = Stacks(frozen)
        self.adam = StackedAdam(self.stacks, compute=dtype)
        self.limit = token_limit(config, self.stacks.device)
        self.eager = EagerStep(config, prefixes, first=first, rates=self.rates, limit=self.limit)
        self.runs: list[ActiveRun] = []
        self.places = 1
        self.data: DeviceRows | None = None
        self.steady: GraphStep | None = None
        self.unread: list[tuple[Tensor, list[tuple[ActiveRun, int, int]]]] = []
        self.read_at = 0.0

    def prepare(self, coming: Sequence[ActiveRun], places: int) -> None:
        """Decide how many learn at once, and whether their steps are worth a program."""
        self.places = max(1, min(places, len(coming)))
        if self.stacks.device.type != "cuda" or not coming:
            return
        steps = sum(c.per_epoch * c.job.epochs - c.state.step for c in coming)
        largest = max(c.job.batch * padded_length(max(c.lengths), self.config.max_length) for c in coming)
        if steps < _WORTH * self.places or largest > self.limit:
            return
        self.places = min(self.places, self.limit // largest, LARGEST)
        self.data = DeviceRows.of([c.job.train for c in coming], coming[0].job.plan.head, self.stacks.device)

    def fill(self, waiting: deque[ActiveRun]) -> bool:
        """Let those go who are done and take in who waits; say whether there is anyone to teach."""
        for run in [run for run in self.runs if run.done]:
            self.runs.remove(run)
            self.stacks.remove(run.slot)
            self.adam.release(run.slot)
        while waiting and len(self.runs) < self.places:
            self._admit(waiting.popleft())
        if self.data and self.runs and 2 * len(self.runs) <= self.places:
            self._move_together()
        if self.data and self.runs and not self.steady:
            self.steady = self._make_steady(self.data)
        return bool(self.runs)

    def _make_steady(self, data: DeviceRows) -> GraphStep:
        job = self.runs[0].job
        prefix = self.prefixes.get(job.train.tokens, self.first) if self.first else None
        return GraphStep(
            self.config,
            self.stacks,
            self.adam,
            data,
            job.plan,
            batch=job.batch,
            rates=self.rates,
            first=self.first,
            prefix=prefix,
            programs=self.programs,
        )

    def _move_together(self) -> None:
        """Leave no empty places: the last few of a queue should not pay for all."""
        held = [
            [self.stacks.take(run.slot, of) for of in (None, self.adam.first, self.adam.second)] for run in self.runs
        ]
        runs, self.runs, self.steady, self.places = self.runs, [], None, len(self.runs)
        self.stacks = Stacks(self.stacks.frozen)
        self.adam = StackedAdam(self.stacks, compute=self.dtype)
        for run, tensors in zip(runs, held, strict=True):
            self._admit(run, dict(zip(("weights", "first", "second"), tensors, strict=True)))

    def _admit(self, run: ActiveRun, tensors: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
        """Take a learner in, with the tensors it left off with where there are any."""
        run.slot = self.stacks.put(run.job.plan, run.job.initial)
        self.adam.admit(run.slot, run.job.settings)
        self.runs.append(run)
        if found := tensors or run.state.tensors:
            self.stacks.write(run.slot, found["weights"])
            self.stacks.write(run.slot, found["first"], self.adam.first)
            self.stacks.write(run.slot, found["second"], self.adam.second)
            self.adam.steps[run.slot] = run.state.step

    def step(self) -> bool:
        """Take one step for every learner; say whether their losses have been read."""
        chosen = [(run, run.next_batch()) for run in self.runs]
        rates = {run.slot: run.schedule.at(run.state.step) for run in self.runs}
        losses = self._steady_step(chosen, rates) if self.steady else None
        if losses is None:
            losses = self._eager_step(chosen)
            self.adam.step(rates)
        else:
            self.adam.count(rates)
        places = self._places()
        self.unread.append((losses, [(run, places[run.slot], run.state.step) for run in self.runs]))
        for run in self.runs:
            run.state.step += 1
        due = any(run.state.step % run.per_epoch == 0 for run in self.runs)
        if due or not self.steady or time.perf_counter() - self.read_at > _READ_EVERY:
            self._read_losses()
            return True
        return False

    def _places(self) -> dict[int, int]:
        """Say where each slot's loss stands among a step's losses."""
        if self.steady:
            return {run.slot: self.stacks.slot(run.slot).rows[0][1] for run in self.runs}
        return {run.slot: k for k, run in enumerate(self.runs)}

    def _read_losses(self) -> None:
        """Bring losses to the host and look whether they are numbers; until then nobody had to wait for the device."""
        unread, self.unread, self.read_at = self.unread, [], time.perf_counter()
        if not unread:
            return
        for (_, who), losses in zip(unread, torch.stack([found for found, _ in unread]).tolist(), strict=True):
            for run, k, step in who:
                if run.state.failure:
                    continue
                if not np.isfinite(losses[k]):
                    run.state.failure = _diverged(run, f"the loss became {losses[k]}", step)
                run.losses.append(losses[k])

    def _steady_step(self, chosen: Sequence[tuple[ActiveRun, np.ndarray]], rates: Mapping[int, float]) -> Tensor | None:
        """Take the step as a program; None, once and for all, where the device has no room for it."""
        assert self.steady is not None
        assert self.data is not None
        places, turns = self._places(), []
        for run, batch in chosen:
            longest = max(run.lengths[row] for row in batch)
            rows = batch + self.data.first[id(run.job.train)]
            clock = run.job.seed, run.state.step
            turns.append(Turn(places[run.slot], rows, run.weigh(batch), longest, *clock))
        try:
            return self.steady.step(turns, self.adam.table(rates))
        except torch.OutOfMemoryError:
            self._read_losses()
            self.steady = self.data = None
        torch.cuda.empty_cache()
        return None

    def _eager_step(self, chosen: Sequence[tuple[ActiveRun, np.ndarray]]) -> Tensor:
        """Compute every learner's gradients, operation by operation; give the losses."""
        works = [run.work(batch, self.stacks.device) for run, batch in chosen]
        return self.eager.step(self.stacks, self.adam, works)

    def end_epoch(self, run: ActiveRun) -> float | None:
        """Score the dev rows, keep the weights if they are the best so far, and note where the run stands.

        None, and the run has failed, where there is nothing to score.
        """
        job, state = run.job, run.state
        prefix = self.prefixes.get(job.dev.tokens, self.first) if self.first else None
        slots = [run.slot] * len(job.dev)
        given = outputs(self.config, self.stacks, job.dev.tokens, slots, prefix)
        if not all(np.isfinite(out).all() for out in given):
            what = "the outputs on the dev rows are not finite"
            state.failure = _diverged(run, what, run.state.step)
            return None
        score = job.score(given)
        better = not state.best_epoch or score > state.best_score
        state.epoch += 1
        seconds = time.perf_counter() - run.began
        state.history.append({"loss": float(np.mean(run.losses)), "score": score, "seconds": seconds})
        run.order = []
        state.tensors["weights"] = self.stacks.take(run.slot)
        state.tensors["first"] = self.stacks.take(run.slot, self.adam.first)
        state.tensors["second"] = self.stacks.take(run.slot, self.adam.second)
        if better:
            state.best_epoch, state.tensors["best"] = state.epoch, state.tensors["weights"]
        return score


def _diverged(run: ActiveRun, what: str, step: int) -> str:
    rate = run.job.rate
    return (
        f"At step {step + 1}, epoch {run.state.epoch + 1}, {what}. The learning rate {rate:g} is "
        f"most likely too high: try --lr {rate / 10:g}. Nothing was written to the bank."
    )
