"""Run a study: train the runs that have no record, together where possible. Records are the only state.

Knows no YAML and no cluster.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from adapterbank.config import Config
from adapterbank.encoder.backbone import Backbone, load
from adapterbank.encoder.recompute import check_recompute
from adapterbank.errors import AdapterbankError, ConfigError, InputError, TrainingError
from adapterbank.methods import find_method
from adapterbank.storage import records
from adapterbank.storage.bank import Bank
from adapterbank.storage.record_store import FolderStore, RecordStore, open_store
from adapterbank.studies import selection
from adapterbank.studies.grid import Study, latest, options, with_seeds
from adapterbank.studies.progress import RunEvent, SweepProgress
from adapterbank.studies.saved_states import SavedStates
from adapterbank.studies.selection import Choice
from adapterbank.studies.units import Unit, units
from adapterbank.training.builder import PreparedRun, RunBuilder, UnloadedEncoder, identity, same_epochs
from adapterbank.training.dataset import DatasetReader
from adapterbank.training.job import Progress
from adapterbank.training.loop import AT_ONCE
from adapterbank.training.once import PutOnce, is_version_of
from adapterbank.training.run import RunOutcome, failed, find_unloaded, train_together
from adapterbank.training.search_run import search_record

KEEP = ("none", "best", "all")
"""Which packages are added to the bank: none, those that are their task's best on dev when they end, all."""
RunRecord = dict[str, Any]


@dataclass(frozen=True)
class SweepContext:
    """What a unit needs in addition to its runs."""

    store: RecordStore
    bank: str | None = None
    """The bank for packages, and for records without a place of their own; None if no packages are kept."""
    states: Path | None = None
    """The folder for the state of unfinished runs."""
    at_once: int = AT_ONCE
    keep: str = "none"
    recompute: str = "auto"
    """Whether steps compute outputs again instead of keeping them; changes no gradient."""
    notify: Callable[[RunEvent], None] = lambda event: None
    source: str | None = None
    """The bank whose tasks runs may start from; None if there is none."""
    stage: Callable[[str, int, int], None] = lambda what, done, total: None
    is_best: Callable[[str, float], bool] = lambda task, score: True
    """Returns whether a score is a task's best so far, for `keep` best."""


UnitRunner = Callable[[Sequence[Unit], SweepContext], None]
"""Runs units, in any order, anywhere."""


def make_context(
    bank: str | Path | None,
    records: str | Path | None,
    *,
    keep: str = "none",
    at_once: int = AT_ONCE,
    recompute: str = "auto",
) -> SweepContext:
    """Return the context of a sweep; records are stored in the bank unless `records` is given."""
    check_recompute(recompute)
    if keep not in KEEP:
        raise ConfigError([f"keep is {keep!r}; it must be one of {', '.join(KEEP)}."])
    if bank is None and (records is None or keep != "none"):
        raise ConfigError(["A sweep needs a bank, or a folder of records if it keeps no packages."])
    source = None if bank is None else str(bank)
    if records is None:
        assert bank is not None
        kept = open_store(Path(bank, "records"))
        return SweepContext(kept, source, Path(bank, "runs"), at_once, keep, recompute, source=source)
    store = open_store(records)
    states = store.path / "runs" if isinstance(store, FolderStore) else None
    return SweepContext(store, source if keep != "none" else None, states, at_once, keep, recompute, source=source)


@dataclass
class SweepOutcome:
    """The result of a sweep."""

    progress: SweepProgress
    choices: list[tuple[str, Choice]] = field(default_factory=list)
    """The name of each block with a `select`, and the setting chosen for each group, with all its seeds."""

    @property
    def tally(self) -> SweepProgress:
        """An earlier name of `progress`."""
        return self.progress

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return {**self.progress.to_json(), "chosen": [{"block": name, **one.to_json()} for name, one in self.choices]}


def sweep(
    study: Study,
    context: SweepContext,
    *,
    engine: UnitRunner | None = None,
    watch: Callable[[SweepProgress], None] = lambda progress: None,
    limit: int | None = None,
    retry: bool = False,
) -> SweepOutcome:
    """Run all runs of a study that have no record, then those that its blocks select.

    Args:
        study: The runs.
        context: Where records and packages are stored.
        engine: What runs the units; by default this process.
        watch: Called with the progress after every change.
        limit: The largest number of new runs to start.
        retry: Run failed runs again.
    """
    if context.bank is not None and len({run.backbone for run in study.runs}) > 1:
        raise ConfigError(
            ["The runs have several backbones, but a bank has one: use a folder of records and keep no packages."]
        )
    if retry:
        for hash, record in context.store.all().items():
            if selection.failed(record) and options(record) in study.runs:
                context.store.drop(hash)
    context.store.check()  # before training anything that could not be stored
    progress = SweepProgress()

    def notify(event: RunEvent) -> None:
        progress.update(event)
        watch(progress)

    context = replace(context, notify=notify, is_best=progress.better)
    run_all = engine or run_units
    begun = _run_missing(study.runs, context, progress, run_all, limit)
    further = _further(study, context.store)
    _run_missing(further, context, progress, run_all, None if limit is None else limit - begun)
    return SweepOutcome(progress, _chosen(study, context.store))


def _run_missing(
    runs: Sequence[Config], context: SweepContext, progress: SweepProgress, run_all: UnitRunner, limit: int | None
) -> int:
    """Run what has no record, and return the number of runs that were started."""
    recorded = find_records(runs, context.store)
    # Runs that were refused before come last; otherwise they would use up a limit each time.
    new = [run for run in runs if run not in recorded]
    new += [run for run in runs if run in recorded and lacks_data(recorded[run])]
    left_out = set(new[limit:]) if limit is not None else set()
    taken = [run for run in runs if run not in left_out]
    progress.total += len(runs)
    progress.new += len(new) - len(left_out)
    run_all(units(taken), context)
    return len(new) - len(left_out)


def find_records(runs: Iterable[Config], store: RecordStore) -> dict[Config, RunRecord]:
    """Return the records of runs by their options, whether or not the data has changed since."""
    return _of(runs, latest(store.all().values()))


def _of(runs: Iterable[Config], recorded: Mapping[Config, RunRecord]) -> dict[Config, RunRecord]:
    wanted = set(runs)
    return {run: record for run, record in recorded.items() if run in wanted}


def lacks_data(record: Mapping[str, Any]) -> bool:
    """Return whether a run failed because its data could not be read or did not fit; such a run is tried again."""
    return selection.failed(record) and record["config"].get("data") is None


def _further(study: Study, store: RecordStore) -> tuple[Config, ...]:
    """Return the runs that selection adds when the grids are done: the chosen settings with their seeds."""
    found: dict[Config, None] = {}
    recorded = latest(store.all().values())
    for block in study.blocks:
        own = _of(block.runs, recorded)
        if block.select is None or len(own) < len(block.runs):  # a missing record could change the choice
            continue
        for choice in selection.choose(own.values(), block.select.per, block.select.by):
            found |= dict.fromkeys(with_seeds(choice.record["config"], block.select.seeds))
    grid = set(study.runs)
    return tuple(run for run in found if run not in grid)


def _chosen(study: Study, store: RecordStore) -> list[tuple[str, Choice]]:
    """Return each block's choices: the settings chosen on its grid, with all the seeds they have been run with."""
    recorded = latest(store.all().values())
    by_setting: dict[str, list[RunRecord]] = {}
    for record in recorded.values():
        if not selection.failed(record):
            by_setting.setdefault(selection.setting(record), []).append(record)
    found = []
    for block in study.blocks:
        if block.select is None:
            continue
        per, by = block.select.per, block.select.by
        for choice in selection.choose(_of(block.runs, recorded).values(), per, by):
            group = selection.group(choice.record, per)
            same = [r for r in by_setting[selection.setting(choice.record)] if selection.group(r, per) == group]
            (whole,) = selection.choose(same, per, by)
            found.append((block.name, replace(whole, settings=choice.settings)))
    return found


# --- a unit on this machine -----------------------------------------------------------------------------------------


def run_units(found: Sequence[Unit], context: SweepContext) -> None:
    """Run units one after the other in this process."""
    name, backbone = "", None
    for unit in found:
        if not any(find_method(config.method).slot for config in unit):
            run_unit(unit, None, context)
            continue
        if backbone is None or unit[0].backbone != name:
            name = unit[0].backbone
            backbone = load(name)
        run_unit(unit, backbone, context)


def run_unit(unit: Unit, backbone: Backbone | None, context: SweepContext) -> None:
    """Run the runs of a unit that have no record; a failed run leaves a record with the reason.

    Without a backbone, no method of the unit needs one.
    """
    bank, reader, recorded = None, DatasetReader(), context.store.all()
    unloaded = UnloadedEncoder() if context.bank is None else find_unloaded(Path(context.bank), unit[0].backbone)
    for config in unit:
        if not find_method(config.method).slot:
            _search(config, reader, backbone or unloaded, context, recorded)
    if backbone is None:
        return
    if context.bank is not None:
        bank = Bank.open(context.bank, backbone.reference, create=True)
    builder = RunBuilder(backbone, context.stage, reader, context.recompute, context.source)
    waiting = list(_prepared(unit, builder, context, recorded))
    if not waiting:
        return
    with SavedStates(context.states) as states:
        for one in _train(waiting, backbone, bank, context, states):  # those that did not fit into memory together
            if _train([one], backbone, bank, context, states):
                text = "There is not enough memory for this run; lower batch or max_length, or use another device."
                _end(one, RunOutcome(failed(one.resolved.identity, text, one), None), context, states)


def _train(
    prepared: Sequence[PreparedRun], backbone: Backbone, bank: Bank | None, context: SweepContext, states: SavedStates
) -> list[PreparedRun]:
    """Train runs together; return those that have not ended because memory ran out."""
    configs = [one.resolved.config for one in prepared]
    left, resumed = dict(enumerate(prepared)), states.load(prepared)
    for first, *others in same_epochs(prepared, resumed):
        for number in (first, *others) if first in resumed else ():
            prepared[number].notes.append(f"Resuming after epoch {resumed[first].epoch}.")

    def into(number: int, score: float) -> PutOnce | None:
        if context.keep == "none" or bank is None:
            return None
        best = context.is_best(configs[number].task, score) and not _beaten(prepared[number], score, bank)
        return PutOnce(bank) if context.keep == "all" or best else None

    def end(number: int, outcome: RunOutcome) -> None:
        _end(left.pop(number), outcome, context, states)

    def watch(progress: Progress) -> None:
        context.notify(RunEvent(configs[progress.run], "running", progress.step / progress.steps))

    with contextlib.suppress(torch.OutOfMemoryError, MemoryError):
        train_together(
            backbone,
            prepared,
            end,
            into=into,
            watch=watch,
            keep=lambda number, state: states.save(prepared[number], state),
            resumed=resumed,
            at_once=context.at_once,
        )
    return list(left.values())


def _beaten(run: PreparedRun, score: float, bank: Bank) -> bool:
    """Return whether the bank's default of the task, from an earlier sweep or training, is as good on the same rows."""
    try:
        default = bank.get(run.resolved.config.task).manifest
    except AdapterbankError:  # there is none, or it is damaged
        return False
    metric, reached = default.task["metric"], default.metrics.get("dev", {}).get(default.task["metric"], math.nan)
    if reached == score and is_version_of(default, run.resolved):
        return False  # it is this run's own, which was killed before its record was written
    rows = run.resolved.data.about().get("dev")  # without dev rows, scores are of other models: see `fitted`
    same = rows is not None and default.data.get("dev") == rows and metric == run.resolved.data.task.metric
    return same and reached >= score


def _end(run: PreparedRun, outcome: RunOutcome, context: SweepContext, states: SavedStates) -> None:
    """Store a run's record, and only then delete its saved state."""
    context.store.add(outcome.record)
    states.forget(run)
    score = selection.score(outcome.record)
    kind = "failed" if outcome.failure else "done"
    notes = tuple(outcome.record["notes"])
    context.notify(RunEvent(run.resolved.config, kind, score=score, failure=outcome.failure, notes=notes))


def _prepared(
    unit: Unit, builder: RunBuilder, context: SweepContext, recorded: Mapping[str, Mapping[str, Any]]
) -> Iterator[PreparedRun]:
    """Prepare the runs without a record; one that does not fit its data or backbone leaves a record with the reason."""
    for config in unit:
        if not find_method(config.method).slot:
            continue
        try:
            resolved = builder.resolve(config)
            if resolved.hash in recorded:
                context.notify(_known(config, recorded[resolved.hash]))
                continue
            yield builder.prepare(resolved)
        except InputError as error:
            _refuse(config, builder.backbone, error, context)


def _search(
    config: Config,
    reader: DatasetReader,
    backbone: Backbone | UnloadedEncoder,
    context: SweepContext,
    recorded: Mapping[str, Mapping[str, Any]],
) -> None:
    """Run a method that needs no encoder; unlike a single run, a search that the user stops leaves no record."""
    try:
        data = reader.read(config)
        whole = identity(config, backbone, data.about())
        if known := recorded.get(records.config_hash(whole)) or _same_search(whole, recorded.values()):
            context.notify(_known(config, known))
            return
        record = search_record(config, backbone, data, context.stage)
    except (InputError, TrainingError) as error:
        _refuse(config, backbone, error, context)
        return
    if record.get("stopped"):
        raise KeyboardInterrupt
    context.store.add(record)
    context.notify(RunEvent(config, "done", score=selection.score(record), notes=tuple(record["notes"])))


def _same_search(whole: Mapping[str, Any], recorded: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the record of the same search, where one of the two did not know the encoder beside it."""
    wanted, either = {**whole, "backbone_sha256": ""}, whole["backbone_sha256"] == ""
    for record in recorded:
        config = record["config"]
        if (either or config.get("backbone_sha256") == "") and {**config, "backbone_sha256": ""} == wanted:
            return record
    return None


def _known(config: Config, record: Mapping[str, Any]) -> RunEvent:
    failure, notes = str(record.get("failure", "")), tuple(record.get("notes", ()))
    return RunEvent(config, "known", score=selection.score(record), failure=failure, notes=notes)


def _refuse(config: Config, backbone: Backbone | UnloadedEncoder, error: Exception, context: SweepContext) -> None:
    """Record a run that cannot be run, with the reason."""
    record = failed(identity(config, backbone, None), str(error))
    new = context.store.add(record)
    context.notify(RunEvent(config, "failed" if new else "known", failure=record["failure"]))
