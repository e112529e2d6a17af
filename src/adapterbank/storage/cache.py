"""A cache on disk: named arrays by key, which can be deleted at any time. Knows no texts or tokens.

Entries are written atomically. A damaged entry counts as absent, and an entry that cannot be written is computed again
next time; neither ever fails a run.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from adapterbank.errors import StorageError
from adapterbank.storage import files
from adapterbank.storage.reading import open_file

FOLDER = "ADAPTERBANK_CACHE"
"""The environment variable that names the folder."""
_ENDING = ".npz"
_CHECKSUM = 32
"""Bytes of the sha256 at the end of an entry."""


def folder() -> Path:
    """Return the folder of the cache: ADAPTERBANK_CACHE, or `adapterbank` in the user's cache folder."""
    named = os.environ.get(FOLDER)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or ("" if named else Path.home() / ".cache")
        return Path(named).expanduser() if named else Path(base) / "adapterbank"
    except RuntimeError:  # the user, or the home folder, does not exist
        place = f"{FOLDER} is {named!r}" if named else "The cache is located in the user's home folder"
        raise StorageError(f"{place}, but there is no such home folder; set {FOLDER} to a folder.") from None


def get(key: str) -> dict[str, np.ndarray] | None:
    """Return the arrays of a key, or None if there is no intact entry."""
    try:
        with open_file(_path(key)) as (file, size):
            data = file.read(size)
        # Our own checksum, because a damaged list of an archive's entries may still be the list of fewer entries.
        if hashlib.sha256(data[:-_CHECKSUM]).digest() != data[-_CHECKSUM:]:
            return None
        with np.load(io.BytesIO(data[:-_CHECKSUM]), allow_pickle=False) as archive:
            # Entries are stored uncompressed, so that none is larger than the file, whatever the archive says.
            if sum(entry.file_size for entry in archive.zip.infolist()) > size:
                return None
            found = {name: archive[name] for name in archive.files}
    except Exception:
        # All of them: zipfile, zlib, tokenize, ast and numpy read these bytes in turn and document no common error.
        return None
    # A member that is no array is returned as bytes.
    return found if all(isinstance(value, np.ndarray) for value in found.values()) else None


def put(key: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Store arrays under a key; a disk error is ignored."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    try:
        data = buffer.getvalue()
        files.atomic_write(_path(key), data + hashlib.sha256(data).digest())
    except (OSError, StorageError):
        return


def usage() -> tuple[int, int]:
    """Return the number of entries and their size in bytes."""
    found = _entries()
    return len(found), sum(files.size_of(path) for path in found)


def clear() -> tuple[int, int]:
    """Delete every entry, and no other file of the folder; return the `usage` before."""
    before = usage()
    with files.storage_errors(folder()):
        for path in [*_entries(), *folder().glob(f"{files.TEMPORARY}*")]:
            path.unlink(missing_ok=True)
    return before


def _path(key: str) -> Path:
    return folder() / f"{key}{_ENDING}"


def _entries() -> list[Path]:
    return sorted(folder().glob(f"*{_ENDING}"))
