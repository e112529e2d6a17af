"""Texts whose words are known. Kinds with an answer for each word share this file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from adapterbank.kinds.labels import is_list_text, items_of
from adapterbank.kinds.values import as_text

Span = tuple[int, int]
"""The first and the last-plus-one character of a word."""
_WORD = re.compile(r"https?://\S+|[@#]?\w+(?:[-.'’_]\w+)*|[^\w\s]")
"""A word of a plain text: an address, a word with its inner marks (`well-known`, `don't`, `U.S`), or a single mark."""


class Words(str):
    """A text that was given as words: the words with blanks between them. Anything else may treat it as a text."""

    spans: tuple[Span, ...]
    """The place of each word in the text; a word without characters is empty."""

    def __new__(cls, text: str, spans: Iterable[Span] = ()) -> Words:
        """Create it from the text and the place of each word."""
        made = super().__new__(cls, text)
        made.spans = tuple(spans)
        return made

    @classmethod
    def of(cls, words: Iterable[object]) -> Words:
        """Join words to a text."""
        texts = [as_text(word) for word in words]
        starts = [0]
        for text in texts:
            starts.append(starts[-1] + len(text) + 1)
        return cls(" ".join(texts), ((start, end - 1) for start, end in pairwise(starts)))


def joined(value: Any) -> Any:
    """Return a list of words as a text, also one that was written as text, `['a', 'b']`; any other value as it is."""
    if is_list_text(value):
        return Words.of(items_of(value))
    is_list = isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value)
    return Words.of(value) if is_list else value


def word_spans(text: str) -> tuple[Span, ...]:
    """Return the place of each word of a text: the words it was given as, or those of a plain text."""
    if isinstance(text, Words):
        return text.spans
    return tuple(found.span() for found in _WORD.finditer(text))
