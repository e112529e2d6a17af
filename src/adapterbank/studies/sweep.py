"""A study's runs, those without a record, trained together where they can be. Records are the only state there is.

Runs of one backbone, device, precision, dropout, length and data set are a unit: they share their rows, so they have
long and short batches at the same time, and one call of the training loop takes them all. Knows no YAML and no cluster.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from adapterbank.config import Config
from adapterbank.encoder.backbone import Backbone, load
from adapterbank.errors import AdapterbankError, ConfigError, InputError, TrainingError
from adapterbank.methods import find_method
from adapterbank.storage import records
from adapterbank.storage.bank import Bank
from adapterbank.storage.record_store import FolderStore, RecordStore, open_store
from adapterbank.studies import selection
from adapterbank.studies.grid import Study, latest, options, with_seeds
from adapterbank.studies.progress import RunEvent, SweepProgress
from adapterbank.studies.selection import Choice
from adapterbank.training import run_state
from adapterbank.training.builder import PreparedRun, RunBuilder, identity
from adapterbank.training.dataset import SOURCE
from adapterbank.training.job import Progress, RunState
from adapterbank.training.loop import AT_ONCE
from adapterbank.training.run import RunOutcome, failed, search_record, train_together

KEEP = ("none", "best", "all")
"""Which packages go into the bank: none, those that were a task's best on dev when they ended, all."""
UNIT = 64
"""Runs of a unit at most: their data and first numbers are in memory at once."""
_CHEAP = 8_000_000
"""Trained parameters up to which the state of an unfinished run is kept: four numbers for each are written."""
_KEEP_EVERY = 20.0
"""Seconds between two states of one run that are kept."""
_TOGETHER = ("backbone", "device", "precision", "dropout", "max_length", "doc_stride", *SOURCE)

Unit = tuple[Config, ...]


@dataclass(frozen=True)
class SweepContext:
    """What a unit needs beside its runs."""

    store: RecordStore
    bank: str | None = None
    """Where packages go, and records unless they have a place of their own; None for records alone."""
    states: Path | None = None
    """Where unfinished runs keep what they need to go on."""
    at_once: int = AT_ONCE
    keep: str = "none"
    hear: Callable[[RunEvent], None] = lambda news: None
    stage: Callable[[str, int, int], None] = lambda what, done, total: None
    wanted: Callable[[str, float], bool] = lambda task, score: True
    """With `keep` best: says whether a score is a task's best so far."""


Engine = Callable[[Sequence[Unit], SweepContext], None]
"""Runs units, in any order, anywhere."""


def make_context(
    bank: str | Path | None, records: str | Path | None, *, keep: str = "none", at_once: int = AT_ONCE
) -> SweepContext:
    """Say where a sweep leaves what it makes: records in the bank's folder of them unless another place is named."""
    if keep not in KEEP:
        raise ConfigError([f"keep is {keep!r}; it must be one of {', '.join(KEEP)}."])
    if bank is None and (records is None or keep != "none"):
        raise ConfigError(["A sweep needs a bank, or a folder of records for a sweep that keeps no packages."])
    if records is None:
        assert bank is not None
        return SweepContext(open_store(Path(bank, "records")), str(bank), Path(bank, "runs"), at_once, keep)
    store = open_store(records)
    states = store.path / "runs" if isinstance(store, FolderStore) else None
    return SweepContext(store, str(bank) if keep != "none" else None, states, at_once, keep)


@dataclass
class SweepOutcome:
    """What a sweep came to."""

    progress: SweepProgress
    choices: list[tuple[str, Choice]] = field(default_factory=list)
    """For each block with a `select`, by its name: what was chosen for each group, all seeds counted."""

    @property
    def tally(self) -> SweepProgress:
        """The name that `progress` had first."""
        return self.progress

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON values."""
        return {**self.progress.to_json(), "chosen": [{"block": name, **one.to_json()} for name, one in self.choices]}


def sweep(
    study: Study,
    context: SweepContext,
    *,
    engine: Engine | None = None,
    watch: Callable[[SweepProgress], None] = lambda progress: None,
    limit: int | None = None,
    retry: bool = False,
) -> SweepOutcome:
    """Run what has no record yet, then what the blocks select.

    `watch` hears of every change; `limit` is how many new runs are begun at most; with `retry` runs that failed
    are run again.
    """
    if context.bank is not None and len({run.backbone for run in study.runs}) > 1:
        raise ConfigError(["The runs have several backbones, and a bank has one: give records alone, and keep none."])
    if retry:
        for hash, record in context.store.all().items():
            if selection.failed(record) and options(record) in study.runs:
                context.store.drop(hash)
    context.store.check()  # before anything is trained that could not be kept
    progress = SweepProgress()

    def hear(news: RunEvent) -> None:
        progress.hear(news)
        watch(progress)

    told = replace(context, hear=hear, wanted=progress.better)
    work = engine or run_units
    begun = _work(study.runs, told, progress, work, limit)
    further = _further(study, context.store)
    _work(further, told, progress, work, None if limit is None else limit - begun)
    return SweepOutcome(progress, _chosen(study, context.store))


def _work(
    runs: Sequence[Config], context: SweepContext, progress: SweepProgress, work: Engine, limit: int | None
) -> int:
    """Have runs run, and give how many had no record."""
    known = standing(runs, context.store)
    # What was refused before comes last, else it would use up a limit each time.
    new = [run for run in runs if run not in known] + [run for run in runs if run in known and unread(known[run])]
    left_out = set(new[limit:]) if limit is not None else set()
    taken = [run for run in runs if run not in left_out]
    progress.total += len(runs)
    progress.new += len(new) - len(left_out)
    work(units(taken), context)
    return len(new) - len(left_out)


def standing(runs: Iterable[Config], store: RecordStore) -> dict[Config, dict[str, Any]]:
    """Give the records that runs have by their options; whether the data are the same as then is not looked at."""
    wanted = set(runs)
    return {run: record for run, record in latest(store.all().values()).items() if run in wanted}


def unread(record: Mapping[str, Any]) -> bool:
    """Say whether a record tells of data that could not be read, or did not fit: such a run is tried again."""
    return selection.failed(record) and record["config"].get("data") is None


def units(runs: Iterable[Config], at_most: int = UNIT) -> list[Unit]:
    """Group runs that can be trained together, in the order in which they were asked for."""
    groups: dict[tuple[Any, ...], list[Config]] = {}
    for run in runs:
        groups.setdefault(tuple(getattr(run, name) for name in _TOGETHER), []).append(run)
    return [tuple(group[i : i + at_most]) for group in groups.values() for i in range(0, len(group), at_most)]


def _further(study: Study, store: RecordStore) -> tuple[Config, ...]:
    """Give the runs that are asked for once the grids are done: chosen settings, with their seeds."""
    found: dict[Config, None] = {}
    for block in study.blocks:
        have = standing(block.runs, store)
        if block.select is None or len(have) < len(block.runs):  # with more records the choice might be another
            continue
        for choice in selection.choose(have.values(), block.select.per, block.select.by):
            found |= dict.fromkeys(with_seeds(choice.record["config"], block.select.seeds))
    grid = set(study.runs)
    return tuple(run for run in found if run not in grid)


def _chosen(study: Study, store: RecordStore) -> list[tuple[str, Choice]]:
    """Say what each block chose in the end: the setting chosen on its grid, with all seeds it has been run with."""
    everything = [record for record in latest(store.all().values()).values() if not selection.failed(record)]
    found = []
    for block in study.blocks:
        if block.select is None:
            continue
        for choice in selection.choose(standing(block.runs, store).values(), block.select.per, block.select.by):
            same = [one for one in everything if selection.setting(one) == selection.setting(choice.record)]
            (whole,) = selection.choose(same, block.select.per, block.select.by)
            found.append((block.name, Choice(choice.group, whole.record, whole.runs, choice.settings)))
    return found


# --- a unit on this machine -----------------------------------------------------------------------------------------


def run_units(found: Sequence[Unit], context: SweepContext) -> None:
    """Run units one after the other, here."""
    name, backbone = "", None
    for unit in found:
        if backbone is None or unit[0].backbone != name:
            name = unit[0].backbone
            backbone = load(name)
        run_unit(unit, backbone, context)


def run_unit(unit: Unit, backbone: Backbone, context: SweepContext) -> None:
    """Run those of a unit that have no record; a run that fails leaves one that says why."""
    bank = None
    if context.bank is not None:
        bank = Bank.open(context.bank, backbone.reference, create=True)
    builder, known = RunBuilder(backbone, context.stage), context.store.all()
    for config in unit:
        if not find_method(config.method).slot:
            _search(config, builder, context, known)
    waiting = list(_prepared(unit, builder, context, known))
    if not waiting:
        return
    with _States(context.states) as states:
        for one in _train(waiting, backbone, bank, context, states):  # those for whom there was no room together
            if _train([one], backbone, bank, context, states):
                text = "There is not enough memory for this run; lower batch or max_length, or use another device."
                _end(one, RunOutcome(failed(one.resolved.identity, text, one), None), context, states)


def _train(
    crowd: Sequence[PreparedRun], backbone: Backbone, bank: Bank | None, context: SweepContext, states: _States
) -> list[PreparedRun]:
    """Train runs together; gives those that have not ended because the memory did not do."""
    configs = [one.resolved.config for one in crowd]
    left = dict(enumerate(crowd))

    def into(number: int, score: float) -> Bank | None:
        if context.keep == "none" or bank is None:
            return None
        best = context.wanted(configs[number].task, score) and not _beaten(crowd[number], score, bank)
        return bank if context.keep == "all" or best else None

    def end(number: int, ended: RunOutcome) -> None:
        _end(left.pop(number), ended, context, states)

    def watch(progress: Progress) -> None:
        context.hear(RunEvent(configs[progress.run], "running", progress.step / progress.steps))

    with contextlib.suppress(torch.OutOfMemoryError, MemoryError):
        train_together(
            backbone,
            crowd,
            end,
            into=into,
            watch=watch,
            keep=lambda number, state: states.keep(crowd[number], state),
            resumed=states.load(crowd),
            at_once=context.at_once,
        )
    return list(left.values())


def _beaten(ready: PreparedRun, score: float, bank: Bank) -> bool:
    """Say whether the bank's default of the task is as good on the same dev rows: of an earlier sweep, or a train."""
    try:
        held = bank.get(ready.resolved.config.task).manifest
    except AdapterbankError:  # none there, or one that is damaged
        return False
    metric = held.task["metric"]
    same = held.data.get("dev") == ready.resolved.data.about()["dev"] and metric == ready.resolved.data.task.metric
    return same and float(held.metrics["dev"][metric]) >= score


def _end(ready: PreparedRun, ended: RunOutcome, context: SweepContext, states: _States) -> None:
    """Write a run's record, and then only forget how it got there."""
    context.store.add(ended.record)
    states.forget(ready)
    score = selection.score(ended.record)
    kind = "failed" if ended.failure else "done"
    context.hear(RunEvent(ready.resolved.config, kind, score=score, failure=ended.failure))


def _prepared(
    unit: Unit, builder: RunBuilder, context: SweepContext, known: Mapping[str, Mapping[str, Any]]
) -> Iterator[PreparedRun]:
    """Make those ready that have no record; what does not fit its data or the backbone leaves a record that says so."""
    for config in unit:
        if not find_method(config.method).slot:
            continue
        try:
            resolved = builder.look(config)
            if resolved.hash in known:
                context.hear(_known(config, known[resolved.hash]))
                continue
            yield builder.ready(resolved)
        except InputError as error:
            _refuse(config, builder.backbone, error, context)


def _search(config: Config, builder: RunBuilder, context: SweepContext, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Run a method that needs no encoder by itself; one that the user stops leaves no record, unlike a run alone."""
    backbone = builder.backbone
    try:
        data = builder.read(config)
        hash = records.config_hash(identity(config, backbone, data.about()))
        if hash in known:
            context.hear(_known(config, known[hash]))
            return
        record = search_record(config, backbone, data, context.stage)
    except (InputError, TrainingError) as error:
        _refuse(config, backbone, error, context)
        return
    if record.get("stopped"):
        raise KeyboardInterrupt
    context.store.add(record)
    context.hear(RunEvent(config, "done", score=selection.score(record)))


def _known(config: Config, record: Mapping[str, Any]) -> RunEvent:
    return RunEvent(config, "known", score=selection.score(record), failure=str(record.get("failure", "")))


def _refuse(config: Config, backbone: Backbone, error: Exception, context: SweepContext) -> None:
    """Record a run that cannot be run, with the reason."""
    record = failed(identity(config, backbone, None), str(error))
    new = context.store.add(record)
    context.hear(RunEvent(config, "failed" if new else "known", failure=record["failure"]))


class _States:
    """The states of a unit's unfinished runs, kept where that costs little beside the training."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._stack = folder, contextlib.ExitStack()
        self._own: dict[str, Path] = {}
        self._kept: dict[str, float] = {}

    def __enter__(self) -> _States:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def load(self, crowd: Sequence[PreparedRun]) -> dict[int, RunState]:
        """Give what was kept of runs, by their places; a state that is damaged counts as none."""
        found: dict[int, RunState] = {}
        for number, one in enumerate(crowd):
            folder = self._folder / one.resolved.hash if self._folder else None
            if folder is not None and (folder / "state.json").is_file():
                with contextlib.suppress(InputError):
                    state = run_state.load(folder)
                    if state is not None:
                        found[number] = state
                        one.notes.append(f"Going on after epoch {state.epoch}.")
        return found

    def keep(self, one: PreparedRun, state: RunState) -> None:
        """Keep a state, unless it is large or the last one is recent."""
        numbers = sum(tensor.numel() for tensor in state.tensors["weights"].values())
        hash, now = one.resolved.hash, time.monotonic()
        if self._folder is None or numbers > _CHEAP or now - self._kept.setdefault(hash, now) < _KEEP_EVERY:
            return
        if hash not in self._own:
            self._own[hash] = self._stack.enter_context(run_state.own_folder(self._folder, hash))
        run_state.save(self._own[hash], state)
        self._kept[hash] = now

    def forget(self, one: PreparedRun) -> None:
        """Remove the state of a run that has ended."""
        hash = one.resolved.hash
        if self._folder is not None:
            run_state.forget(self._own.pop(hash, self._folder / hash))
