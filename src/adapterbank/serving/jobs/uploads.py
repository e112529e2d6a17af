"""An upload of data files: streamed to disk under a limit, hashed, complete or absent. Knows no runs and no HTTP.

The files of a run arrive end to end in one body: the training data, then dev and test data if there is any.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from adapterbank.errors import InputError
from adapterbank.serving.jobs.run_store import new_id
from adapterbank.storage import files

OTHERS = ("dev", "test")
"""The splits that may follow the training data."""


class TooLarge(InputError):
    """A data file is larger than allowed."""


def check_size(size: int, limit: int) -> None:
    """Refuse a file that is too large."""
    if size > limit:
        raise TooLarge(f"The data file is larger than {limit} bytes; send fewer rows, or use Parquet.")


def data_files(folder: Path, id: str, ending: str) -> dict[str, Path]:
    """Return where the files of a run are, by split."""
    return {"train": folder / f"{id}.{ending}", **{name: folder / f"{id}-{name}.{ending}" for name in OTHERS}}


class Upload:
    """Data files that are written part by part, and deleted unless they are submitted."""

    def __init__(self, folder: Path, ending: str, limit: int, sizes: Mapping[str, int] | None = None) -> None:
        """Start an upload; `sizes` has the bytes of the training data and of each file that follows it, if any does."""
        self.format, self.id, self.size = ending, new_id(), 0
        self.path = folder / f"{self.id}.{ending}"
        self._limit, self._hash = limit, hashlib.sha256()
        self._left = {"train": limit, **(sizes or {})}
        self._others = {name: size for name, size in self._left.items() if name in OTHERS}
        self._paths = data_files(folder, self.id, ending)
        self._parts = {name: folder / f"{files.TEMPORARY}{self.id}-{name}" for name in self._left}
        self.files: dict[str, BinaryIO] = {}
        for name, part in self._parts.items():
            with files.storage_errors(part):
                self.files[name] = open(part, "xb")  # noqa: SIM115 (closed by `finish` or on exit)

    def __enter__(self) -> Upload:
        """Start the upload."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Delete files that were not submitted."""
        try:
            for name, part in self._parts.items():
                with files.storage_errors(part):
                    self.files[name].close()  # writes what is buffered, for which the disk may be full
        finally:
            for part in self._parts.values():
                part.unlink(missing_ok=True)

    def write(self, part: bytes) -> None:
        """Add bytes; refuse as soon as they are too many."""
        self.size += len(part)
        check_size(self.size, self._limit)
        self._hash.update(part)
        for name, left in self._left.items():
            mine, part = part[:left], part[left:]
            self._left[name] -= len(mine)
            with files.storage_errors(self._parts[name]):
                self.files[name].write(mine)

    def finish(self) -> dict[str, Any]:
        """Close the files, give them their final names, and return their format, size and hash."""
        if not self.size:
            raise InputError(
                "The request has no body; send the data file as the body: curl --data-binary @reviews.csv …"
            )
        if self._others and any(self._left.values()):
            raise InputError("The body is shorter than the files that it should hold; send all of them, end to end.")
        for name, part in self._parts.items():
            with files.storage_errors(part):
                self.files[name].flush()
                os.fsync(self.files[name].fileno())
                self.files[name].close()
        for name, part in reversed(self._parts.items()):  # the training data last: it stands for all
            with files.storage_errors(part):
                os.replace(part, self._paths[name])
        return {"format": self.format, "bytes": self.size, "sha256": self._hash.hexdigest(), **self._others}

    def discard(self) -> None:
        """Delete files that have their final names."""
        for path in self._paths.values():
            path.unlink(missing_ok=True)
