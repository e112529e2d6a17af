"""API keys: who may do what, in one private JSON file. Knows no HTTP, and of tasks only their names.

A key is 256 random bits, and the file holds their sha256 alone. A slow hash, as passwords need, would buy nothing: it
makes guesses dear, and nobody can guess one of 2**256 secrets however cheap a guess is. It would cost every request.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adapterbank.errors import AdapterbankError, InputError, StorageError, UnknownName
from adapterbank.storage import files
from adapterbank.storage.package import check_name, parse_ref
from adapterbank.tasks.catalog import bank_name

SCOPES = ("predict", "train", "admin")
"""`admin` may do all that the others may, and remove tasks and roll them back."""
PREFIX = "abk_"
"""How every secret starts, so that people and scanners of leaked secrets know one when they see it."""
FILE = "keys.json"
"""Its name in a bank."""
_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_BURST_SECONDS = 10.0
"""As many seconds' worth of requests may come at once."""


@dataclass(frozen=True)
class Key:
    """What is known of a key; its secret is not."""

    name: str
    scopes: tuple[str, ...]
    tasks: tuple[str, ...] | None
    """By their names in the bank; None for all."""
    rate: int | None
    """Requests a minute; None for no limit."""
    created: str
    sha256: str = field(repr=False)

    def allows(self, scope: str, task: str | None = None) -> bool:
        """Whether a request of this scope may touch this task (`name`, `name@version`); None where it names none."""
        if scope not in self.scopes and "admin" not in self.scopes:
            return False
        return task is None or self.tasks is None or bank_name(task.partition("@")[0]) in self.tasks

    def to_json(self) -> dict[str, Any]:
        """Give what may be shown."""
        return {name: value for name, value in asdict(self).items() if name != "sha256"}


class Keys:
    """The keys of one file, which is read again whenever it has changed."""

    def __init__(self, path: str | Path) -> None:
        """Name the file; it need not be there."""
        self.path = Path(path)
        self._seen: tuple[int, ...] | None = None
        self._held: tuple[Key, ...] = ()
        self._reading = threading.Lock()

    def add(self, name: str, scopes: Iterable[str], tasks: Iterable[str] | None = None, rate: int | None = None) -> str:
        """Make a key and give its secret, which nothing can show again."""
        made = _checked(name, tuple(scopes), None if tasks is None else tuple(tasks), rate)
        secret = PREFIX + secrets.token_urlsafe(32)
        with self._locked():
            held = self.list()
            if any(key.name == name for key in held):
                raise InputError(f"There is a key {name!r} already; choose another name, or revoke that one first.")
            self._write([*held, Key(*made, files.now(), _hash(secret))])
        return secret

    def list(self) -> list[Key]:
        """Give all keys, oldest first."""
        return [*self._current()]

    def revoke(self, name: str) -> None:
        """Forget a key; a running server refuses it from the next request on."""
        with self._locked():
            held = self.list()
            if all(key.name != name for key in held):
                raise UnknownName(name, f"a key of {self.path}", [key.name for key in held])
            self._write([key for key in held if key.name != name])

    def check(self, secret: str) -> Key | None:
        """Give the key that a secret belongs to; takes the same time whichever it is, and if it is none."""
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
                self._seen, self._held = None, ()
                return ()
            # Every write makes a new file, so its number changes even where the clock is coarse.
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                self._held = _read(self.path)
                self._seen = seen
            return self._held

    def _write(self, keys: Iterable[Key]) -> None:
        value = {"format": _FORMAT, "keys": [asdict(key) for key in keys]}
        files.atomic_write(self.path, files.pretty_json(value), private=True)

    def _locked(self) -> Any:
        return files.locked(self.path.with_name(f".{self.path.name}.lock"))


class Pace:
    """Holds each key to its rate: a bucket that fills evenly and holds ten seconds' worth, at least one request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def wait(self, key: Key) -> float:
        """Take one request from a key's bucket: 0 where it may go on, else the seconds until it may come again."""
        if key.rate is None:
            return 0.0
        per_second, now = key.rate / 60, self._clock()
        most = max(1.0, per_second * _BURST_SECONDS)
        with self._lock:
            held, at = self._buckets.get(key.name, (most, now))
            held = min(most, held + (now - at) * per_second)
            short = 1 - held
            self._buckets[key.name] = (held if short > 1e-9 else held - 1, now)
        return short / per_second if short > 1e-9 else 0.0


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def _checked(
    name: str, scopes: tuple[str, ...], tasks: tuple[str, ...] | None, rate: int | None
) -> tuple[str, tuple[str, ...], tuple[str, ...] | None, int | None]:
    """Say what is wrong with a key that is to be made; gives it with its tasks as the bank names them."""
    if not _NAME.fullmatch(name):
        allowed = "1 to 64 of A-Z a-z 0-9 . _ - that start with a letter or digit"
        raise InputError(f"{name!r} cannot be the name of a key; use {allowed}.")
    for scope in scopes:
        if scope not in SCOPES:
            raise UnknownName(scope, "a scope", SCOPES)
    if not scopes:
        raise InputError(f"The key {name!r} has no scope, so it could do nothing; give one of {', '.join(SCOPES)}.")
    if tasks is not None and not tasks:
        raise InputError(f"The key {name!r} has an empty list of tasks; name some, or leave the list out for all.")
    if rate is not None and not 1 <= rate <= 1_000_000:
        raise InputError(f"rate is {rate!r}; it must be from 1 to 1000000 requests a minute.")
    named = None if tasks is None else tuple(dict.fromkeys(_task(task) for task in tasks))
    return name, tuple(scope for scope in SCOPES if scope in scopes), named, rate


def _task(task: str) -> str:
    name, version = parse_ref(task)
    if version is not None:
        raise InputError(f"{task!r} is one version; a key is for all versions of a task, so write {name!r}.")
    return name


def _read(path: Path) -> tuple[Key, ...]:
    """Read the file; one that is damaged opens nothing to nobody."""
    try:
        value = files.read_json(path)
        if value["format"] != _FORMAT:
            raise ValueError(f"format {value['format']!r}")
        return tuple(_key(row) for row in value["keys"])
    except FileNotFoundError:
        return ()
    except (AdapterbankError, KeyError, TypeError, ValueError) as error:
        remedy = "restore it from a copy, or delete it and make new keys"
        raise StorageError(f"The file of keys {path} cannot be used ({error!r}); {remedy}.") from error


def _key(row: dict[str, Any]) -> Key:
    tasks = None if row["tasks"] is None else tuple(check_name(task) for task in row["tasks"])
    scopes = tuple(scope for scope in row["scopes"] if scope in SCOPES)
    rate = row["rate"]
    if not re.fullmatch(r"[0-9a-f]{64}", row["sha256"]) or not (rate is None or (type(rate) is int and rate > 0)):
        raise ValueError(f"the key {row['name']!r}")
    return Key(str(row["name"]), scopes, tasks, rate, str(row["created"]), row["sha256"])
