"""Which packages are served: follows a bank's folder, as tasks come and go. Knows the engine's names, no rows, no HTTP.

The bank is looked through twice a second: a stat a task, so that a thousand tasks cost milliseconds. What is new
or changed is loaded before it takes its place, and what cannot be loaded is refused with a sentence; neither touches
the other tasks. Older versions are loaded when they are asked for, and few of them are kept.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from adapterbank.errors import AdapterbankError, PackageDamaged, UnknownName
from adapterbank.inference.engine import Engine
from adapterbank.inference.slot_cache import TaskHandle
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import Package, parse_ref

POLL = 0.4
"""Seconds between two looks: a new package is served within one, its loading included."""
PINNED = 32
"""Versions that are kept beside the default ones; the least recently used go first."""
_CLOSELY = 5
"""Every so many looks is a close one."""
_LISTED = 5
"""Near names in a refusal."""
_LOADERS = 2
_LOCKS = 64
_TRIES = 3
"""So often is a task read that is changed while it is read."""
_COARSE = 2.5
"""Seconds for which a time of writing says little: some file systems count them by twos."""

log = logging.getLogger("adapterbank.serving")


@dataclass(frozen=True)
class ServedTask:
    """A package that can be asked."""

    package: Package
    known: TaskHandle
    """The engine's."""
    key: str
    """Its name in the engine."""


Seen = tuple[Any, ...]
"""What tells that a task has changed: its default version, and times, inodes and sizes of its folder and files."""
_UNSEEN: Seen = (None, None)


class TaskRegistry:
    """The tasks of a bank in an engine."""

    def __init__(self, bank: Bank, engine: Engine) -> None:
        """Serve nothing yet; see `look` and `follow`."""
        self.bank, self.engine = bank, engine
        self.ready = False
        """Whether the bank has been looked through once."""
        self.problems: dict[str, str] = {}
        """A sentence for each task that is refused."""
        self._held: dict[str, ServedTask] = {}
        self._pinned: OrderedDict[tuple[str, int], ServedTask] = OrderedDict()
        self._seen: dict[str, Seen] = {}
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self) -> None:
        """Look at the bank again and again, from a thread of its own."""
        self._stopped.clear()
        self._thread = threading.Thread(target=self._follow, name="shelf", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        if self._thread:
            self._thread.join()

    @property
    def count(self) -> int:
        """How many tasks are served."""
        return len(self._held)

    def held(self) -> dict[str, ServedTask]:
        """Give the default package of each task by name."""
        return dict(sorted(self._held.copy().items()))

    def find(self, ref: str) -> ServedTask | None:
        """Give what answers for `name` or `name@version`, if the engine has it; never waits. Raises for a bad name."""
        name, version = parse_ref(ref)
        held = self._held.get(name)
        if held is None or version in (None, held.package.manifest.version):
            return None if name in self.problems and version is None else held
        pinned = self._pinned.get((name, version or 0))
        if pinned is not None:
            with contextlib.suppress(KeyError):
                self._pinned.move_to_end((name, version or 0))
        return pinned

    def fetch(self, ref: str) -> ServedTask:
        """Give what answers for a task, loaded now if need be; raises what says why it cannot."""
        if held := self.find(ref):
            return held
        name, version = parse_ref(ref)
        self.look_at(name)
        if held := self.find(ref):
            return held
        if name not in self._held and name not in self.problems:
            raise self.unknown(name)
        if version is None:
            raise PackageDamaged(self.problems.get(name, f"{name} cannot be used now; ask again."))
        return self._pin(name, version)

    def unknown(self, name: str) -> UnknownName:
        """Say that there is no such task, and which come near."""
        near = difflib.get_close_matches(name, list(self._held), n=_LISTED, cutoff=0.3)
        return UnknownName(name, "a task of this bank", near or sorted(self._held)[:_LISTED], see="GET /v1/tasks")

    def look(self, *, closely: bool = True) -> None:
        """Look through the bank once, and load, replace and drop what has changed.

        Every pointer and version is written by a rename, which a task's folder shows; what else may have happened to
        the files is seen only on looking closely.
        """
        names = self.bank.folders()
        changed = [name for name in {*names, *list(self._seen)} if self._changed(name, closely)]
        see = partial(self.look_at, closely=closely)
        if len(changed) > 1:
            with ThreadPoolExecutor(_LOADERS) as pool:
                list(pool.map(see, sorted(changed)))
        else:
            list(map(see, changed))
        if not self.ready:
            self._warm()
        self.ready = not self._stopped.is_set()

    def _warm(self) -> None:
        """Let nobody wait for a compiler who asks once it is ready."""
        try:
            self.engine.warm()
        except Exception as error:  # then they do
            log.error("failed", exc_info=error)

    def look_at(self, name: str, *, closely: bool = False) -> None:
        """Look at one task, for who has changed it or asks for it before the next look."""
        with self._lock_of(name):
            if self._changed(name, closely) and not self._stopped.is_set():
                self._refresh(name)

    def _follow(self) -> None:
        last, looks = "", 0
        while not self._stopped.is_set():
            try:
                self.look(closely=looks % _CLOSELY == 0)
                last, looks = "", looks + 1
            except Exception as error:  # a bank that cannot be read for a while must not end the watch
                if (text := f"{type(error).__name__}: {error}") != last:
                    log.error("bank", extra={"fields": {"problem": text}})
                last = text
            self._stopped.wait(POLL)

    def _lock_of(self, name: str) -> threading.Lock:
        """Give the lock of a task: who asks for one does not wait while a thousand others are loaded."""
        return self._locks[hash(name) % len(self._locks)]

    def _changed(self, name: str, closely: bool) -> bool:
        """Whether a task is not as it was seen; what was written just now is read, as times may be coarse."""
        seen = self._seen.get(name, _UNSEEN)
        folder = _stat(self._folder(name))
        if folder != seen[1] or (folder is None and name in self._seen):
            return True
        if folder and time.time() - folder[0] / 1e9 < _COARSE:
            with contextlib.suppress(AdapterbankError, OSError):
                return self.bank.default(name) != seen[0] or self._stamp(name, seen[0]) != seen
        return closely and self._stamp(name, seen[0]) != seen

    def _folder(self, name: str) -> str:
        return f"{self.bank.path}/tasks/{name}"

    def _stamp(self, name: str, version: int | None) -> Seen:
        """Tell a task's state, and that of its version, without reading them."""
        return version, *self._pointer_stats(name), *self._version_stats(name, version)

    def _pointer_stats(self, name: str) -> Seen:
        return _stat(self._folder(name)), _stat(f"{self._folder(name)}/task.json")

    def _version_stats(self, name: str, version: int | None) -> Seen:
        files = ("manifest.json", "weights.safetensors") if version else ()
        return tuple(_stat(f"{self._folder(name)}/{version}/{file}") for file in files)

    def _refresh(self, name: str) -> None:
        """Serve a task as it is now, or say why not."""
        old = self._held.get(name)
        for _ in range(_TRIES):  # what was changed while it was read is no problem of its own
            seen, held, problem = self._read(name)
            if not problem or self._stamp(name, seen[0]) == seen:
                break
        if problem and self.problems.get(name) != problem:
            log.error("refused", extra={"fields": {"task": name, "problem": problem}})
        _set(self.problems, name, problem)
        _set(self._held, name, held)
        _set(self._seen, name, seen if seen[1] or problem else None)
        pinned = [self._pinned.pop(key, None) for key in list(self._pinned) if key[0] == name]
        if old and not held and not problem:
            log.info("removed", extra={"fields": {"task": name}})
        for one in (old, *pinned):  # a version that is still there is loaded again when it is asked for
            if one:
                self._let_go(one)

    def _read(self, name: str) -> tuple[Seen, ServedTask | None, str | None]:
        """Load a task's default version; gives how it stood before it was read, and what is wrong with it."""
        seen: Seen = (None, *self._pointer_stats(name))  # what changes from here on is seen at the next look
        try:
            version = self.bank.default(name)
            seen = (version, *seen[1:], *self._version_stats(name, version))
            return seen, self._load(self.bank.get(f"{name}@{version}")) if version else None, None
        except AdapterbankError as error:
            return seen, None, str(error)
        except Exception as error:  # the system's, say: it may pass, so this task is looked at again
            return _UNSEEN, None, f"{name} cannot be read ({type(error).__name__}: {error})."

    def _load(self, package: Package) -> ServedTask:
        # All that the manifest says is in the name: equal weights may have other labels.
        key = f"{package.ref}#{package.manifest.to_json()['checksum']}"
        known = self.engine.slots.find(key)
        if known is None:
            self.engine.load(package, key)
            known = self.engine.slots.find(key)
            log.info("loaded", extra={"fields": {"task": package.ref}})
        else:
            package.tensors()  # its files have changed under it: are they still what the manifest says?
        assert known is not None
        return ServedTask(package, known, key)

    def _pin(self, name: str, version: int) -> ServedTask:
        with self._lock_of(name):
            if held := self.find(f"{name}@{version}"):
                return held
            self._pinned[name, version] = held = self._load(self.bank.get(f"{name}@{version}"))
        while len(self._pinned) > PINNED:
            with contextlib.suppress(KeyError):  # another thread was quicker
                extra = self._pinned.popitem(last=False)[1]
                with self._lock_of(extra.package.manifest.name):
                    self._let_go(extra)
        return held

    def _let_go(self, held: ServedTask) -> None:
        """Drop a package from the engine unless it is still on the shelf; what is queued for it is still answered."""
        name, version = held.package.manifest.name, held.package.manifest.version
        if held.key not in {one.key for one in (self._held.get(name), self._pinned.get((name, version))) if one}:
            with contextlib.suppress(UnknownName):
                self.engine.remove(held.key)


def _set(table: dict[str, Any], name: str, value: Any) -> None:
    """Let a table say this of a task; None is nothing."""
    if value is None:
        table.pop(name, None)
    else:
        table[name] = value


def _stat(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    # The time of change too: a copy may bring its own time of writing, and permissions leave that alone.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size
