"""Where a sweep keeps its records: a folder, or any URL that fsspec supports. At most one record per config.

The name of a record is the hash of its config. If two writers race for one name, `add` returns True for one of them: a
file system decides by a hard link, an object store by a conditional put. A store that supports neither is checked for
the name first; if two writers pass that check at once, the later record replaces the earlier one.

A record never changes, so each file is parsed once per process: `all` lists the names and reads only the new ones,
which also finds the records of other machines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from adapterbank.errors import DataError, InputError, StorageError
from adapterbank.install import extra_command
from adapterbank.storage import files, reading, records

_ATOMIC_PUT = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"}
"""Protocols of stores in which an object appears complete or not at all."""

Record = dict[str, Any]


class RecordStore(Protocol):
    """A place for records."""

    location: str
    """The folder or URL."""

    def check(self) -> None:
        """Raise an error if the store cannot be written, before there is anything to write."""

    def add(self, record: Mapping[str, Any]) -> bool:
        """Store a record; return False, and change nothing, if its config has one."""

    def all(self) -> dict[str, Record]:
        """Return every record by the hash of its config."""

    def drop(self, hash: str) -> None:
        """Delete the record of a failed run, so that it is run again."""


def open_store(where: str | Path) -> RecordStore:
    """Open a folder or URL of records; it is created with the first record."""
    text = str(where)
    if "://" in text and not text.startswith("file://"):
        return RemoteStore(text)
    # Absolute, because a worker may read it from another working directory.
    return FolderStore(Path(text.removeprefix("file://")).absolute())


class _ParsedRecords:
    """Records that this process has parsed, with their hashes, by file name."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Hashable, str, Record]] = {}

    def get(self, name: str, version: Hashable, read: Callable[[], Record]) -> tuple[str, Record]:
        """Return a file's hash and record; `read` parses the file if `version` is new."""
        if name not in self._found or self._found[name][0] != version:
            record = read()
            self._found[name] = version, records.config_hash(record["config"]), record
        return self._found[name][1:]

    def forget(self, name: str) -> None:
        """Parse this file again next time."""
        self._found.pop(name, None)

    def __reduce__(self) -> tuple[type[_ParsedRecords], tuple[()]]:
        """Pickle as empty: a worker on another machine reads what it needs."""
        return _ParsedRecords, ()


class FolderStore:
    """Records in a folder on a disk, shared or not."""

    def __init__(self, path: Path) -> None:
        """See `open_store`."""
        self.path, self.location = path, str(path)
        self._parsed = _ParsedRecords()

    def check(self) -> None:
        """See `RecordStore`; the folder is created with the first record."""
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not existing.is_dir():
            raise StorageError(f"{existing} cannot be used: it is a file, not a folder; choose another.")
        if not os.access(existing, os.W_OK):
            raise StorageError(f"{existing} is not writable, so records cannot be stored there; choose another folder.")

    def add(self, record: Mapping[str, Any]) -> bool:
        """See `RecordStore`."""
        return records.add(self.path, record)

    def all(self) -> dict[str, Record]:
        """See `RecordStore`."""
        found: dict[str, Record] = {}
        for path in records.paths(self.path):
            with contextlib.suppress(FileNotFoundError):  # another sweep retries this run
                status = path.stat()
                version = (status.st_ino, status.st_mtime_ns, status.st_size)  # a retried run has a new file
                hash, record = self._parsed.get(path.name, version, partial(records.read, path))
                found.setdefault(hash, record)  # the first of several runs of one config counts
        return found

    def drop(self, hash: str) -> None:
        """See `RecordStore`."""
        files.discard(self.path / f"{hash}.json")


class RemoteStore:
    """Records at a URL."""

    def __init__(self, url: str) -> None:
        """See `open_store`."""
        try:
            import fsspec
        except ImportError:
            raise InputError(f"{url} is a URL, which needs fsspec: {extra_command('ray')}") from None
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InputError(f"{url} cannot be opened: {' '.join(str(error).split())}.") from error
        self.location, self._root = url, root.rstrip("/")
        self._atomic = url.split("://")[0] in _ATOMIC_PUT
        self._parsed = _ParsedRecords()

    def check(self) -> None:
        """See `RecordStore`; stores differ in their permissions, so the first record is the test."""

    def add(self, record: Mapping[str, Any]) -> bool:
        """See `RecordStore`."""
        hash, data = records.encode(record)
        path = f"{self._root}/{hash}.json"
        try:
            if self._atomic:
                self._fs.pipe_file(path, data, mode="create")
                return True
        except FileExistsError:
            return False
        if self._fs.exists(path):
            return False
        temporary = f"{self._root}/{files.TEMPORARY}{uuid4().hex}"
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(temporary, data)
        self._fs.mv(temporary, path)
        return True

    def all(self) -> dict[str, Record]:
        """See `RecordStore`."""
        self._fs.invalidate_cache()  # other machines write here too
        if not self._fs.exists(self._root):
            return {}
        names = [path.rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False)]
        found: dict[str, Record] = {}
        for name in sorted(filter(records.is_record, names), key=records.order):
            try:
                hash, record = self._parsed.get(name, None, partial(self._read, name))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{self._root}/{name} is not a record; move it elsewhere and run again.") from error
            found.setdefault(hash, record)
        return found

    def _read(self, name: str) -> Record:
        return records.decode(self._fs.cat_file(f"{self._root}/{name}", end=reading.LARGE + 1), name)

    def drop(self, hash: str) -> None:
        """See `RecordStore`."""
        self._fs.rm(f"{self._root}/{hash}.json")
        self._parsed.forget(f"{hash}.json")
