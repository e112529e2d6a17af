"""What a run trains on: a config's files, Python data or task of the catalog -> examples. Knows no tokens, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from adapterbank.config import Config
from adapterbank.errors import ConfigError, DataError, InputError, UnknownName
from adapterbank.kinds.table import KINDS
from adapterbank.storage.package import check_name
from adapterbank.tasks import catalog
from adapterbank.tasks.columns import find_columns, infer_task
from adapterbank.tasks.examples import read_examples, split
from adapterbank.tasks.spec import Examples, Task
from adapterbank.tasks.tables import Table, table_from

_DEV_SHARE = 0.1
"""Of the training data, when no dev data is given."""
SOURCE = ("task", "train", "dev", "test", "data_root", "text", "text_pair", "label", "kind", "labels", "metric")
"""The options that say which examples there are; `limit` and `seed` only choose among them."""


@dataclass(frozen=True)
class Dataset:
    """A run's examples, ready to train on."""

    task: Task
    splits: Mapping[str, Examples]
    """train, dev and perhaps test."""
    notes: tuple[str, ...]
    """What the user should know: rows left out, columns found."""

    def about(self) -> dict[str, Any]:
        """Return each split's rows and fingerprint."""
        return {name: {"rows": rows, "sha256": sha256} for name, (rows, sha256) in self._fingerprints.items()}

    @cached_property
    def _fingerprints(self) -> dict[str, tuple[int, str]]:
        return {name: (len(e), e.fingerprint()) for name, e in self.splits.items()}


def named(config: Config, given: Mapping[str, Any] | None = None) -> Config:
    """Return the config with a catalog task under its name in a bank, and with its data unless other data is named."""
    if config.task not in catalog.CATALOG:
        return config
    own = config.train or ("" if "train" in (given or {}) else config.task)
    return replace(config, task=catalog.bank_name(config.task), train=own)


def read_data(config: Config, given: Mapping[str, Any] | None = None) -> Dataset:
    """Read the splits that a config names; `given` has them as Python data instead of files."""
    return DatasetReader(given).read(config)


class DatasetReader:
    """Reads each data set once, however many runs name it; runs on the same rows get the very same object."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        """`given` has splits as Python data instead of files."""
        self.given = given or {}
        self._whole: dict[tuple[Any, ...], Dataset] = {}
        self._cut: dict[tuple[Any, ...], Dataset] = {}

    def read(self, config: Config) -> Dataset:
        """Read the splits that a config names."""
        config = named(config, self.given)
        check_name(config.task)
        source = tuple(getattr(config, name) for name in SOURCE)
        if source not in self._whole:
            self._whole[source] = _read(config, self.given)
        whole = self._whole[source]
        if "dev" in whole.splits and not 0 < config.limit < len(whole.splits["train"]):
            return whole
        key = (source, config.limit, config.seed)
        if key not in self._cut:
            self._cut[key] = _cut(config, whole)
        return self._cut[key]


def _read(config: Config, given: Mapping[str, Any]) -> Dataset:
    """Read all labelled rows, as they are."""
    task, tables = _tables(config, given)
    found: dict[str, Examples] = {}
    notes: list[str] = []
    for name, table in tables.items():
        found[name], report = read_examples(table, task)
        notes += report.notes
    return Dataset(task, found, tuple(notes))


def _cut(config: Config, whole: Dataset) -> Dataset:
    """Hold out dev rows where there are none, and draw as many training rows as are wanted."""
    task, found, notes = whole.task, dict(whole.splits), list(whole.notes)
    if "dev" not in found:
        usable = len(found["train"])
        found["train"], found["dev"] = split(found["train"], task=task, fraction=_DEV_SHARE, seed=config.seed)
        notes.append(f"No dev data given: {len(found['dev'])} of {usable} training rows are held out for it.")
    if config.limit and config.limit < len(found["train"]):
        import numpy as np

        order = np.random.default_rng(config.seed).permutation(len(found["train"]))[: config.limit]
        found["train"] = found["train"].select(sorted(int(i) for i in order))
        notes.append(f"Training on {config.limit} rows drawn with seed {config.seed}.")
        _check_classes(task, found["train"])
    return Dataset(task, found, tuple(notes))


def _tables(config: Config, given: Mapping[str, Any]) -> tuple[Task, dict[str, Table]]:
    """Return the task and the table of each split: of files, of Python data, or of the catalog."""
    sources = {name: given.get(name, getattr(config, name)) for name in ("train", "dev", "test")}
    if sources["train"] is None or (isinstance(sources["train"], str) and not sources["train"]):
        raise ConfigError(["train is missing; name a file of training data, or a task of: adapterbank catalog."])
    if isinstance(sources["train"], str) and catalog.is_named(sources["train"]):
        task, tables = _from_catalog(config, sources["train"])
    else:
        tables = {"train": table_from(sources["train"], "train")}
        columns = find_columns(tables["train"], config.text, config.text_pair, config.label, config.kind)
        labels = tuple(name.strip() for name in config.labels.split(",")) if config.labels else None
        task = infer_task(
            tables["train"], columns, name=config.task, kind=config.kind, labels=labels, metric=config.metric
        )
    own = {name: table_from(sources[name], name) for name in ("dev", "test") if sources[name] is not None}
    return task, {"train": tables.pop("train"), **tables, **own}


def _from_catalog(config: Config, name: str) -> tuple[Task, dict[str, Table]]:
    stated = [option for option in ("text", "text_pair", "label", "kind", "labels") if getattr(config, option)]
    if stated:
        raise ConfigError(
            f"{option} is {getattr(config, option)!r}, but {name!r} has its own in the catalog; leave it out."
            for option in stated
        )
    found = catalog.train_splits(name, config.data_root)
    return replace(found.task, name=config.task, metric=config.metric or found.task.metric), found.labelled()


def _check_classes(task: Task, train_rows: Examples) -> None:
    if KINDS[task.kind].single_label and len(set(train_rows.targets or [])) < 2:
        raise DataError(f"With so few rows only one class of {task.name!r} is left to train on; raise --limit.")


def defaults(task: str, train: Any = None) -> dict[str, Any]:
    """Return the options that a task of the catalog wants other than usual; a caller's own win over them."""
    if isinstance(train, str) and train:
        name = train if catalog.is_named(train) else ""
    else:
        name = task if train is None or isinstance(train, str) else ""
    return dict(catalog.CATALOG[name].options) if name in catalog.CATALOG else {}


def catalog_name(ref: str) -> str | None:
    """Return the name in the catalog of a task of a bank, `name` or `name@version`."""
    name = catalog.bank_name(ref.partition("@")[0])
    return next((known for known in catalog.CATALOG if catalog.bank_name(known) == name), None)


def scored_table(ref: str, source: Any, split_name: str, root: str | None) -> Table:
    """Return the labelled rows that a task is scored on: those of `source`, or the catalog's split of that name."""
    named = isinstance(source, str) and catalog.is_named(source)
    if source is not None and not named:
        return table_from(source)
    name = source if named else catalog_name(ref)
    if name is None:
        raise InputError(f"{ref!r} is no task of the catalog, so it has no data of its own; name some with --data.")
    try:
        found = catalog.load(name, root)
    except DataError as error:
        if source is not None:
            raise
        raise InputError(
            f"No data was given, so {ref!r} was to be scored on that of the catalog's {name!r}: {error} "
            f"Name other data with --data."
        ) from None
    tables = found.labelled()
    if split_name not in tables:
        raise UnknownName(split_name, f"a labelled split of {name!r} in {found.source}", tables)
    return tables[split_name]
