"""What may be kept to save work and thrown away at any time: named arrays under a key. Knows no texts or tokens.

Entries are written whole or not at all. One that is damaged counts as absent, and a disk that refuses costs the work
again, never the run.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from adapterbank.errors import StorageError
from adapterbank.storage import files as storage

FOLDER = "ADAPTERBANK_CACHE"
"""The environment variable that names the folder."""
_ENDING = ".npz"


def folder() -> Path:
    """Give the folder of the cache: the environment's, or `adapterbank` in the user's cache folder."""
    named = os.environ.get(FOLDER)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or ("" if named else Path.home() / ".cache")
        return Path(named).expanduser() if named else Path(base) / "adapterbank"
    except RuntimeError:  # a user, or a home, that is not there
        told = f"{FOLDER} names {named!r}" if named else "The cache lies in the user's home"
        raise StorageError(f"{told}, but there is no such home; name a folder with {FOLDER}.") from None


def get(key: str) -> dict[str, np.ndarray] | None:
    """Give the arrays of a key, or None where there are none that are whole."""
    try:
        # Our own handle: np.load leaves one open where it meets a damaged archive.
        with open(_path(key), "rb") as file, np.load(file, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        # RuntimeError: a flipped bit may say that the archive is encrypted, or packed in a way nobody knows.
        return None


def put(key: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Keep arrays under a key, if the disk lets us."""
    held = io.BytesIO()
    np.savez(held, **arrays)  # type: ignore[arg-type]
    try:
        storage.atomic_write(_path(key), held.getvalue())
    except (OSError, StorageError):
        return


def usage() -> tuple[int, int]:
    """Give the number of entries and their bytes."""
    found = _entries()
    return len(found), sum(storage.size_of(path) for path in found)


def clear() -> tuple[int, int]:
    """Remove every entry, and nothing else that lies in the folder; gives what `usage` gave before."""
    before = usage()
    with storage.refusals_explained(folder()):
        for path in [*_entries(), *folder().glob(f"{storage.TEMPORARY}*")]:
            path.unlink(missing_ok=True)
    return before


def _path(key: str) -> Path:
    return folder() / f"{key}{_ENDING}"


def _entries() -> list[Path]:
    return sorted(folder().glob(f"*{_ENDING}"))
