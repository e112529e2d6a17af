"""CSV and TSV texts as columns. It knows no files and no encodings."""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from adapterbank.errors import DataError
from adapterbank.kinds.values import short
from adapterbank.tasks.dialects import Dialect, FileForm, find_dialect
from adapterbank.tasks.limits import TableBudget

_FIELD_LIMIT = 2**31 - 1  # the csv module stops at 131,072 characters, less than a long document
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_SHOWN = {"\t": "a tab", ",": "a comma"}


def read_separated(
    text: str, usual: str, form: FileForm, budget: TableBudget
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the columns of a text, and notes for the user; `usual` is the separator of the file's extension."""
    csv.field_size_limit(budget.limits.text if budget.limits else _FIELD_LIMIT)
    dialect = find_dialect(text, usual, form, budget.source)
    lines = _Lines(text, dialect, budget)
    records = _records(csv.reader(lines, **dialect.options), lines, budget.source)
    line, first = next((line, fields) for line, fields in records if fields)
    budget.check_columns(len(first))
    named = form.header is not False
    header = check_header(first, budget.source) if named else [str(place) for place in range(1, len(first) + 1)]
    body = records if named else itertools.chain([(line, first)], records)
    columns: list[list[str]] = [[] for _ in header]
    rows = 0
    for line, fields in body:
        if not fields and len(header) > 1:
            continue
        fields = _fitted(fields or [""], header, dialect, f"{budget.source}, line {line}")
        if named and len(header) > 1 and fields == first:
            raise DataError(f"{budget.source}, line {line} repeats the header; remove that line.")
        rows += 1
        budget.add_row(fields, rows, len(header))
        for column, field in zip(columns, fields, strict=True):
            column.append(field)
    found = dict(zip(header, columns, strict=True))
    unnamed = {name for name, given in zip(header, first, strict=True) if named and not given.strip()}
    found = {name: values for name, values in found.items() if name not in unnamed or any(map(str.strip, values))}
    return found, dialect_notes(dialect, usual, form, budget.source)


def dialect_notes(dialect: Dialect, usual: str, form: FileForm, source: Any) -> list[str]:
    """Return what a user should know of the form that was found."""
    notes = []
    if form.separator is None and dialect.separator != usual:
        notes.append(f"{source} separates its fields with {_SHOWN.get(dialect.separator, repr(dialect.separator))}.")
    if dialect.quoted and usual == dialect.separator == "\t":
        notes.append(f"{source} has its texts in quotes, which are removed.")
    return notes


def _fitted(fields: list[str], header: list[str], dialect: Dialect, where: str) -> list[str]:
    """Return a row of the header's length: spreadsheets add empty fields at the end."""
    if len(fields) > len(header) and not any(map(str.strip, fields[len(header) :])):
        return fields[: len(header)]
    if len(fields) != len(header):
        mark = _SHOWN.get(dialect.separator, repr(dialect.separator))
        advice = f"quote a text that contains {mark}" if dialect.quoted else f"a text must not contain {mark}"
        raise DataError(
            f"{where}: {len(fields)} field{'s' * (len(fields) != 1)}, but the header has {len(header)}; {advice}, or "
            f"state the separator "
            f"with --separator."
        )
    return fields


class _Lines:
    """The lines of a text without its last line ends. It counts separators: the csv module splits any number."""

    def __init__(self, text: str, dialect: Dialect, budget: TableBudget) -> None:
        end = len(text)
        while end and text[end - 1] in "\r\n":
            end -= 1
        self._lines, self._budget = _LINE.finditer(text, dialect.skip, end), budget
        self._delimiter = dialect.separator
        self.skipped = 1 if dialect.skip else 0
        """Lines before the first row."""
        self.separators = 0
        """Separators since the record began, which are at least its fields less one; a quoted text has some too."""

    def __iter__(self) -> _Lines:
        return self

    def check_field(self, error: csv.Error) -> None:
        """Raise the error of a text that is too long, if that is what the csv module reports."""
        if self._budget.limits and "field limit" in str(error):
            self._budget.check_text(self._budget.limits.text + 1)

    def __next__(self) -> str:
        line = next(self._lines)[0]
        self.separators += line.count(self._delimiter)
        self._budget.check_row_text(self.separators)
        return line


def _records(reader: Any, lines: _Lines, source: Any) -> Iterator[tuple[int, list[str]]]:
    while True:
        line = reader.line_num + 1 + lines.skipped  # where the record starts: a quoted text may span several lines
        lines.separators = 0
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            lines.check_field(error)
            advice = "close every quote, and double the quotes inside a quoted text"
            raise DataError(f"{source}, line {line}: {error}; {advice}.") from None
        yield line, fields


def check_header(fields: list[str], source: Any) -> list[str]:
    """Return the names of the columns; refuse a name that stands twice."""
    names = [name.strip() or f"column{place}" for place, name in enumerate(fields, 1)]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        problem = f"{source} has two columns named {short(twice)!r}"
        raise DataError(f"{problem}; give each its own name, or add --no-header if the first line is a row.")
    return names
