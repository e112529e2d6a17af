"""Values as text: texts of others made safe to show, counts, sizes and durations with their units."""

from __future__ import annotations

from adapterbank.tasks.writers import CONTROL

LONGEST = 200
"""Characters of a name or a label that are shown; JSON has all of them."""


def escaped(text: str, keep: str = "") -> str:
    """Return text with its control characters written out, as Python writes them, except those to `keep`.

    Names, labels and messages may come from files that others wrote; a terminal must not obey them.
    """
    return CONTROL.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun: `1 task`, `2 tasks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_size(count: float) -> str:
    """Return a number of bytes with its unit: `812 B`, `2.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def format_duration(seconds: float | None) -> str:
    """Return a duration with its unit: `5 s`, `10 min`, `2.0 h`; `unknown time` for None."""
    if seconds is None:
        return "unknown time"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
