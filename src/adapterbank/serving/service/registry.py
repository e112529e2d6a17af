"""Which packages are served: follows a bank's folder as tasks come and go. Knows the engine's tasks, no rows, no HTTP.

The bank is scanned twice a second, with one stat per task, so that a thousand tasks cost milliseconds. A new or changed
task is loaded before it replaces the old one, and a task that cannot be loaded is refused with a message; neither
affects the other tasks. Older versions are loaded on demand, and only a few of them are kept. If the disk does not
answer for one task, the others are read without it, and its loaded version is still served.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

from adapterbank.errors import AdapterbankError, PackageDamaged, StorageError, UnknownName
from adapterbank.inference.engine import Engine
from adapterbank.inference.loading import content_name
from adapterbank.inference.slot_cache import TaskHandle
from adapterbank.serving.heartbeat import Heartbeat
from adapterbank.serving.service.task_reader import NoAnswer, TaskReader
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import Package, parse_ref
from adapterbank.storage.requirements import foundation, stands_on

POLL = 0.4
"""Seconds between two scans: a new package is served within one second, including the time to load it."""
PINNED = 32
"""Number of versions kept besides the default ones; the least recently used are dropped first."""
_THOROUGH = 5
"""Every so many scans is thorough."""
_SUGGESTIONS = 5
"""Number of similar names in an error message."""
_LOADERS = 2
_COMPILING = 600.0
"""Seconds that compiling for a GPU may take."""
_STOPPING = 1.0
"""Seconds that `stop` waits for a scan in progress."""
_TRIES = 3
"""How often a task is read again if it changes while it is read."""
_COARSE = 2.5
"""Seconds during which a modification time is not conclusive: some file systems have a resolution of two seconds."""

log = logging.getLogger("adapterbank.serving")


@dataclass(frozen=True)
class ServedTask:
    """A package that the engine has loaded."""

    package: Package
    handle: TaskHandle
    """The engine's handle."""
    key: str
    """Its name in the engine."""


Stamp = tuple[Any, ...]
"""What shows that a task has changed: its default version, and times, inodes and sizes of its folder and files."""
_UNSEEN: Stamp = (None, None)


class TaskRegistry:
    """The tasks of a bank in an engine."""

    def __init__(self, bank: Bank, engine: Engine) -> None:
        """Take the bank and the engine; nothing is served before `scan` or `follow`."""
        self.bank, self.engine = bank, engine
        self.ready = False
        """Whether the bank has been scanned once."""
        self.problems: dict[str, str] = {}
        """The tasks that cannot be served, with the reason."""
        self._served: dict[str, ServedTask] = {}
        self._pinned: OrderedDict[tuple[str, int], ServedTask] = OrderedDict()
        self.stamps: dict[str, Stamp] = {}
        """The state of each task when it was read."""
        self._below: dict[tuple[str, int], list[str]] = {}
        """What versions stand on, whose changes change them."""
        self._bounded: weakref.WeakSet[TaskHandle] = weakref.WeakSet()
        self._reader = TaskReader(_LOADERS)
        self._heartbeat = Heartbeat()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self) -> None:
        """Scan the bank repeatedly in a thread."""
        self._stopped.clear()
        self._thread = threading.Thread(target=self._follow, name="registry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop scanning; a scan that hangs is not waited for."""
        self._stopped.set()
        if self._thread:
            self._thread.join(_STOPPING)

    def stalled(self) -> list[str]:
        """Return what stands still: the scan, or tasks that the disk does not answer for; never waits."""
        return [*self._heartbeat.stalled(), *self._reader.stalled()]

    def all_problems(self) -> dict[str, str]:
        """Return the tasks that cannot be served, and those that cannot be read now, with the reason; never waits."""
        return dict(sorted({**self._reader.hung(), **self.problems.copy()}.items()))

    @property
    def count(self) -> int:
        """The number of tasks that are served."""
        return len(self._served)

    @property
    def pinned(self) -> list[str]:
        """The versions that are loaded besides the default ones, least recently used first."""
        return [f"{name}@{version}" for name, version in list(self._pinned)]

    def tasks(self) -> dict[str, ServedTask]:
        """Return the default package of each task by name."""
        return dict(sorted(self._served.copy().items()))

    def find(self, ref: str) -> ServedTask | None:
        """Return `name` or `name@version` if it is loaded; never waits. Raises for an invalid name."""
        name, version = parse_ref(ref)
        served = self._served.get(name)
        if served is None or version in (None, served.package.manifest.version):
            return None if name in self.problems and version is None else served
        pinned = self._pinned.get((name, version or 0))
        if pinned is not None:
            with contextlib.suppress(KeyError):
                self._pinned.move_to_end((name, version or 0))
        return pinned

    def fetch(self, ref: str) -> ServedTask:
        """Return a task, loading it if necessary; raise an error that says why it cannot be loaded."""
        if served := self.find(ref):
            return served
        name, version = parse_ref(ref)
        self.refresh(name)
        if served := self.find(ref):
            return served
        if name not in self._served and name not in self.problems:
            raise self.unknown(name)
        if version is None:
            raise PackageDamaged(self.problems.get(name, f"{name} cannot be used now; try again."))
        return self._pin(name, version)

    def unknown(self, name: str) -> UnknownName:
        """Return the error for a task that does not exist, with similar names."""
        near = difflib.get_close_matches(name, list(self._served), n=_SUGGESTIONS, cutoff=0.3)
        choices = near or sorted(self._served)[:_SUGGESTIONS]
        return UnknownName(name, "a task of this bank", choices, see="GET /v1/tasks")

    def scan(self, *, thorough: bool = True) -> None:
        """Scan the bank once, and load, replace and drop what has changed.

        Pointers and versions are written by a rename, which changes the task's folder. Any other change to the files is
        seen by a thorough scan only.
        """
        with self._heartbeat.work("listing the bank's tasks"):
            names = self.bank.folders()
        known = sorted({*names, *list(self.stamps)})
        self._reader.each(known, partial(self._refresh, thorough=thorough))
        if not self.ready:
            with self._heartbeat.work("compiling", _COMPILING):
                self._warm_up()
        self.ready = not self._stopped.is_set()

    def _warm_up(self) -> None:
        """Compile ahead of the first request."""
        try:
            self.engine.warm()
        except Exception as error:  # then the first requests compile
            log.error("failed", exc_info=error)

    def refresh(self, name: str, *, thorough: bool = False) -> None:
        """Read one task again if it has changed, without waiting for the next scan."""
        self._reader.one(name, partial(self._refresh, name, thorough=thorough))

    def _refresh(self, name: str, *, thorough: bool) -> None:
        if not self._stopped.is_set() and self._changed(name, thorough):
            self._replace(name)

    def _follow(self) -> None:
        last, scans = "", 0
        while not self._stopped.is_set():
            try:
                self.scan(thorough=scans % _THOROUGH == 0)
                last, scans = "", scans + 1
            except Exception as error:  # a bank that cannot be read for a while must not end the loop
                if (text := f"{type(error).__name__}: {error}") != last:
                    log.error("bank", extra={"fields": {"problem": text}})
                last = text
            self._stopped.wait(POLL)

    def _changed(self, name: str, thorough: bool) -> bool:
        """Whether a task differs from what was read; one written just now is compared, as times may be coarse."""
        seen = self.stamps.get(name, _UNSEEN)
        folder = _stat(self._folder(name))
        if folder != seen[1] or (folder is None and name in self.stamps):
            return True
        if folder and time.time() - folder[0] / 1e9 < _COARSE:
            with contextlib.suppress(AdapterbankError, OSError):
                return self.bank.default(name) != seen[0] or self._stamp(name, seen[0]) != seen
        stands = (name, seen[0]) in self._below
        return (thorough or stands) and self._stamp(name, seen[0]) != seen

    def _folder(self, name: str) -> str:
        return f"{self.bank.path}/tasks/{name}"

    def _stamp(self, name: str, version: int | None) -> Stamp:
        """Return the state of a task and its version without reading them."""
        return version, *self._pointer_stats(name), *self._version_stats(name, version)

    def _pointer_stats(self, name: str) -> Stamp:
        return _stat(self._folder(name)), _stat(f"{self._folder(name)}/task.json")

    def _version_stats(self, name: str, version: int | None) -> Stamp:
        files = ("manifest.json", "weights.safetensors") if version else ()
        own = tuple(_stat(f"{self._folder(name)}/{version}/{file}") for file in files)
        refs = [ref.split("@") for ref in self._below.get((name, version or 0), ())]
        return own + tuple(_stat(f"{self._folder(under)}/{number}/{file}") for under, number in refs for file in files)

    def _replace(self, name: str) -> None:
        """Serve the current state of a task, or record why it cannot be served."""
        old = self._served.get(name)
        for _ in range(_TRIES):  # a task that changed while it was read is not at fault
            seen, served, problem = self._read(name)
            if not problem or self._stamp(name, seen[0]) == seen:
                break
        if problem and self.problems.get(name) != problem:
            log.error("refused", extra={"fields": {"task": name, "problem": problem}})
        _set(self.problems, name, problem)
        _set(self._served, name, served)
        _set(self.stamps, name, seen if seen[1] or problem else None)
        pinned = [self._pinned.pop(key, None) for key in list(self._pinned) if key[0] == name]
        if old and not served and not problem:
            log.info("removed", extra={"fields": {"task": name}})
        for one in (old, *pinned):  # a version that still exists is loaded again on demand
            if one:
                self._release(one)

    def _read(self, name: str) -> tuple[Stamp, ServedTask | None, str | None]:
        """Load a task's default version; return its stamp before it was read, and what is wrong with it."""
        seen: Stamp = (None, *self._pointer_stats(name))  # later changes are seen by the next scan
        try:
            version = self.bank.default(name)
            seen = (version, *seen[1:], *self._version_stats(name, version))
            if version is None:
                return seen, None, None
            package = self.bank.get(f"{name}@{version}")
            _set(self._below, (name, version), stands_on(package) or None)
            seen = (*seen[:3], *self._version_stats(name, version))
            return seen, self._load(package), None
        except StorageError as error:  # of the system: it may be temporary, so the task is read again
            return _UNSEEN, None, str(error)
        except AdapterbankError as error:
            return seen, None, str(error)
        except Exception as error:  # an error of the system may be temporary, so the task is read again
            return _UNSEEN, None, f"{name} cannot be read ({type(error).__name__}: {error})."

    def _load(self, package: Package, *, asked: bool = True) -> ServedTask:
        below = foundation(package)
        try:
            for base in below:
                self._load(base, asked=False)
            return self._load_alone(package, asked=asked)
        finally:
            self.engine.release([content_name(base) for base in reversed(below)])

    def _load_alone(self, package: Package, *, asked: bool) -> ServedTask:
        key = content_name(package)
        handle = self.engine.slots.find(key)
        if handle is None:
            self.engine.load(package, key, asked=asked)
            handle = self.engine.slots.find(key)
            assert handle is not None
            self._bound(handle, package)
            log.info("loaded", extra={"fields": {"task": package.ref}})
        else:
            package.tensors()  # its files have changed: do they still match the manifest?
            if asked:
                self.engine.ask(key)
        return ServedTask(package, handle, key)

    def _bound(self, handle: TaskHandle, package: Package) -> None:
        """Let a lane that loads a slot again not hang; what several tasks stand on may come here twice."""
        with self.engine.slots.lock:
            if handle not in self._bounded:
                self._bounded.add(handle)
                read, size = handle.source, package.manifest.bytes
                handle.source = lambda: self._reader.one(package.manifest.name, read, size)

    def _pin(self, name: str, version: int) -> ServedTask:
        served = self._reader.one(name, partial(self._load_pinned, name, version))
        while len(self._pinned) > PINNED:
            with contextlib.suppress(KeyError):  # another thread was faster
                key, extra = self._pinned.popitem(last=False)
                try:
                    self._reader.one(key[0], partial(self._release, extra))
                except NoAnswer:  # it is released when its task is read again
                    self._pinned[key] = extra
                    break
        return served

    def _load_pinned(self, name: str, version: int) -> ServedTask:
        if served := self.find(f"{name}@{version}"):
            return served
        self._pinned[name, version] = served = self._load(self.bank.get(f"{name}@{version}"))
        return served

    def _release(self, served: ServedTask) -> None:
        """Remove a package from the engine unless it is still served; requests in the queue are still answered."""
        name, version = served.package.manifest.name, served.package.manifest.version
        if served.key not in {one.key for one in (self._served.get(name), self._pinned.get((name, version))) if one}:
            with contextlib.suppress(UnknownName):
                self.engine.remove(served.key)


def _set(table: dict[Any, Any], name: Any, value: Any) -> None:
    """Set an entry of a table, or delete it if the value is None."""
    if value is None:
        table.pop(name, None)
    else:
        table[name] = value


def _stat(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    # The change time too: a copy may keep its modification time, and permissions do not affect that.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size
