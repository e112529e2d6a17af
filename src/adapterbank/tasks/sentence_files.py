"""The layout of data sets of tagged sentences: files of CoNLL or CoNLL-U. It knows no catalog and no tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterbank.errors import DataError
from adapterbank.kinds.values import listed
from adapterbank.tasks.dialects import FileForm
from adapterbank.tasks.layouts import Files, first_file
from adapterbank.tasks.limits import TableBudget
from adapterbank.tasks.tables import READERS, Table, ending_of


@dataclass(frozen=True)
class ConllFiles:
    """Files of sentences; a split may be several files, whose sentences follow each other."""

    files: Mapping[str, Sequence[str | tuple[str, ...]]]
    """What a split may be called: alternatives, each a file or the files that make up the split."""
    tags: str = "tags"
    """The column that becomes `label`: `tags` of CoNLL, or one of `conll.CONLLU`."""

    def find(self, root: Path, folder: str) -> Files:
        """See `DataLayout`; a split is there if all its files are."""
        found = {split: self._first(root, folder, choices) for split, choices in self.files.items()}
        return {split: paths for split, paths in found.items() if paths}

    def read(self, files: Files, text: Sequence[str]) -> dict[str, Table]:
        """See `DataLayout`; a text is the list of its words, and its label the list of their tags."""
        return {split: self._joined([self._read(path) for path in paths], text[0]) for split, paths in files.items()}

    def _first(self, root: Path, folder: str, choices: Sequence[str | tuple[str, ...]]) -> list[Path]:
        for choice in choices:
            names = (choice,) if isinstance(choice, str) else choice
            paths = [path for name in names if (path := first_file(root, folder, (name,)))]
            if len(paths) == len(names):
                return paths
        return []

    def _read(self, path: Path) -> Table:
        # Some are published under names with other extensions, such as emerging.test.annotated.
        ending = ending_of(path) if ending_of(path) in READERS else ".conll"
        table = READERS[ending](path, TableBudget(path), FileForm())
        if not table.rows or self.tags not in table.columns:
            problem = f"{path} has {table.rows} sentences with the columns {listed(table.columns)}"
            raise DataError(f"{problem}, but this data set needs {self.tags!r}; is it the original file?")
        return table

    def _joined(self, parts: Sequence[Table], text: str) -> Table:
        columns: dict[str, list[Any]] = {
            text: [words for part in parts for words in part.columns["tokens"]],
            "label": [tags for part in parts for tags in part.columns[self.tags]],
        }
        source = " + ".join([parts[0].source, *(Path(part.source).name for part in parts[1:])])
        return Table(columns, source, tuple(note for part in parts for note in part.notes))
