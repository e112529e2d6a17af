"""The trainer: the encoder, the stacks and the optimiser that active runs share. Knows no queue of runs."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from adapterbank.encoder.batch import padded_length
from adapterbank.encoder.kernels import find_kernels
from adapterbank.encoder.kernels.launch import CompilerError
from adapterbank.encoder.placed import PlacedEncoder
from adapterbank.encoder.prefix_cache import Prefix, PrefixCache
from adapterbank.encoder.recompute import Recomputing
from adapterbank.errors import SlowerWarning
from adapterbank.inference.graphs import GraphCompiler, runs_graphs
from adapterbank.inference.rows import Rows
from adapterbank.inference.runner import outputs
from adapterbank.kinds.table import KINDS
from adapterbank.slots.stack import LARGEST, Stacks
from adapterbank.training.bases import Base
from adapterbank.training.eager_step import EagerStep, token_limit
from adapterbank.training.graph_rule import GraphRule, StepClock
from adapterbank.training.graph_step import DeviceRows, GraphStep, captured_limit
from adapterbank.training.job import ActiveRun
from adapterbank.training.optimizer import StackedAdam
from adapterbank.training.step_input import StepContext, StepInput, dropout_rates

COLLAPSED_AFTER, FEWEST_STEPS = 2, 100
"""Epochs, and steps if these are more, after which a run that gives one answer to everything begins again."""
TOKENS_COLLAPSED_AFTER = 3
"""Where tokens are answered, a run is judged after one of so many parts of its epochs."""
MOST_RESTARTS = 2
LOG = logging.getLogger("adapterbank.train")
READ_EVERY = 0.2
"""The most seconds between two reads of a graph's losses."""


class Trainer:
    """The encoder, the stacks and the optimiser that all active runs share."""

    def __init__(
        self,
        encoder: PlacedEncoder,
        prefixes: PrefixCache,
        *,
        dropout: float | None,
        first: int,
        programs: GraphCompiler,
        rule: GraphRule,
    ) -> None:
        config = encoder.config
        self.encoder, self.programs = encoder, programs
        self.context = StepContext(
            config, prefixes, first, dropout_rates(config, dropout), Recomputing(encoder.recompute)
        )
        self.stacks = Stacks(encoder.tensors)
        self.adam = StackedAdam(self.stacks, compute=encoder.dtype)
        self.bases: dict[Base, int] = {}
        """The slots of what runs stand on."""
        self.limit = token_limit(config, self.stacks.device)
        self.eager = EagerStep(self.context, limit=self.limit)
        self.runs: list[ActiveRun] = []
        self.places = 1
        self.sets: list[Rows] = []
        """The rows of all runs, if their steps may run as graphs."""
        self.data: DeviceRows | None = None
        self.graph_step: GraphStep | None = None
        self.clock, self.left = StepClock(rule), 0
        self.has_kernels = find_kernels(encoder.device) is not None
        self.must_free = False
        self.unread: list[tuple[Tensor, list[tuple[ActiveRun, int, int]]]] = []
        self.read_at = 0.0

    def prepare(self, waiting: Sequence[ActiveRun], places: int) -> None:
        """Decide how many runs train at once, and whether their steps may run as captured graphs."""
        self.places = max(1, min(places, len(waiting)))
        eager = waiting and (waiting[0].job.mix > 1 or waiting[0].job.base is not None)
        if not runs_graphs(self.stacks.device) or not waiting or eager:
            return  # a mixture draws other tensors at each step, and the table of a graph is fixed; it knows no bases
        steps = sum(run.per_epoch * run.job.epochs - run.state.step for run in waiting)
        longest = self.context.config.max_length
        largest = max(
            run.job.batch * run.job.train.most_windows * padded_length(run.longest, longest) for run in waiting
        )
        limit = captured_limit(self.encoder, waiting[0].job.plan) or self.limit
        if largest > limit:
            return
        self.places = min(self.places, limit // largest, LARGEST)
        self.sets, self.left = [run.job.train for run in waiting], -(-steps // self.places)

    def fill(self, waiting: deque[ActiveRun]) -> bool:
        """Remove finished runs and admit waiting ones; return whether any run is active."""
        for run in [run for run in self.runs if run.done]:
            self.runs.remove(run)
            self.stacks.remove(run.slot)
            self.adam.release(run.slot)
        while waiting and len(self.runs) < self.places:
            self._admit(waiting.popleft())
        if self.runs and self._graph_is_due():
            empty = self.places - len(self.runs)
            if empty >= len(self.runs) or (empty and not self.graph_step):
                self.compact()
            if not self.graph_step:
                with self._graphs_or_none():
                    self.graph_step = self._make_graph_step()
        return bool(self.runs)

    def _graph_is_due(self) -> bool:
        """Return whether steps run as graphs, now or once these are ready."""
        if not self.sets or self.data:
            return bool(self.sets)
        alone = self.runs[0].job.plan.alone
        return self.clock.worth_a_graph(self.left, kernels=self.has_kernels and not alone)

    @contextlib.contextmanager
    def _graphs_or_none(self) -> Iterator[None]:
        """Run this and all further steps without graphs if the device lacks the memory, or kernels do not compile.

        Where outputs are still kept, only this step: the next one is a graph that computes them again.
        """
        again = False
        try:
            yield
            return
        except torch.OutOfMemoryError:
            again = self.graph_step is not None and self.graph_step.in_place and self.context.recomputing.start()
        except CompilerError as error:
            warnings.warn(f"Training runs slower, without its own kernels ({error}).", SlowerWarning, 2)
        self.read_losses()
        self.graph_step, self.must_free = None, True
        if not again:
            self.data, self.sets = None, []

    def _make_graph_step(self) -> GraphStep:
        job = self.runs[0].job
        data = self.data = self.data or DeviceRows.of(self.sets, job.plan.head, self.stacks.device)
        return GraphStep(
            self.context,
            self.stacks,
            self.adam,
            data,
            job.plan,
            batch=job.batch,
            programs=self.programs,
            prefix=self._prefix(job.train),
        )

    def _prefix(self, rows: Rows) -> Prefix | None:
        """Return the outputs of the frozen layers below the first that trains; None if there are none."""
        first = self.context.first
        return self.context.prefixes.get(rows.tokens, first) if first else None

    def compact(self) -> None:
        """Remove empty places, so that the last runs of a queue do not pay for a full batch."""
        saved = [
            [self.stacks.take(run.slot, of) for of in (None, self.adam.first, self.adam.second)] for run in self.runs
        ]
        runs, self.runs, self.graph_step, self.places = self.runs, [], None, len(self.runs)
        self.stacks, self.bases = Stacks(self.stacks.frozen), {}
        self.adam = StackedAdam(self.stacks, compute=self.encoder.dtype)
        for run, tensors in zip(runs, saved, strict=True):
            self._admit(run, dict(zip(("weights", "first", "second"), tensors, strict=True)))

    def _admit(self, run: ActiveRun, tensors: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
        """Add a run, with its tensors or those of its state if it has any."""
        under = run.job.base.put(self.stacks, self.bases) if run.job.base else ()
        run.slot = self.stacks.put(run.job.mixture.whole, run.job.initial, *under)
        self.adam.admit(run.slot, run.job.settings)
        self.runs.append(run)
        if saved := tensors or run.state.tensors:
            self.stacks.write(run.slot, saved["weights"])
            self.stacks.write(run.slot, saved["first"], self.adam.first)
            self.stacks.write(run.slot, saved["second"], self.adam.second)
            self.adam.steps[run.slot] = run.state.step

    def step(self) -> bool:
        """Take one step for every run; return whether the losses have been read."""
        began = time.perf_counter()
        inputs = [run.step_input(run.next_batch()) for run in self.runs]
        rates = {run.slot: run.schedule.at(run.state.step) for run in self.runs}
        losses = self._captured_losses(inputs, rates)
        captured = losses is not None
        if losses is None:
            self.read_losses()  # those of graphs are as many as there are places
            losses = self.eager.step(self.stacks, self.adam, inputs)
            self.adam.step(rates)
        else:
            self.adam.count(rates)
        places = [
            self.graph_step.place(run.slot) if self.graph_step and captured else k for k, run in enumerate(self.runs)
        ]
        self.unread.append(
            (losses, [(run, place, run.state.step) for run, place in zip(self.runs, places, strict=True)])
        )
        self.left -= 1
        for run in self.runs:
            run.state.step += 1
        due = any(run.state.step % run.per_epoch == 0 for run in self.runs)
        if not (due or not captured or time.perf_counter() - self.read_at > READ_EVERY):
            return False
        self.read_losses()
        if not captured:
            self.clock.seconds.append(time.perf_counter() - began)
        return True

    def read_losses(self) -> None:
        """Copy the unread losses to the host and check them; only this waits for the device."""
        unread, self.unread, self.read_at = self.unread, [], time.perf_counter()
        if not unread:
            return
        for (_, runs), losses in zip(unread, torch.stack([losses for losses, _ in unread]).tolist(), strict=True):
            for run, k, step in runs:
                if run.state.failure:
                    continue
                if not np.isfinite(losses[k]):
                    run.state.failure = _diverged(run, f"the loss became {losses[k]}", step)
                run.losses.append(losses[k])

    def _captured_losses(self, inputs: Sequence[StepInput], rates: Mapping[int, float]) -> Tensor | None:
        """Take the step as a captured graph; return None where it does not, or not yet, run as one."""
        with self._graphs_or_none():
            table = self.adam.table(rates)
            if self.graph_step and self.graph_step.ready(inputs, table, wait=self.clock.rule.waits):
                if self.clock.seconds:
                    LOG.debug("steps run as graphs after %d eager ones of %.4f s", *self.clock.summary())
                    self.clock.seconds = []
                return self.graph_step.step(inputs, table)
        if self.must_free and torch.cuda.is_available():
            torch.cuda.empty_cache()  # only here: until then the error keeps the outputs alive
        self.must_free = False
        return None

    def end_epoch(self, run: ActiveRun) -> float | None:
        """Score the dev rows, keep the weights if they are the best so far, and update the run's state.

        Return None, and mark the run as failed, if its outputs are not finite.
        """
        job, state = run.job, run.state
        weights = self.stacks.take(run.slot)
        merged = job.mixture.merge(weights)
        dev_outputs = self._dev_outputs(run, merged, weights)
        if not all(np.isfinite(out).all() for out in dev_outputs):
            what = "the outputs on the dev rows are not finite"
            state.failure = _diverged(run, what, run.state.step)
            return None
        score = job.score(dev_outputs)
        better = not job.chooses or not state.best_epoch or score > state.best_score
        state.epoch += 1
        seconds = time.perf_counter() - run.began
        state.history.append({"loss": float(np.mean(run.losses)), "score": score, "seconds": seconds})
        run.order = []
        LOG.debug("epoch %d of %d: %.1f s, dev score %.4f", state.epoch, job.epochs, seconds, score)
        state.tensors["weights"] = weights
        state.tensors["first"] = self.stacks.take(run.slot, self.adam.first)
        state.tensors["second"] = self.stacks.take(run.slot, self.adam.second)
        if better:
            state.best_epoch, state.tensors["best"] = state.epoch, merged
        if self._gives_up(run) and job.collapsed(dev_outputs, [one["loss"] for one in state.history]):
            self._restart(run)
        elif job.averages:
            self._average(run, merged)
        return score

    def _average(self, run: ActiveRun, weights: dict[str, Tensor]) -> None:
        """Add an epoch's weights to their mean; after the last epoch, score the mean.

        Each epoch counts twice as much as the one before: the last four have 15 of 16 parts.
        """
        state = run.state
        before = state.tensors.get("average", weights)
        state.tensors["average"] = {name: (before[name] + tensor) / 2 for name, tensor in weights.items()}
        if not run.done:
            return
        found = self._dev_outputs(run, state.tensors["average"], state.tensors["weights"])
        if all(np.isfinite(out).all() for out in found):
            state.history[-1]["average"] = run.job.score(found)

    def _dev_outputs(
        self, run: ActiveRun, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> list[np.ndarray]:
        """Return the head outputs of a run's dev rows with these tensors, in place of its present weights."""
        dev = run.job.dev
        if tensors is not weights:
            self.stacks.write(run.slot, tensors)
        with run.job.mixture.slots(self.stacks, run.slot) as (slot,):
            found = outputs(self.context.config, self.stacks, dev.tokens, [slot] * len(dev), self._prefix(dev))
        if tensors is not weights:
            self.stacks.write(run.slot, weights)
        return found

    def _gives_up(self, run: ActiveRun) -> bool:
        """Return whether a run that has collapsed by now may begin again; none has learned much in a few steps.

        Nor has one whose rate still rises: it is judged after an epoch at its full rate. Where tokens are answered,
        most answers are the same, and a run may give nothing else for some epochs.
        """
        rising = math.ceil(round(run.job.warmup * run.job.epochs, 6))
        judged = max(COLLAPSED_AFTER, -(-FEWEST_STEPS // run.per_epoch), rising + 1)
        if KINDS[run.job.plan.head.kind].per_token:
            judged = max(judged, -(-run.job.epochs // TOKENS_COLLAPSED_AFTER))
        # Again after one more epoch: a loss that falls from a peak to that of the prior still falls at first.
        due = judged <= run.state.epoch <= judged + 1 and run.state.epoch < run.job.epochs
        return due and len(run.state.restarts) < MOST_RESTARTS

    def _restart(self, run: ActiveRun) -> None:
        """Let a run begin again, with a third of its learning rate."""
        job, state = run.job, run.state
        self.left += state.step
        state.restarts.append(
            {"lr": run.rate, "epochs": state.epoch, **{name: state.history[-1][name] for name in ("loss", "score")}}
        )
        state.epoch = state.step = state.best_epoch = 0
        state.history, state.tensors = [], {}
        zeros = {name: torch.zeros_like(tensor) for name, tensor in job.initial.items()}
        self.stacks.write(run.slot, job.initial)
        self.stacks.write(run.slot, zeros, self.adam.first)
        self.stacks.write(run.slot, zeros, self.adam.second)
        self.adam.steps[run.slot] = 0


def _diverged(run: ActiveRun, what: str, step: int) -> str:
    rate = run.rate
    return (
        f"At step {step + 1}, epoch {run.state.epoch + 1}, {what}. The learning rate {rate:g} is "
        f"probably too high: try --lr {rate / 10:g}. Nothing was written to the bank."
    )
