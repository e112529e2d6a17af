"""Runs whose head is fitted to the rows: those with few labels, and those that train nothing else. Knows no files."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from adapterbank.encoder.placed import PlacedEncoder
from adapterbank.errors import TrainingError
from adapterbank.inference.rows import Rows
from adapterbank.kinds.calibration import FEWEST_ROWS
from adapterbank.training import logistic
from adapterbank.training.job import Progress, RunState, TrainingJob
from adapterbank.training.pairs import SlotEncoder, train_pairs


def train_fitted(
    encoder: PlacedEncoder,
    job: TrainingJob,
    *,
    number: int = 0,
    dropout: float | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> RunState:
    """Train what lies below the head on pairs of rows, fit the head, and return the run's final state."""
    began, rows = time.perf_counter(), job.train
    slot = SlotEncoder(encoder, job.plan, job.initial, job.settings, dropout, job.base)
    state, losses = RunState(), [0.0]

    def told(done: int, steps: int, loss: float) -> None:
        losses.append(loss)
        speed = done * job.batch / max(1e-9, time.perf_counter() - began)
        watch(Progress(number, 1, 1, done, steps, loss, speed))

    try:
        if job.dev is rows or job.plan.only_head:
            vectors = _of_texts(slot, rows)
        if job.dev is rows:
            state.held_out = _held_out(vectors, job)
        if not job.plan.only_head:
            state.step = _train_pairs(slot, job, told)
            vectors = _of_texts(slot, rows)
        _fit(slot, vectors, job, state)
    except TrainingError as error:
        state.failure = str(error)
        return state
    for epoch in state.history:
        epoch |= {"loss": losses[-1], "seconds": (time.perf_counter() - began) / len(state.history)}
    state.about = {"fitted": {"steps": state.step, "strength": state.about["strength"], "rows": rows.units}}
    steps = max(1, state.step)
    watch(Progress(number, 1, 1, steps, steps, losses[-1], 0.0, state.best_score))
    return state


def _classes(rows: Rows) -> list[int]:
    return list(rows.targets or [])


def _of_texts(slot: SlotEncoder, rows: Rows) -> np.ndarray:
    """Return the vector of each text, the mean of its windows'."""
    return rows.pool(slot.vectors(rows.tokens))


def _held_out(vectors: np.ndarray, job: TrainingJob) -> list[np.ndarray]:
    """Return the outputs for each row of a head on the encoder as it is, fitted to other texts."""
    rows, balanced = job.train, job.class_weights is not None
    tokens = [(row.ids.tobytes(), row.types.tobytes()) for row in rows.tokens]
    outputs, keys = job.plan.head.outputs, [tuple(tokens[a:b]) for a, b in pairwise(rows.starts)]
    found = logistic.held_out(vectors, _classes(rows), outputs, seed=job.seed, balanced=balanced, keys=keys)
    return list(np.repeat(found, np.diff(rows.starts), axis=0))


def _train_pairs(slot: SlotEncoder, job: TrainingJob, told: Callable[[int, int, float], None]) -> int:
    return train_pairs(
        slot,
        job.train,
        rate=job.rate,
        batch=job.batch,
        warmup=job.warmup,
        seed=job.seed,
        watch=told,
    )


def _fit(slot: SlotEncoder, vectors: np.ndarray, job: TrainingJob, state: RunState) -> None:
    """Fit the head, and keep the strength with the best dev score if there are dev rows enough to choose."""
    balanced = job.class_weights is not None
    if not np.isfinite(vectors).all():
        raise TrainingError(f"The vectors of the rows are not finite; lower the learning rate {job.rate:g}.")
    weights = slot.stacks.take(slot.slot)
    separate = job.dev is not job.train
    dev = slot.vectors(job.dev.tokens) if separate else None
    chooses = dev is not None and job.dev.units >= FEWEST_ROWS
    for strength in logistic.STRENGTHS if chooses else (logistic.usual_strength(job.plan.head.outputs),):
        weight, bias = logistic.fit(
            vectors, _classes(job.train), job.plan.head.outputs, strength=strength, balanced=balanced
        )
        outputs = state.held_out if dev is None else list(dev @ weight.T + bias)
        score = job.score(outputs or [])
        if not state.best_epoch or score > state.best_score:
            state.best_epoch = len(state.history) + 1
            state.about = {"strength": strength}
            fitted = {"head.weight": torch.from_numpy(weight), "head.bias": torch.from_numpy(bias)}
            state.tensors["best"] = weights | fitted
        state.history.append({"score": score})
    state.epoch = len(state.history)
