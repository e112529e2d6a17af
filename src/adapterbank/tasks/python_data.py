"""Python data as columns: lists, dicts, NumPy arrays, frames and `datasets` objects, by what they can do.

None of these libraries is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adapterbank.errors import InputError
from adapterbank.kinds.values import listed, short
from adapterbank.tasks.class_labels import with_names
from adapterbank.tasks.limits import TableBudget

TUPLE_COLUMNS = {2: ("text", "label"), 3: ("text", "text_pair", "label")}
"""Column names of tuples, by their length."""
SPLIT_NAMES = {"train": "train", "dev": "dev", "validation": "dev", "valid": "dev", "val": "dev", "test": "test"}
"""Our names for the usual names of splits."""


def splits_from(**given: Any) -> dict[str, Any]:
    """Return the splits that are given; `train` may hold several by name, as a dict or a `DatasetDict`."""
    found = {name: data for name, data in given.items() if data is not None}
    inside = found.get("train")
    if not (isinstance(inside, Mapping) and "train" in inside and not hasattr(inside, "column")):
        return found
    unknown = [str(name) for name in inside if name not in SPLIT_NAMES]
    if unknown:
        raise InputError(
            f"train has the split {unknown[0]!r}; name splits {listed(SPLIT_NAMES)}, and leave out others."
        )
    named = [SPLIT_NAMES[name] for name in inside] + [name for name in found if name != "train"]
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"The split {twice!r} is given twice; give it once.")
    own = {SPLIT_NAMES[name]: data for name, data in inside.items() if data is not None}
    return {**found, **own}


def columns_from(data: Any, source: str) -> dict[str, list[Any]]:
    """Return data as columns; tuples are (text, label) or (text, second text, label)."""
    if hasattr(data, "to_dict") or hasattr(data, "to_pydict"):
        data = _frame_columns(data, source)
    elif hasattr(data, "dtype") and hasattr(data, "tolist"):
        data = {name: data[name] for name in data.dtype.names} if data.dtype.names else data.tolist()
    if isinstance(data, tuple) and (columns := _separate_columns(data, source)):
        data = columns
    if isinstance(data, Mapping):
        return _from_columns(data, source)
    if isinstance(data, (list, tuple)):
        return _from_rows(data, source)
    raise InputError(
        f"{source} is a {type(data).__name__}; give a path, a list of dicts, a list of (text, label) or "
        f"(text, second text, label) tuples, a dict of columns, a NumPy array, or a DataFrame."
    )


def from_records(records: Iterable[Mapping[Any, Any]], budget: TableBudget | None = None) -> dict[str, list[Any]]:
    """Return rows as columns, counted against a budget."""
    columns: dict[str, list[Any]] = {}
    rows = 0
    for record in records:
        plain = {str(name): _plain(value) for name, value in record.items()}
        if budget:  # before a column is made: one row may name many new ones, each with a value for every row
            new = plain.keys() - columns.keys()
            budget.add_row([*new, *plain.values()], rows + 1, len(columns) + len(new))
        for name, value in plain.items():
            column = columns.setdefault(name, [])
            # A key that a row lacks is a missing value, because JSON writers leave out nulls.
            column += [None] * (rows - len(column))
            column.append(value)
        rows += 1
    for column in columns.values():
        column += [None] * (rows - len(column))
    return columns


def _from_rows(rows: Sequence[Any], source: str) -> dict[str, list[Any]]:
    if all(isinstance(row, Mapping) for row in rows):
        return from_records(rows)
    width = len(rows[0]) if isinstance(rows[0], (tuple, list)) else 0
    for place, row in enumerate(rows, 1):
        if width not in TUPLE_COLUMNS or not isinstance(row, (tuple, list)) or len(row) != width:
            raise InputError(
                f"{source}, row {place}: {short(row)} does not match the other rows; give all rows as dicts, all as "
                f"(text, label), or all as (text, second text, label)."
            )
    return {name: [_plain(row[place]) for row in rows] for place, name in enumerate(TUPLE_COLUMNS[width])}


def _separate_columns(data: tuple[Any, ...], source: str) -> dict[str, Any] | None:
    """Return (texts, labels) or (texts, second texts, labels) as columns; None for a tuple of rows."""
    arrays = [hasattr(part, "shape") for part in data]
    if len(data) not in TUPLE_COLUMNS or not all(isinstance(part, list) or hasattr(part, "shape") for part in data):
        return None
    if not any(arrays) and len(data[0]) in TUPLE_COLUMNS:
        raise InputError(
            f"{source} is a tuple of lists, which may be rows or columns; give a dict of columns, or a list of rows."
        )
    return dict(zip(TUPLE_COLUMNS[len(data)], data, strict=True))


def _from_columns(columns: Mapping[Any, Any], source: str) -> dict[str, list[Any]]:
    for name, column in columns.items():
        if isinstance(column, (str, bytes, Mapping)) or not hasattr(column, "__iter__"):
            raise InputError(f"{source}: column {name!r} is a {type(column).__name__}; give a list of values.")
    found = {str(name): [_plain(value) for value in column] for name, column in columns.items()}
    lengths = {name: len(column) for name, column in found.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"{source}: columns differ in length ({lengths}); each needs a value for every row.")
    return found


def _frame_columns(frame: Any, source: str) -> Any:
    names = [str(name) for name in getattr(frame, "columns", getattr(frame, "column_names", ()))]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{source} has two columns named {short(twice)!r}; give each its own name.")
    if hasattr(frame, "to_pydict"):
        return frame.to_pydict()  # pyarrow
    try:
        return frame.to_dict(orient="list")  # pandas
    except TypeError:
        columns = frame.to_dict()  # `datasets` and polars return columns by default
    features = getattr(frame, "features", None) or {}
    return {name: _named(values, features.get(name)) for name, values in columns.items()}


def _named(values: Any, feature: Any) -> Any:
    """Return the names of labels that `datasets` stores as numbers; -1 is a row without one."""
    names = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)
    return [with_names(value, names) for value in values] if names else values


def _plain(value: Any) -> Any:
    # Arrays and their scalars become Python values; the missing values of pandas become None.
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.to_list() if hasattr(value, "to_list") else value
