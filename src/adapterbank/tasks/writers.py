"""Rows to the bytes of CSV, TSV, JSONL and Parquet files, chunk by chunk. Knows no tasks and no paths."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from adapterbank.errors import DataError
from adapterbank.kinds.values import short

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""What a terminal obeys instead of showing it, and halves of characters, which cannot be printed."""
LABEL_SEPARATOR = "|"
"""Between the labels of a cell in CSV and TSV; `train` reads them so."""
_GROUP = 1 << 15
"""Rows of a row group of Parquet."""
_BREAKS = re.compile(r"[\t\r\n]+")


@dataclass(frozen=True)
class OutputColumn:
    """A column of a file to write."""

    name: str
    holds: str = "text"
    """text, number, integer, flag, texts (a list of them, such as labels), or words (a list of any texts).

    Only Parquet asks, and CSV for words: any of them may hold what stands between labels.
    """


@dataclass(frozen=True)
class OutputLayout:
    """What a file of rows holds; JSON lines need none of it, as each names its own values."""

    columns: Sequence[OutputColumn]
    delimiter: str = ","
    schema: Any = None
    """The Arrow schema of the columns that come from a Parquet file."""


class RowEncoder(Protocol):
    """Turns rows into the bytes of a file; all that it returns, end to end, is the file."""

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the bytes of further rows; some may be kept for later."""

    def finish(self) -> bytes:
        """Return what is left: the rows kept, and the end of the file."""


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON; the control characters that JSON itself allows in texts are escaped too."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=_plain)
    return CONTROL.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def value_type(values: Sequence[Any]) -> str:
    """Return what a column of these values holds, for `OutputColumn`."""
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, bool) for value in known):
        return "flag"
    if known and all(isinstance(value, int) and not isinstance(value, bool) for value in known):
        return "integer"
    if known and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known):
        return "number"
    if any(known) and all(isinstance(value, (list, tuple)) for value in known):
        return "words" if all(isinstance(one, str) for value in known for one in value) else "text"
    return "text"


class JsonRows:
    """A JSON object on each line, with the values that its row has."""

    def __init__(self, layout: OutputLayout) -> None:
        """Take any layout."""

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        """See `RowEncoder`."""
        return "".join([json_text(_without_nan(row)) + "\n" for row in rows]).encode()

    def finish(self) -> bytes:
        """See `RowEncoder`."""
        return b""


class SeparatedValues:
    """A header and a record for each row. Lists of labels are joined; lists of words and objects are JSON."""

    def __init__(self, layout: OutputLayout, *, quoted: bool = True) -> None:
        """Without `quoted`, tabs and line breaks in texts become blanks, because nothing else can stand for them."""
        self._names, self._quoted = [column.name for column in layout.columns], quoted
        self._words = {column.name for column in layout.columns if column.holds == "words"}
        self._lines: list[str] = []
        style: Any = {} if quoted else {"quoting": csv.QUOTE_NONE, "quotechar": None}
        delimiter = layout.delimiter if quoted else "\t"
        # The csv module quotes the characters of the line end alone, and a text may contain either of them.
        self._writer = csv.writer(self, delimiter=delimiter, lineterminator="\r\n", **style)
        self._writer.writerow(map(self._cell, self._names))

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        """See `RowEncoder`."""
        self._writer.writerows([self._cell(row.get(name), name) for name in self._names] for row in rows)
        lines, self._lines = self._lines, []
        return "".join(lines).encode("utf-8", "replace")

    def write(self, line: str) -> None:
        """Take a record from the csv module."""
        self._lines.append(line[:-2] + "\n")

    def finish(self) -> bytes:
        """See `RowEncoder`."""
        return self.encode([])

    def _cell(self, value: Any, column: str = "") -> str:
        is_words = column in self._words and isinstance(value, (list, tuple))
        text = json_text(value) if is_words else _cell_text(value)
        return text if self._quoted else _BREAKS.sub(" ", text)


def tab_separated(layout: OutputLayout) -> RowEncoder:
    """Return the encoder of TSV, which has no quotes."""
    return SeparatedValues(layout, quoted=False)


class ParquetRows:
    """Row groups of a fixed size; columns from a Parquet file keep their types."""

    def __init__(self, layout: OutputLayout) -> None:
        """Start the file."""
        import pyarrow
        from pyarrow.parquet import ParquetWriter

        types = {
            **{"text": pyarrow.string(), "number": pyarrow.float64(), "integer": pyarrow.int64()},
            **{"flag": pyarrow.bool_(), **dict.fromkeys(("texts", "words"), pyarrow.list_(pyarrow.string()))},
        }
        given = {} if layout.schema is None else {field.name: field for field in layout.schema}
        self._columns = {column.name: column.holds for column in layout.columns if column.name not in given}
        fields = [given.get(column.name, pyarrow.field(column.name, types[column.holds])) for column in layout.columns]
        self._schema, self._pyarrow = pyarrow.schema(fields), pyarrow
        self._sink, self._rows = io.BytesIO(), list[Mapping[str, Any]]()
        self._writer = ParquetWriter(_Forward(self._sink), self._schema)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        """See `RowEncoder`."""
        self._rows += rows
        if len(self._rows) >= _GROUP:
            self._write()
        return self._drained()

    def finish(self) -> bytes:
        """See `RowEncoder`."""
        self._write()
        self._writer.close()
        return self._drained()

    def _write(self) -> None:
        rows, self._rows = self._rows, []
        arrays = []
        for field in self._schema:
            values = [row.get(field.name) for row in rows]
            if self._columns.get(field.name) == "text":
                values = [None if value is None else _cell_text(value) for value in values]
            try:
                arrays.append(self._pyarrow.array(values, type=field.type))
            except (self._pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
                reason = short(str(error).splitlines()[0], 90)
                raise DataError(
                    f"Column {field.name!r} does not have the same type in all rows ({reason}); write .jsonl instead."
                ) from None
        if rows:
            self._writer.write_table(self._pyarrow.Table.from_arrays(arrays, schema=self._schema))

    def _drained(self) -> bytes:
        data = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        return data


class _Forward(io.RawIOBase):
    """A file that hands its bytes on and remembers only how many there were."""

    def __init__(self, sink: io.BytesIO) -> None:
        self._sink, self._count = sink, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._count += self._sink.write(data)
        return len(data)

    def tell(self) -> int:
        return self._count


ENCODERS: dict[str, Callable[[OutputLayout], RowEncoder]] = {
    "csv": SeparatedValues,
    "tsv": tab_separated,
    "jsonl": JsonRows,
    "parquet": ParquetRows,
}
"""The formats that can be written."""


class Compressed:
    """Another encoder's bytes as members of a gzip file, so that it is whole after each of them."""

    def __init__(self, inner: RowEncoder) -> None:
        """Compress what this encoder returns."""
        self._inner = inner

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        """See `RowEncoder`."""
        return self._packed(self._inner.encode(rows))

    def finish(self) -> bytes:
        """See `RowEncoder`."""
        return self._packed(self._inner.finish())

    def _packed(self, data: bytes) -> bytes:
        return gzip.compress(data, 6, mtime=0) if data else b""


def _without_nan(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with null for the numbers that JSON does not have, which Parquet files and frames do."""
    if not any(isinstance(value, float) and not math.isfinite(value) for value in row.values()):
        return row
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _cell_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)) and all(isinstance(one, str) and LABEL_SEPARATOR not in one for one in value):
        return LABEL_SEPARATOR.join(value)
    return json_text(value) if isinstance(value, (list, tuple, dict)) else str(value)


def _plain(value: Any) -> Any:
    """Return a value of a Parquet file, such as a date or bytes, as JSON has it: as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
