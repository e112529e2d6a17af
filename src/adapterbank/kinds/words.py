"""Texts whose words are known. Kinds with an answer for each word share this file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any
from unicodedata import category

from adapterbank.kinds.values import as_text

Span = tuple[int, int]
"""The first and the last-plus-one character of a word."""
_IDEOGRAPHS = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Characters that are words of their own, as they are tokens of their own in BERT."""
_QUOTED = r"""(?:'(?:[^'\\\n]|\\.)*+'|"(?:[^"\\\n]|\\.)*+")"""
_WRITTEN = re.compile(rf"\s*\[\s*{_QUOTED}(?:\s*,\s*{_QUOTED})*+\s*,?\s*\]\s*", re.DOTALL)
"""A list of words as Python or JSON writes it; `[a]` is a text with brackets."""
_ESCAPE = re.compile(r"\\(u[0-9a-f]{4}|U000[0-9a-f]{5}|U0010[0-9a-f]{4}|x[0-9a-f]{2}|.)", re.DOTALL)
_LAST_MARK = 0x20000
"""Beyond are ideographs, and marks that no text has."""


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
    if isinstance(value, str) and value.lstrip()[:1] == "[" and _WRITTEN.fullmatch(value):
        return Words.of(_written_words(value))
    is_list = isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value)
    return Words.of(value) if is_list else value


def _written_words(text: str) -> list[str]:
    try:
        return [str(word) for word in json.loads(text)]
    except ValueError:
        return [_ESCAPE.sub(_unescaped, quoted[1:-1]) for quoted in re.findall(_QUOTED, text, re.DOTALL)]


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else {"n": "\n", "t": "\t", "r": "\r"}.get(code, code)


def word_spans(text: str) -> tuple[Span, ...]:
    """Return the place of each word of a text: the words it was given as, or those of a plain text."""
    if isinstance(text, Words):
        return text.spans
    return tuple(found.span() for found in _word_pattern().finditer(text))


@cache
def _word_pattern() -> re.Pattern[str]:
    """Return the pattern of a word of a plain text.

    It is an address, an ideograph, a word with its inner marks (`well-known`, `don't`, `U.S`), or a single mark.
    Letters and symbols keep the marks that combine with them: accents, vowel signs, joiners, tones of skin.
    """
    marks = "".join(map(chr, (code for code in range(0x300, _LAST_MARK) if category(chr(code))[0] == "M")))
    letter, symbol = rf"(?:[^\W{_IDEOGRAPHS}][{marks}]*)", rf"[^\w\s][{marks}\U0001f3fb-\U0001f3ff]*"
    words = rf"[@#]?{letter}+(?:[-.'’_\u200c\u200d]{letter}+)*"
    return re.compile(rf"https?://\S*[\w/]|[{_IDEOGRAPHS}][{marks}]*|{words}|{symbol}(?:\u200d{symbol})*")
