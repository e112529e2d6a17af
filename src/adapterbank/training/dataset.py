"""A run's data: examples from files, Python data or the catalog, as a config names them. Knows no tokens, no torch."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from adapterbank.config import Config, resolve
from adapterbank.encoder.sources import width_at_hand
from adapterbank.errors import ConfigError, DataError, InputError, UnknownName
from adapterbank.kinds.table import KINDS
from adapterbank.methods import METHODS, parse_size
from adapterbank.storage.package import check_name
from adapterbank.tasks import catalog
from adapterbank.tasks.columns import find_columns, infer_task
from adapterbank.tasks.compound import split_names
from adapterbank.tasks.dialects import FileForm
from adapterbank.tasks.examples import read_examples
from adapterbank.tasks.spec import Examples, Task
from adapterbank.tasks.splitting import split
from adapterbank.tasks.tables import Table, table_from

FEW_ROWS = 64
"""Rows of a class up to which its labels are few."""
_AS_FOUND = FileForm()
LOG = logging.getLogger("adapterbank.load")
VALIDATION = "validation"
"""The name of given dev rows on which nothing is chosen."""
_DEV_SHARE = 0.1
"""Share of the training data that becomes dev data if there is none."""
SOURCE = (
    *("task", "train", "dev", "test", "data_root", "text", "text_pair", "label", "kind", "labels", "metric"),
    *("separator", "header", "label_separator", "drop_unlabelled"),
)
"""The options that define the examples; `limit` and `seed` only choose among them."""


@dataclass(frozen=True)
class Dataset:
    """A run's examples, ready to train on."""

    task: Task
    splits: Mapping[str, Examples]
    """train, and dev, validation and test if there are such rows; without few labels there is always dev."""
    notes: tuple[str, ...]
    """Messages for the user, such as dropped rows and inferred columns."""
    few: bool = False
    """Whether a run on it follows the recipe for few labels, which needs no dev rows."""

    def about(self) -> dict[str, Any]:
        """Return each split's rows and fingerprint."""
        return {name: {"rows": rows, "sha256": sha256} for name, (rows, sha256) in self._fingerprints.items()}

    @cached_property
    def _fingerprints(self) -> dict[str, tuple[int, str]]:
        return {name: (len(e), e.fingerprint()) for name, e in self.splits.items()}


def canonical(config: Config, splits: Mapping[str, Any] | None = None) -> Config:
    """Return the config as runs compare and record it; whoever accepts options calls this, and nothing below does.

    A catalog task gets its name in a bank, and its data unless other data is named; defaults are filled in.
    """
    if config.task in catalog.CATALOG:
        own = config.train or ("" if "train" in (splits or {}) else config.task)
        config = replace(config, task=catalog.bank_name(config.task), train=own)
    return resolve(config, width_at_hand(config.backbone) if config.lr is None else 0)


def read_data(config: Config, splits: Mapping[str, Any] | None = None) -> Dataset:
    """Read the splits that a config names; `splits` has them as Python data instead of files."""
    return DatasetReader(splits).read(canonical(config, splits))


class DatasetReader:
    """Reads each data set once for all runs that name it; runs on the same rows get the same object."""

    def __init__(self, splits: Mapping[str, Any] | None = None) -> None:
        """Create a reader; `splits` has splits as Python data instead of files."""
        self.splits = splits or {}
        self._whole: dict[tuple[Any, ...], Dataset] = {}
        self._cut: dict[tuple[Any, ...], Dataset] = {}

    def read(self, config: Config) -> Dataset:
        """Read the splits that a canonical config names."""
        check_name(config.task)
        source = tuple(getattr(config, name) for name in SOURCE)
        if source not in self._whole:
            self._whole[source] = _read(config, self.splits)
        whole = self._whole[source]
        few = has_few_labels(config, whole)
        own_dev = "dev" in whole.splits and config.choose_on == "dev"
        if own_dev and not 0 < config.limit < len(whole.splits["train"]) and not few:
            return whole
        key = (source, config.limit, config.seed, few, config.choose_on)
        if key not in self._cut:
            self._cut[key] = replace(_cut(config, whole, few), few=few)
        return self._cut[key]


def has_few_labels(config: Config, data: Dataset) -> bool:
    """Return whether a run follows the recipe for few labels: half of the classes or more have few rows.

    It fits one label per row by a linear head; `few` may ask for it, and then refuses what it cannot do. Epochs,
    patience, the average and mixtures belong to the usual recipe, so that a run that sets them follows that one.
    """
    task, wanted = data.task, config.few == "always"
    problems = [] if KINDS[task.kind].single_label else [f"the task is {task.kind}"]
    problems += [f"head_hidden is {config.head_hidden}"] if config.head_hidden else []
    problems += [f"size is {config.size}"] if parse_size(config.size).mean else []
    problems += [] if METHODS[config.method].slot else [f"the method is {config.method}"]
    if wanted and problems:
        raise ConfigError([f"few is 'always', but {problems[0]}, for which there is no such recipe; leave it out."])
    if problems or config.few == "never":
        return False
    own = config.patience or config.average or config.mix > 1 or config.window_pooling == "weights"
    if not wanted and (own or config.epochs != METHODS[config.method].defaults["epochs"].value):
        return False  # the user has a recipe of his own
    rows = data.splits["train"]
    share = min(1.0, config.limit / len(rows)) if config.limit else 1.0
    counts = Counter(rows.targets or []).values()
    return wanted or statistics.median(counts) * share <= FEW_ROWS


def _read(config: Config, data: Mapping[str, Any]) -> Dataset:
    """Read all labelled rows."""
    named = "train" not in data and catalog.is_named(config.train)
    task, tables = read_tables(config, data)
    splits: dict[str, Examples] = {}
    notes: list[str] = []
    for name, table in tables.items():
        splits[name], report = read_examples(table, task, drop_unlabelled=config.drop_unlabelled)
        notes += report.notes + ([] if named else report.remarks)
        LOG.debug("%s: %d rows of %s", name, len(splits[name]), table.source)
    return Dataset(task, splits, tuple(notes))


def _cut(config: Config, whole: Dataset, few: bool) -> Dataset:
    """Hold out dev rows if no dev data is given to choose on and a run needs it, and draw `limit` training rows."""
    task, splits, notes = whole.task, dict(whole.splits), list(whole.notes)
    _set_aside(splits, config)
    why = "Dev data chooses nothing" if VALIDATION in splits else "No dev data given"
    if "dev" not in splits and not few:
        usable = len(splits["train"])
        splits["train"], splits["dev"] = hold_out(splits["train"], task, config.seed)
        notes.append(f"{why}: {len(splits['dev'])} of {usable} training rows are held out for it.")
    if config.limit and config.limit < len(splits["train"]):
        from adapterbank.draws import RandomStream

        order = RandomStream(config.seed, "limit").permutation(len(splits["train"]))[: config.limit]
        splits["train"] = splits["train"].select(sorted(order.tolist()))
        notes.append(f"Training on {config.limit} rows drawn with seed {config.seed}.")
        _check_classes(task, splits["train"])
    return Dataset(task, splits, tuple(notes))


def _set_aside(splits: dict[str, Examples], config: Config) -> None:
    """Let given dev rows choose nothing if the config says so."""
    if config.choose_on == "train" and "dev" in splits:
        splits[VALIDATION] = splits.pop("dev")


def hold_out(rows: Examples, task: Task, seed: int) -> tuple[Examples, Examples]:
    """Return the training rows without a seeded tenth, and that tenth as dev rows."""
    return split(rows, task=task, fraction=_DEV_SHARE, seed=seed)


def preview(task: Task, tables: Mapping[str, Table], config: Config) -> dict[str, Any]:
    """Return what training on these tables would drop, hold out and note, and why it would be refused."""
    read: dict[str, Examples] = {}
    found: dict[str, Any] = {"dropped": {}, "notes": [], "refused": []}
    for name, table in tables.items():
        for drop in dict.fromkeys((config.drop_unlabelled, True)):
            try:
                read[name], report = read_examples(table, task, drop_unlabelled=drop)
            except DataError as error:
                found["refused"] += [str(error)] if str(error) not in found["refused"] else []
                continue
            found["dropped"][name] = {"empty": report.empty, "unlabelled": report.unlabelled}
            found["notes"] += [*(report.notes if drop == config.drop_unlabelled else table.notes), *report.remarks]
            break
    few = "train" in read and has_few_labels(resolve(config), Dataset(task, read, ()))
    _set_aside(read, config)
    found |= {"few": few, "held_out": "train" in read and "dev" not in read and not few}
    if found["held_out"]:
        try:
            read["train"], read["dev"] = hold_out(read["train"], task, config.seed)
        except DataError as error:
            found["refused"].append(str(error))
    return {**found, "rows": {name: len(examples) for name, examples in read.items()}}


def file_form(config: Config) -> FileForm:
    """Return what a config states of CSV and TSV files."""
    return FileForm(config.separator, config.header)


def read_tables(config: Config, data: Mapping[str, Any]) -> tuple[Task, dict[str, Table]]:
    """Return the task and the table of each split, from files, Python data or the catalog."""
    sources = {name: data.get(name, getattr(config, name)) for name in ("train", "dev", "test")}
    if sources["train"] is None or (isinstance(sources["train"], str) and not sources["train"]):
        raise ConfigError(["train is missing; name a file of training data, or a task that adapterbank catalog lists."])
    if isinstance(sources["train"], str) and catalog.is_named(sources["train"]):
        task, tables = _from_catalog(config, sources["train"])
    else:
        tables = {"train": table_from(sources["train"], "train", file_form(config))}
        columns = find_columns(tables["train"], config.text, config.text_pair, config.label, config.kind)
        task = infer_task(
            tables["train"],
            columns,
            name=config.task,
            kind=config.kind,
            labels=split_names(config.labels) if config.labels else None,
            metric=config.metric,
            label_separator=config.label_separator,
        )
    own = {
        name: table_from(sources[name], name, file_form(config))
        for name in ("dev", "test")
        if sources[name] is not None
    }
    return task, {"train": tables.pop("train"), **tables, **own}


def _from_catalog(config: Config, name: str) -> tuple[Task, dict[str, Table]]:
    stated = [
        option
        for option in ("text", "text_pair", "label", "kind", "labels", "label_separator")
        if getattr(config, option)
    ]
    if stated:
        raise ConfigError(
            f"{option} is {getattr(config, option)!r}, but {name!r} has its own in the catalog; leave it out."
            for option in stated
        )
    source = catalog.train_splits(name, config.data_root)
    return replace(source.task, name=config.task, metric=config.metric or source.task.metric), source.labelled()


def _check_classes(task: Task, train_rows: Examples) -> None:
    if KINDS[task.kind].single_label and len(set(train_rows.targets or [])) < 2:
        raise DataError(f"The drawn training rows have only one class of {task.name!r}; raise --limit.")


def defaults(task: str, train: Any = None) -> dict[str, Any]:
    """Return the options for which a catalog task has its own defaults; the caller's options override them."""
    if isinstance(train, str) and train:
        name = train if catalog.is_named(train) else ""
    else:
        name = task if train is None or isinstance(train, str) else ""
    return dict(catalog.CATALOG[name].options) if name in catalog.CATALOG else {}


def catalog_name(ref: str) -> str | None:
    """Return the catalog's name for a task of a bank, `name` or `name@version`; None if it is not in the catalog."""
    name = catalog.bank_name(ref.partition("@")[0])
    return next((entry for entry in catalog.CATALOG if catalog.bank_name(entry) == name), None)


def scored_table(ref: str, source: Any, split_name: str, root: str | None, form: FileForm = _AS_FOUND) -> Table:
    """Return the labelled rows to score a task on: `source`, or the catalog's split of that name."""
    named = isinstance(source, str) and catalog.is_named(source)
    if source is not None and not named:
        return table_from(source, form=form)
    name = source if named else catalog_name(ref)
    if name is None:
        raise InputError(f"{ref!r} is not in the catalog, so it has no data of its own; name data with --data.")
    try:
        loaded = catalog.load(name, root)
    except DataError as error:
        if source is not None:
            raise
        raise InputError(
            f"No data was given, and the catalog's data for {ref!r} ({name!r}) cannot be read: {error} "
            f"Choose other data with --data."
        ) from None
    tables = loaded.labelled()
    if split_name not in tables:
        raise UnknownName(split_name, f"a labelled split of {name!r} in {loaded.source}", tables)
    return tables[split_name]
