"""Runs: train one or several prepared runs, and write a record and, for most methods, a package for each.

All input is checked before the bank is touched (`builder`). The bank's tasks change in one atomic step at the end.
Knows no grid: `sweep` chooses the runs that train together.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from adapterbank import __version__
from adapterbank.config import Config
from adapterbank.encoder.backbone import Backbone, load
from adapterbank.encoder.placed import place
from adapterbank.errors import DataError, TrainingError
from adapterbank.inference.audit import fingerprint
from adapterbank.inference.engine import Engine
from adapterbank.inference.loading import content_name
from adapterbank.inference.resident import Resident
from adapterbank.kinds.kind import HeadOutputs
from adapterbank.methods import find_method
from adapterbank.runtime import stamp
from adapterbank.storage import files, records
from adapterbank.storage.bank import Bank
from adapterbank.storage.bank_head import is_unused
from adapterbank.storage.comparison import shortfall
from adapterbank.storage.leases import leased
from adapterbank.storage.package import FORMAT, Manifest, Package, count_params, pack
from adapterbank.storage.requirements import ref_of
from adapterbank.tasks.spec import Task
from adapterbank.training import run_state
from adapterbank.training.builder import PreparedRun, ResolvedRun, RunBuilder, UnloadedEncoder, same_epochs
from adapterbank.training.callbacks import Callbacks
from adapterbank.training.dataset import DatasetReader, canonical
from adapterbank.training.final_scores import fitted_task, measure_reliability, score_split
from adapterbank.training.fitted import train_fitted
from adapterbank.training.job import Begun, Progress, RunState
from adapterbank.training.loop import AT_ONCE, Together
from adapterbank.training.once import PutOnce, find_added, resolve_again
from adapterbank.training.search_run import search_record
from adapterbank.training.wide_first import train

_OF_EPOCHS = ("epochs", "patience")
"""Options that a run whose head is fitted does not use."""


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    record: dict[str, Any] = field(repr=False)
    record_path: Path
    package: Package | None
    """None for a method that writes only a record."""
    notes: tuple[str, ...]


LOG = logging.getLogger("adapterbank.train")


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run, before its record is written."""

    record: dict[str, Any] = field(repr=False)
    package: Package | None
    """None if the run failed or its package was not kept."""

    @property
    def failure(self) -> str:
        """Why the run failed, in one sentence; empty if it did not."""
        return str(self.record.get("failure", ""))


class PackageStore(Protocol):
    """Takes the package of a run: a bank, or one that takes it once."""

    def put(self, draft: Manifest, tensors: Mapping[str, np.ndarray], default: str = "new") -> Package:
        """Add a package as a new version of its task."""
        ...

    def served(self, name: str) -> Manifest | None:
        """Return the manifest of a task's default version."""
        ...


def run(
    config: Config,
    backbone: Backbone | None,
    bank_path: str | Path,
    *,
    reader: DatasetReader | None = None,
    callbacks: Callbacks | None = None,
    resuming: bool = False,
    begun: Begun | None = None,
    recompute: str = "auto",
) -> Result:
    """Train one task and add it to the bank, which is created if it does not exist.

    `backbone` is loaded if it is None and the method needs it. `reader` reads the data, by default the config's files;
    `recompute` is one of `recompute.RECOMPUTE` and changes no gradient.
    """
    callbacks, reader = callbacks or Callbacks(), reader or DatasetReader()
    config = canonical(config, reader.splits)
    if not find_method(config.method).slot:
        return _run_search(config, backbone, Path(bank_path), reader, callbacks)
    builder = RunBuilder(backbone := backbone or load(config.backbone), callbacks.stage, reader, recompute, bank_path)
    resolved = resolve_again(builder, config, Path(bank_path)) if resuming else builder.resolve(config)
    prepared = builder.prepare(resolved)
    bank = _open(bank_path, backbone)
    reported = 0

    def report() -> None:
        nonlocal reported
        for text in prepared.notes[reported:]:
            callbacks.note(text)
        reported = len(prepared.notes)

    report()  # only now: a refused run prints its error alone
    with own_folder(bank.runs_path, resolved) as folder:
        newest = bank.newest(config.task)
        if resuming:  # without a state, only the newest version may be that of this run
            newest = run_state.newest_before(folder, newest - 1)
        if resuming and (ended := _ended_before(bank, resolved, newest)):
            run_state.forget(folder)
            return ended
        resumed = {0: begun.state} if begun and begun.state else _resumed(folder, resuming, prepared)
        report()
        outcomes: list[RunOutcome] = []
        train_together(
            backbone,
            [prepared],
            lambda _, outcome: outcomes.append(outcome),
            into=lambda _, score: PutOnce(bank, newest) if resuming else bank,
            watch=callbacks.watch,
            keep=lambda _, state: run_state.save(folder, state, newest),
            resumed=resumed,
        )
        report()
        (outcome,) = outcomes
        if outcome.package is None:
            raise TrainingError(outcome.failure)
        record = {**outcome.record, **(begun.about if begun else {})}
        path = records.write(bank.records_path, record)
        run_state.forget(folder)
    return Result(record, path, outcome.package, tuple(prepared.notes))


@contextlib.contextmanager
def own_folder(runs: Path, resolved: ResolvedRun) -> Iterator[Path]:
    """Claim a run's folder, and protect what the run stands on."""
    refs = [ref_of(one) for one in resolved.base.references] if resolved.base else []
    with run_state.own_folder(runs, resolved.hash) as folder, leased(folder, resolved.config.task, refs):
        yield folder


def _ended_before(bank: Bank, resolved: ResolvedRun, newest: int) -> Result | None:
    """Return the result of this very run if it had added its version and its record before it was killed."""
    path, made = records.find(bank.records_path, resolved.hash), find_added(bank, resolved, newest)
    with contextlib.suppress(DataError):  # a damaged record
        if path and made and (record := records.read(path)).get("package") == made.ref:
            return Result(record, path, made, tuple(record.get("notes", ())))
    return None


def _run_search(
    config: Config,
    backbone: Backbone | None,
    bank_path: Path,
    reader: DatasetReader,
    callbacks: Callbacks,
) -> Result:
    """Search for the best model without the encoder, which writes a record and no package.

    Where there is no bank yet and no encoder is loaded, the record alone is written; the bank may follow.
    """
    from adapterbank.automl.search import check

    data = reader.read(config)
    check(data.task)
    encoder = backbone or find_unloaded(bank_path, config.backbone)
    if backbone:
        _open(bank_path, backbone)
    for text in data.notes:
        callbacks.note(text)
    record = search_record(config, encoder, data, callbacks.stage)
    for text in record["notes"][len(data.notes) :]:
        callbacks.note(text)
    return Result(record, records.write(bank_path / "records", record), None, tuple(record["notes"]))


def find_unloaded(bank_path: Path, name: str) -> UnloadedEncoder:
    """Return what a bank knows of the encoder `name`, which is not loaded; refuse a folder that cannot be a bank."""
    if is_unused(bank_path):
        return UnloadedEncoder()
    own = Bank.open(bank_path).backbone
    return UnloadedEncoder(own["sha256"] if own["name"] == name else "")


def _open(path: str | Path, backbone: Backbone) -> Bank:
    return Bank.open(path, backbone.reference, create=True)


def train_together(
    backbone: Backbone,
    runs: Sequence[PreparedRun],
    end: Callable[[int, RunOutcome], None],
    *,
    into: Callable[[int, float], PackageStore | None],
    watch: Callable[[Progress], None] = lambda progress: None,
    keep: Callable[[int, RunState], None] = lambda run, state: None,
    resumed: Mapping[int, RunState] | None = None,
    at_once: int = AT_ONCE,
) -> None:
    """Train runs of one device, precision and dropout; call `end` with each run's number and outcome when it ends.

    Runs that differ only in whether they average have the same epochs, and train once. `into` returns, for a run's
    number and dev score, the bank for its package, or None to keep no package.
    """
    first = runs[0].resolved
    # Once, for training and for the final scores.
    placed = place(backbone, first.device, first.dtype, first.layout, recompute=first.recompute)
    LOG.debug("the encoder is on %s", placed.device)
    engine: Engine | None = None

    def finish(number: int, state: RunState) -> None:
        nonlocal engine
        prepared = runs[number]
        if state.failure:
            end(number, RunOutcome(failed(prepared.resolved.identity, state.failure, prepared), None))
            return
        if state.narrowed:
            prepared = replace(prepared, resolved=prepared.resolved.narrowed(state.narrowed["units"]))
        if engine is None:
            engine = Engine(backbone, programs=False, placed=placed)
        end(number, finish_run(prepared, backbone, state, engine, into(number, state.best_score)))

    def finish_all(place: int, state: RunState) -> None:
        for number in reversed(looped[place]):  # the first last: until then its saved state is that of all
            finish(number, state if runs[number].job.averages else state.without_average())

    def watch_all(progress: Progress) -> None:
        for number in looped[progress.run]:
            watch(replace(progress, run=number))

    dropout, looped = first.config.dropout, same_epochs(runs, resumed or {})
    for number, run in enumerate(runs):
        if run.job.fitted:
            finish(number, train_fitted(placed, run.job, number=number, dropout=dropout, watch=watch))
    train(
        placed,
        [runs[numbers[0]].job for numbers in looped],
        dropout=dropout,
        watch=watch_all,
        keep=lambda place, state: keep(looped[place][0], state),
        resume={place: resumed[own] for place, (own, *_) in enumerate(looped) if resumed and own in resumed},
        end=finish_all,
        together=Together(at_once),
    )


def failed(identity: Mapping[str, Any], failure: str, prepared: PreparedRun | None = None) -> dict[str, Any]:
    """Return the record of a run that could not start or failed."""
    record = {"config": dict(identity), "failure": " ".join(failure.split())}
    if prepared is not None:
        resolved = prepared.resolved
        record |= {
            "task": resolved.data.task.to_json(),
            "stamp": stamp(resolved.device, resolved.dtype, resolved.layout),
        }
    return {**record, "notes": list(prepared.notes) if prepared else [], "created": files.now()}


def finish_run(
    prepared: PreparedRun, backbone: Backbone, state: RunState, engine: Engine, bank: PackageStore | None
) -> RunOutcome:
    """Score the weights that are kept, add them to the bank if there is one, and return the outcome."""
    began, resolved = time.perf_counter(), prepared.resolved
    config, data, task = resolved.config, resolved.data, resolved.data.task
    best = {name: tensor.numpy() for name, tensor in state.kept.items()}
    below = resolved.base
    bases = tuple(engine.load(one, content_name(one), asked=False) for one in (below.packages if below else ()))
    reading = config.max_length, config.doc_stride, resolved.windows
    engine.enter(config.task, Resident(task, resolved.plan, *reading, bases), best)
    outputs = {
        name: HeadOutputs(task, data.splits[name], rows, engine.outputs(rows.tokens, [config.task] * len(rows)))
        for name, rows in prepared.rows.items()
    }
    if "dev" in outputs:
        task = fitted_task(outputs["dev"], calibrated=config.calibrate)
    outputs = {name: replace(given, task=task) for name, given in outputs.items()}
    if state.held_out is not None:  # each training row as scored by a head that was fitted to others
        outputs["dev"] = HeadOutputs(task, data.splits["train"], prepared.job.train, state.held_out)
    prepared.notes.extend(state.notes())
    notes = prepared.notes if state.held_out is None else None  # those outputs are not the model's own
    LOG.debug("computed the outputs of %s with the best weights", " and ".join(outputs) or "no split")
    scores = {name: score_split(given, name == "dev", notes) for name, given in outputs.items()}
    measured = {name: measured for name, given in outputs.items() if (measured := measure_reliability(given))}
    for name, one in measured.items():
        scores[name]["calibration_error"] = one["calibration_error"]
    manifest = _draft(prepared, task, backbone, scores, best, fingerprint(engine, config.task) if bank else {})
    if bank and (served := bank.served(manifest.name)):
        prepared.notes.extend(shortfall(manifest, served, config.default))
    manifest = replace(manifest, notes=list(prepared.notes))
    LOG.debug("scored them")
    package = bank.put(manifest, best, config.default) if bank else None
    manifest = package.manifest if package else replace(manifest, bytes=len(pack(best)), created=files.now())
    LOG.debug("wrote the package")
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
        "seconds": prepared.seconds + training + time.perf_counter() - began,
        "examples_per_second": prepared.job.train.units * len(state.history) / max(training, 1e-9),
        "stamp": stamp(resolved.device, resolved.dtype, resolved.layout),
        **state.about,
        **({"windows": resolved.windows} if resolved.windows else {}),
        **({"start_from": resolved.start.about()} if resolved.start else {}),
        **(resolved.base.about() if resolved.base else {}),
        **({"average": state.average} if state.average else {}),
        **({"restarts": state.restarts} if state.restarts else {}),
        **({"narrowed": state.narrowed} if state.narrowed else {}),
        "notes": list(prepared.notes),
        **({"calibration": measured} if measured else {}),
    }
    return RunOutcome(record, package)


def _resumed(folder: Path, resuming: bool, prepared: PreparedRun) -> dict[int, RunState]:
    state = run_state.load(folder, prepared.job) if resuming else None
    if state is not None:
        prepared.notes.append(f"Resuming after epoch {state.epoch}.")
        return {0: state}
    if resuming:
        prepared.notes.append("There is no unfinished run of this config and data; training starts at the first epoch.")
    return {}


def _draft(
    prepared: PreparedRun,
    task: Task,
    backbone: Backbone,
    scores: Mapping[str, Mapping[str, Any]],
    tensors: Mapping[str, np.ndarray],
    outputs: dict[str, Any],
) -> Manifest:
    resolved = prepared.resolved
    config, data = resolved.config, resolved.data
    count = sum(array.size for array in tensors.values())
    new = sum(array.size for name, array in tensors.items() if name not in backbone.tensors)
    return Manifest(
        format=FORMAT,
        name=config.task,
        version=0,
        task=task.to_json(),
        method=resolved.plan.to_json(),
        backbone=backbone.reference,
        recipe={k: v for k, v in resolved.recipe.items() if not (prepared.job.fitted and k in _OF_EPOCHS)},
        seed=config.seed,
        data=data.about(),
        metrics={name: {k: v for k, v in s.items() if isinstance(v, int | float)} for name, s in scores.items()},
        params=count_params(count, encoder=backbone.parameters, new=new),
        bytes=0,
        weights_sha256="",
        library=__version__,
        created="",
        fingerprint=outputs,
        requires=resolved.base.references if resolved.base else [],
    )
