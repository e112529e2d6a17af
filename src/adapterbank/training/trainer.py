"""The trainer: the encoder, the stacks and the optimiser that active runs share. Knows no queue of runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from adapterbank.encoder.batch import padded_length
from adapterbank.encoder.placed import PlacedEncoder
from adapterbank.encoder.prefix_cache import Prefix, PrefixCache
from adapterbank.encoder.recompute import Recomputing
from adapterbank.inference.graphs import GraphCompiler, runs_graphs
from adapterbank.inference.rows import Rows
from adapterbank.inference.runner import outputs
from adapterbank.kinds.table import KINDS
from adapterbank.slots.stack import LARGEST, Stacks
from adapterbank.training.eager_step import EagerStep, token_limit
from adapterbank.training.graph_step import DeviceRows, GraphStep
from adapterbank.training.job import ActiveRun
from adapterbank.training.optimizer import StackedAdam
from adapterbank.training.step_input import StepContext, StepInput, dropout_rates

STEPS_WORTH_A_GRAPH = 500
"""Steps per run above which a graph is worth its compilation."""
COLLAPSED_AFTER, FEWEST_STEPS = 2, 100
"""Epochs, and steps if these are more, after which a run that gives one answer to everything begins again."""
TOKENS_COLLAPSED_AFTER = 3
"""Where tokens are answered, a run is judged after one of so many parts of its epochs."""
MOST_RESTARTS = 2
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
    ) -> None:
        config = encoder.config
        self.encoder, self.programs = encoder, programs
        self.context = StepContext(
            config, prefixes, first, dropout_rates(config, dropout), Recomputing(encoder.recompute)
        )
        self.stacks = Stacks(encoder.tensors)
        self.adam = StackedAdam(self.stacks, compute=encoder.dtype)
        self.limit = token_limit(config, self.stacks.device)
        self.eager = EagerStep(self.context, limit=self.limit)
        self.runs: list[ActiveRun] = []
        self.places = 1
        self.data: DeviceRows | None = None
        self.graph_step: GraphStep | None = None
        self.unread: list[tuple[Tensor, list[tuple[ActiveRun, int, int]]]] = []
        self.read_at = 0.0

    def prepare(self, waiting: Sequence[ActiveRun], places: int) -> None:
        """Decide how many runs train at once, and whether their steps run as a captured graph."""
        self.places = max(1, min(places, len(waiting)))
        if not runs_graphs(self.stacks.device) or not waiting:
            return
        steps = sum(run.per_epoch * run.job.epochs - run.state.step for run in waiting)
        longest = self.context.config.max_length
        largest = max(
            run.job.batch * run.job.train.most_windows * padded_length(run.longest, longest) for run in waiting
        )
        if steps < STEPS_WORTH_A_GRAPH * self.places or largest > self.limit:
            return
        self.places = min(self.places, self.limit // largest, LARGEST)
        self.data = DeviceRows.of([run.job.train for run in waiting], waiting[0].job.plan.head, self.stacks.device)

    def fill(self, waiting: deque[ActiveRun]) -> bool:
        """Remove finished runs and admit waiting ones; return whether any run is active."""
        for run in [run for run in self.runs if run.done]:
            self.runs.remove(run)
            self.stacks.remove(run.slot)
            self.adam.release(run.slot)
        while waiting and len(self.runs) < self.places:
            self._admit(waiting.popleft())
        if self.data and self.runs and 2 * len(self.runs) <= self.places:
            self.compact()
        if self.data and self.runs and not self.graph_step:
            self.graph_step = self._make_graph_step(self.data)
        return bool(self.runs)

    def _make_graph_step(self, data: DeviceRows) -> GraphStep:
        job = self.runs[0].job
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
        self.stacks = Stacks(self.stacks.frozen)
        self.adam = StackedAdam(self.stacks, compute=self.encoder.dtype)
        for run, tensors in zip(runs, saved, strict=True):
            self._admit(run, dict(zip(("weights", "first", "second"), tensors, strict=True)))

    def _admit(self, run: ActiveRun, tensors: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
        """Add a run, with its tensors or those of its state if it has any."""
        run.slot = self.stacks.put(run.job.plan, run.job.initial)
        self.adam.admit(run.slot, run.job.settings)
        self.runs.append(run)
        if saved := tensors or run.state.tensors:
            self.stacks.write(run.slot, saved["weights"])
            self.stacks.write(run.slot, saved["first"], self.adam.first)
            self.stacks.write(run.slot, saved["second"], self.adam.second)
            self.adam.steps[run.slot] = run.state.step

    def step(self) -> bool:
        """Take one step for every run; return whether the losses have been read."""
        inputs = [run.step_input(run.next_batch()) for run in self.runs]
        rates = {run.slot: run.schedule.at(run.state.step) for run in self.runs}
        losses = self._captured_losses(inputs, rates) if self.graph_step else None
        if losses is None:
            losses = self.eager.step(self.stacks, self.adam, inputs)
            self.adam.step(rates)
        else:
            self.adam.count(rates)
        places = [self.graph_step.place(run.slot) if self.graph_step else k for k, run in enumerate(self.runs)]
        self.unread.append(
            (losses, [(run, place, run.state.step) for run, place in zip(self.runs, places, strict=True)])
        )
        for run in self.runs:
            run.state.step += 1
        due = any(run.state.step % run.per_epoch == 0 for run in self.runs)
        if due or not self.graph_step or time.perf_counter() - self.read_at > READ_EVERY:
            self.read_losses()
            return True
        return False

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
        """Take the step as a captured graph; return None, now and later, if the device lacks the memory."""
        while self.data and self.graph_step:
            try:
                return self.graph_step.step(inputs, self.adam.table(rates))
            except torch.OutOfMemoryError:
                self.read_losses()
                self.graph_step = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if self.context.recomputing.start():
                self.graph_step = self._make_graph_step(self.data)
            else:
                self.data = None
        return None

    def end_epoch(self, run: ActiveRun) -> float | None:
        """Score the dev rows, keep the weights if they are the best so far, and update the run's state.

        Return None, and mark the run as failed, if its outputs are not finite.
        """
        job, state = run.job, run.state
        slots = [run.slot] * len(job.dev)
        dev_outputs = outputs(self.context.config, self.stacks, job.dev.tokens, slots, self._prefix(job.dev))
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
        state.tensors["weights"] = self.stacks.take(run.slot)
        state.tensors["first"] = self.stacks.take(run.slot, self.adam.first)
        state.tensors["second"] = self.stacks.take(run.slot, self.adam.second)
        if better:
            state.best_epoch, state.tensors["best"] = state.epoch, state.tensors["weights"]
        if self._gives_up(run) and job.collapsed(dev_outputs, [one["loss"] for one in state.history]):
            self._restart(run)
        return score

    def _gives_up(self, run: ActiveRun) -> bool:
        """Return whether a run that has collapsed by now may begin again; in a few steps, none has learned much.

        Where tokens are answered, most answers are the same, and a run may give nothing else for some epochs.
        """
        judged = max(COLLAPSED_AFTER, -(-FEWEST_STEPS // run.per_epoch))
        if KINDS[run.job.plan.head.kind].per_token:
            judged = max(judged, -(-run.job.epochs // TOKENS_COLLAPSED_AFTER))
        # Again after one more epoch: a loss that falls from a peak to that of the prior still falls at first.
        due = judged <= run.state.epoch <= judged + 1 and run.state.epoch < run.job.epochs
        return due and len(run.state.restarts) < MOST_RESTARTS

    def _restart(self, run: ActiveRun) -> None:
        """Let a run begin again, with a third of its learning rate."""
        job, state = run.job, run.state
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
