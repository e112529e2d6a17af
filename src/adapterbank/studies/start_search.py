"""Automatic start: the task of the bank to start from, by a short race of successive halving. Knows no shell.

The task's own training rows are the course: some are held out, and all candidates train on others for a few steps, as
slots of one batch, beside a run with new tensors. The better half runs again for twice the steps, and so on. Scores are
on the held-out rows; neither dev nor test is looked at.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from adapterbank.config import AUTO, FRESH, Config
from adapterbank.draws import RandomStream
from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.placed import PlacedEncoder, place
from adapterbank.errors import ConfigError
from adapterbank.storage.package import Manifest
from adapterbank.studies.size_search import run_auto
from adapterbank.tasks.spec import Examples
from adapterbank.tasks.splitting import split
from adapterbank.training.builder import ResolvedRun, RunBuilder
from adapterbank.training.callbacks import Callbacks
from adapterbank.training.dataset import Dataset, DatasetReader, canonical
from adapterbank.training.job import Begun, Progress, TrainingJob
from adapterbank.training.loop import Together, train
from adapterbank.training.run import Result, run
from adapterbank.training.start import Start, Starts

STEPS = (20, 40, 80)
"""The most steps of a run in each round; a round has half the runs of the one before."""
MOST = 16
"""The most runs in the first round, one of them with new tensors: 16 · 20 + 8 · 40 + 4 · 80 = 960 steps in all."""
HELD_OUT, SHARE = 500, 0.2
"""The most rows that are held out, and the largest share of the rows."""
FEWEST = 50
"""With fewer rows to hold out than this, a difference of scores says nothing."""


@dataclass(frozen=True)
class RaceTrial:
    """One run of a round with its score."""

    start: str
    """The package, or none."""
    round: int
    steps: int
    score: float
    """The score on the held-out rows after the last step; -inf if the run diverged."""

    def to_json(self) -> dict[str, Any]:
        """Return the trial as JSON values, which have no infinity."""
        return {**asdict(self), "score": self.score if math.isfinite(self.score) else None}


@dataclass(frozen=True)
class Course:
    """The rows of a race, and the run that they are for."""

    builder: RunBuilder
    resolved: ResolvedRun = field(repr=False)
    train: Examples = field(repr=False)
    held_out: Examples = field(repr=False)

    def jobs(self, starts: Sequence[Start | None], steps: int) -> list[TrainingJob]:
        """Return the jobs of a round: the same rows for all, and a schedule that ends with the round."""
        batch, rows = self.resolved.config.batch, self.train
        data = Dataset(
            self.resolved.data.task,
            {"train": rows.select(range(min(len(rows), steps * batch))), "dev": self.held_out},
            (),
        )
        epochs = max(1, steps // -(-len(data.splits["train"]) // batch))
        config = replace(self.resolved.config, epochs=epochs, patience=0, average=False)
        runs = [replace(self.resolved, config=config, data=data, start=start) for start in starts]
        usual = [self.builder.prepare(one).job for one in runs]
        return [replace(job, chooses=False, collapsed=lambda outputs, losses: False) for job in usual]


def choose_training(config: Config, *, any_size: bool, tolerance: float) -> Callable[..., Result]:
    """Return the function that trains a run: a plain one, or one that first finds its size or its start."""
    if any_size:
        return partial(run_auto, tolerance=tolerance)
    return run_from_best if config.start_from == AUTO else run


def run_from_best(
    config: Config,
    backbone: Backbone,
    bank_path: str | Path,
    *,
    reader: DatasetReader | None = None,
    callbacks: Callbacks | None = None,
    resuming: bool = False,
    recompute: str = "auto",
) -> Result:
    """Find the task to start from, or none, then train as `run` does; the record has the race under `starting`."""
    if resuming:
        raise ConfigError(
            ["start_from is 'auto', which cannot be resumed; name the task that was chosen, or leave --resume out."]
        )
    callbacks, reader = callbacks or Callbacks(), reader or DatasetReader()
    builder = RunBuilder(backbone, reader=reader, recompute=recompute, bank=bank_path)
    resolved = builder.resolve(canonical(replace(config, start_from=FRESH), reader.splits))
    if resolved.plan.alone:
        what = f"start_from is 'auto', but slots of method {config.method!r} do not share a batch"
        raise ConfigError([f"{what}; name the task to start from, or use another method, such as adapter."])
    began = time.perf_counter()
    found, left_out = Starts(backbone, bank_path).fitting(resolved.plan, _is_other(resolved), MOST - 1, resolved.base)
    about: dict[str, Any] = {"left_out": left_out}
    course = _course(builder, resolved)
    chosen: Start | None = None
    if not found or course is None:
        what = "the training rows are too few to hold some out" if found else "no task of the bank has the same form"
        reason = f"start_from is 'auto', but {what}; the run starts with new tensors."
    else:
        encoder = place(backbone, resolved.device, resolved.dtype, resolved.layout, recompute=resolved.recompute)
        chosen, trials = race(course, found, encoder, callbacks)
        reason = explain(chosen, trials)
        about |= {
            "rows": len(course.train),
            "held_out": len(course.held_out),
            "trials": [one.to_json() for one in trials],
        }
    callbacks.note(reason)
    about = {"reason": reason, **about, "seconds": time.perf_counter() - began}
    return run(
        replace(config, start_from=chosen.ref if chosen else FRESH),
        backbone,
        bank_path,
        reader=reader,
        callbacks=callbacks,
        begun=Begun(None, {"starting": about}),
        recompute=recompute,
    )


def _is_other(resolved: ResolvedRun) -> Callable[[Manifest], bool]:
    """Return a function that tells whether a package knows none of a run's rows, as far as its manifest says."""
    rows = resolved.data.about()["train"]
    return lambda made: made.name != resolved.config.task and made.data.get("train") != rows


def _course(builder: RunBuilder, resolved: ResolvedRun) -> Course | None:
    """Return the rows of a race, as many as its last round needs; None if there are too few, or few labels."""
    rows, config = resolved.data.splits["train"], resolved.config
    wanted = min(len(rows), STEPS[-1] * config.batch + HELD_OUT)
    held_out = min(HELD_OUT, int(SHARE * wanted))
    if resolved.data.few or held_out < FEWEST:
        return None
    order = RandomStream(config.seed, "race").permutation(len(rows))[:wanted]
    some = rows.select(order.tolist())
    return Course(
        builder, resolved, *split(some, task=resolved.data.task, fraction=held_out / wanted, seed=config.seed)
    )


def race(
    course: Course, found: Sequence[Start], encoder: PlacedEncoder, callbacks: Callbacks
) -> tuple[Start | None, list[RaceTrial]]:
    """Run all rounds; return the winner, None for new tensors, and every trial. New tensors run in every round."""
    starts: list[Start | None] = [None, *found]
    trials: list[RaceTrial] = []
    for number, steps in enumerate(STEPS, 1):
        what = f"round {number} of {len(STEPS)}: {len(starts)} starts, {steps} steps each"
        scores = _scores(course.jobs(starts, steps), course, encoder, partial(callbacks.stage, what))
        now = [RaceTrial(_name(start), number, steps, score) for start, score in zip(starts, scores, strict=True)]
        trials += now
        best = max(now, key=lambda trial: trial.score)
        callbacks.note(f"{what}; best on {len(course.held_out)} held-out rows {best.score:.4f}, from {best.start}")
        ranked = sorted(zip(scores, starts, strict=True), key=lambda pair: -pair[0])  # new tensors first among equals
        if number == len(STEPS):
            return ranked[0][1], trials
        kept = [start for _, start in ranked if start is not None][: max(1, -(-len(starts) // 2) - 1)]
        starts = [None, *kept]
    raise AssertionError("a race has a last round")


def _scores(
    jobs: Sequence[TrainingJob], course: Course, encoder: PlacedEncoder, watch: Callable[[int, int], None]
) -> list[float]:
    """Train jobs as slots of one batch, and return the score of each after its last step."""
    steps = [0] * len(jobs)
    total = sum(job.epochs * -(-job.train.units // job.batch) for job in jobs)

    def count(progress: Progress) -> None:
        steps[progress.run] = progress.step
        watch(sum(steps), total)

    states = train(
        encoder,
        jobs,
        dropout=course.resolved.config.dropout,
        watch=count,
        end=lambda number, state: None,  # a run that diverges loses the race, and stops no other
        together=Together(len(jobs)),
    )
    return [-math.inf if state.failure else state.history[-1]["score"] for state in states]


def _name(start: Start | None) -> str:
    return start.ref if start else FRESH


def explain(chosen: Start | None, trials: Sequence[RaceTrial]) -> str:
    """Return one sentence that explains the choice."""
    last = {trial.start: trial.score for trial in trials if trial.round == len(STEPS)}
    fresh = last.pop(FRESH)
    name, score = max(last.items(), key=lambda pair: pair[1])
    if chosen is None:
        return f"The run starts with new tensors: {fresh:.4f} on the held-out rows, and {score:.4f} from {name}."
    return f"The run starts from {name}: {score:.4f} on the held-out rows, and {fresh:.4f} with new tensors."
