"""Whole-or-nothing writes, checksums and locks on a local disk; knows nothing of banks, packages or records.

Every name that is not finished yet starts with `.tmp-`, so that whatever a killed process leaves behind can
be told from what was meant to stay. A system error that the user can mend (disk full, no permission) becomes
a `StorageError` in one place, `refusals_explained`; any other `OSError` passes as it is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

from adapterbank.errors import InputError, StorageError

TEMPORARY = ".tmp-"
"""How the name of everything unfinished starts."""

_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space there and try again",
    errno.EDQUOT: "your disk quota is used up; free some space or ask for more, and try again",
    errno.EROFS: "the file system is read-only; choose a folder that can be written",
    errno.EACCES: "permission is denied; change the permissions or choose another folder",
    errno.EPERM: "permission is denied; change the permissions or choose another folder",
    errno.ENOTDIR: "a part of that path is a file; choose another folder",
}

# Not every file system has hard links (FAT, many bucket mounts); these are the ways in which they say so.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}


@contextlib.contextmanager
def refusals_explained(path: Path) -> Iterator[None]:
    """Turn what the disk refuses, and the user can mend, into a `StorageError` that names `path`."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0)
        if remedy is None:
            raise
        raise StorageError(f"{path} cannot be used: {remedy}.") from error


# --- checksums and JSON -------------------------------------------------------------------------------


def now() -> str:
    """Give the time as files and records state it: UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def sha256_bytes(data: bytes) -> str:
    """Return the sha256 of `data` in hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file in hex, without holding the file in memory."""
    with refusals_explained(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any, parsed: bool = False) -> str:
    """Write `value` so that equal JSON gives equal text: sorted keys, no spaces, no nan.

    A value that was not `parsed` from JSON goes through it once before its keys are sorted, because keys that
    are numbers sort otherwise than the strings they are read back as (2 < 10, but "10" < "2").
    """
    plain = value if parsed else json.loads(_dumps(value))
    return _dumps(plain, sort_keys=True, separators=(",", ":"))


def sha256_json(value: Any, parsed: bool = False) -> str:
    """Return the sha256 of the canonical JSON of `value`."""
    return sha256_bytes(canonical_json(value, parsed).encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON, whole or not at all."""
    atomic_write(path, pretty_json(value))


def pretty_json(value: Any) -> bytes:
    """Return the bytes that `write_json` writes; for those who must have them before touching the disk."""
    return (_dumps(value, indent=2) + "\n").encode()


def read_json(path: Path) -> Any:
    """Read a JSON file; `InputError` when it is not JSON, `FileNotFoundError` when it is not there."""
    with refusals_explained(path), open(path, "rb") as file:
        data = file.read()
    try:
        return _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}); restore it from a copy.") from error


def _dumps(value: Any, **layout: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, **layout)
        text.encode()  # half a surrogate pair passes json.dumps, and would fail only on writing
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"A value cannot be kept as JSON: {error}. Use text, finite numbers, lists and mappings, "
            "and null for a number that is nan or infinite."
        ) from error
    return text


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


# Python reads NaN and Infinity by default, which other JSON readers refuse and no file of ours holds.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


# --- files --------------------------------------------------------------------------------------------


def make_folder(path: Path) -> None:
    """Make a folder and those above it; nothing happens when it is there already."""
    try:
        with refusals_explained(path):
            path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise StorageError(f"{path} cannot be used: it is a file, not a folder; choose another.") from error


def atomic_write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write or replace a file: a reader sees the old bytes or the new ones, never a part.

    One that is `private` can be read and written by its owner alone, from its first byte on.
    """
    with _staged(path, data, private) as temporary:
        os.replace(temporary, path)


def atomic_create(path: Path, data: bytes) -> None:
    """Write a file that must not exist yet; of several writers one wins, the others get FileExistsError."""
    with _staged(path, data) as temporary:
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Without hard links, take the name first. A reader may then see an empty file for a moment.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            os.replace(temporary, path)


@contextlib.contextmanager
def _staged(path: Path, data: bytes, private: bool = False) -> Iterator[Path]:
    """Hold `data` in a flushed temporary file beside `path`; the caller gives it its name."""
    make_folder(path.parent)
    temporary = path.with_name(_temporary_name())
    with refusals_explained(path):
        try:
            # Not tempfile: its files are private (0600), and a bank is shared with whom umask allows.
            with open(temporary, "xb") as file:
                if private:
                    os.fchmod(file.fileno(), 0o600)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
        _flush_folder(path.parent)


def _flush_folder(path: Path) -> None:
    """Make a rename in this folder outlast a power cut, where the file system can.

    A refusal is not an error: the rename is done and seen by everyone, and some network file systems
    cannot flush folders at all. Raising here would report as failed what has happened.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _temporary_name() -> str:
    return f"{TEMPORARY}{uuid4().hex}"


# --- folders ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `final` on clean exit, and vanishes on any other."""
    with temporary_folder(final.parent) as temporary:
        yield temporary
        publish_folder(temporary, final)


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder inside `parent`, gone afterwards unless it was published under another name."""
    make_folder(parent)
    temporary = parent / _temporary_name()
    try:
        with refusals_explained(parent):
            temporary.mkdir()
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_folder(temporary: Path, final: Path) -> None:
    """Flush all files of a finished folder and give it its name; FileExistsError when that is taken."""
    taken = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
    with refusals_explained(final):
        for folder, _, files in os.walk(temporary):
            for name in files:
                _flush_file(Path(folder, name))
            _flush_folder(Path(folder))
        if os.path.lexists(final):
            raise taken
        try:
            # A rename onto a folder with something in it fails, so a writer that was quicker is safe.
            os.rename(temporary, final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise taken from error
            raise
        _flush_folder(final.parent)


def _flush_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path) -> Path:
    """Take a folder out of sight in one step, and return where it is; `discard` then frees the space."""
    hidden = path.with_name(_temporary_name())
    with refusals_explained(path):
        os.rename(path, hidden)
    return hidden


def discard(path: Path) -> None:
    """Delete a file or a folder; it may be gone already."""
    with refusals_explained(path), contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    return sum(status.st_size for status in _statuses(path) if stat.S_ISREG(status.st_mode))


def leftovers(folders: Iterable[Path], older_than_seconds: float) -> list[Path]:
    """Return what lies unfinished in `folders` and was not written to for that long, as nobody still does."""
    limit = time.time() - older_than_seconds
    found = [path for folder in folders for path in sorted(folder.glob(f"{TEMPORARY}*"))]
    return [path for path in found if max((s.st_mtime for s in _statuses(path)), default=limit) <= limit]


def _statuses(path: Path) -> Iterator[os.stat_result]:
    """Yield the status of a path and of all below it; what vanishes meanwhile is passed over."""
    for item in (path, *path.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            yield item.lstat()


# --- locks --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Have a folder for oneself unless somebody has, and say whether one does; never waits. Left empty, it goes."""
    make_folder(folder)
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(held)
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock on a lock file; waits for its turn, among processes and threads alike.

    Each call opens the file anew, and flock belongs to the opening: so two threads exclude each other too,
    and a thread that asks twice waits for ever. The lock file stays, since deleting it would let a third
    writer in; the lock itself ends with the process that holds it.
    """
    make_folder(path.parent)
    with refusals_explained(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
    try:
        yield
    finally:
        # Closing alone would not do: a process forked meanwhile still holds the same opening.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
