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

from adapterbank import records, resume, selection
from adapterbank.bank import Bank
from adapterbank.config import Config
from adapterbank.data import SOURCE
from adapterbank.encoder.checkpoint import Backbone, load
from adapterbank.errors import AdapterbankError, ConfigError, InputError, TrainingError
from adapterbank.grid import Study, latest, options, with_seeds
from adapterbank.ledger import Folder, Ledger, open_ledger
from adapterbank.lesson import Progress, State
from adapterbank.methods import find_method
from adapterbank.prepare import Ready, Workshop, identity
from adapterbank.run import Ended, failed, search_record, train_together
from adapterbank.selection import Choice
from adapterbank.tally import News, Tally
from adapterbank.train import AT_ONCE

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
class Means:
    """What a unit needs beside its runs."""

    ledger: Ledger
    bank: str | None = None
    """Where packages go, and records unless they have a place of their own; None for records alone."""
    states: Path | None = None
    """Where unfinished runs keep what they need to go on."""
    at_once: int = AT_ONCE
    keep: str = "none"
    hear: Callable[[News], None] = lambda news: None
    stage: Callable[[str, int, int], None] = lambda what, done, total: None
    wanted: Callable[[str, float], bool] = lambda task, score: True
    """With `keep` best: says whether a score is a task's best so far."""


Engine = Callable[[Sequence[Unit], Means], None]
"""Runs units, in any order, anywhere."""


def make_means(
    bank: str | Path | None, records: str | Path | None, *, keep: str = "none", at_once: int = AT_ONCE
) -> Means:
    """Say where a sweep leaves what it makes: records in the bank's folder of them unless another place is named."""
    if keep not in KEEP:
        raise ConfigError([f"keep is {keep!r}; it must be one of {', '.join(KEEP)}."])
    if bank is None and (records is None or keep != "none"):
        raise ConfigError(["A sweep needs a bank, or a folder of records for a sweep that keeps no packages."])
    if records is None:
        assert bank is not None
        return Means(open_ledger(Path(bank, "records")), str(bank), Path(bank, "runs"), at_once, keep)
    ledger = open_ledger(records)
    states = ledger.path / "runs" if isinstance(ledger, Folder) else None
    return Means(ledger, str(bank) if keep != "none" else None, states, at_once, keep)


@dataclass
class Outcome:
    """What a sweep came to."""

    tally: Tally
    choices: list[tuple[str, Choice]] = field(default_factory=list)
    """For each block with a `select`, by its name: what was chosen for each group, all seeds counted."""

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON values."""
        return {**self.tally.to_json(), "chosen": [{"block": name, **one.to_json()} for name, one in self.choices]}


def sweep(
    study: Study,
    means: Means,
    *,
    engine: Engine | None = None,
    watch: Callable[[Tally], None] = lambda tally: None,
    limit: int | None = None,
    retry: bool = False,
) -> Outcome:
    """Run what has no record yet, then what the blocks select.

    `watch` hears of every change; `limit` is how many new runs are begun at most; with `retry` runs that failed
    are run again.
    """
    if means.bank is not None and len({run.backbone for run in study.runs}) > 1:
        raise ConfigError(["The runs have several backbones, and a bank has one: give records alone, and keep none."])
    if retry:
        for hash, record in means.ledger.all().items():
            if selection.failed(record) and options(record) in study.runs:
                means.ledger.drop(hash)
    means.ledger.check()  # before anything is trained that could not be kept
    tally = Tally()

    def hear(news: News) -> None:
        tally.hear(news)
        watch(tally)

    told = replace(means, hear=hear, wanted=tally.better)
    work = engine or run_units
    begun = _work(study.runs, told, tally, work, limit)
    further = _further(study, means.ledger)
    _work(further, told, tally, work, None if limit is None else limit - begun)
    return Outcome(tally, _chosen(study, means.ledger))


def _work(runs: Sequence[Config], means: Means, tally: Tally, work: Engine, limit: int | None) -> int:
    """Have runs run, and give how many had no record."""
    known = standing(runs, means.ledger)
    # What was refused before comes last, else it would use up a limit each time.
    new = [run for run in runs if run not in known] + [run for run in runs if run in known and unread(known[run])]
    left_out = set(new[limit:]) if limit is not None else set()
    taken = [run for run in runs if run not in left_out]
    tally.total += len(runs)
    tally.new += len(new) - len(left_out)
    work(units(taken), means)
    return len(new) - len(left_out)


def standing(runs: Iterable[Config], ledger: Ledger) -> dict[Config, dict[str, Any]]:
    """Give the records that runs have by their options; whether the data are the same as then is not looked at."""
    wanted = set(runs)
    return {run: record for run, record in latest(ledger.all().values()).items() if run in wanted}


def unread(record: Mapping[str, Any]) -> bool:
    """Say whether a record tells of data that could not be read, or did not fit: such a run is tried again."""
    return selection.failed(record) and record["config"].get("data") is None


def units(runs: Iterable[Config], at_most: int = UNIT) -> list[Unit]:
    """Group runs that can be trained together, in the order in which they were asked for."""
    groups: dict[tuple[Any, ...], list[Config]] = {}
    for run in runs:
        groups.setdefault(tuple(getattr(run, name) for name in _TOGETHER), []).append(run)
    return [tuple(group[i : i + at_most]) for group in groups.values() for i in range(0, len(group), at_most)]


def _further(study: Study, ledger: Ledger) -> tuple[Config, ...]:
    """Give the runs that are asked for once the grids are done: chosen settings, with their seeds."""
    found: dict[Config, None] = {}
    for block in study.blocks:
        have = standing(block.runs, ledger)
        if block.select is None or len(have) < len(block.runs):  # with more records the choice might be another
            continue
        for choice in selection.choose(have.values(), block.select.per, block.select.by):
            found |= dict.fromkeys(with_seeds(choice.record["config"], block.select.seeds))
    grid = set(study.runs)
    return tuple(run for run in found if run not in grid)


def _chosen(study: Study, ledger: Ledger) -> list[tuple[str, Choice]]:
    """Say what each block chose in the end: the setting chosen on its grid, with all seeds it has been run with."""
    everything = [record for record in latest(ledger.all().values()).values() if not selection.failed(record)]
    found = []
    for block in study.blocks:
        if block.select is None:
            continue
        for choice in selection.choose(standing(block.runs, ledger).values(), block.select.per, block.select.by):
            same = [one for one in everything if selection.setting(one) == selection.setting(choice.record)]
            (whole,) = selection.choose(same, block.select.per, block.select.by)
            found.append((block.name, Choice(choice.group, whole.record, whole.runs, choice.settings)))
    return found


# --- a unit on this machine -----------------------------------------------------------------------------------------


def run_units(found: Sequence[Unit], means: Means) -> None:
    """Run units one after the other, here."""
    name, backbone = "", None
    for unit in found:
        if backbone is None or unit[0].backbone != name:
            name = unit[0].backbone
            backbone = load(name)
        run_unit(unit, backbone, means)


def run_unit(unit: Unit, backbone: Backbone, means: Means) -> None:
    """Run those of a unit that have no record; a run that fails leaves one that says why."""
    bank = None
    if means.bank is not None:
        bank = Bank.open(means.bank, backbone.reference, create=True)
    workshop, known = Workshop(backbone, means.stage), means.ledger.all()
    for config in unit:
        if not find_method(config.method).slot:
            _search(config, workshop, means, known)
    waiting = list(_prepared(unit, workshop, means, known))
    if not waiting:
        return
    with _States(means.states) as states:
        for one in _train(waiting, backbone, bank, means, states):  # those for whom there was no room together
            if _train([one], backbone, bank, means, states):
                text = "There is not enough memory for this run; lower batch or max_length, or use another device."
                _end(one, Ended(failed(one.prospect.identity, text, one), None), means, states)


def _train(crowd: Sequence[Ready], backbone: Backbone, bank: Bank | None, means: Means, states: _States) -> list[Ready]:
    """Train runs together; gives those that have not ended because the memory did not do."""
    configs = [one.prospect.config for one in crowd]
    left = dict(enumerate(crowd))

    def into(number: int, score: float) -> Bank | None:
        if means.keep == "none" or bank is None:
            return None
        best = means.wanted(configs[number].task, score) and not _beaten(crowd[number], score, bank)
        return bank if means.keep == "all" or best else None

    def end(number: int, ended: Ended) -> None:
        _end(left.pop(number), ended, means, states)

    def watch(progress: Progress) -> None:
        means.hear(News(configs[progress.run], "running", progress.step / progress.steps))

    with contextlib.suppress(torch.OutOfMemoryError, MemoryError):
        train_together(
            backbone,
            crowd,
            end,
            into=into,
            watch=watch,
            keep=lambda number, state: states.keep(crowd[number], state),
            resumed=states.load(crowd),
            at_once=means.at_once,
        )
    return list(left.values())


def _beaten(ready: Ready, score: float, bank: Bank) -> bool:
    """Say whether the bank's default of the task is as good on the same dev rows: of an earlier sweep, or a train."""
    try:
        held = bank.get(ready.prospect.config.task).manifest
    except AdapterbankError:  # none there, or one that is damaged
        return False
    metric = held.task["metric"]
    same = held.data.get("dev") == ready.prospect.data.about()["dev"] and metric == ready.prospect.data.task.metric
    return same and float(held.metrics["dev"][metric]) >= score


def _end(ready: Ready, ended: Ended, means: Means, states: _States) -> None:
    """Write a run's record, and then only forget how it got there."""
    means.ledger.add(ended.record)
    states.forget(ready)
    score = selection.score(ended.record)
    kind = "failed" if ended.failure else "done"
    means.hear(News(ready.prospect.config, kind, score=score, failure=ended.failure))


def _prepared(unit: Unit, workshop: Workshop, means: Means, known: Mapping[str, Mapping[str, Any]]) -> Iterator[Ready]:
    """Make those ready that have no record; what does not fit its data or the backbone leaves a record that says so."""
    for config in unit:
        if not find_method(config.method).slot:
            continue
        try:
            prospect = workshop.look(config)
            if prospect.hash in known:
                means.hear(_known(config, known[prospect.hash]))
                continue
            yield workshop.ready(prospect)
        except InputError as error:
            _refuse(config, workshop.backbone, error, means)


def _search(config: Config, workshop: Workshop, means: Means, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Run a method that needs no encoder by itself; one that the user stops leaves no record, unlike a run alone."""
    backbone = workshop.backbone
    try:
        data = workshop.read(config)
        hash = records.config_hash(identity(config, backbone, data.about()))
        if hash in known:
            means.hear(_known(config, known[hash]))
            return
        record = search_record(config, backbone, data, means.stage)
    except (InputError, TrainingError) as error:
        _refuse(config, backbone, error, means)
        return
    if record.get("stopped"):
        raise KeyboardInterrupt
    means.ledger.add(record)
    means.hear(News(config, "done", score=selection.score(record)))


def _known(config: Config, record: Mapping[str, Any]) -> News:
    return News(config, "known", score=selection.score(record), failure=str(record.get("failure", "")))


def _refuse(config: Config, backbone: Backbone, error: Exception, means: Means) -> None:
    """Record a run that cannot be run, with the reason."""
    record = failed(identity(config, backbone, None), str(error))
    new = means.ledger.add(record)
    means.hear(News(config, "failed" if new else "known", failure=record["failure"]))


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

    def load(self, crowd: Sequence[Ready]) -> dict[int, State]:
        """Give what was kept of runs, by their places; a state that is damaged counts as none."""
        found: dict[int, State] = {}
        for number, one in enumerate(crowd):
            folder = self._folder / one.prospect.hash if self._folder else None
            if folder is not None and (folder / "state.json").is_file():
                with contextlib.suppress(InputError):
                    state = resume.load(folder)
                    if state is not None:
                        found[number] = state
                        one.notes.append(f"Going on after epoch {state.epoch}.")
        return found

    def keep(self, one: Ready, state: State) -> None:
        """Keep a state, unless it is large or the last one is recent."""
        numbers = sum(tensor.numel() for tensor in state.tensors["weights"].values())
        hash, now = one.prospect.hash, time.monotonic()
        if self._folder is None or numbers > _CHEAP or now - self._kept.setdefault(hash, now) < _KEEP_EVERY:
            return
        if hash not in self._own:
            self._own[hash] = self._stack.enter_context(resume.own_folder(self._folder, hash))
        resume.save(self._own[hash], state)
        self._kept[hash] = now

    def forget(self, one: Ready) -> None:
        """Remove the state of a run that has ended."""
        hash = one.prospect.hash
        if self._folder is not None:
            resume.forget(self._own.pop(hash, self._folder / hash))
