"""Tables: files and Python data as named columns of plain values. They know no tasks, labels or models.

Every file is UTF-8. An error message is one sentence with the file, the line and the remedy.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterbank.errors import DataError, InputError
from adapterbank.kinds.values import listed, short
from adapterbank.tasks.limits import MAX_DEPTH, TableBudget, TableLimits, check_depth
from adapterbank.tasks.parquet import read_parquet

TUPLE_COLUMNS = {2: ("text", "label"), 3: ("text", "text_pair", "label")}
"""Column names of tuples, by their length."""

_FIELD_LIMIT = 2**31 - 1  # the csv module stops at 131,072 characters, less than a long document
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_JSON_LINE = re.compile(r"[^\n]*\n|[^\n]+")


@dataclass(frozen=True)
class Table:
    """Columns of equal length."""

    columns: dict[str, list[Any]]
    source: str = "data"
    """The file or argument it was read from, for messages."""

    def at(self, row: int) -> str:
        """Return the location of a row for messages; rows count from 1, without the header."""
        return f"{self.source}, row {row + 1}"

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values()), []))


def read_table(path: str | os.PathLike[str], limits: TableLimits | None = None) -> Table:
    """Read a file in the format of its extension (`READERS`); text formats may be compressed as .gz.

    Give `limits` for a file from outside: it is refused before more than that is in memory.
    """
    file = _existing(path)
    ending = _ending(file)
    if ending not in READERS:
        raise DataError(
            f"{file} has the extension {ending!r}, which is not one of {', '.join(READERS)}; "
            f"save the table as one of these (text formats may also end in .gz)."
        )
    table = READERS[ending](file, TableBudget(file, limits))
    if not table.rows:
        raise DataError(f"{file} has columns ({listed(table.columns)}) but no rows; add some.")
    return table


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Return the lines of a text file; blank lines are kept, and a final line break starts no further line."""
    return [line.removesuffix("\r") for line in _decoded(*_unlimited(path)).removesuffix("\n").split("\n")]


def is_plain_text(path: str | os.PathLike[str]) -> bool:
    """Return whether the file's extension is that of plain text (.txt, .txt.gz)."""
    return _ending(Path(path)) == ".txt"


def table_from(data: Any, source: str = "data") -> Table:
    """Return data as a table: a path, a table, a list of dicts or tuples, a dict of columns, or a DataFrame.

    Tuples are (text, label) or (text, second text, label).
    """
    if isinstance(data, Table):
        return data
    if isinstance(data, (str, os.PathLike)):
        return read_table(data)
    if hasattr(data, "to_dict"):
        data = _frame_columns(data)
    if isinstance(data, Mapping):
        table = _from_columns(data, source)
    elif isinstance(data, (list, tuple)):
        table = _from_rows(data, source)
    else:
        raise InputError(
            f"{source} is a {type(data).__name__}; give a path, a list of dicts, a list of (text, label) or "
            f"(text, second text, label) tuples, a dict of columns, or a DataFrame."
        )
    if not table.rows:
        raise DataError(f"{source} has no rows; give at least one.")
    return table


# --- files --------------------------------------------------------------------------------------------------


def _existing(path: str | os.PathLike[str]) -> Path:
    file = Path(path).expanduser()
    try:
        folder, there = file.is_dir(), file.exists()
    except OSError as error:  # such as a name that is too long, when a text is given instead of a path
        raise DataError(f"{short(str(file))} cannot be a file: {error.strerror}; give a path.") from None
    if folder:
        inside = sorted(entry.name for entry in file.iterdir() if _ending(entry) in READERS)
        raise DataError(f"{file} is a folder; name a file in it: {listed(inside) or 'it contains no table'}.")
    if there:
        return file
    if not file.parent.is_dir():
        raise DataError(f"There is no file {file}, and no folder {file.parent}; check the path.")
    names = sorted(entry.name for entry in file.parent.iterdir())
    near = difflib.get_close_matches(file.name, names, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"its folder contains: {listed(names)}."
    raise DataError(f"There is no file {file}; {hint}")


def _ending(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _unlimited(path: str | os.PathLike[str]) -> tuple[Path, TableBudget]:
    file = _existing(path)
    return file, TableBudget(file)


def _decoded(path: Path, budget: TableBudget) -> str:
    data = unpacked(path, budget)
    if data[:2] == b"\x1f\x8b":
        raise DataError(f"{path} is compressed with gzip, but its name does not end in .gz; decompress or rename it.")
    budget.check_encoded(data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
        raise DataError(
            f"{path} is not UTF-8: byte {error.start} (line {line}) is 0x{data[error.start]:02x}; "
            f"convert it, for instance: iconv -f {encoding} -t utf-8 OLD > NEW"
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(
            f"{path} has a NUL byte on line {line}, so it is not plain text (UTF-16, or a spreadsheet?); "
            f"save it as UTF-8."
        )
    if not text or text.isspace():
        raise DataError(f"{path} is empty; it needs rows (and a header, if it is a table).")
    return text


def unpacked(path: Path, budget: TableBudget | None = None) -> bytes:
    """Return a file's bytes, decompressed if its name ends in .gz."""
    budget = budget or TableBudget(path)
    try:
        with budget.open(path) as raw:
            file = gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw
            data = file.read(-1 if budget.limits is None else budget.limits.memory + 1)
        budget.check_memory(len(data))
        return data
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be decompressed ({error}); compress it again with gzip.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None


def _read_csv(path: Path, budget: TableBudget) -> Table:
    return _read_separated(path, ",", csv.QUOTE_MINIMAL, budget)


def _read_tsv(path: Path, budget: TableBudget) -> Table:
    # No quoting: GLUE's files contain stray quotes, which would otherwise swallow the lines after them.
    return _read_separated(path, "\t", csv.QUOTE_NONE, budget)


def _read_separated(path: Path, delimiter: str, quoting: Any, budget: TableBudget) -> Table:
    csv.field_size_limit(budget.limits.text if budget.limits else _FIELD_LIMIT)
    lines = _Lines(_decoded(path, budget), delimiter, budget)
    records = _records(csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True), lines, path)
    first = next(fields for _, fields in records if fields)
    budget.check_columns(len(first))
    header = _header(first, path, delimiter)
    columns: list[list[str]] = [[] for _ in header]
    rows = 0
    for line, fields in records:
        if not fields and len(header) > 1:
            continue
        fields = fields or [""]  # with one column a blank line is a row, so that predictions match the lines
        if len(fields) != len(header):
            advice = "quote a text that contains a comma" if delimiter == "," else "a text must not contain a tab"
            found = f"{len(fields)} fields, but the header has {len(header)}"
            raise DataError(f"{path}, line {line}: {found}; {advice}.")
        rows += 1
        budget.add_row(fields, rows, len(header))
        for column, field in zip(columns, fields, strict=True):
            column.append(field)
    return Table(dict(zip(header, columns, strict=True)), str(path))


class _Lines:
    """The lines of a text without its last line ends. It counts separators: the csv module splits any number."""

    def __init__(self, text: str, delimiter: str, budget: TableBudget) -> None:
        end = len(text)
        while end and text[end - 1] in "\r\n":
            end -= 1
        self._lines, self._delimiter, self._budget = _LINE.finditer(text, 0, end), delimiter, budget
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


def _records(reader: Any, lines: _Lines, path: Path) -> Iterator[tuple[int, list[str]]]:
    while True:
        line = reader.line_num + 1  # where the record starts: a quoted text may span several lines
        lines.separators = 0
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            lines.check_field(error)
            advice = "close every quote, and double the quotes inside a quoted text"
            raise DataError(f"{path}, line {line}: {error}; {advice}.") from None
        yield line, fields


def _header(fields: list[str], path: Path, delimiter: str) -> list[str]:
    names = [name.strip() or f"column{place}" for place, name in enumerate(fields, 1)]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"{path} has two columns named {short(twice)!r}; give each its own name.")
    other = next((mark for mark in (";", "\t", "|") if mark in names[0]), None)
    if len(names) == 1 and other and delimiter == ",":
        raise DataError(f"{path} seems to separate fields with {other!r}; save it with commas, or as .tsv.")
    return names


def _read_jsonl(path: Path, budget: TableBudget) -> Table:
    text = _decoded(path, budget)

    def records() -> Iterator[dict[str, Any]]:
        for line, found in enumerate(_JSON_LINE.finditer(text), 1):
            budget.check_row_text(found.end() - found.start())
            if row := found[0].strip():
                record = _parsed(row, path, line)
                if not isinstance(record, dict):
                    raise DataError(f"{path}, line {line}: {short(row)} is not a JSON object; write one on each line.")
                yield record

    return _from_records(records(), str(path), budget)


def _read_json(path: Path, budget: TableBudget) -> Table:
    text = _decoded(path, budget)
    budget.check_json(text)
    content = _parsed(text, path)
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise DataError(f"{path} is not a list of objects; write a list, or one object on each line as .jsonl.")
    odd = next((place for place, row in enumerate(rows, 1) if not isinstance(row, dict)), None)
    if odd is not None:
        raise DataError(f"{path}, row {odd}: {short(rows[odd - 1])} is not a JSON object; every row must be one.")
    if not rows:
        raise DataError(f"{path} has no rows; add at least one object to the list.")
    return _from_records(_squad_rows(rows, path) if "paragraphs" in rows[0] else rows, str(path), budget)


def _squad_rows(articles: list[dict[str, Any]], path: Path) -> Iterator[dict[str, Any]]:
    # SQuAD's files nest questions in paragraphs in articles; each question becomes a row.
    try:
        for article in articles:
            for paragraph in article.get("paragraphs", []):
                for question in paragraph.get("qas", []):
                    row = {"id": question.get("id"), "title": article.get("title")}
                    row |= {"question": question.get("question"), "context": paragraph.get("context")}
                    given = question.get("answers", [])
                    yield row | {"answers": {key: [one.get(key) for one in given] for key in ("text", "answer_start")}}
    except (AttributeError, TypeError):
        problem = "has paragraphs, but is not nested like SQuAD"
        raise DataError(f"{path} {problem}; write lists of objects: paragraphs, qas, answers.") from None


def _parsed(text: str, path: Path, line: int = 1) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{path}, line {line + error.lineno - 1}, column {error.colno}"
        near = short(text[error.pos :].strip())
        raise DataError(f"{where}: not valid JSON, {error.msg[0].lower()}{error.msg[1:]}, near {near!r}.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {line}: this JSON cannot be used: {error}.") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        check_depth(value, f"{path}, line {line}")
    return value


def _read_parquet(path: Path, budget: TableBudget) -> Table:
    return Table(read_parquet(path, budget), str(path))


READERS: dict[str, Callable[[Path, TableBudget], Table]] = {
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


# --- Python data --------------------------------------------------------------------------------------------


def _from_rows(rows: Sequence[Any], source: str) -> Table:
    if all(isinstance(row, Mapping) for row in rows):
        return _from_records(rows, source)
    width = len(rows[0]) if isinstance(rows[0], (tuple, list)) else 0
    for place, row in enumerate(rows, 1):
        if width not in TUPLE_COLUMNS or not isinstance(row, (tuple, list)) or len(row) != width:
            raise InputError(
                f"{source}, row {place}: {short(row)} does not match the other rows; give all rows as dicts, all as "
                f"(text, label), or all as (text, second text, label)."
            )
    names = TUPLE_COLUMNS[width]
    return Table({name: [_plain(row[place]) for row in rows] for place, name in enumerate(names)}, source)


def _from_records(records: Iterable[Mapping[Any, Any]], source: str, budget: TableBudget | None = None) -> Table:
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
    return Table(columns, source)


def _from_columns(columns: Mapping[Any, Any], source: str) -> Table:
    for name, column in columns.items():
        if isinstance(column, (str, bytes, Mapping)) or not hasattr(column, "__iter__"):
            raise InputError(f"{source}: column {name!r} is a {type(column).__name__}; give a list of values.")
    table = Table({str(name): [_plain(value) for value in column] for name, column in columns.items()}, source)
    lengths = {name: len(column) for name, column in table.columns.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"{source}: columns differ in length ({lengths}); each needs a value for every row.")
    return table


def _frame_columns(frame: Any) -> Any:
    try:
        return frame.to_dict(orient="list")  # pandas
    except TypeError:
        return frame.to_dict()  # `datasets` and polars return columns by default


def _plain(value: Any) -> Any:
    # Arrays and their scalars become Python values; the missing values of pandas become None.
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value.tolist() if hasattr(value, "tolist") else value
