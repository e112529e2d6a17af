"""Atomic writes, checksums and locks on a local disk; `reading` is the way back. Knows no banks, packages or records.

The name of every unfinished file or folder starts with `.tmp-`, which distinguishes the leftovers of a killed process
from finished files. An operating system error (disk full, no permission) becomes a `StorageError` in one place,
`storage_errors`; only a file that is missing or exists already is left to the caller.
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
from typing import Any
from uuid import uuid4

from adapterbank.errors import InputError, StorageError

TEMPORARY = ".tmp-"
"""Prefix of the names of unfinished files and folders."""

_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space there and try again",
    errno.EDQUOT: "your disk quota is exceeded; free some space or request a larger quota, and try again",
    errno.EROFS: "the file system is read-only; choose a writable folder",
    errno.EACCES: "permission is denied; change the permissions or choose another folder",
    errno.EPERM: "permission is denied; change the permissions or choose another folder",
    errno.ENOTDIR: "a part of that path is a file; choose another folder",
}

# Some file systems have no hard links (FAT, many bucket mounts); they report it with one of these errors.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise operating system errors as a `StorageError` that names `path`; a missing or existing file is none."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(path: Path | str, error: OSError) -> StorageError:
    """Return an operating system error as a sentence that names `path` and, for a common one, the remedy."""
    reason = _REMEDIES.get(error.errno or 0) or (os.strerror(error.errno) if error.errno else str(error))
    return StorageError(f"{path} cannot be used: {reason}.")


# --- checksums and JSON -------------------------------------------------------------------------------


def now() -> str:
    """Return the current time as files and records state it: ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def sha256_bytes(data: bytes) -> str:
    """Return the sha256 of `data` in hex."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: Any, parsed: bool = False) -> str:
    """Return the canonical JSON of `value`, equal for equal JSON: sorted keys, no spaces, no nan.

    A value that was not `parsed` from JSON is encoded and decoded once before its keys are sorted, because numeric keys
    sort differently from the strings they become in JSON (2 < 10, but "10" < "2").
    """
    plain = value if parsed else json.loads(_dumps(value))
    return _dumps(plain, sort_keys=True, separators=(",", ":"))


def sha256_json(value: Any, parsed: bool = False) -> str:
    """Return the sha256 of the canonical JSON of `value`."""
    return sha256_bytes(canonical_json(value, parsed).encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    atomic_write(path, pretty_json(value))


def pretty_json(value: Any) -> bytes:
    """Return the bytes that `write_json` writes."""
    return (_dumps(value, indent=2) + "\n").encode()


def _dumps(value: Any, **layout: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, **layout)
        text.encode()  # json.dumps accepts an unpaired surrogate, which fails only when it is written
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"A value cannot be stored as JSON: {error}. Use text, finite numbers, lists and mappings, "
            "and null for a number that is nan or infinite."
        ) from error
    return text


# --- files --------------------------------------------------------------------------------------------


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless they exist."""
    try:
        with storage_errors(path):
            path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise StorageError(f"{path} cannot be used: it is a file, not a folder; choose another.") from error


def atomic_write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write or replace a file; a reader sees the old content or the new, never a part.

    A `private` file has mode 0600 from its first byte on.
    """
    with _staged(path, data, private) as temporary:
        os.replace(temporary, path)


def atomic_create(path: Path, data: bytes) -> None:
    """Create a file that must not exist yet; one of several writers succeeds, the others get FileExistsError."""
    with _staged(path, data) as temporary:
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Without hard links, create the name first. A reader may then see an empty file for a moment.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            os.replace(temporary, path)


@contextlib.contextmanager
def _staged(path: Path, data: bytes, private: bool = False) -> Iterator[Path]:
    """Yield a flushed temporary file with `data` beside `path`; the caller renames it."""
    make_folder(path.parent)
    temporary = path.with_name(_temporary_name())
    with storage_errors(path):
        try:
            # Not tempfile: its files have mode 0600, and the umask decides who may read a bank.
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
    """Make a rename in this folder survive a power failure, if the file system supports it.

    Errors are ignored: the rename is done and visible, and some network file systems cannot flush folders. Raising here
    would report a write as failed that has succeeded.
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
    """Yield a temporary folder that is renamed to `final` on success and deleted on an exception."""
    with temporary_folder(final.parent) as temporary:
        yield temporary
        publish_folder(temporary, final)


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder inside `parent`; delete it afterwards unless it was published under another name."""
    make_folder(parent)
    temporary = parent / _temporary_name()
    try:
        with storage_errors(parent):
            temporary.mkdir()
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_folder(temporary: Path, final: Path) -> None:
    """Flush all files of a folder and rename it to `final`; raise FileExistsError if that name is taken."""
    taken = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
    with storage_errors(final):
        for folder, _, names in os.walk(temporary):
            for name in names:
                _flush_file(Path(folder, name))
            _flush_folder(Path(folder))
        if os.path.lexists(final):
            raise taken
        try:
            # A rename onto a non-empty folder fails, so it cannot overwrite the folder of a faster writer.
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
    """Rename a folder to a temporary name in one step and return its new path; `discard` then frees the space."""
    hidden = path.with_name(_temporary_name())
    with storage_errors(path):
        os.rename(path, hidden)
    return hidden


def discard(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    with storage_errors(path), contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    return sum(status.st_size for status in _statuses(path) if stat.S_ISREG(status.st_mode))


def leftovers(folders: Iterable[Path], older_than_seconds: float) -> list[Path]:
    """Return the unfinished files and folders in `folders` that have not been written to for that long."""
    found: list[Path] = []
    for folder in folders:
        with contextlib.suppress(OSError):  # there is none, or it cannot be read: whoever needs it says so
            found += [folder / name for name in sorted(os.listdir(folder)) if name.startswith(TEMPORARY)]
    return [path for path in found if is_old(path, older_than_seconds)]


def is_old(path: Path, seconds: float) -> bool:
    """Return whether nothing in a file or folder was written within these last seconds, by its own times.

    A time far in the future was set by a clock that was wrong, so it counts as old too; clocks of two machines may
    differ by less than these seconds.
    """
    now = time.time()
    return all(abs(now - status.st_mtime) >= seconds for status in _statuses(path))


def is_full(error: StorageError) -> bool:
    """Return whether a full disk or an exceeded quota is the cause of an error."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def _statuses(path: Path) -> Iterator[os.stat_result]:
    """Yield the status of a path and of everything below it; skip what is deleted meanwhile."""
    for item in (path, *path.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            yield item.lstat()


# --- locks --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Lock a folder without waiting and yield whether that succeeded; delete the folder afterwards if it is empty."""
    make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock of a lock file; wait for other processes and threads to release it.

    flock belongs to an open file description and each call opens the file again, so two threads exclude each other, and
    a thread that locks twice waits forever. The lock file is never deleted, because that would let a third writer in;
    the lock is released when its process ends.
    """
    make_folder(path.parent)
    with storage_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
    try:
        yield
    finally:
        # Closing is not enough: a process forked meanwhile shares the open file description.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def check_output(source: Any, output: Any) -> None:
    """Refuse to write over the file that is read; what are not names are no files."""
    names = [one for one in (source, output) if isinstance(one, (str, os.PathLike))]
    if len(names) == 2 and all(map(os.path.exists, names)) and os.path.samefile(*names):
        raise InputError(f"{os.fspath(output)} is the file that is read; write the answers to another one.")


def may_be_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a file in place of one: it has no ending, or cannot be read."""
    try:
        return entry.is_dir() or "." not in entry.name
    except OSError:  # such as a link that leads to itself: whoever reads it says so
        return True
