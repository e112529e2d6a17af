"""Columns that stand for several: texts joined into one, a column of 0 and 1 for each label, cells of several labels.

Such a column is named by the list of its parts, `title,body`; a part that contains a comma is quoted as in CSV.
"""

from __future__ import annotations

import csv
import difflib
import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from adapterbank.errors import DataError
from adapterbank.kinds.values import as_number, is_missing, listed, short
from adapterbank.tasks.tables import Table

NO_SEPARATOR = "none"
"""As `--label-separator`: every cell is one label."""
_SET, _UNSET = ("true", "yes", "x", "y"), ("false", "no", "n")


def split_names(names: str) -> tuple[str, ...]:
    """Return the names in a list that is separated by commas; a name in quotes may contain one."""
    try:
        rows = list(csv.reader([names], skipinitialspace=True))
    except csv.Error:
        return (names,)
    return tuple(name.strip() for name in rows[0]) if rows and rows[0] else (names,)


def join_names(names: Iterable[Any]) -> str:
    """Return names as a list that `split_names` reads."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(list(names))
    return line.getvalue()


def unknown_column(table: Table, name: str, option: str) -> DataError:
    """Return the error for a column that a table does not have."""
    near = difflib.get_close_matches(name, table.columns, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return DataError(
        f"{table.source} has no column {name!r}.{hint} Choose with {option} from: {listed(table.columns)}."
    )


def parts_of(table: Table, name: str) -> tuple[str, ...]:
    """Return the columns that a name stands for: one of that name, or several that it lists; none if one is absent."""
    parts = (name,) if name in table.columns else split_names(name)
    return parts if all(part in table.columns for part in parts) else ()


def has_columns(table: Table, names: Iterable[str]) -> bool:
    """Return whether a table has all columns that these names stand for."""
    return all(parts_of(table, name) for name in names)


def with_texts(table: Table, names: Sequence[str]) -> Table:
    """Return the table with each text under its name; the texts of several columns are joined, one on each line."""
    made = {name: _joined(table, parts_of(table, name)) for name in names if name not in table.columns}
    absent = next((name for name in made if not parts_of(table, name)), None)
    if absent is not None:
        gone = next(part for part in split_names(absent) if part not in table.columns)
        raise unknown_column(table, gone, "--text")
    return replace(table, columns={**table.columns, **made}) if made else table


def with_label(table: Table, name: str, *, single: bool = False, separator: str | None = None) -> Table:
    """Return the table with the label under its name, and its cells split where a separator is stated.

    A list of columns is one for each label; with `single`, exactly one of them must be set in a row.
    """
    parts = parts_of(table, name)
    if not parts:
        gone = next(part for part in split_names(name) if part not in table.columns)
        raise unknown_column(table, gone, "--label")
    if len(parts) > 1:
        return replace(table, columns={**table.columns, name: _chosen(table, parts, single)})
    if separator is None:
        return table
    return replace(table, columns={**table.columns, name: [_split(cell, separator) for cell in table.columns[name]]})


def _joined(table: Table, parts: Sequence[str]) -> list[Any]:
    rows = zip(*(table.columns[part] for part in parts), strict=True)
    found: list[Any] = []
    for place, row in enumerate(rows):
        filled = [value for value in row if not is_missing(value)]
        odd = next((value for value in filled if isinstance(value, (list, tuple, dict, set, bytes))), None)
        if odd is not None:
            problem = f"{short(odd)} in one of the columns {listed(parts)} is not a text"
            raise DataError(f"{table.at(place)}: {problem}; choose others with --text.")
        found.append("\n".join(str(value) for value in filled))
    return found


def _split(cell: Any, separator: str) -> Any:
    if not isinstance(cell, str) or is_missing(cell):
        return cell
    if separator == NO_SEPARATOR:
        return [cell.strip()]
    return [part.strip() for part in cell.split("\t" if separator == "tab" else separator) if part.strip()]


def _chosen(table: Table, parts: Sequence[str], single: bool) -> list[Any]:
    flags = {part: [_flag(table, part, row) for row in range(table.rows)] for part in parts}
    # Where nothing is a 0, an empty cell is one. Otherwise nobody has said whether its label applies.
    zeros = any(flag is False for column in flags.values() for flag in column)
    found: list[Any] = []
    for row in range(table.rows):
        mine = {part: flags[part][row] for part in parts}
        names = [part for part, flag in mine.items() if flag]
        blank = [part for part, flag in mine.items() if flag is None]
        if zeros and len(blank) == len(parts):
            found.append(None)
            continue
        if zeros and blank:
            raise DataError(f"{table.at(row)}: column {blank[0]!r} is empty; write 0 or 1.")
        if single and len(names) != 1:
            problem = f"{len(names)} of the columns {listed(parts)} are set"
            raise DataError(f"{table.at(row)}: {problem}; set exactly one, or use --kind multilabel.")
        found.append(names[0] if single else names)
    return found


def _flag(table: Table, column: str, row: int) -> bool | None:
    value = table.columns[column][row]
    if is_missing(value):
        return None
    number = as_number(value)
    word = str(value).strip().lower()
    if number in (0, 1) or word in _SET or word in _UNSET:
        return word in _SET if number is None else bool(number)
    raise DataError(
        f"{table.at(row)}: {short(value)!r} in column {column!r} is neither 0 nor 1, which one of several label "
        f"columns must be; name one column with --label."
    )
