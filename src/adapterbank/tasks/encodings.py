"""Encodings: which one a file's bytes are in. It knows no tables."""

from __future__ import annotations

import codecs
import re
from typing import Any

from adapterbank.errors import DataError

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is the beginning of this one
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_WHOLE = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
"""A character of two bytes or more in UTF-8."""
_ASCII = bytes(range(128))
_NO_TEXT = bytes([*range(9), 11, *range(14, 32), 0x81, 0x8D, 0x8F, 0x90, 0x9D])
"""Control characters, and what Windows-1252 does not define."""
_SAMPLE = 1 << 16
"""Bytes that are looked at to tell UTF-16 from other bytes."""


def find_encoding(data: bytes, source: Any, *, whole: bool = True) -> str:
    """Return the encoding of a file: UTF-8, UTF-16 or UTF-32, or else Windows-1252; raise if it is none of these.

    With `whole=False` the bytes are the beginning of a file, and the last character may be cut.
    """
    for mark, name in _MARKS:
        if data.startswith(mark):
            return name
    if b"\0" in data[:_SAMPLE] and (wide := _wide(data[:_SAMPLE])):
        return wide
    try:
        codecs.utf_8_decode(data, "strict", whole)
    except UnicodeDecodeError as error:
        if _is_western(data):
            return "cp1252"
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{source} is not UTF-8: byte {error.start} (line {line}) is 0x{data[error.start]:02x}; "
            f"convert it, for instance: iconv -f latin1 -t utf-8 OLD > NEW"
        ) from None
    return "utf-8"


def encoding_note(source: Any, encoding: str) -> str | None:
    """Return the sentence that tells the user of an encoding other than UTF-8."""
    if encoding.startswith("utf-8"):
        return None
    if encoding.startswith("utf"):
        return f"{source} was read as {encoding[:6].upper()}."
    return f"{source} is not UTF-8 and was read as Windows-1252; if letters are wrong, save it as UTF-8."


def _wide(head: bytes) -> str | None:
    """Return which UTF-16 without a mark the bytes are, if every line break, or most characters, are of two bytes."""
    head = head[: len(head) // 2 * 2]
    for name, first in (("utf-16-le", 1), ("utf-16-be", 0)):
        try:
            text = codecs.getincrementaldecoder(name)().decode(head)
        except UnicodeDecodeError:
            continue
        breaks, zeros = text.count("\n"), head[first::2].count(0)
        if "\0" not in text and (2 * breaks > head.count(b"\n") or 5 * zeros >= len(head)):
            return name
    return None


def _is_western(data: bytes) -> bool:
    """Return whether bytes that are not UTF-8 can be Western text: accents among many more plain letters."""
    high = len(data.translate(None, _ASCII))
    letters = sum(data.count(letter) for letter in b"aeinorst")
    if high > letters or len(data.translate(None, _NO_TEXT)) < len(data):
        return False
    # Where most are whole characters of UTF-8, it is UTF-8 with a damaged byte. Counted one by one, to build no list.
    return 2 * sum(len(found[0]) for found in _WHOLE.finditer(data)) < high
