"""What unfinished runs stand on: their folders say so, and these packages are not removed. Knows no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from adapterbank import errors
from adapterbank.storage import files, reading

_FILE, STATE = "stands-on.json", "state.json"
_LARGEST = 1 << 16
"""The most bytes of such a file."""


@contextlib.contextmanager
def leased(folder: Path, task: str, refs: Sequence[str]) -> Iterator[None]:
    """Say in a run's folder, which the run has claimed, what it stands on; afterwards, only as long as a state is kept.

    Whoever is killed before a state is saved leaves a file that nobody heeds: its folder is claimed no longer.
    """
    if not refs:
        yield
        return
    files.write_json(folder / _FILE, reading.seal({"task": task, "requires": list(refs)}))
    try:
        yield
    finally:
        if not os.path.lexists(folder / STATE):
            with contextlib.suppress(OSError):
                (folder / _FILE).unlink()


def unfinished(runs: Path) -> dict[str, list[str]]:
    """Return the runs that stand on each package, as the middle of a sentence: those going on, or with a state."""
    found: dict[str, list[str]] = {}
    for folder in sorted(runs.iterdir()) if os.path.isdir(runs) else ():
        if not os.path.lexists(folder / _FILE) or not (os.path.lexists(folder / STATE) or _is_claimed(folder)):
            continue
        with contextlib.suppress(errors.AdapterbankError, OSError, TypeError, KeyError):
            about = reading.read_checked(folder / _FILE, _LARGEST)
            for ref in about["requires"]:
                found.setdefault(str(ref), []).append(f"the unfinished run {folder.name} of {str(about['task'])!r}")
    return found


def _is_claimed(folder: Path) -> bool:
    with files.claimed(folder) as free:
        return not free
