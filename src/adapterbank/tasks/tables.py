"""Tables: files and Python data as named columns of plain values. They know no tasks, labels or models.

An error message is one sentence with the file, the line and the remedy.
"""

from __future__ import annotations

import difflib
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterbank.errors import DataError
from adapterbank.kinds.values import listed, short
from adapterbank.tasks.conll import read_conll, read_conllu
from adapterbank.tasks.dialects import FileForm
from adapterbank.tasks.encodings import encoding_note, find_encoding
from adapterbank.tasks.limits import MAX_DEPTH, TableBudget, TableLimits, check_depth
from adapterbank.tasks.parquet import read_parquet
from adapterbank.tasks.python_data import columns_from, from_records
from adapterbank.tasks.separated import read_separated

_AS_FOUND = FileForm()
_OBJECT_LINE = re.compile(r"\s*(\{[^\n]*\})[^\S\n]*\n\s*\S")
_EMPTY_LINE = re.compile(r"\n[ \t\r]*\n")
_JSON_LINE = re.compile(r"[^\n]*\n|[^\n]+")


@dataclass(frozen=True)
class Table:
    """Columns of equal length."""

    columns: dict[str, list[Any]]
    source: str = "data"
    """The file or argument it was read from, for messages."""
    notes: tuple[str, ...] = ()
    """What the user should know of how it was read."""
    assumed_header: bool = False
    """Whether the names of the columns are a file's first line, and nobody stated that it is a header."""

    def at(self, row: int) -> str:
        """Return the location of a row for messages; rows count from 1, without the header."""
        return f"{self.source}, row {row + 1}"

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values()), []))


def read_table(path: str | os.PathLike[str], limits: TableLimits | None = None, form: FileForm = _AS_FOUND) -> Table:
    """Read a file in the format of its extension (`READERS`); text formats may be compressed as .gz.

    Give `limits` for a file from outside: it is refused before more than that is in memory. `form` states what is
    known of a CSV or TSV file.
    """
    file = existing_file(path)
    ending = ending_of(file)
    if ending not in READERS:
        raise DataError(
            f"{file} has the extension {ending!r}, which is not one of {', '.join(READERS)}; "
            f"save the table as one of these (text formats may also end in .gz)."
        )
    return _with_rows(READERS[ending](file, TableBudget(file, limits), form))


def read_numbers(path: str | os.PathLike[str]) -> Table:
    """Read a Parquet file whose labels stay numbers, also where it states their names."""
    file = existing_file(path)
    return _with_rows(Table(read_parquet(file, TableBudget(file), named=False), str(file)))


def _with_rows(table: Table) -> Table:
    if not table.rows:
        raise DataError(f"{table.source} has columns ({listed(table.columns)}) but no rows; add some.")
    return table


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Return the lines of a text file; blank lines are kept, and a final line break starts no further line."""
    return [line.removesuffix("\r") for line in _decoded(*_unlimited(path))[0].removesuffix("\n").split("\n")]


def is_plain_text(path: str | os.PathLike[str]) -> bool:
    """Return whether the file's extension is that of plain text (.txt, .txt.gz)."""
    return ending_of(Path(path)) == ".txt"


def table_from(data: Any, source: str = "data", form: FileForm = _AS_FOUND) -> Table:
    """Return data as a table: a path, a table, a list of dicts or tuples, a dict of columns, an array, or a frame.

    Tuples are (text, label) or (text, second text, label).
    """
    if isinstance(data, Table):
        return data
    if isinstance(data, (str, os.PathLike)):
        return read_table(data, form=form)
    # An empty list would have no columns either.
    table = Table(columns_from(data, source) if not _is_empty(data) else {}, source)
    if not table.rows:
        raise DataError(f"{source} has no rows; give at least one.")
    return table


def _is_empty(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and not data


# --- files --------------------------------------------------------------------------------------------------


def existing_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file; for one that does not exist, name what is there instead."""
    file = Path(path).expanduser()
    try:
        folder, there = file.is_dir(), file.exists()
    except OSError as error:  # such as a name that is too long, when a text is given instead of a path
        raise DataError(f"{short(str(file))} cannot be a file: {error.strerror}; give a path.") from None
    if folder:
        inside = sorted(entry.name for entry in file.iterdir() if ending_of(entry) in READERS)
        raise DataError(f"{file} is a folder; name a file in it: {listed(inside) or 'it contains no table'}.")
    if there:
        return file
    if not file.parent.is_dir():
        raise DataError(f"There is no file {file}, and no folder {file.parent}; check the path.")
    names = sorted(entry.name for entry in file.parent.iterdir())
    near = difflib.get_close_matches(file.name, names, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"its folder contains: {listed(names)}."
    raise DataError(f"There is no file {file}; {hint}")


def ending_of(path: Path) -> str:
    """Return the extension of a file, in small letters, without that of its compression."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _unlimited(path: str | os.PathLike[str]) -> tuple[Path, TableBudget]:
    file = existing_file(path)
    return file, TableBudget(file)


def _decoded(path: Path, budget: TableBudget) -> tuple[str, list[str]]:
    """Return the text of a file, and a note if it is not in UTF-8."""
    data = unpacked(path, budget)
    if data[:2] == b"\x1f\x8b":
        raise DataError(f"{path} is compressed with gzip, but its name does not end in .gz; decompress or rename it.")
    budget.check_encoded(data)
    encoding = find_encoding(data, path)
    budget.check_encoded(data, encoding)
    try:
        text = data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} begins as {encoding.upper()}, but byte {error.start} does not fit; save it as UTF-8."
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(
            f"{path} has a NUL byte on line {line}, so it is not plain text (UTF-16, or a spreadsheet?); "
            f"save it as UTF-8."
        )
    if not text or text.isspace():
        raise DataError(f"{path} is empty; it needs rows (and a header, if it is a table).")
    note = encoding_note(path, encoding)
    return text, [note] if note else []


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


def _read_csv(path: Path, budget: TableBudget, form: FileForm) -> Table:
    return _read_separated(path, ",", budget, form)


def _read_tsv(path: Path, budget: TableBudget, form: FileForm) -> Table:
    return _read_separated(path, "\t", budget, form)


def _read_separated(path: Path, usual: str, budget: TableBudget, form: FileForm) -> Table:
    text, notes = _decoded(path, budget)
    columns, more = read_separated(text, usual, form, budget)
    return Table(dict(columns), str(path), (*notes, *more), assumed_header=form.header is None)


def _read_jsonl(path: Path, budget: TableBudget, form: FileForm) -> Table:
    text, notes = _decoded(path, budget)
    return Table(from_records(_json_lines(text, path, budget), budget), str(path), tuple(notes))


def _json_lines(text: str, path: Path, budget: TableBudget) -> Iterator[dict[str, Any]]:
    for line, found in enumerate(_JSON_LINE.finditer(text), 1):
        budget.check_row_text(found.end() - found.start())
        if row := found[0].strip():
            record = parse_json(row, path, line)
            if not isinstance(record, dict):
                raise DataError(f"{path}, line {line}: {short(row)} is not a JSON object; write one on each line.")
            yield record


def _read_json(path: Path, budget: TableBudget, form: FileForm) -> Table:
    text, notes = _decoded(path, budget)
    budget.check_json(text)
    rows = _json_lines(text, path, budget) if _is_lines(text) else _json_rows(parse_json(text, path), path)
    return Table(from_records(rows, budget), str(path), tuple(notes))


def _is_lines(text: str) -> bool:
    """Return whether a .json file has an object on each line, as .jsonl files have."""
    first = _OBJECT_LINE.match(text)
    try:
        return first is not None and isinstance(json.loads(first[1]), dict)
    except (ValueError, RecursionError):
        return False


def _json_rows(content: Any, path: Path) -> Iterator[dict[str, Any]]:
    rows = content.get("data") if isinstance(content, dict) else content
    if isinstance(content, dict) and not isinstance(rows, list):
        yield from _column_rows(content, path)
        return
    if not isinstance(rows, list):
        raise DataError(f"{path} is not a list of objects; write a list, or one object on each line as .jsonl.")
    odd = next((place for place, row in enumerate(rows, 1) if not isinstance(row, dict)), None)
    if odd is not None:
        raise DataError(f"{path}, row {odd}: {short(rows[odd - 1])} is not a JSON object; every row must be one.")
    if not rows:
        raise DataError(f"{path} has no rows; add at least one object to the list.")
    yield from _squad_rows(rows, path) if "paragraphs" in rows[0] else rows


def _column_rows(columns: dict[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of JSON columns: lists, or objects by row as pandas writes them."""
    keys: list[Any] = [range(len(one)) if isinstance(one, list) else one for one in columns.values()]
    same = all(isinstance(one, (dict, range)) and list(one) == list(keys[0]) for one in keys)
    if not columns or not same:
        problem = "is neither a list of objects nor an object of columns of the same length"
        raise DataError(f"{path} {problem}; write a list, or one object on each line as .jsonl.")
    for key in keys[0]:
        yield {name: column[key] for name, column in columns.items()}


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


def parse_json(text: str, path: Path, line: int = 1) -> Any:
    """Return the value of a JSON text that begins on this line of a file."""
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


def _read_parquet(path: Path, budget: TableBudget, form: FileForm) -> Table:
    return Table(read_parquet(path, budget), str(path))


def _read_conll(path: Path, budget: TableBudget, form: FileForm) -> Table:
    return _sentences(path, budget, read_conll)


def _read_conllu(path: Path, budget: TableBudget, form: FileForm) -> Table:
    return _sentences(path, budget, read_conllu)


def _read_txt(path: Path, budget: TableBudget, form: FileForm) -> Table:
    """Read the columns of CoNLL-2003, whose files end in .txt; plain text is no table."""
    return _sentences(path, budget, _read_divided)


def _read_divided(text: str, budget: TableBudget) -> tuple[dict[str, list[Any]], list[str]]:
    if not _EMPTY_LINE.search(text):
        raise DataError(
            f"{budget.source} has no empty line, so it is not a table of sentences with a word and its tags on each "
            f"line; add an empty line after each sentence, or save another table as .csv, .jsonl or .parquet."
        )
    return read_conll(text, budget)


def _sentences(
    path: Path, budget: TableBudget, read: Callable[[str, TableBudget], tuple[dict[str, list[Any]], list[str]]]
) -> Table:
    text, notes = _decoded(path, budget)
    columns, more = read(text, budget)
    return Table(columns, str(path), (*notes, *more))


READERS: dict[str, Callable[[Path, TableBudget, FileForm], Table]] = {
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".conll": _read_conll,
    ".conllu": _read_conllu,
    ".iob": _read_conll,
    ".bio": _read_conll,
    ".txt": _read_txt,
}
"""How a table with this extension is read. To predict, a .txt file has one text on each line instead."""
