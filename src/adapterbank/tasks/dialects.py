"""Dialects of CSV and TSV files: the separator, the quoting and the header, found or as stated. Knows no columns."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from typing import Any

from adapterbank.errors import DataError

SEPARATORS = (",", ";", "\t", "|")
"""What may separate fields if the user states nothing."""
STATED = {",": ",", ";": ";", "|": "|", ":": ":", "tab": "\t", "\t": "\t", "comma": ",", "semicolon": ";", "bar": "|"}
"""How a user may state a separator."""
_SAMPLE = 1 << 16
"""Characters that the separator is found in."""
_STATED = re.compile(r"\"?sep=(.)\"?\r?\n")  # Excel's own first line
_FIELD = re.compile(r'"(?:[^"]|"")*+"(?=[\t\r\n]|\Z)|[^\t\r\n"]*+(?=[\t\r\n]|\Z)')


@dataclass(frozen=True)
class FileForm:
    """What the user states of a file of separated fields; None for what is to be found."""

    separator: str | None = None
    header: bool | None = None
    """Whether the first line names the columns; by default it does."""


@dataclass(frozen=True)
class Dialect:
    """How the fields of a file are separated."""

    separator: str
    quoted: bool = True
    """Whether a field in quotes may contain separators and line breaks."""
    skip: int = 0
    """Characters before the first row."""

    @property
    def options(self) -> dict[str, Any]:
        """What `csv.reader` is given."""
        quoting = csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE
        return {"delimiter": self.separator, "quoting": quoting, "strict": True}


def separator_of(stated: str) -> str:
    """Return the separator that a user means; raise ValueError if it cannot be one."""
    if stated not in STATED:
        raise ValueError("one of , ; | : or tab")
    return STATED[stated]


def find_dialect(text: str, usual: str, form: FileForm, source: Any) -> Dialect:
    """Return the dialect of a file from its text, or the beginning of it.

    `usual` is the separator of its extension. Another one is found only if it alone fits the header and every row;
    where two fit, the file is refused.
    """
    stated = _STATED.match(text)
    skip = stated.end() if stated else 0
    if form.separator is not None:
        mark = separator_of(form.separator)
    else:
        mark = stated[1] if stated else _found(text[:_SAMPLE], usual, source)
    # A .tsv file is unquoted: GLUE's contain stray quotes, which would otherwise swallow the lines after them.
    return Dialect(mark, mark != "\t" or usual != "\t" or is_quoted(text), skip)


def is_quoted(text: str) -> bool:
    """Return whether a tab-separated text was written with quotes.

    Then every field is in quotes or has none, and in one of them, at least, quotes are doubled or a break is quoted.
    """
    if '"' not in text:
        return False
    place, proof = 0, False
    while place < len(text):
        found = _FIELD.match(text, place)
        if found is None:
            return False
        field = found[0]
        proof = proof or (field.startswith('"') and any(sign in field[1:-1] for sign in ('"', "\t", "\n", "\r")))
        place = found.end() + 1
    return proof


def _found(sample: str, usual: str, source: Any) -> str:
    widths = {mark: _widths(sample, mark, quoted=usual != "\t") for mark in SEPARATORS}
    wide = [mark for mark in SEPARATORS if widths[mark][0] > 1]
    even = [mark for mark in wide if len(set(widths[mark])) == 1]
    if len(even) == 1:
        return even[0]
    if not even and (usual in wide or not wide):
        return usual
    if not even and len(wide) == 1:
        return wide[0]  # the reader names the line that does not fit
    choices = " or ".join(repr(mark) if mark != "\t" else "a tab" for mark in even or wide)
    raise DataError(f"{source} may separate its fields with {choices}; state which with --separator.")


def _widths(sample: str, mark: str, *, quoted: bool) -> list[int]:
    """Return the number of fields in each record; 0 for one that cannot be read."""
    lines = sample.replace("\r\n", "\n").replace("\r", "\n")
    if len(sample) == _SAMPLE:
        lines = lines[: lines.rfind("\n") + 1] or lines
    found: list[int] = []
    try:
        found += [
            len(row) for row in csv.reader(io.StringIO(lines, newline=""), **Dialect(mark, quoted).options) if row
        ]
    except csv.Error:
        first = next(iter(csv.reader(lines.lstrip("\n").split("\n")[:1], delimiter=mark)), [])
        found = [len(first), 0]
    return found or [1]
