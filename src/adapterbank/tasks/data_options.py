"""The options of a run that say what its data is, and how an option is declared. Knows no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from adapterbank.kinds.table import KINDS
from adapterbank.metrics import METRICS

CHOOSE_ON = ("dev", "train")
LONG = ("auto", "cut", "windows")
WINDOW_POOLINGS = ("auto", "mean", "weights")


def option(
    default: Any,
    help: str,
    *,
    group: str,
    low: float | None = None,
    high: float | None = None,
    choices: Collection[str] = (),
    later: bool = False,
) -> Any:
    """Declare a field with its help and its allowed values.

    `later` marks a field that earlier records do not have. At its default it is left out of records and hashes, so
    that the same run keeps its identity.
    """
    meta = {"help": help, "group": group, "low": low, "high": high, "choices": choices, "later": later}
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class DataOptions:
    """The options of the data."""

    task: str = option("", "Name of the task in the bank.", group="Data")
    train: str = option(
        "",
        "Training data: a CSV, TSV, JSON, JSONL or Parquet file, or a task of the catalog (default: --task).",
        group="Data",
    )
    dev: str | None = option(
        None, "Data that selects the best epoch (default: the catalog's, or a seeded tenth of --train).", group="Data"
    )
    test: str | None = option(None, "Data to score once, at the end.", group="Data")
    choose_on: str = option(
        "dev",
        "Rows that select the best epoch: dev, or train for a seeded tenth of --train; dev is then scored once, at the "
        "end, as validation.",
        group="Data",
        choices=CHOOSE_ON,
        later=True,
    )
    data_root: str | None = option(
        None, "Folder with the data of the catalog's tasks (default: ADAPTERBANK_DATA).", group="Data"
    )
    text: str | None = option(
        None,
        "Column of the text, by name or number; title,body joins two (default: one with a usual name).",
        group="Data",
    )
    text_pair: str | None = option(None, "Column of the second text of a pair.", group="Data")
    label: str | None = option(
        None, "Column of the label; a,b,c for a column of 0 and 1 for each of several labels.", group="Data"
    )
    kind: str | None = option(None, "Kind of task (default: by the labels).", group="Data", choices=KINDS.keys())
    labels: str | None = option(
        None, "Label names in order, separated by commas (default: as they appear, numbers sorted).", group="Data"
    )
    label_separator: str | None = option(
        None,
        "Between the labels of a cell, such as , or ; (default: |, or lists as Python and JSON write them); none if "
        "each cell is one label.",
        group="Data",
        later=True,
    )
    drop_unlabelled: bool = option(
        False, "Leave out rows without a label, refused otherwise.", group="Data", later=True
    )
    separator: str | None = option(
        None, "Between the fields of CSV and TSV files: , ; | : or tab (default: found).", group="Data", later=True
    )
    header: bool | None = option(
        None,
        "Whether the first line of CSV and TSV files names the columns; otherwise their names are 1, 2, … "
        "(default: it does).",
        group="Data",
        later=True,
    )
    metric: str | None = option(
        None, "Metric that selects the best epoch (default: by the kind).", group="Data", choices=tuple(METRICS)
    )
    limit: int = option(
        0, "Use only this many training rows, drawn with --seed; 0 for all.", group="Data", low=0, high=10**9
    )
    max_length: int = option(128, "Most tokens of a row; see --long.", group="Data", low=4, high=10**6)
    long: str = option(
        "auto",
        "Longer texts: cut them, or read them in windows whose outputs are pooled (auto: windows if a tenth of the "
        "training texts would lose more than a quarter).",
        group="Data",
        choices=LONG,
        later=True,
    )
    max_windows: int = option(
        8,
        "Most windows of a text; of a longer one, evenly spaced parts are read.",
        group="Data",
        low=2,
        high=1024,
        later=True,
    )
    window_pooling: str = option(
        "auto",
        "How the windows of a text count: all the same, or by weights that train (auto: weights, unless the head is "
        "fitted).",
        group="Data",
        choices=WINDOW_POOLINGS,
        later=True,
    )
    doc_stride: int = option(
        128,
        "Span, tagging: tokens between the starts of two windows of a long document; at most half a window.",
        group="Data",
        low=1,
        high=10**6,
    )
