"""Runs: one or many that are ready, in; a record and perhaps a package for each, out. The only assembler.

Everything that can be wrong with the input is found before the bank is touched (`prepare`); its tasks change in one
atomic step at the very end. Knows no grid: `sweep` says which runs go together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adapterbank import __version__
from adapterbank.config import Config, resolve
from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.placed import place
from adapterbank.errors import TrainingError
from adapterbank.inference.audit import fingerprint
from adapterbank.inference.engine import Engine
from adapterbank.inference.predictions import decide
from adapterbank.inference.rows import Rows
from adapterbank.kinds import scoring
from adapterbank.kinds.kind import HeadOutputs
from adapterbank.kinds.table import KINDS
from adapterbank.methods import find_method
from adapterbank.runtime import stamp
from adapterbank.storage import files, records
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import FORMAT, Manifest, Package, count_params, pack
from adapterbank.tasks.spec import Examples, Task
from adapterbank.training import run_state
from adapterbank.training.builder import PreparedRun, RunBuilder, identity
from adapterbank.training.callbacks import Callbacks
from adapterbank.training.dataset import Dataset, DatasetReader, named
from adapterbank.training.job import Progress, RunState
from adapterbank.training.loop import AT_ONCE, train


@dataclass(frozen=True)
class Result:
    """What a run left behind."""

    record: dict[str, Any] = field(repr=False)
    record_path: Path
    package: Package | None
    """None of a method that leaves a record alone."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RunOutcome:
    """What a run came to; the record is not written yet."""

    record: dict[str, Any] = field(repr=False)
    package: Package | None
    """None where the run failed, or nobody wanted its package."""

    @property
    def failure(self) -> str:
        """Why the run failed, in a sentence; empty where it did not."""
        return str(self.record.get("failure", ""))


def run(
    config: Config,
    backbone: Backbone,
    bank_path: str | Path,
    *,
    reader: DatasetReader | None = None,
    callbacks: Callbacks | None = None,
    resuming: bool = False,
    reached: RunState | None = None,
    about: Mapping[str, Any] | None = None,
) -> Result:
    """Train one task and put it into the bank, which is created if it does not exist.

    `reader` reads the data, by default the files that the config names. `reached` is the state that this very run has
    reached already; `about` is added to its record.
    """
    callbacks = callbacks or Callbacks()
    if not find_method(config.method).slot:
        return _keep_found(config, backbone, bank_path, reader or DatasetReader(), callbacks)
    builder = RunBuilder(backbone, callbacks.stage, reader)
    resolved = builder.look(config)
    ready = builder.ready(resolved)
    bank = _open(bank_path, backbone)
    reported = 0

    def report() -> None:
        nonlocal reported
        for text in ready.notes[reported:]:
            callbacks.note(text)
        reported = len(ready.notes)

    report()  # only now: nothing can be refused any more, and a mistake is one sentence
    with run_state.own_folder(bank.runs_path, resolved.hash) as kept:
        resumed = {0: reached} if reached else _resumed(kept, resuming, ready.notes.append)
        report()
        ended: list[RunOutcome] = []
        train_together(
            backbone,
            [ready],
            lambda _, one: ended.append(one),
            into=lambda _, score: bank,
            watch=callbacks.watch,
            keep=lambda _, state: run_state.save(kept, state),
            resumed=resumed,
        )
        report()
        (one,) = ended
        if one.package is None:
            raise TrainingError(one.failure)
        record = {**one.record, **(about or {})}
        path = records.write(bank.records_path, record)
        run_state.forget(kept)
    return Result(record, path, one.package, tuple(ready.notes))


def _keep_found(
    config: Config,
    backbone: Backbone,
    bank_path: str | Path,
    reader: DatasetReader,
    callbacks: Callbacks,
) -> Result:
    """Do without the encoder: search for the best model of the texts, which leaves a record and no package."""
    from adapterbank.automl.search import check

    config = resolve(named(config, reader.given))
    data = reader.read(config)
    check(data.task)
    bank = _open(bank_path, backbone)
    for text in data.notes:
        callbacks.note(text)
    record = search_record(config, backbone, data, callbacks.stage)
    for text in record["notes"][len(data.notes) :]:
        callbacks.note(text)
    return Result(record, records.write(bank.records_path, record), None, tuple(record["notes"]))


def search_record(
    config: Config, backbone: Backbone, data: Dataset, stage: Callable[[str, int, int], None] = lambda what, d, n: None
) -> dict[str, Any]:
    """Search for the best model without the encoder and give the record; one that was stopped says so.

    A search that the user ended early is known by the models it came to, so it does not stand for the whole one.
    """
    from adapterbank.automl.search import check, search

    check(data.task)
    began, metric, notes = time.perf_counter(), data.task.metric, list(data.notes)

    def watch(done: int, total: int, best: float | None) -> None:
        so_far = "" if best is None else f", best {metric} {best:.4f}"
        stage(f"model {done + 1}/{total}{so_far}", done, total)

    found = search(
        data.task,
        data.splits["train"],
        data.splits["dev"],
        trials=config.trials,
        minutes=config.minutes,
        seed=config.seed,
        watch=watch,
    )
    if found.stopped:
        tried = len(found.history)
        notes.append(f"Stopped after {tried} of {config.trials} models; the best of them is kept.")
        config = replace(config, trials=tried)
    stopped = {"stopped": True} if found.stopped else {}
    about = found.about(data.task, data.splits, backbone.parameters)
    rest = {"package": None, "bytes": 0, "stamp": stamp(torch.device("cpu"), torch.float32), **stopped}
    whole = identity(config, backbone, data.about())
    return {"config": whole, **about, **rest, "seconds": time.perf_counter() - began, "notes": notes}


def _open(path: str | Path, backbone: Backbone) -> Bank:
    return Bank.open(path, backbone.reference, create=True)


def train_together(
    backbone: Backbone,
    runs: Sequence[PreparedRun],
    end: Callable[[int, RunOutcome], None],
    *,
    into: Callable[[int, float], Bank | None],
    watch: Callable[[Progress], None] = lambda progress: None,
    keep: Callable[[int, RunState], None] = lambda run, state: None,
    resumed: Mapping[int, RunState] | None = None,
    at_once: int = AT_ONCE,
) -> None:
    """Train runs of one device, precision and dropout; `end` hears of each, by its number, as soon as it has ended.

    `into` says, by a run's number and dev score, which bank its package goes into, None for no bank.
    """
    first = runs[0].resolved
    placed = place(backbone, first.device, first.dtype)  # once, for the training and for the scores at its end
    engine: Engine | None = None

    def ended(number: int, state: RunState) -> None:
        nonlocal engine
        ready = runs[number]
        if state.failure:
            end(number, RunOutcome(failed(ready.resolved.identity, state.failure, ready), None))
            return
        if engine is None:
            engine = Engine(backbone, programs=False, placed=placed)
        end(number, _finish(ready, backbone, state, engine, into(number, state.best_score)))

    train(
        placed,
        [ready.job for ready in runs],
        dropout=first.config.dropout,
        watch=watch,
        keep=keep,
        resume=resumed,
        at_once=at_once,
        end=ended,
    )


def failed(identity: Mapping[str, Any], failure: str, ready: PreparedRun | None = None) -> dict[str, Any]:
    """Return the record of a run that could not be run, or not to its end."""
    found = {"config": dict(identity), "failure": " ".join(failure.split())}
    if ready is not None:
        resolved = ready.resolved
        found |= {"task": resolved.data.task.to_json(), "stamp": stamp(resolved.device, resolved.dtype)}
    return {**found, "notes": list(ready.notes) if ready else [], "created": files.now()}


def _finish(ready: PreparedRun, backbone: Backbone, state: RunState, engine: Engine, bank: Bank | None) -> RunOutcome:
    """Score the best epoch's weights, put them into the bank if there is one, and write down what came of it."""
    began, resolved = time.perf_counter(), ready.resolved
    config, data, task = resolved.config, resolved.data, resolved.data.task
    best = {name: tensor.numpy() for name, tensor in state.tensors["best"].items()}
    engine.put(config.task, task, resolved.plan, best, config.max_length, config.doc_stride)
    given = {name: engine.outputs(rows.tokens, [config.task] * len(rows)) for name, rows in ready.rows.items()}
    task = KINDS[task.kind].tune(HeadOutputs(task, data.splits["dev"], ready.rows["dev"], given["dev"]))
    scores = {
        name: _scores(task, data.splits[name], rows, given[name], ready.notes if name == "dev" else None)
        for name, rows in ready.rows.items()
    }
    manifest = _draft(ready, task, backbone, scores, best, fingerprint(engine, config.task) if bank else {})
    package = bank.put(manifest, best) if bank else None
    manifest = package.manifest if package else replace(manifest, bytes=len(pack(best)), created=files.now())
    training = sum(epoch["seconds"] for epoch in state.history)
    record = {
        "config": resolved.identity,
        "package": package.ref if package else None,
        "task": manifest.task,
        "metrics": scores,
        "params": manifest.params,
        "bytes": manifest.bytes,
        "best_epoch": state.best_epoch,
        "history": state.history,
        "created": manifest.created,
        "seconds": ready.seconds + training + time.perf_counter() - began,
        "examples_per_second": len(ready.job.train) * len(state.history) / max(training, 1e-9),
        "stamp": stamp(resolved.device, resolved.dtype),
        "notes": list(ready.notes),
    }
    return RunOutcome(record, package)


def _scores(
    task: Task, examples: Examples, rows: Rows, given: Sequence[np.ndarray], notes: list[str] | None
) -> dict[str, Any]:
    """Score a split with the weights that are kept; with `notes`, say so if they give one answer to everything."""
    said, targets = decide(task, examples, rows, given), examples.targets or []
    if notes is not None:
        notes += KINDS[task.kind].notes(task, said, targets)
    return scoring.report(task, said, targets)


def _resumed(kept: Path, resuming: bool, tell: Callable[[str], None]) -> dict[int, RunState]:
    state = run_state.load(kept) if resuming else None
    if state is not None:
        tell(f"Going on after epoch {state.epoch}.")
        return {0: state}
    if resuming:
        tell("There is no unfinished run of this config and data; it starts at the first epoch.")
    return {}


def _draft(
    ready: PreparedRun,
    task: Task,
    backbone: Backbone,
    scores: Mapping[str, Mapping[str, Any]],
    tensors: Mapping[str, np.ndarray],
    outputs: dict[str, Any],
) -> Manifest:
    resolved = ready.resolved
    config, data = resolved.config, resolved.data
    count = sum(array.size for array in tensors.values())
    new = sum(array.size for name, array in tensors.items() if name not in backbone.tensors)
    recipe = ("lr", "epochs", "batch", "warmup", "weight_decay", "epsilon", "bias_correction", "clip", "dropout",
              "class_weights", "patience", "max_length", "doc_stride", "sigma")  # fmt: skip
    return Manifest(
        format=FORMAT,
        name=config.task,
        version=0,
        task=task.to_json(),
        method=resolved.plan.to_json(),
        backbone=backbone.reference,
        recipe={name: getattr(config, name) for name in recipe},
        seed=config.seed,
        data=data.about(),
        metrics={name: {k: v for k, v in s.items() if isinstance(v, int | float)} for name, s in scores.items()},
        params=count_params(count, encoder=backbone.parameters, new=new),
        bytes=0,
        weights_sha256="",
        library=__version__,
        created="",
        fingerprint=outputs,
    )
