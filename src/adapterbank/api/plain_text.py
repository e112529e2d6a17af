"""Texts of others, made safe to show: a terminal must not obey them, and a page must not run them."""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""What a terminal obeys instead of showing it, and halves of characters, which cannot be printed."""


def escaped(text: str, keep: str = "") -> str:
    """Return text with its control characters written out, as Python writes them, except those to `keep`.

    Names, labels and messages may come from files that others wrote; a terminal must not obey them.
    """
    return CONTROL.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)
