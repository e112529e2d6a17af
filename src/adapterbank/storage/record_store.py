"""Where a sweep's records are kept: a folder, or any URL that fsspec knows. At most one record a config, never changed.

The record's name is the hash of its config. Of two writers of one name one wins and the other is told so: a file system
by a hard link, an object store by a put that asks for a new object. Where a store can neither, the name is looked for
first, and the worst of two writers at once is that the later one's record stands; two there never are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from adapterbank.errors import DataError, InputError, StorageError
from adapterbank.storage import files, records

_PUT_IS_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"}
"""Protocols of stores in which an object appears whole or not at all."""


class RecordStore(Protocol):
    """A place for records."""

    def check(self) -> None:
        """Refuse a place that cannot be written, before there is anything to write."""

    def add(self, record: Mapping[str, Any]) -> bool:
        """Keep a record; False, and nothing changes, where its config has one."""

    def all(self) -> dict[str, dict[str, Any]]:
        """Give every record by the hash of its config."""

    def drop(self, hash: str) -> None:
        """Forget a failed run's record, so that it is run again."""


def open_ledger(where: str | Path) -> RecordStore:
    """Open a folder or URL of records; it is made with the first one."""
    text = str(where)
    if "://" in text and not text.startswith("file://"):
        return RemoteStore(text)
    return FolderStore(Path(text.removeprefix("file://")).absolute())  # for whoever reads it from another place


class FolderStore:
    """Records in a folder on a disk, shared or not."""

    def __init__(self, path: Path) -> None:
        """See `open_ledger`."""
        self.path = path

    def check(self) -> None:
        """See `RecordStore`; it is made with the first record."""
        there = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not there.is_dir():
            raise StorageError(f"{there} cannot be used: it is a file, not a folder; choose another.")
        if not os.access(there, os.W_OK):
            raise StorageError(f"{there} cannot be written, so there is no place for records; choose another.")

    def add(self, record: Mapping[str, Any]) -> bool:
        """See `RecordStore`."""
        path = self.path / f"{records.config_hash(record['config'])}.json"
        try:
            files.atomic_create(path, files.pretty_json(record))
        except FileExistsError:
            return False
        return True

    def all(self) -> dict[str, dict[str, Any]]:
        """See `RecordStore`."""
        found: dict[str, dict[str, Any]] = {}
        for record in records.read_all(self.path):  # the first of several runs of one config counts
            found.setdefault(records.config_hash(record["config"]), record)
        return found

    def drop(self, hash: str) -> None:
        """See `RecordStore`."""
        files.discard(self.path / f"{hash}.json")


class RemoteStore:
    """Records behind a URL."""

    def __init__(self, url: str) -> None:
        """See `open_ledger`."""
        try:
            import fsspec
        except ImportError:
            raise InputError(f"{url} is a URL, which needs fsspec: pip install 'adapterbank[ray]'.") from None
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InputError(f"{url} cannot be opened: {' '.join(str(error).split())}.") from error
        self._root = root.rstrip("/")
        self._whole = url.split("://")[0] in _PUT_IS_WHOLE
        self._read: dict[str, dict[str, Any]] = {}  # by name: what has been read once stays as it is

    def check(self) -> None:
        """See `RecordStore`; stores differ in what they allow, so they are asked with the first record only."""

    def add(self, record: Mapping[str, Any]) -> bool:
        """See `RecordStore`."""
        path = f"{self._root}/{records.config_hash(record['config'])}.json"
        data = files.pretty_json(record)
        try:
            if self._whole:
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

    def all(self) -> dict[str, dict[str, Any]]:
        """See `RecordStore`."""
        self._fs.invalidate_cache()  # others write here too
        if not self._fs.exists(self._root):
            return {}
        names = [path.rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False)]
        found: dict[str, dict[str, Any]] = {}
        for name in sorted(name for name in names if name.endswith(".json") and not name.startswith(".")):
            try:
                if name not in self._read:
                    self._read[name] = json.loads(self._fs.cat_file(f"{self._root}/{name}"))
                record = self._read[name]
                found.setdefault(records.config_hash(record["config"]), record)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{self._root}/{name} is not a record; move it elsewhere and run again.") from error
        return found

    def drop(self, hash: str) -> None:
        """See `RecordStore`."""
        self._fs.rm(f"{self._root}/{hash}.json")
        self._read.pop(f"{hash}.json", None)
