"""CoNLL and CoNLL-U texts as columns of sentences: each cell is the list of a sentence's words, or of their tags.

A line holds one word and its tags, and an empty line ends a sentence. This module knows no files and no encodings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from adapterbank.errors import DataError
from adapterbank.kinds.values import short
from adapterbank.tasks.limits import TableBudget

MOST_COLUMNS = 10
"""More columns are not those of a CoNLL file; the widest, CoNLL-U, has ten."""
CONLLU = {"tokens": 1, "lemmas": 2, "upos": 3, "xpos": 4, "feats": 5, "deprels": 7}
"""The columns of a CoNLL-U table, and their places in a line."""

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_BLANKS = re.compile(r"[ \t]+")
_KEYED = re.compile(r"# *\S+ = ")
"""A comment with a key, such as `# sent_id = 3`, which may have as many blanks as the lines of words."""
_DOCUMENT = "-DOCSTART-"
"""The first word of a line that starts a document."""
_SHOWN = 5
"""Line numbers in a note."""
_LINE_BYTES = 256
"""Bytes in memory of a line of a sentence and of its fields, until the sentence is counted; its texts are bounded."""
_WORD = re.compile(r"[0-9]+")
_NO_WORD = re.compile(r"[0-9]+[-.][0-9]+")
"""The id of a line of CoNLL-U that is no word of its own: the span of a contraction (1-2), or an empty node (8.1)."""


class _ConllLine(NamedTuple):
    number: int
    text: str
    """Without the line end, and without blanks and tabs before it."""


class _LineShape(NamedTuple):
    """How the lines of a file are divided; the first line of a word decides it."""

    tabs: bool
    width: int
    line: int
    """The number of that line, for messages."""

    def fields(self, line: str) -> list[str]:
        return split(line, self.tabs)

    def is_comment(self, line: str) -> bool:
        """Return whether a line starts like a comment and cannot be a word: `#` is a word of many tweets."""
        if not line.startswith("# "):
            return line == "#"
        mixed = not self.tabs and ("\t" in line or _KEYED.match(line) is not None)
        return mixed or len(self.fields(line)) != self.width


class _LineCount:
    """A count of lines, and the numbers of the first few for a note."""

    def __init__(self) -> None:
        self.count, self._first = 0, list[int]()

    def add(self, number: int) -> None:
        self.count += 1
        if len(self._first) < _SHOWN:
            self._first.append(number)

    def __str__(self) -> str:
        shown = ", ".join(map(str, self._first)) + (", …" if self.count > _SHOWN else "")
        return f"1 line ({shown})" if self.count == 1 else f"{self.count:,} lines ({shown})"


def read_conll(text: str, budget: TableBudget) -> tuple[dict[str, list[Any]], list[str]]:
    """Return the columns `tokens`, `column_2`, `column_3`, … and `tags`, and notes for the user.

    The first column holds the words, and the last one `tags`. Tabs or blanks divide a line, as they divide the first
    one; where tabs do, a word may contain blanks.
    """
    shape = _find_shape(text, budget)
    names = ["tokens", *(f"column_{place}" for place in range(2, shape.width)), "tags"]
    columns: list[list[list[str]]] = [[] for _ in names]
    comments, wordless = _LineCount(), _LineCount()
    for lines in _sentences(text, budget):
        words = []
        for number, line in lines:
            if shape.is_comment(line):
                comments.add(number)
            elif not line.startswith(_DOCUMENT):
                words.append(_checked(shape.fields(line), shape, number, line, budget))
                if not words[-1][0]:
                    wordless.add(number)
        _add(words, columns, budget)
    notes = []
    if wordless.count:
        notes.append(f"{budget.source}: {wordless} with a tag but no word; an empty word keeps the place.")
    if comments.count:
        notes.append(f"{budget.source}: skipped {comments} that start with '#' and cannot be a word.")
    return dict(zip(names, columns, strict=True)), notes


def read_conllu(text: str, budget: TableBudget) -> tuple[dict[str, list[Any]], list[str]]:
    """Return the columns of `CONLLU`, with the syntactic words as tokens, and no notes.

    Universal Dependencies scores syntactic words: the parts of a contraction (`1-2`) are words and it is not, and
    empty nodes (`8.1`) are no words of the text.
    """
    columns: list[list[list[str]]] = [[] for _ in CONLLU]
    for lines in _sentences(text, budget):
        words = []
        for number, line in lines:
            if line.startswith("#"):
                continue
            fields = split(line, tabs=True)
            if len(fields) != MOST_COLUMNS or not (_WORD.fullmatch(fields[0]) or _NO_WORD.fullmatch(fields[0])):
                raise DataError(
                    f"{budget.source}, line {number}: {short(line)!r} is not a word of CoNLL-U; write its number and "
                    f"nine more fields with tabs between them, or name the file .conll."
                )
            if _WORD.fullmatch(fields[0]):
                words.append([fields[place] for place in CONLLU.values()])
        _add(words, columns, budget)
    return dict(zip(CONLLU, columns, strict=True)), []


def split(line: str, tabs: bool) -> list[str]:
    """Return the fields of a line, without the blanks around them."""
    return [field.strip(" ") for field in line.split("\t")] if tabs else _BLANKS.split(line.strip(" \t"))


def _lines(text: str) -> Iterator[_ConllLine]:
    # Not str.splitlines, which also splits at characters that tweets contain, nor str.split, which takes more memory.
    for number, found in enumerate(_LINE.finditer(text), 1):
        yield _ConllLine(number, found[0].rstrip(" \t\r\n"))


def _sentences(text: str, budget: TableBudget) -> Iterator[list[_ConllLine]]:
    """Yield the lines of each sentence; a line of blanks and tabs divides them as an empty one does."""
    sentence: list[_ConllLine] = []
    characters = 0
    for line in _lines(text):
        if line.text:
            characters += len(line.text) + 1
            budget.check_row_text(characters)
            sentence.append(line)
            budget.check_memory(_LINE_BYTES * len(sentence))
        elif sentence:
            yield sentence
            sentence, characters = [], 0
    if sentence:
        yield sentence


def _find_shape(text: str, budget: TableBudget) -> _LineShape:
    """Return how the first line that is surely a word is divided."""
    for number, line in _lines(text):
        budget.check_row_text(len(line))
        if not line or line.startswith("# ") or line == "#" or line.startswith(_DOCUMENT):
            continue
        shape = _LineShape("\t" in line, len(split(line, "\t" in line)), number)
        if shape.width == 1:
            raise DataError(
                f"{budget.source}, line {number}: {short(line)!r} is one column; write each word and its tag on a line "
                f"of their own, with a tab between them, and an empty line after each sentence."
            )
        if shape.width > MOST_COLUMNS:
            raise DataError(
                f"{budget.source}, line {number}: {short(line)!r} has {shape.width} columns, but a CoNLL file has at "
                f"most {MOST_COLUMNS}; write one word and its tags on each line."
            )
        return shape
    raise DataError(f"{budget.source} has no words, only comments; write a word and its tag on each line.")


def _checked(fields: list[str], shape: _LineShape, number: int, line: str, budget: TableBudget) -> list[str]:
    if len(fields) == shape.width:
        return fields
    mark = "tabs" if shape.tabs else "blanks"
    count = "1 column" if len(fields) == 1 else f"{len(fields)} columns"
    raise DataError(
        f"{budget.source}, line {number}: {short(line)!r} has {count}, but line {shape.line} has {shape.width}; write "
        f"a word and {'its tag' if shape.width == 2 else f'{shape.width - 1} tags'} with {mark} between them."
    )


def _add(words: list[list[str]], columns: list[list[list[str]]], budget: TableBudget) -> None:
    """Add a sentence to the columns; one without words, such as the line that starts a document, is none."""
    if words:
        cells = [list(cell) for cell in zip(*words, strict=True)]
        budget.add_row(cells, len(columns[0]) + 1, len(columns))
        for column, cell in zip(columns, cells, strict=True):
            column.append(cell)
