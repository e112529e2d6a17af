"""The rows of text files, read line by line: CSV, TSV, JSON lines and plain lines. Knows no files and no tasks.

A row that cannot be read has its problem beside what could be read of it, and the rows after it are read.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from adapterbank.errors import DataError
from adapterbank.kinds.values import short
from adapterbank.tasks.separated import check_header
from adapterbank.tasks.tables import parse_json

LONGEST = 10_000_000
"""Characters of a line, or of a quoted text; an unclosed quote must not take the rest of a file into memory."""
_QUOTES = "close every quote, and double the quotes inside a quoted text"


class StreamRow(NamedTuple):
    """One row of a file."""

    number: int
    """The line on which it starts; in formats without lines its number, from 1."""
    values: dict[str, Any]
    problem: str = ""
    """Why it cannot be read; `values` then has what could be."""


@dataclass(frozen=True)
class TextForm:
    """How the bytes of a text file become rows."""

    encoding: str
    delimiter: str = ","
    quoted: bool = True
    """Whether a field in quotes may contain separators and line breaks."""
    skip: int = 0
    """Characters before the first row."""
    notes: tuple[str, ...] = ()
    """What the user should know of these decisions."""


class _LineReader:
    """The lines of a file, one by one, for the csv module; those of a record can be read again."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._again: list[str] = []
        self.number = 0
        """The number of the last line."""
        self.taken: list[str] = []
        """The lines of the current record."""
        self.problem = ""

    def __iter__(self) -> _LineReader:
        return self

    def __next__(self) -> str:
        line = self._again.pop() if self._again else self._file.readline(LONGEST)
        if not line:
            raise StopIteration
        if len(line) == LONGEST and line[-1] not in "\r\n":
            self.problem = f"the line has more than {LONGEST:,} characters; shorten it"
            while (rest := self._file.readline(LONGEST)) and rest[-1] not in "\r\n":
                pass
            line = line[:100].replace('"', "'") + "\n"
        self.number += 1
        self.taken.append(line)
        return line

    def begin(self) -> int:
        """Start a record; return the number of its first line."""
        self.taken, self.problem = [], ""
        return self.number + 1

    def retry(self) -> None:
        """Return to the line after the first one of the record."""
        self.number -= len(self.taken) - 1
        self._again += reversed(self.taken[1:])


def is_wide(encoding: str) -> bool:
    """Return whether characters have several bytes, so that damage is not one byte."""
    return encoding.startswith(("utf-16", "utf-32"))


def _damage(text: str, encoding: str) -> str:
    """Return what makes a text unusable: a byte that is not in the file's encoding, or NUL; empty if nothing does."""
    if "\0" in text:
        return "it has a NUL byte, so it is not plain text; save it as UTF-8"
    if is_wide(encoding):
        return f"it has bytes that are not {encoding.upper()}; save the file as UTF-8" if "\ufffd" in text else ""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            byte = ord(text[error.start]) - 0xDC00
            known = encoding.upper().removesuffix("-SIG")
            return f"byte 0x{byte:02x} is not {known}; convert the file, for instance with iconv"
    return ""


def _readable(text: str) -> str:
    """Return a text that can be written, with a replacement character for each byte that is not in the encoding."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").replace("\0", "\ufffd")


def separated_rows(file: TextIO, name: str, form: TextForm) -> tuple[tuple[str, ...], Iterator[StreamRow]]:
    """Return the header of CSV or TSV, and its rows."""
    csv.field_size_limit(LONGEST)
    lines = _LineReader(file)
    if form.skip:  # Excel's own first line
        next(lines)
        lines.begin()
    quoting: Any = csv.QUOTE_MINIMAL if form.quoted else csv.QUOTE_NONE
    reader = csv.reader(lines, delimiter=form.delimiter, quoting=quoting, strict=True)
    try:
        fields = next(fields for fields in reader if fields)
    except csv.Error as error:
        raise DataError(f"{name}, line {lines.number}: {error}; {_QUOTES}.") from None
    except StopIteration:
        raise DataError(f"{name} is empty; it needs rows (and a header, if it is a table).") from None
    if problem := _damage("".join(lines.taken), form.encoding):
        raise DataError(f"{name}, line 1: {problem}.")
    header = check_header(fields, name)
    rows = _records(reader, lines, header, form)
    return tuple(header), rows if len(header) > 1 else _without_last_blanks(rows)


def _records(reader: Any, lines: _LineReader, header: Sequence[str], form: TextForm) -> Iterator[StreamRow]:
    advice = "quote a text that has a separator" if form.quoted else "a text must not contain a tab"
    while True:
        first = lines.begin()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            lines.retry()
            yield StreamRow(first, {header[0]: _readable(lines.taken[0].rstrip("\r\n"))}, f"{error}; {_QUOTES}")
            continue
        if not fields and len(header) > 1:
            continue
        fields = fields or [""]  # with one column a blank line is a row, so that predictions match the lines
        problem = lines.problem or _damage("".join(lines.taken), form.encoding)
        if len(fields) > len(header) and not any(map(str.strip, fields[len(header) :])):
            fields = fields[: len(header)]  # spreadsheets add empty fields at the end
        if len(fields) != len(header):
            problem = problem or f"{len(fields)} fields, but the header has {len(header)}; {advice}"
            fields += [""] * (len(header) - len(fields))
        values = dict(zip(header, fields, strict=False))
        yield StreamRow(first, {k: _readable(v) for k, v in values.items()} if problem else values, problem)


def _without_last_blanks(rows: Iterator[StreamRow]) -> Iterator[StreamRow]:
    """Leave out blank lines at the end of a file with one column; others are rows."""
    blanks: list[StreamRow] = []
    for row in rows:
        if not row.problem and not any(row.values.values()):
            blanks.append(row)
            continue
        yield from blanks
        blanks = []
        yield row


def object_rows(file: TextIO, name: str, encoding: str) -> Iterator[StreamRow]:
    """Return the JSON objects of a file, one on each line."""
    lines = _LineReader(file)
    first = lines.begin()
    for line in lines:
        if line.strip():
            problem = lines.problem or _damage(line, encoding)
            values = {}
            if not problem:
                try:
                    values = parse_json(line.strip(), Path(name), first)
                except DataError as error:
                    problem = str(error).removeprefix(f"{name}, line {first}").lstrip(":, ")
                if not problem and not isinstance(values, dict):
                    problem, values = f"{short(line.strip())} is not a JSON object; write one on each line", {}
            yield StreamRow(first, {} if problem else values, problem.removesuffix("."))
        first = lines.begin()


def line_rows(file: TextIO, columns: tuple[str, ...], encoding: str) -> Iterator[StreamRow]:
    """Return the text, or the two texts with a tab between them, on each line."""
    lines = _LineReader(file)
    first = lines.begin()
    for line in lines:
        text = line.removesuffix("\n").removesuffix("\r")
        parts = text.split("\t") if len(columns) == 2 else [text]
        problem = lines.problem or _damage(text, encoding)
        if len(parts) != len(columns):
            problem = problem or f"{len(parts) - 1} tabs; it needs exactly one, between {' and '.join(columns)}"
            parts = [text, ""]
        if problem:
            parts = [_readable(part) for part in parts]
        yield StreamRow(first, dict(zip(columns, parts, strict=True)), problem)
        first = lines.begin()
