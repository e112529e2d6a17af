"""Values of table cells, and how messages quote them. Plain functions; they know no tables, labels or tasks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def is_missing(value: Any) -> bool:
    """Return whether a cell is empty: None, NaN or only whitespace."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def as_number(value: Any) -> float | None:
    """Return the number in a cell, or None. A boolean is a word, and 1_000 is not a number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return float(value) if _NUMBER.fullmatch(value.strip()) else None
    try:
        return float(value) if isinstance(value, (int, float, Decimal)) else None
    except OverflowError:
        return math.inf


def as_text(value: Any) -> str:
    """Return the text of a cell; an empty one for an empty cell."""
    text = value if isinstance(value, str) else "" if is_missing(value) else str(value)
    # JSON can carry half of a surrogate pair, which no tokenizer takes.
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def listed(names: Iterable[Any], most: int = 12) -> str:
    """Return names as a list for a message: only the first few of many."""
    shown = [short(name) for name in names]
    more = f", … ({len(shown)} in all)" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def short(value: Any, most: int = 40) -> str:
    """Return a value as text for a message, truncated if it is long."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"
