"""Limits on a table from outside, and a count against them while the table is read. Knows no formats."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from adapterbank.errors import DataError

MAX_DEPTH = 32
"""Levels of lists and objects in a value, whatever the limits: deeper values could not be printed."""
_ROW_TEXTS = 4
"""A JSON row may have the characters of this many of the longest texts."""
_POINTER = 8
"""Bytes of a reference to a value."""
_JSON_SIGNS = {"{": 64, "[": 64, ",": 64, ":": 128}
"""Bytes in memory that a sign of JSON may stand for: an object, a list, a further value, a key with its value."""
_TAILS, _NARROW, _MIDDLE = bytes(range(0x80, 0xC0)), bytes(range(0xC4)), bytes(range(0xF0))
"""Bytes of UTF-8: those that continue a character, and all those of texts with one or two bytes a character."""

_DECODED = {"cp1252": 2, "utf-16": 2, "utf-16-le": 2, "utf-16-be": 2, "utf-32": 1}
"""Bytes of text in memory, at most, for each byte of the file, by its encoding."""


@dataclass(frozen=True)
class TableLimits:
    """The most that a table may hold."""

    rows: int = 1_000_000
    columns: int = 1_000
    text: int = 1_000_000
    """Characters of one text."""
    memory: int = 1 << 30
    """Bytes of all values in memory, whatever the size of the file."""


DEFAULT_TABLE_LIMITS = TableLimits()


class TableBudget:
    """What has been read of one file; raises as soon as it exceeds the limits. Without limits nothing is refused."""

    def __init__(self, source: Any, limits: TableLimits | None = None) -> None:
        """Take the name of the file, for messages."""
        self.source, self.limits, self.used = source, limits, 0

    def open(self, path: Path) -> BinaryIO:
        """Open the file to read; under limits only a regular one, without waiting for a pipe or a device."""
        if self.limits is None:
            return path.open("rb")
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), "rb")
        try:
            self.check_regular(os.fstat(file.fileno()))
        except DataError:
            file.close()
            raise
        return file

    def check_regular(self, status: os.stat_result) -> None:
        """Refuse a pipe, a device or a folder, which have no size."""
        if self.limits and not stat.S_ISREG(status.st_mode):
            raise DataError(f"{self.source} is not a regular file; copy its content into one.")

    def check_rows(self, count: int) -> None:
        """Refuse too many rows."""
        if self.limits and count > self.limits.rows:
            self._refuse(f"has more than {self.limits.rows:,} rows")

    def check_columns(self, count: int) -> None:
        """Refuse too many columns."""
        if self.limits and count > self.limits.columns:
            self._refuse(f"has more than {self.limits.columns:,} columns")

    def check_text(self, characters: int) -> None:
        """Refuse a text that is too long."""
        if self.limits and characters > self.limits.text:
            self._refuse(f"has a text of more than {self.limits.text:,} characters")

    def check_row_text(self, characters: int) -> None:
        """Refuse a row that is too long, before it is parsed."""
        if self.limits and characters > _ROW_TEXTS * self.limits.text:
            self._refuse(f"has a row of more than {_ROW_TEXTS * self.limits.text:,} characters")

    def check_memory(self, size: int) -> None:
        """Refuse what would take too much memory beside all that has been read."""
        if self.limits and self.used + size > self.limits.memory:
            self._refuse(f"takes more than {self.limits.memory:,} bytes once it is decoded")

    def check_encoded(self, data: bytes, encoding: str = "utf-8") -> None:
        """Refuse what is too large as text, before it is decoded: one emoji makes every character four bytes."""
        if self.limits and encoding in _DECODED:
            self.check_memory((1 + _DECODED[encoding]) * len(data))
        elif self.limits and not data.isascii():
            width = 4 if data.translate(None, _MIDDLE) else 2 if data.translate(None, _NARROW) else 1
            # The bytes count too: to widen a text the decoder copies it, while they are still in memory.
            self.check_memory(len(data) + width * len(data.translate(None, _TAILS)))

    def check_json(self, text: str) -> None:
        """Refuse JSON whose values would take too much memory, before it is parsed."""
        if self.limits:
            self.check_memory(sum(size * text.count(sign) for sign, size in _JSON_SIGNS.items()))

    def add(self, size: int) -> None:
        """Count bytes."""
        self.check_memory(size)
        self.used += size

    def add_row(self, values: Iterable[Any], rows: int, columns: int) -> None:
        """Count a row; `rows` and `columns` are those of the table so far."""
        if self.limits is None:
            return
        self.check_rows(rows)
        self.check_columns(columns)
        self.add(self._size(values))
        self.check_memory(_POINTER * rows * columns)

    def _size(self, values: Iterable[Any]) -> int:
        """Return the bytes of values and of all that they contain."""
        size, left = 0, list(values)
        while left:
            value = left.pop()
            size += sys.getsizeof(value)
            if isinstance(value, str):
                self.check_text(len(value))
            elif isinstance(value, dict):
                left += [*value.keys(), *value.values()]
            elif isinstance(value, list):
                left += value
        return size

    def _refuse(self, problem: str) -> None:
        raise DataError(f"{self.source} {problem}, which is the limit; use less data.")


def check_depth(value: Any, where: str) -> None:
    """Refuse a value of lists and objects with too many levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inside = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        level = [one for values in inside for one in values]
        if not level:
            return
    raise DataError(f"{where}: a value has more than {MAX_DEPTH} levels; write texts and labels.")
