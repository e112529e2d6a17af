"""Tables of any size, row by row: CSV, TSV, JSONL, Parquet and plain lines, from files and pipes. Knows no tasks.

A row that cannot be read has its problem in place of its values, and reading goes on after it. Only what concerns the
whole file (no such file, no header, a damaged archive) is raised.
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from adapterbank.errors import DataError
from adapterbank.kinds.values import short
from adapterbank.tasks.class_labels import named_schema, stored_names, with_names
from adapterbank.tasks.dialects import FileForm, find_dialect
from adapterbank.tasks.encodings import encoding_note, find_encoding
from adapterbank.tasks.separated import dialect_notes
from adapterbank.tasks.tables import Table, ending_of, existing_file, read_table
from adapterbank.tasks.text_rows import StreamRow, TextForm, is_wide, line_rows, object_rows, separated_rows

FORMATS = {
    **{".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"},
    **{".parquet": "parquet", ".txt": "lines"},
    **{".conll": "conll", ".iob": "conll", ".bio": "conll", ".conllu": "conllu"},
}
"""The format of each extension; text formats may also be compressed as .gz."""
_WHOLE = ("json", "conll", "conllu")
"""The formats that are read whole, before their first row is answered."""
PIPED = ("lines", "csv", "tsv", "jsonl", "parquet")
"""The formats that standard input may have."""
CHUNK_ROWS = 2048
"""Rows that are read, answered and written at a time."""
CHUNK_CHARACTERS = 1 << 24
"""Characters after which a chunk ends early, so that memory does not grow with the length of texts."""
_HEAD = 1 << 18
"""Bytes from which encoding and separator are decided."""


@dataclass
class RowStream:
    """An open file: its rows, and how much of it has been read."""

    source: str
    """Its name, for messages."""
    form: str
    rows: Iterator[StreamRow]
    columns: tuple[str, ...] | None = None
    """None if each row names its own."""
    text: TextForm | None = None
    """How its bytes are read; None for formats that are not text."""
    schema: Any = None
    """The Arrow schema of a Parquet file."""
    total: int | None = None
    """Bytes of the file, or rows where these are known; None for a pipe."""
    position: Callable[[], int] = lambda: 0
    """How much of `total` has been read."""

    def at(self, number: int) -> str:
        """Return the place of a row for messages."""
        return f"{self.source}, {'row' if self.form in ('parquet', *_WHOLE) else 'line'} {number}"


def format_of(path: str | os.PathLike[str]) -> str | None:
    """Return the format that a file's extension names; None if it names none."""
    return FORMATS.get(ending_of(Path(path)))


def find_form(head: bytes, form: str, source: str) -> TextForm:
    """Decide encoding and separator from the first bytes of a file, as `tables.read_table` decides them."""
    try:
        encoding = find_encoding(head, source, whole=len(head) < _HEAD)
    except DataError:
        encoding = "utf-8"  # the rows with damaged bytes are bad ones
    note = encoding_note(source, encoding)
    notes: tuple[str, ...] = (note,) if note else ()
    decoding = "utf-8-sig" if encoding == "utf-8" else encoding
    if form not in ("csv", "tsv"):
        return TextForm(decoding, notes=notes)
    text = codecs.getincrementaldecoder(decoding)("replace").decode(head)
    if len(head) == _HEAD:
        text = text[: text.rfind("\n") + 1] or text
    usual = "\t" if form == "tsv" else ","
    dialect = find_dialect(text, usual, FileForm(), source)
    notes += tuple(dialect_notes(dialect, usual, FileForm(), source))
    return TextForm(decoding, dialect.separator, dialect.quoted, dialect.skip, notes)


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
            path = existing_file(source)
            name, form = str(path), form or format_of(path)
            if form is None:
                raise DataError(
                    f"{path} has the extension {ending_of(path)!r}, which is not one of {', '.join(FORMATS)}; "
                    f"save it as one of these, or name its format with --format."
                )
        if form == "parquet":
            assert path is not None
            yield _parquet(path, name, stack)
        elif form in _WHOLE:
            yield _whole(read_table(source), name, form)  # type: ignore[arg-type]  # no format of a pipe
        else:
            raw = source if path is None else stack.enter_context(path.open("rb"))
            yield _text(raw, name, form, tuple(line_columns), path)  # type: ignore[arg-type]


def chunks(rows: Iterator[StreamRow]) -> Iterator[list[StreamRow]]:
    """Return the rows in lists, each of a bounded size in memory."""
    chunk: list[StreamRow] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += sum(map(_characters, row.values.values()))
        if len(chunk) >= CHUNK_ROWS or size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _characters(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_characters, value))
    return len(value) if isinstance(value, str) else 0


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
    found = find_form(head, form, name)
    # Bytes that are not in the encoding become surrogates, which make their row a bad one; see `_damage`.
    separated = form in ("csv", "tsv")
    file = io.TextIOWrapper(
        io.BufferedReader(_Replayed(head, data, name), 1 << 16),
        encoding=found.encoding,
        errors="replace" if is_wide(found.encoding) else "surrogateescape",
        newline="" if separated else "\n",
    )
    regular = path is not None and path.is_file()
    stream = RowStream(name, form, iter(()), text=found, total=path.stat().st_size if path and regular else None)
    stream.position = raw.tell if regular else lambda: 0
    if separated:
        stream.columns, stream.rows = separated_rows(file, name, found)
    elif form == "jsonl":
        stream.rows = object_rows(file, name, found.encoding)
    else:
        stream.columns, stream.rows = line_columns, line_rows(file, line_columns, found.encoding)
    return stream


# --- tables that are not text -------------------------------------------------------------------------------


def _spooled(source: BinaryIO, stack: ExitStack) -> Path:
    """Copy a pipe into a temporary file."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    path = Path(folder) / "stdin.parquet"
    with path.open("wb") as file:
        while block := source.read(1 << 20):
            file.write(block)
    return path


def _whole(table: Table, name: str, form: str) -> RowStream:
    names = list(table.columns)
    rows = zip(*table.columns.values(), strict=True)
    found = (StreamRow(i, dict(zip(names, row, strict=True))) for i, row in enumerate(rows, 1))
    text = TextForm("utf-8", notes=table.notes) if table.notes else None
    return RowStream(name, form, found, tuple(names), text, total=table.rows)


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
                    words = {name: with_names(values[name], known) for name, known in labels.items()}
                    yield StreamRow(done, values | words if words else values)
        except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError, LookupError) as error:
            raise DataError(f"{name}, after row {done}: {_reason(error)}; write the Parquet file again.") from None

    schema = file.schema_arrow
    if len(set(schema.names)) < len(schema.names):
        raise DataError(f"{name} has two columns of one name; give each its own name.")
    labels = stored_names(schema)
    total, schema = file.metadata.num_rows, named_schema(schema, labels)
    return RowStream(name, "parquet", rows(), tuple(schema.names), None, schema, total, lambda: done)


def _reason(error: BaseException) -> str:
    return short(next(iter(str(error).splitlines()), type(error).__name__), 90)
