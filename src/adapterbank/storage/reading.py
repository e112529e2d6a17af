"""The one door for what lies on disk in a bank, a cache, a mirror or a folder of records. Knows no formats but JSON.

A file from outside may be anything: a pipe that never answers, a folder, a link to itself, ten gigabytes of nothing.
`read_file` takes regular files only, opens them without blocking, and refuses what is larger than the caller allows
before it reads a byte. Whatever is wrong with a file is a `StorageError` that names it; only a missing file is a
`FileNotFoundError`.

`read_checked` reads a mapping that `seal` gave a checksum over all its other fields, so that a flipped bit is an error
and not another value. A file of the time before checksums has exactly the fields it had then.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from adapterbank.errors import InputError, StorageError
from adapterbank.storage import files

SMALL = 1 << 20
"""The most bytes of a small file: pointers, a bank's head."""
LARGE = 16 << 20
"""The most bytes of a larger one: keys, a record."""
CHECKSUM = "checksum"

_TYPES = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_REASONS = {
    errno.ELOOP: "it is a link that leads to itself",
    errno.ENXIO: "it is a socket or a device",
    errno.EISDIR: "it is a folder",
    errno.ENOTDIR: "a part of its path is a file",
    errno.ENAMETOOLONG: "its name is too long",
}


@contextlib.contextmanager
def open_file(path: Path | str) -> Iterator[tuple[BufferedReader, int]]:
    """Open a regular file to read and yield it with its size; never waits for a pipe or a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = _TYPES.get(stat.S_IFMT(status.st_mode), "something else")
            raise StorageError(f"{path} cannot be read: it is {kind}, not a regular file; remove it.")
        with open(descriptor, "rb", closefd=False) as file:
            yield file, status.st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)


def read_file(path: Path | str, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes."""
    with open_file(path) as (file, size):
        if size > limit:
            raise StorageError(f"{path} has {size:,} bytes, more than the {limit:,} that such a file may have.")
        data = file.read(limit + 1)  # it may grow meanwhile
    if len(data) > limit:
        raise StorageError(f"{path} grows while it is read, beyond the {limit:,} bytes that such a file may have.")
    return data


def sha256_file(path: Path | str) -> str:
    """Return the sha256 of a regular file in hex, without loading the whole file into memory."""
    with open_file(path) as (file, _):
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path | str, limit: int = LARGE) -> Any:
    """Read a JSON file; raise `InputError` if it is not JSON and `FileNotFoundError` if it does not exist."""
    try:
        return parse_json(read_file(path, limit))
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); restore it from a copy.") from error


def parse_json(data: bytes) -> Any:
    """Parse JSON from outside; raise `ValueError` for whatever is not JSON."""
    try:
        return _DECODER.decode(data.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_checked(path: Path | str, limit: int = LARGE, *, before: Collection[str] = ()) -> dict[str, Any]:
    """Read a mapping that was sealed; `before` are the fields of such a file before checksums existed, if it did."""
    value = read_json(path, limit)
    try:
        return check_seal(value, before=before)
    except ValueError as error:
        raise InputError(f"{path} {error}; restore it from a copy.") from error


def seal(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with a checksum over its fields."""
    return {**value, CHECKSUM: files.sha256_json(value)}


def check_seal(value: Any, *, before: Collection[str] = ()) -> dict[str, Any]:
    """Return a mapping without its checksum; raise `ValueError` if the two do not belong together."""
    if not isinstance(value, dict):
        raise ValueError("is not a mapping")
    rest = {key: item for key, item in value.items() if key != CHECKSUM}
    if CHECKSUM not in value and before and rest.keys() == {*before}:
        return rest
    try:
        checksum = files.sha256_json(rest, parsed=True)
    except InputError as error:
        raise ValueError(f"holds what cannot be written ({error})") from error
    if value.get(CHECKSUM) != checksum:
        raise ValueError("was changed after it was written")
    return rest


def _unreadable(path: Path | str, error: OSError) -> StorageError:
    reason = _REASONS.get(error.errno or 0)
    return StorageError(f"{path} cannot be read: {reason}; remove it.") if reason else files.storage_error(path, error)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


# By default Python accepts NaN and Infinity, which are not JSON and which this library never writes.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
