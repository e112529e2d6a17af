"""An upload of a data file: streamed to disk under a limit, hashed, complete or absent. Knows no runs and no HTTP."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from adapterbank.errors import InputError
from adapterbank.serving.jobs.run_store import new_id
from adapterbank.storage import files


class TooLarge(InputError):
    """A data file is larger than allowed."""


def check_size(size: int, limit: int) -> None:
    """Refuse a file that is too large."""
    if size > limit:
        raise TooLarge(f"The data file is larger than {limit} bytes; send fewer rows, or use Parquet.")


class Upload:
    """A data file that is written part by part, and deleted unless it is submitted."""

    def __init__(self, folder: Path, ending: str, limit: int) -> None:
        self.format, self.id, self.size = ending, new_id(), 0
        self.path = folder / f"{self.id}.{ending}"
        self._limit, self._hash = limit, hashlib.sha256()
        self._part = folder / f"{files.TEMPORARY}{self.id}"
        with files.storage_errors(self._part):
            self.file = open(self._part, "xb")  # noqa: SIM115 (closed by `finish` or on exit)

    def __enter__(self) -> Upload:
        """Start the upload."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Delete a file that was not submitted."""
        try:
            with files.storage_errors(self._part):
                self.file.close()  # writes what is buffered, for which the disk may be full
        finally:
            self._part.unlink(missing_ok=True)

    def write(self, part: bytes) -> None:
        """Add bytes; refuse as soon as they are too many."""
        self.size += len(part)
        check_size(self.size, self._limit)
        self._hash.update(part)
        with files.storage_errors(self._part):
            self.file.write(part)

    def finish(self) -> dict[str, Any]:
        """Close the file, give it its final name, and return its format, size and hash."""
        if not self.size:
            raise InputError(
                "The request has no body; send the data file as the body: curl --data-binary @reviews.csv …"
            )
        with files.storage_errors(self._part):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            os.replace(self._part, self.path)
        return {"format": self.format, "bytes": self.size, "sha256": self._hash.hexdigest()}
