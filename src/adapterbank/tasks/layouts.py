"""The file layouts of public data sets, read as tables with the same columns. They know no catalog and no tasks.

A layout finds its files (`find`) and reads them (`read`). Every layout returns for each split a table whose columns are
the texts as the caller names them, `label`, and `index` or `id` if the file numbers its rows. A split named `all` is a
data set that has no splits. Labels keep the file's spelling unless the layout has `names`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from adapterbank.errors import DataError
from adapterbank.kinds.values import listed
from adapterbank.tasks.tables import Table, read_numbers, read_table, unpacked

WHOLE = "all"
"""The name of the split of a data set that has no splits."""

_PARENTS = (".", "glue_data", "GLUE", "glue", "squad", "SQuAD", "squad_v1", "squad_v2")
"""Folders of a data root that are searched for official downloads."""

Files = Mapping[str, Sequence[Path]]
"""The files of each split."""


class DataLayout(Protocol):
    """One way in which a data set is published."""

    def find(self, root: Path, folder: str) -> Files:
        """Return the files that exist; none if the data set does not have this layout."""

    def read(self, files: Files, text: Sequence[str]) -> dict[str, Table]:
        """Read them, with these names for the text columns."""


def first_file(root: Path, folder: str, choices: Sequence[str]) -> Path | None:
    """Return the first of these files that is in the data root or the data set's folder, compressed or not."""
    bases = [root / parent for parent in (*_PARENTS, folder)]
    tries = (base / name for base in bases for choice in choices for name in (choice, f"{choice}.gz"))
    return next((path for path in tries if path.exists()), None)


def _present(root: Path, folder: str, files: Mapping[str, Sequence[str]]) -> dict[str, list[Path]]:
    found = {split: first_file(root, folder, choices) for split, choices in files.items()}
    return {split: [path] for split, path in found.items() if path is not None}


def decoded(path: Path) -> str:
    """Return the content of an old text file: UTF-8, or else Latin-1, which accepts any byte."""
    data = unpacked(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\0", "")


def _json(path: Path) -> Any:
    try:
        return json.loads(decoded(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON ({error}); download it again.") from None


def renamed(labels: Sequence[Any], names: Mapping[str, str | None]) -> list[str | None]:
    """Return for each label the name of the first key that it starts with; None if there is none."""
    known: dict[Any, str | None] = {}
    for label in labels:
        if label not in known:
            known[label] = next((name for key, name in names.items() if str(label).startswith(key)), None)
    return [known[label] for label in labels]


def _table(columns: dict[str, list[Any]], names: Mapping[str, str | None], source: str) -> Table:
    if names and "label" in columns:
        found, columns["label"] = columns["label"], renamed(columns["label"], names)
        keep = [row for row, label in enumerate(columns["label"]) if label is not None]
        if not keep:
            raise DataError(f"{source}: no label is one of {listed(names)}; it has {listed(dict.fromkeys(found))}.")
        columns = {name: [column[row] for row in keep] for name, column in columns.items()}
    return Table(columns, source)


# --- Parquet ------------------------------------------------------------------------------------------------


_HUB_SPLITS = {"validation": "dev", "validation_matched": "dev", "validation_mismatched": "dev_mismatched",
               "test_matched": "test"}  # fmt: skip
_NUMBERS = ("index", "idx", "id")
"""Usual names of columns that number the rows."""


@dataclass(frozen=True)
class Parquet:
    """A folder of `<split>.parquet`, texts and `label` by name, label names in `labels.json`."""

    labels: tuple[str, ...] = ()
    """Label names in the order of their numbers, if there is no `labels.json`."""

    def find(self, root: Path, folder: str) -> Files:
        """See `DataLayout`."""
        paths = sorted((root / folder).glob("*.parquet")) if folder else []
        stems = {path: path.stem.removesuffix("-00000-of-00001") for path in paths}  # as the hub names its files
        return {_HUB_SPLITS.get(stem, stem): [path] for path, stem in stems.items()}

    def read(self, files: Files, text: Sequence[str]) -> dict[str, Table]:
        """See `DataLayout`; the texts are all columns but the label and the row number, in their order."""
        found = {}
        for split, (path,) in files.items():
            table = read_numbers(path)  # the catalog has its own names for them
            mine = [name for name in table.columns if name not in ("label", *_NUMBERS)]
            if len(mine) != len(text):
                raise DataError(f"{path} has the text columns {listed(mine)}; this data set needs {listed(text)}.")
            columns = {name: table.columns[own] for name, own in zip(text, mine, strict=True)}
            number = next((name for name in _NUMBERS if name in table.columns), None)
            if number is not None and split.startswith("test"):
                columns["index"] = table.columns[number]
            found[split] = Table(columns | {"label": self._words(split, path, table)}, str(path))
        return found

    def _words(self, split: str, path: Path, table: Table) -> list[Any]:
        file = path.with_name("labels.json")
        words = _json(file) if file.is_file() else list(self.labels)
        if not isinstance(words, list):
            raise DataError(f"{file} is not a list of label names; write one, in the order of the numbers.")
        labels: list[Any] = table.columns.get("label", [None] * table.rows)
        if words or split.startswith("test"):
            # Parquet copies of GLUE write -1, null or NaN for labels that only the server knows.
            labels = [None if label in (None, -1) or label != label else label for label in labels]
        places = {label for label in labels if label is not None}
        # A column of integers with missing values may be read as floats: 1.0.
        if not words or not all(isinstance(label, (int, float)) and float(label).is_integer() for label in places):
            return labels
        odd = sorted(label for label in places if not 0 <= label < len(words))
        if odd:
            named = file if file.is_file() else "this data set"
            raise DataError(
                f"{path} has the label {odd[0]:g}, but {named} names {len(words)} ({listed(words)}), from 0; "
                f"write the names of all labels, in the order of their numbers, into {file}."
            )
        return [None if label is None else words[int(label)] for label in labels]


# --- tables -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Delimited:
    """Tables separated by commas (quoted) or by tabs (never quoted): GLUE's files, Kaggle's and others."""

    files: Mapping[str, Sequence[str]]
    """The names that a split's file may have, in the data root or the data set's folder."""
    text: tuple[str | int, ...]
    """Columns by name, or by index in a file without a header."""
    label: str | int | None = "label"
    mark: str = ","
    header: bool = True
    names: Mapping[str, str | None] = field(default_factory=dict)
    """Label names by prefix; rows whose label matches no prefix, or one with None, are left out."""
    headed: Mapping[str, Sequence[str | int]] = field(default_factory=dict)
    """Splits whose file has a different header, with their text columns: GLUE's test sets."""
    joined: bool = False
    """Whether all text columns are joined into one text."""

    def find(self, root: Path, folder: str) -> Files:
        """See `DataLayout`."""
        return _present(root, folder, self.files)

    def read(self, files: Files, text: Sequence[str]) -> dict[str, Table]:
        """See `DataLayout`."""
        return {split: self._read(split, path, text) for split, (path,) in files.items()}

    def _read(self, split: str, path: Path, text: Sequence[str]) -> Table:
        header, rows = _rows(path, self.mark, self.header or split in self.headed)
        places = [_column(header, name, path) for name in self.headed.get(split, self.text)]
        label = (
            _column(header, self.label, path, need=not split.startswith("test")) if split not in self.headed else None
        )
        numbered = ("index", "id") if split.startswith("test") else ()
        number = next((header[name] for name in numbered if name in header), None)
        last = max([*places, *([label] if label is not None else [])])
        # A few rows of the official QQP lack a field; leaving out a test row would shift all rows after it.
        whole = [row for row in rows if len(row) > last]
        if not whole:
            raise DataError(f"{path} has no row with {last + 1} fields or more; is it the original file?")
        if split.startswith("test") and len(whole) < len(rows):
            raise DataError(f"{path} has a row with too few fields, so its rows cannot be numbered; download it again.")
        parts = [[row[place] for row in whole] for place in places]
        if self.joined:
            parts = [[" ".join(row) for row in zip(*parts, strict=True)]]
        columns: dict[str, list[Any]] = dict(zip(text, parts, strict=True))
        if label is not None:
            columns["label"] = [row[label] for row in whole]
        if number is not None:
            columns["index"] = [row[number] for row in whole]
        return _table(columns, self.names, str(path))


def _rows(path: Path, mark: str, header: bool) -> tuple[dict[str, int], list[list[str]]]:
    if mark == "\t":
        text = decoded(path).replace("\r\n", "\n").removesuffix("\n")
        rows = [line.split("\t") for line in text.split("\n")]
    else:
        csv.field_size_limit(2**31 - 1)
        try:
            rows = [row for row in csv.reader(io.StringIO(decoded(path), newline="")) if row]
        except csv.Error as error:
            raise DataError(f"{path} cannot be read as CSV ({error}); download it again.") from None
    if not rows:
        raise DataError(f"{path} is empty; download it again.")
    if not header:
        return {}, rows
    return {name.strip().lower(): place for place, name in enumerate(rows[0])}, rows[1:]


def _column(header: Mapping[str, int], name: Any, path: Path, need: bool = True) -> Any:
    if isinstance(name, int) or (name is None and not need):
        return name
    place = next((place for known, place in header.items() if known.startswith(str(name).lower())), None)
    place = header.get(str(name).lower(), place)
    if place is None and need:
        raise DataError(f"{path} has no column {name!r}; its columns: {listed(header)}. Is it the original file?")
    return place


# --- a label and a text on each line, a file for each class, a folder for each class -------------------------


@dataclass(frozen=True)
class Lines:
    """A label, a space and a text on each line."""

    files: Mapping[str, Sequence[str]]
    names: Mapping[str, str | None] = field(default_factory=dict)

    def find(self, root: Path, folder: str) -> Files:
        """See `DataLayout`."""
        return _present(root, folder, self.files)

    def read(self, files: Files, text: Sequence[str]) -> dict[str, Table]:
        """See `DataLayout`."""
        found = {}
        for split, (path,) in files.items():
            pairs = [line.split(" ", 1) for line in _lines(path) if " " in line]
            columns: dict[str, list[Any]] = {text[0]: [line for _, line in pairs], "label": [name for name, _ in pairs]}
            found[split] = _table(columns, self.names, str(path))
        return found


@dataclass(frozen=True)
class ClassFiles:
    """A file for each class, with a text on each line and no splits."""

    files: Mapping[str, Sequence[str]]
    """The names that a class's file may have."""

    def find(self, root: Path, folder: str) -> Files:
        """See `DataLayout`."""
        found = [first_file(root, folder, choices) for choices in self.files.values()]
        return {WHOLE: [path for path in found if path is not None]} if all(found) else {}

    def read(self, files: Files, text: Sequence[str]) -> dict[str, Table]:
        """See `DataLayout`."""
        rows = [(line, label) for label, path in zip(self.files, files[WHOLE], strict=True) for line in _lines(path)]
        columns: dict[str, list[Any]] = {text[0]: [line for line, _ in rows], "label": [label for _, label in rows]}
        return {WHOLE: Table(columns, str(files[WHOLE][0].parent))}


@dataclass(frozen=True)
class Folders:
    """A folder for each class, with a file for each text."""

    files: Mapping[str, Sequence[str]]
    """The names that a split's folder may have."""
    names: Mapping[str, str | None] = field(default_factory=dict)

    def find(self, root: Path, folder: str) -> Files:
        """See `DataLayout`."""
        return {split: [path] for split, (path,) in _present(root, folder, self.files).items() if path.is_dir()}

    def read(self, files: Files, text: Sequence[str]) -> dict[str, Table]:
        """See `DataLayout`."""
        found = {}
        for split, (path,) in files.items():
            rows = [file for file in sorted(path.glob("*/*")) if file.is_file()]
            columns: dict[str, list[Any]] = {
                text[0]: [decoded(file) for file in rows],
                "label": [file.parent.name for file in rows],
            }
            found[split] = _table(columns, self.names, str(path))
        return found


def _lines(path: Path) -> Iterator[str]:
    # Not splitlines: it would also split texts at control characters, which old files contain.
    return (line for line in re.split(r"\r?\n", decoded(path)) if line.strip())


# --- JSON ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairsJson:
    """One JSON object of splits, each a list of [text, label]: CLINC150."""

    file: str
    splits: Mapping[str, str]
    """Our names for its splits."""

    def find(self, root: Path, folder: str) -> Files:
        """See `DataLayout`."""
        path = first_file(root, folder, (self.file,))
        return dict.fromkeys(self.splits.values(), (path,)) if path else {}

    def read(self, files: Files, text: Sequence[str]) -> dict[str, Table]:
        """See `DataLayout`."""
        path = next(iter(files.values()))[0]
        content = _json(path)
        rows = {ours: content[theirs] for theirs, ours in self.splits.items() if theirs in content}
        odd = [row for mine in rows.values() for row in mine if not isinstance(row, list) or len(row) != 2]
        if odd or not rows:
            raise DataError(f"{path} does not contain lists of [text, label] by split; is it the original file?")
        return {
            split: Table({text[0]: [row[0] for row in mine], "label": [row[1] for row in mine]}, f"{path}, {split}")
            for split, mine in rows.items()
        }


@dataclass(frozen=True)
class SquadJson:
    """SQuAD's own files; `articles` names a file that assigns their articles to splits."""

    files: Mapping[str, Sequence[str]]
    articles: str = ""

    def find(self, root: Path, folder: str) -> Files:
        """See `DataLayout`."""
        found = _present(root, folder, self.files)
        if not self.articles or not found:
            return found
        division = first_file(root, folder, (self.articles,))
        return {split: [*paths, division] for split, paths in found.items()} if division else {}

    def read(self, files: Files, text: Sequence[str]) -> dict[str, Table]:
        """See `DataLayout`; `label` has the answers as {text: […], answer_start: […]}."""
        tables = {paths[0]: read_table(paths[0]) for paths in files.values()}
        found = {}
        for split, (path, *division) in files.items():
            columns = tables[path].columns
            titles = set(columns["title"])
            if division:
                titles &= set(_json(division[0]).get(split, []))
            keep = [row for row, title in enumerate(columns["title"]) if title in titles]
            source = f"{path}, {split} articles" if division else str(path)
            own = {"id": "id", "question": text[0], "context": text[1], "answers": "label"}
            found[split] = Table({ours: [columns[name][row] for row in keep] for name, ours in own.items()}, source)
        return found


# --- splitting a data set -------------------------------------------------------------------------------------


def cut(table: Table, seed: int = 0) -> dict[str, Table]:
    """Split rows into train, dev and test of 80, 10 and 10 per cent, each with the same mix of labels.

    The sizes are those of the paper's Table 2: the integer part of 0.8 n, 0.1 n rounded, and the rest. Rows are
    shuffled within each label and then taken by their rank in it.
    """
    # RandomState, because numpy guarantees that its stream never changes.
    from numpy.random import RandomState

    draw, groups = RandomState(seed), dict[Any, list[int]]()
    for row, label in enumerate(table.columns["label"]):
        groups.setdefault(label, []).append(row)
    ranked: list[tuple[float, int]] = []
    for label in sorted(groups, key=str):
        order = draw.permutation(len(groups[label]))
        ranked += [((rank + 0.5) / len(order), groups[label][place]) for rank, place in enumerate(order)]
    rows = [row for _, row in sorted(ranked)]
    train, dev = 8 * len(rows) // 10, round(len(rows) / 10)
    parts = {"train": rows[:train], "dev": rows[train : train + dev], "test": rows[train + dev :]}
    return {
        split: Table({name: [column[row] for row in mine] for name, column in table.columns.items()}, table.source)
        for split, mine in parts.items()
    }


def joined(tables: Mapping[str, Table]) -> Table:
    """Return the rows of all splits as one table."""
    first = next(iter(tables.values()))
    names = [name for name in first.columns if all(name in table.columns for table in tables.values())]
    columns = {name: [value for table in tables.values() for value in table.columns[name]] for name in names}
    return Table(columns, first.source)
