"""Automatic size: find the smallest adapter that is as good as any other, by successive halving. Knows no shell.

Every size is trained with every learning rate for a few epochs, all together. The better half continues on a longer
rung, and so on, until a few have completed the whole schedule. Each rung trains from the start with a schedule of its
own length, so its scores are those of finished runs, and those of the last rung are exactly those of plain runs. The
smallest size within the tolerance of the best on dev is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from adapterbank.config import FRESH, TOLERANCE, Config, check_tolerance
from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.placed import place
from adapterbank.errors import ConfigError, TrainingError
from adapterbank.methods import METHODS
from adapterbank.training.builder import RunBuilder, first_tensors, make_run_plan
from adapterbank.training.callbacks import Callbacks
from adapterbank.training.dataset import DatasetReader, canonical
from adapterbank.training.job import Begun, Progress, RunState, TrainingJob
from adapterbank.training.loop import train
from adapterbank.training.run import Result, run

SIZES = (4, 16, 64, 256)
RATES = (3e-4, 1e-3, 3e-3)
"""The learning rates that are tried if none is given: around the default, where adapters are best."""
RUNGS = 3
"""Each rung has twice the epochs of the one before and half its runs."""


@dataclass(frozen=True)
class Trial:
    """One run of a rung with its score."""

    size: int
    lr: float
    rung: int
    epochs: int
    score: float
    """The best epoch's score on dev."""


def survivors(trials: Sequence[Trial], tolerance: float, keep: int) -> list[Trial]:
    """Return the trials that continue: the best, then the smallest within the tolerance of it, then by score."""
    best = max(trials, key=_rank)
    near = sorted((t for t in trials if _near(t, best, tolerance)), key=lambda t: (t.size, -t.score))
    rest = sorted((t for t in trials if t not in near), key=_rank, reverse=True)
    return list(dict.fromkeys([best, *near, *rest]))[:keep]


def choose(trials: Sequence[Trial], tolerance: float) -> Trial:
    """Return the smallest size within the tolerance of the best, with its better learning rate."""
    best = max(trials, key=_rank)
    return min((t for t in trials if _near(t, best, tolerance)), key=lambda t: (t.size, -t.score, t.lr))


def reason(chosen: Trial, trials: Sequence[Trial], tolerance: float) -> str:
    """Return one sentence that explains the choice."""
    best = max(trials, key=_rank)
    if best.size == chosen.size:
        return (
            f"Size {chosen.size} (lr {chosen.lr:g}) has the best score on dev, and no smaller size is within "
            f"{tolerance:g} points of it."
        )
    behind = 100 * (best.score - chosen.score)
    return (
        f"Size {chosen.size} (lr {chosen.lr:g}) scores {100 * chosen.score:.2f} on dev, {behind:.2f} points below the "
        f"best ({100 * best.score:.2f}, size {best.size}): the smallest size within {tolerance:g} points of it."
    )


def run_auto(
    config: Config,
    backbone: Backbone,
    bank_path: str | Path,
    *,
    tolerance: float = TOLERANCE,
    reader: DatasetReader | None = None,
    callbacks: Callbacks | None = None,
    resuming: bool = False,
    recompute: str = "auto",
) -> Result:
    """Find the size, then train with it as `run` does; the record lists all trials under `sizing`.

    If the config has a learning rate, no other is tried.
    """
    if "size" not in METHODS[config.method].uses:
        raise ConfigError([f"size is 'auto', but method {config.method!r} has no size; leave it out."])
    if config.start_from != FRESH:
        mistake = f"size is 'auto', but start_from is {config.start_from!r}, which has a size"
        raise ConfigError([f"{mistake}; name that size, or leave start_from out."])
    if resuming:
        raise ConfigError(["size is 'auto', which cannot be resumed; leave --resume out."])
    check_tolerance(tolerance)
    callbacks = callbacks or Callbacks()
    began = time.perf_counter()
    rates = (config.lr,) if config.lr is not None else RATES
    reader = reader or DatasetReader()
    builder = RunBuilder(backbone, reader=reader, recompute=recompute, bank=bank_path)
    resolved = builder.resolve(canonical(config, reader.splits))
    if resolved.data.few:
        callbacks.note(f"size is 'auto', but with few labels no dev rows compare sizes; size {config.size} is used.")
        return run(config, backbone, bank_path, reader=reader, callbacks=callbacks, recompute=recompute)
    config = resolved.config
    usual = replace(config, few="never")  # at no rung another recipe, whatever its epochs
    trials, state = _halve(usual, builder, rates, tolerance, callbacks.note, callbacks.stage)
    last = [trial for trial in trials if trial.rung == RUNGS]
    chosen = choose(last, tolerance)
    why = reason(chosen, last, tolerance)
    callbacks.note(why)
    about = {
        "tolerance": tolerance,
        "reason": why,
        "trials": [asdict(trial) for trial in trials],
        "seconds": time.perf_counter() - began,
    }
    config = replace(config, size=chosen.size, lr=chosen.lr)
    return run(
        config,
        backbone,
        bank_path,
        reader=reader,
        callbacks=callbacks,
        begun=Begun(state[chosen.size, chosen.lr], {"sizing": about}),
        recompute=recompute,
    )


def _halve(
    config: Config,
    builder: RunBuilder,
    rates: Sequence[float],
    tolerance: float,
    note: Callable[[str], None],
    stage: Callable[[str, int, int], None],
) -> tuple[list[Trial], dict[tuple[int, float], RunState]]:
    """Run all rungs; return every trial, and the states of the last rung."""
    assert config.epochs is not None
    candidates = [(size, rate) for size in SIZES for rate in rates]
    found: list[Trial] = []
    states: dict[tuple[int, float], RunState] = {}
    before = 0
    for rung in range(1, RUNGS + 1):
        epochs = -(-config.epochs // 2 ** (RUNGS - rung))
        what = f"rung {rung} of {RUNGS}: {len(candidates)} runs of {epochs} epoch{'s' if epochs > 1 else ''}"
        if epochs == before:  # with one or two epochs in total: an equally long rung would have the same result
            states = {key: states[key] for key in candidates}
        else:
            states = _rung(replace(config, epochs=epochs), builder, candidates, partial(stage, what), note)
        before = epochs
        trials = [Trial(*key, rung, epochs, state.best_score) for key, state in states.items()]
        found += trials
        best = max(trials, key=_rank)
        note(f"{what}; best on dev {100 * best.score:.2f} with size {best.size}, lr {best.lr:g}")
        candidates = [(t.size, t.lr) for t in survivors(trials, tolerance, -(-len(trials) // 2))]
    return found, states


def _rung(
    config: Config,
    builder: RunBuilder,
    candidates: Sequence[tuple[int, float]],
    watch: Callable[[int, int], None],
    note: Callable[[str], None],
) -> dict[tuple[int, float], RunState]:
    """Train sizes and rates together; if the training diverges, train again without the highest rate."""
    resolved = builder.resolve(config)
    common = builder.prepare(resolved).job
    jobs: list[TrainingJob] = []
    for size, rate in candidates:  # on the same rows, tokenised once
        plan = make_run_plan(replace(config, size=size), builder.backbone, resolved.data, resolved.windows)
        first = first_tensors(replace(resolved, config=config, plan=plan), builder.backbone)
        jobs.append(replace(common, plan=plan, initial=first, rate=rate))
    steps = [0] * len(jobs)
    total = sum(job.epochs * -(-job.train.units // job.batch) for job in jobs)

    def count(progress: Progress) -> None:
        steps[progress.run] = progress.step
        watch(sum(steps), total)

    try:
        states = train(
            place(builder.backbone, resolved.device, resolved.dtype, resolved.layout, recompute=resolved.recompute),
            jobs,
            dropout=config.dropout,
            watch=count,
        )
    except TrainingError as error:
        highest = max(rate for _, rate in candidates)
        left = [(size, rate) for size, rate in candidates if rate < highest]
        if not left:
            raise
        note(f"Learning rate {highest:g} is left out: {error}")
        return _rung(config, builder, left, watch, note)
    return dict(zip(candidates, states, strict=True))


def _rank(trial: Trial) -> tuple[float, int]:
    """Return a sort key: the score, then the smaller size."""
    return trial.score, -trial.size


def _near(trial: Trial, best: Trial, tolerance: float) -> bool:
    return 100 * (best.score - trial.score) <= tolerance + 1e-9
