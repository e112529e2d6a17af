"""Tables of any size, row by row: CSV, TSV, JSONL, Parquet and plain lines, from files and pipes. Knows no tasks.

A row that cannot be read has its problem in place of its values, and reading goes on after it. Only what concerns the
whole file (no such file, no header, a damaged archive) is raised.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from adapterbank.errors import DataError
from adapterbank.kinds.values import short
from adapterbank.tasks.tables import Table, _ending, _existing, _header, _parsed, read_table

FORMATS = {
    **{".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"},
    **{".parquet": "parquet", ".txt": "lines"},
}
"""The format of each extension; text formats may also be compressed as .gz."""
PIPED = ("lines", "csv", "tsv", "jsonl", "parquet")
"""The formats that standard input may have."""
CHUNK_ROWS = 2048
"""Rows that are read, answered and written at a time."""
CHUNK_CHARACTERS = 1 << 24
"""Characters after which a chunk ends early, so that memory does not grow with the length of texts."""
LONGEST = 10_000_000
"""Characters of a line, or of a quoted text; an unclosed quote must not take the rest of a file into memory."""
_HEAD = 1 << 18
"""Bytes from which encoding and separator are decided."""
_QUOTES = "close every quote, and double the quotes inside a quoted text"


class StreamRow(NamedTuple):
    """One row of a file."""

    number: int
    """The line on which it starts; in formats without lines its number, from 1."""
    values: dict[str, Any]
    problem: str = ""
    """Why it cannot be read; `values` then has what could be."""


@dataclass(frozen=True)
class Dialect:
    """How the bytes of a text file become rows."""

    encoding: str
    delimiter: str = ","
    quoting: int = csv.QUOTE_MINIMAL


@dataclass
class RowStream:
    """An open file: its rows, and how much of it has been read."""

    source: str
    """Its name, for messages."""
    form: str
    rows: Iterator[StreamRow]
    columns: tuple[str, ...] | None = None
    """None if each row names its own."""
    dialect: Dialect | None = None
    schema: Any = None
    """The Arrow schema of a Parquet file."""
    total: int | None = None
    """Bytes of the file, or rows where these are known; None for a pipe."""
    position: Callable[[], int] = lambda: 0
    """How much of `total` has been read."""

    def at(self, number: int) -> str:
        """Return the place of a row for messages."""
        return f"{self.source}, {'row' if self.form in ('parquet', 'json') else 'line'} {number}"


def format_of(path: str | os.PathLike[str]) -> str | None:
    """Return the format that a file's extension names; None if it names none."""
    return FORMATS.get(_ending(Path(path)))


def find_dialect(head: bytes, form: str) -> Dialect:
    """Decide encoding and separator from the first bytes of a file; `tables.read_table` decides the same."""
    if form == "tsv":
        return Dialect("utf-8-sig", "\t", csv.QUOTE_NONE)
    return Dialect("utf-8-sig")


@contextmanager
def open_stream(
    source: str | os.PathLike[str] | BinaryIO, form: str | None = None, line_columns: Sequence[str] = ("text",)
) -> Iterator[RowStream]:
    """Open a file in the format of its extension, or in `form`; an open binary stream has plain lines by default.

    A plain line is one text, or two with a tab between them; `line_columns` are their names.
    """
    with ExitStack() as stack:
        if not isinstance(source, (str, os.PathLike)):
            path, name, form = None, "Standard input", form or "lines"
            if form == "parquet":  # its footer comes last
                path = _spooled(source, stack)
        else:
            path = _existing(source)
            name, form = str(path), form or format_of(path)
            if form is None:
                raise DataError(
                    f"{path} has the extension {_ending(path)!r}, which is not one of {', '.join(FORMATS)}; save it as "
                    f"one of these, or name its format with --format."
                )
        if form == "parquet":
            assert path is not None
            yield _parquet(path, name, stack)
        elif form == "json":
            yield _whole(read_table(source), name)  # type: ignore[arg-type]  # no format of a pipe
        else:
            raw = source if path is None else stack.enter_context(path.open("rb"))
            yield _text(raw, name, form, tuple(line_columns), path)  # type: ignore[arg-type]


def chunks(rows: Iterator[StreamRow]) -> Iterator[list[StreamRow]]:
    """Return the rows in lists, each of a bounded size in memory."""
    chunk: list[StreamRow] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += sum(len(value) for value in row.values.values() if isinstance(value, str))
        if len(chunk) >= CHUNK_ROWS or size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def as_table(rows: Sequence[StreamRow], source: str) -> Table:
    """Return rows as a table with the columns of all of them; what a row lacks is None."""
    names = dict.fromkeys(name for row in rows for name in row.values)
    return Table({name: [row.values.get(name) for row in rows] for name in names}, source)


# --- text ---------------------------------------------------------------------------------------------------


class _Replayed(io.RawIOBase):
    """A stream whose first bytes were read already, and are returned again."""

    def __init__(self, head: bytes, rest: BinaryIO, name: str) -> None:
        self._head, self._rest, self._name = head, rest, name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self._head[: len(buffer)] or _read(self._rest, len(buffer), self._name)
        self._head = self._head[len(buffer) :]
        buffer[: len(found)] = found
        return len(found)


def _read(file: BinaryIO, size: int, name: str) -> bytes:
    try:
        return file.read(size)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{name} cannot be decompressed ({error}); compress it again with gzip.") from None


def _text(raw: BinaryIO, name: str, form: str, line_columns: tuple[str, ...], path: Path | None) -> RowStream:
    packed = path is not None and path.suffix.lower() == ".gz"
    data: Any = gzip.GzipFile(fileobj=raw) if packed else raw
    head = _read(data, _HEAD, name)
    if head[:2] == b"\x1f\x8b":
        raise DataError(f"{name} is compressed with gzip, but its name does not end in .gz; decompress or rename it.")
    if path is None and not head:
        raise DataError(f"{name} is empty; pipe in one text on each line, or a table with --format.")
    if path is not None and (not head or head.isspace()):
        raise DataError(f"{name} is empty; it needs rows (and a header, if it is a table).")
    dialect = find_dialect(head, form)
    # Bytes that are not in the encoding become surrogates, which make their row a bad one; see `_damage`.
    separated = form in ("csv", "tsv")
    file = io.TextIOWrapper(
        io.BufferedReader(_Replayed(head, data, name), 1 << 16),
        encoding=dialect.encoding,
        errors="surrogateescape",
        newline="" if separated else "\n",
    )
    regular = path is not None and path.is_file()
    stream = RowStream(name, form, iter(()), dialect=dialect, total=path.stat().st_size if path and regular else None)
    stream.position = raw.tell if regular else lambda: 0
    if separated:
        stream.columns, stream.rows = _separated(file, name, dialect)
    elif form == "jsonl":
        stream.rows = _objects(file, name)
    else:
        stream.columns, stream.rows = line_columns, _lines(file, line_columns)
    return stream


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


def _damage(text: str, encoding: str) -> str:
    """Return what makes a text unusable: a byte that is not in the file's encoding, or NUL; empty if nothing does."""
    if "\0" in text:
        return "it has a NUL byte, so it is not plain text; save it as UTF-8"
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


def _separated(file: TextIO, name: str, dialect: Dialect) -> tuple[tuple[str, ...], Iterator[StreamRow]]:
    csv.field_size_limit(LONGEST)
    lines = _LineReader(file)
    quoting: Any = dialect.quoting
    reader = csv.reader(lines, delimiter=dialect.delimiter, quoting=quoting, strict=True)
    try:
        fields = next(fields for fields in reader if fields)
    except csv.Error as error:
        raise DataError(f"{name}, line {lines.number}: {error}; {_QUOTES}.") from None
    except StopIteration:
        raise DataError(f"{name} is empty; it needs rows (and a header, if it is a table).") from None
    if problem := _damage("".join(lines.taken), dialect.encoding):
        raise DataError(f"{name}, line 1: {problem}.")
    header = _header(fields, name, dialect.delimiter)  # type: ignore[arg-type]  # for messages only
    rows = _records(reader, lines, header, dialect)
    return tuple(header), rows if len(header) > 1 else _without_last_blanks(rows)


def _records(reader: Any, lines: _LineReader, header: Sequence[str], dialect: Dialect) -> Iterator[StreamRow]:
    advice = "a text must not contain a tab" if dialect.delimiter == "\t" else "quote a text that has a separator"
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
        problem = lines.problem or _damage("".join(lines.taken), dialect.encoding)
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


def _objects(file: TextIO, name: str) -> Iterator[StreamRow]:
    lines = _LineReader(file)
    first = lines.begin()
    for line in lines:
        if line.strip():
            problem = lines.problem or _damage(line, "UTF-8")
            values = {}
            if not problem:
                try:
                    values = _parsed(line.strip(), Path(name), first)
                except DataError as error:
                    problem = str(error).removeprefix(f"{name}, line {first}").lstrip(":, ")
                if not problem and not isinstance(values, dict):
                    problem, values = f"{short(line.strip())} is not a JSON object; write one on each line", {}
            yield StreamRow(first, {} if problem else values, problem.removesuffix("."))
        first = lines.begin()


def _lines(file: TextIO, columns: tuple[str, ...]) -> Iterator[StreamRow]:
    lines = _LineReader(file)
    first = lines.begin()
    for line in lines:
        text = line.removesuffix("\n").removesuffix("\r")
        parts = text.split("\t") if len(columns) == 2 else [text]
        problem = lines.problem or _damage(text, "UTF-8")
        if len(parts) != len(columns):
            problem = problem or f"{len(parts) - 1} tabs; it needs exactly one, between {' and '.join(columns)}"
            parts = [text, ""]
        if problem:
            parts = [_readable(part) for part in parts]
        yield StreamRow(first, dict(zip(columns, parts, strict=True)), problem)
        first = lines.begin()


# --- tables that are not text -------------------------------------------------------------------------------


def _spooled(source: BinaryIO, stack: ExitStack) -> Path:
    """Copy a pipe into a temporary file."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    path = Path(folder) / "stdin.parquet"
    with path.open("wb") as file:
        while block := source.read(1 << 20):
            file.write(block)
    return path


def _whole(table: Table, name: str) -> RowStream:
    names = list(table.columns)
    rows = zip(*table.columns.values(), strict=True)
    found = (StreamRow(i, dict(zip(names, row, strict=True))) for i, row in enumerate(rows, 1))
    return RowStream(name, "json", found, tuple(names), total=table.rows)


def _parquet(path: Path, name: str, stack: ExitStack) -> RowStream:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        file = stack.enter_context(ParquetFile(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name} cannot be read as a Parquet file ({_reason(error)}); write it again.") from None
    done = 0

    def rows() -> Iterator[StreamRow]:
        nonlocal done
        try:
            for batch in file.iter_batches(batch_size=CHUNK_ROWS, use_threads=False):
                for values in batch.to_pylist():
                    done += 1
                    yield StreamRow(done, values)
        except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError, LookupError) as error:
            raise DataError(f"{name}, after row {done}: {_reason(error)}; write the Parquet file again.") from None

    schema = file.schema_arrow
    if len(set(schema.names)) < len(schema.names):
        raise DataError(f"{name} has two columns of one name; give each its own name.")
    total = file.metadata.num_rows
    return RowStream(name, "parquet", rows(), tuple(schema.names), None, schema, total, lambda: done)


def _reason(error: BaseException) -> str:
    return short(next(iter(str(error).splitlines()), type(error).__name__), 90)
