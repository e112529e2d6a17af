"""API keys: their scopes, tasks and rates, in one private JSON file. Knows no HTTP, and of tasks only their names.

A key is 256 random bits, and the file holds only its sha256. A slow hash, as passwords need, would add no protection:
it makes each guess expensive, but 2**256 secrets cannot be guessed at any price, and every request would pay for it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from adapterbank import schema
from adapterbank.errors import AdapterbankError, InputError, StorageError, UnknownName
from adapterbank.storage import files, reading
from adapterbank.storage.package import parse_ref
from adapterbank.tasks.catalog import bank_name

SCOPES = ("predict", "train", "admin")
"""`admin` includes the other two, and may also remove tasks and roll them back."""
PREFIX = "abk_"
"""The start of every secret, so that people and secret scanners recognise one."""
FILE = "keys.json"
"""Its name within a bank."""
_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FASTEST = 1_000_000
"""The highest rate, in requests per minute."""
_BURST_SECONDS = 10.0
"""A key may use the requests of this many seconds at once."""


@dataclass(frozen=True)
class Key:
    """An API key; its secret is not stored."""

    name: str
    scopes: Annotated[tuple[str, ...], {"choices": SCOPES}]
    tasks: tuple[str, ...] | None
    """Names in the bank; None for all tasks."""
    rate: Annotated[int | None, {"low": 1, "high": _FASTEST}]
    """Requests per minute; None for no limit."""
    created: str
    sha256: str = field(repr=False)

    def allows(self, scope: str, task: str | None = None) -> bool:
        """Whether the key has this scope for this task (`name` or `name@version`); None for a request without one."""
        if scope not in self.scopes and "admin" not in self.scopes:
            return False
        return task is None or self.tasks is None or bank_name(task.partition("@")[0]) in self.tasks

    def to_json(self) -> dict[str, Any]:
        """Return the fields that may be shown."""
        return {name: value for name, value in asdict(self).items() if name != "sha256"}


class Keys:
    """The keys in one file, which is read again whenever it has changed."""

    def __init__(self, path: str | Path) -> None:
        """Take the path of the file, which need not exist."""
        self.path = Path(path)
        self._seen: tuple[int, ...] | None = None
        self._loaded: tuple[Key, ...] = ()
        self._reading = threading.Lock()

    def add(self, name: str, scopes: Iterable[str], tasks: Iterable[str] | None = None, rate: int | None = None) -> str:
        """Add a key and return its secret, which cannot be shown again."""
        made = _checked(name, tuple(scopes), None if tasks is None else tuple(tasks), rate)
        secret = PREFIX + secrets.token_urlsafe(32)
        with self._locked():
            present = self.list()
            if any(key.name == name for key in present):
                raise InputError(f"There is a key {name!r} already; choose another name, or revoke that key first.")
            self._write([*present, Key(*made, files.now(), _hash(secret))])
        return secret

    def list(self) -> list[Key]:
        """Return all keys, oldest first."""
        return [*self._current()]

    def revoke(self, name: str) -> None:
        """Delete a key; a running server refuses it from the next request on."""
        with self._locked():
            present = self.list()
            if all(key.name != name for key in present):
                raise UnknownName(name, f"a key of {self.path}", [key.name for key in present])
            self._write([key for key in present if key.name != name])

    def check(self, secret: str) -> Key | None:
        """Return the key of a secret, or None; the time does not depend on which key it is."""
        wanted, found = _hash(secret), None
        for key in self._current():
            if hmac.compare_digest(key.sha256, wanted):
                found = key
        return found

    def _current(self) -> tuple[Key, ...]:
        with self._reading:
            try:
                status = os.stat(self.path)
            except FileNotFoundError:
                self._seen, self._loaded = None, ()
                return ()
            # Every write creates a new file, so the inode changes even where timestamps are coarse.
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                self._loaded = _read(self.path)
                self._seen = seen
            return self._loaded

    def _write(self, keys: Iterable[Key]) -> None:
        value = {"format": _FORMAT, "keys": [asdict(key) for key in keys]}
        files.atomic_write(self.path, files.pretty_json(reading.seal(value)), private=True)

    def _locked(self) -> Any:
        return files.locked(self.path.with_name(f".{self.path.name}.lock"))


class RateLimiter:
    """Enforces each key's rate with a token bucket of ten seconds' worth of requests, at least one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Take a clock that returns seconds."""
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def wait(self, key: Key) -> float:
        """Take one request from a key's bucket; return 0 if it may run, otherwise the seconds to wait."""
        if key.rate is None:
            return 0.0
        per_second, now = key.rate / 60, self._clock()
        most = max(1.0, per_second * _BURST_SECONDS)
        with self._lock:
            level, at = self._buckets.get(key.name, (most, now))
            level = min(most, level + (now - at) * per_second)
            missing = 1 - level
            self._buckets[key.name] = (level if missing > 1e-9 else level - 1, now)
        return missing / per_second if missing > 1e-9 else 0.0


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def _checked(
    name: str, scopes: Sequence[str], tasks: Sequence[str] | None, rate: int | None
) -> tuple[str, tuple[str, ...], tuple[str, ...] | None, int | None]:
    """Check the fields of a key; return them with the tasks under their names in the bank."""
    if not _NAME.fullmatch(name):
        allowed = "1 to 64 of A-Z a-z 0-9 . _ -, starting with a letter or digit"
        raise InputError(f"{name!r} cannot be the name of a key; use {allowed}.")
    for scope in scopes:
        if scope not in SCOPES:
            raise UnknownName(scope, "a scope", SCOPES)
    if not scopes:
        raise InputError(f"The key {name!r} has no scope; give at least one of {', '.join(SCOPES)}.")
    if tasks is not None and not tasks:
        raise InputError(f"The key {name!r} has an empty list of tasks; name at least one, or omit the list for all.")
    if rate is not None and not 1 <= rate <= _FASTEST:
        raise InputError(f"rate is {rate!r}; it must be from 1 to {_FASTEST} requests per minute.")
    named = None if tasks is None else tuple(dict.fromkeys(_task(task) for task in tasks))
    return name, tuple(scope for scope in SCOPES if scope in scopes), named, rate


def _task(task: str) -> str:
    name, version = parse_ref(task)
    if version is not None:
        raise InputError(f"{task!r} names one version, but a key covers all versions of a task; write {name!r}.")
    return name


def _read(path: Path) -> tuple[Key, ...]:
    """Read the file; a damaged file grants no access."""
    try:
        value = reading.read_checked(path, before=("format", "keys"))
        if value["format"] != _FORMAT:
            raise ValueError(f"format {value['format']!r}")
        if problem := schema.problem(list[Key], value["keys"], "keys"):
            raise ValueError(problem)
        found = tuple(_key(row) for row in value["keys"])
        if len({key.name for key in found}) < len(found):
            raise ValueError("two keys have the same name")
        return found
    except FileNotFoundError:
        return ()
    except (AdapterbankError, KeyError, TypeError, ValueError) as error:
        remedy = "restore it from a copy, or delete it and add new keys"
        raise StorageError(f"The key file {path} cannot be read ({error!r}); {remedy}.") from error


def _key(row: dict[str, Any]) -> Key:
    """Return the key of a row whose types and ranges are checked; refuse what `add` would."""
    name, scopes, tasks, rate = _checked(row["name"], row["scopes"], row["tasks"], row["rate"])
    if not _SHA256.fullmatch(row["sha256"]):
        raise ValueError(f"the key {name!r} has no sha256")
    return Key(name, scopes, tasks, rate, row["created"], row["sha256"])
