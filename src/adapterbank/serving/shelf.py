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
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from adapterbank.bank import Bank
from adapterbank.engine import Engine
from adapterbank.errors import AdapterbankError, PackageDamaged, UnknownName
from adapterbank.package import Package, parse_ref
from adapterbank.residency import Known

POLL = 0.4
"""Seconds between two looks: a new package is served within one, its loading included."""
PINNED = 32
"""Versions that are kept beside the default ones; the least recently used go first."""
_CLOSELY = 5
"""Every so many looks is a close one."""
_LISTED = 5
"""Near names in a refusal."""
_LOADERS = 2

log = logging.getLogger("adapterbank.serving")


@dataclass(frozen=True)
class Held:
    """A package that can be asked."""

    package: Package
    known: Known
    """The engine's."""
    key: str
    """Its name in the engine."""


Seen = tuple[Any, ...]
"""What tells that a task has changed: its default version, and times, inodes and sizes of its files."""


class Shelf:
    """The tasks of a bank in an engine."""

    def __init__(self, bank: Bank, engine: Engine) -> None:
        """Serve nothing yet; see `look` and `follow`."""
        self.bank, self.engine = bank, engine
        self.ready = False
        """Whether the bank has been looked through once."""
        self.problems: dict[str, str] = {}
        """A sentence for each task that is refused."""
        self._held: dict[str, Held] = {}
        self._pinned: OrderedDict[tuple[str, int], Held] = OrderedDict()
        self._seen: dict[str, Seen] = {}
        self._looking = threading.Lock()
        self._changing = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self) -> None:
        """Look at the bank again and again, from a thread of its own."""
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

    def held(self) -> dict[str, Held]:
        """Give the default package of each task by name."""
        return dict(sorted(self._held.copy().items()))

    def find(self, ref: str) -> Held | None:
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

    def fetch(self, ref: str) -> Held:
        """Give what answers for a task, loaded now if need be; raises what says why it cannot."""
        if held := self.find(ref):
            return held
        name, version = parse_ref(ref)
        self._look_at(name)
        if held := self.find(ref):
            return held
        if name not in self._held and name not in self.problems:
            raise self.unknown(name)
        if version is None:
            raise PackageDamaged(self.problems.get(name, f"{name} cannot be used now; ask again."))
        return self._pin(self.bank.get(ref))

    def unknown(self, name: str) -> UnknownName:
        """Say that there is no such task, and which come near."""
        near = difflib.get_close_matches(name, list(self._held), n=_LISTED, cutoff=0.3)
        return UnknownName(name, "a task of this bank", near or sorted(self._held)[:_LISTED], see="GET /v1/tasks")

    def look(self, *, closely: bool = True) -> None:
        """Look through the bank once, and load, replace and drop what has changed.

        Every pointer and version is written by a rename, which a task's folder shows; what else may have happened to
        the files is seen only on looking closely.
        """
        with self._looking:
            names = self.bank.folders()
            known = {name: self._seen.get(name, (None, None)) for name in names}
            kept = slice(None) if closely else slice(1, 2)
            changed = [name for name, seen in known.items() if self._stamp(name, seen[0], closely)[kept] != seen[kept]]
            if len(changed) > 1:
                with ThreadPoolExecutor(_LOADERS) as pool:
                    list(pool.map(self._refresh, changed))
            else:
                for name in changed:
                    self._refresh(name)
            for name in self._seen.keys() - set(names):
                self._drop(name)
            self.ready = True

    def _look_at(self, name: str) -> None:
        """Look at one task, for who asks for it before the next look."""
        with self._looking:
            seen = self._seen.get(name, (None, None))
            if (now := self._stamp(name, seen[0], closely=False))[1] not in (None, seen[1]):
                self._refresh(name)
            elif now[1] is None and name in self._seen:
                self._drop(name)

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

    def _stamp(self, name: str, version: int | None = None, closely: bool = True) -> Seen:
        """Tell a task's state, and that of its version, without reading them."""
        folder = f"{self.bank.path}/tasks/{name}"
        if not closely:
            return version, _stat(folder)
        files = ["", "/task.json"]
        files += [f"/{version}/manifest.json", f"/{version}/weights.safetensors"] if version else []
        return version, *(_stat(folder + file) for file in files)

    def _refresh(self, name: str) -> None:
        """Load a task's default version, or say why not."""
        old, held, version = self._held.get(name), None, None
        seen = self._stamp(name)  # before it is read: what changes meanwhile is seen the next time
        try:
            version = self.bank.default(name)
            seen = self._stamp(name, version)
            held = self._load(self.bank.get(f"{name}@{version}")) if version else None
        except AdapterbankError as error:
            if self.problems.get(name) != str(error):
                log.error("refused", extra={"fields": {"task": name, "problem": str(error)}})
            self.problems[name] = str(error)
        else:
            self.problems.pop(name, None)
        self._seen[name] = seen
        if held is None:
            self._held.pop(name, None)
        else:
            self._held[name] = held
        if old and (held is None or held.key != old.key):
            self._let_go(old)

    def _load(self, package: Package) -> Held:
        key = f"{package.ref}#{package.manifest.weights_sha256}"
        known = self.engine.slots.find(key)
        if known is None:
            self.engine.load(package, key)
            known = self.engine.slots.find(key)
            log.info("loaded", extra={"fields": {"task": package.ref}})
        else:
            package.tensors()  # its files have changed under it: are they still what the manifest says?
        assert known is not None
        return Held(package, known, key)

    def _pin(self, package: Package) -> Held:
        held = self._load(package)
        with self._changing:
            self._pinned[package.manifest.name, package.manifest.version] = held
            extra = [self._pinned.popitem(last=False)[1] for _ in range(len(self._pinned) - PINNED)]
        for one in extra:
            self._let_go(one)
        return held

    def _drop(self, name: str) -> None:
        self._seen.pop(name, None)
        self.problems.pop(name, None)
        log.info("removed", extra={"fields": {"task": name}})
        if old := self._held.pop(name, None):
            self._let_go(old)
        for key in [key for key in self._pinned if key[0] == name]:
            self._let_go(self._pinned.pop(key))

    def _let_go(self, held: Held) -> None:
        """Drop a package from the engine unless it is still on the shelf; what is queued for it is still answered."""
        if all(one.key != held.key for one in (*self._held.values(), *self._pinned.values())):
            with contextlib.suppress(UnknownName):
                self.engine.remove(held.key)


def _stat(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
