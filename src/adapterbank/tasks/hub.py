"""Data sets from the hub, through the library `datasets`, which only this file imports. It knows no catalog."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adapterbank.errors import DataError
from adapterbank.install import extra_command
from adapterbank.tasks.tables import Table

SPLITS = {"train": "train", "dev": "validation", "test": "test"}
"""The usual names of splits on the hub."""


@dataclass(frozen=True)
class Hub:
    """The location of a data set on the hub, and the names of its columns there."""

    path: str
    config: str | None = None
    text: tuple[str, ...] = ("text",)
    label: str = "label"
    splits: Mapping[str, str] = field(default_factory=lambda: SPLITS)
    names: Mapping[str, str | None] = field(default_factory=dict)
    """Our names for labels that are spelt differently there; rows with a label of None are left out."""


def read_hub(hub: Hub, text: Sequence[str]) -> dict[str, Table]:
    """Download a data set, with these names for the text columns; labels are names if the hub has them."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"Downloading {hub.path!r} from the hub needs a library that is not installed: "
            f"{extra_command('data')}, or put the files into the folder given by --data-root or "
            f"ADAPTERBANK_DATA."
        ) from None
    try:
        found = datasets.load_dataset(hub.path, hub.config)
    except Exception as error:  # of the hub, the system, or whichever HTTP library is installed
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise DataError(
            f"{hub.path!r} is not in the data root and cannot be downloaded from the hub ({reason}); "
            f"put the files into the folder given by --data-root or ADAPTERBANK_DATA."
        ) from error
    return {
        ours: _table(found[theirs], hub, text, f"{hub.path} on the hub, {theirs}")
        for ours, theirs in hub.splits.items()
        if theirs in found
    }


def _table(split: Any, hub: Hub, text: Sequence[str], source: str) -> Table:
    columns: dict[str, list[Any]] = {ours: list(split[name]) for ours, name in zip(text, hub.text, strict=True)}
    if hub.label in split.column_names:
        labels = list(split[hub.label])
        known = getattr(split.features.get(hub.label), "names", None)
        words = [known[label] if 0 <= label < len(known) else None for label in labels] if known else labels
        columns["label"] = [hub.names.get(word, word) if isinstance(word, str) else word for word in words]
    for ours, name in (("id", "id"), ("index", "idx")):
        if name in split.column_names:
            columns[ours] = list(split[name])
    if None in hub.names.values():
        keep = [row for row, label in enumerate(columns["label"]) if label is not None]
        columns = {name: [column[row] for row in keep] for name, column in columns.items()}
    return Table(columns, source)
