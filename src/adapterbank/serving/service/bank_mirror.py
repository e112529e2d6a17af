"""A local copy of a bank behind a URL, which follows its source. Knows no service, no HTTP, no Ray.

    bank.json, keys.json        copied when they change
    tasks/<name>/<version>/     complete, by one rename
    tasks/<name>/task.json      after the versions, so that a pointer never names a version that is not here yet

The source is listed twice a second, and only new or changed files are fetched: plain files, no larger than such a file
can be, and weights that leave half of the disk's free space. A pipe in place of a file removes nothing: what was
fetched before stays, and the log names it once. Nothing else is checked here: a package that is damaged at the source
is damaged here, and refused by its reader. The folder is in the cache, belongs to one process and is removed with it;
the next process removes the folders of killed ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from adapterbank.errors import AdapterbankError, BankError, InputError
from adapterbank.install import extra_command
from adapterbank.serving.heartbeat import Heartbeat
from adapterbank.serving.service.task_reader import TaskReader
from adapterbank.storage import cache, reading
from adapterbank.storage import files as storage
from adapterbank.storage.package import is_name, is_version

REFRESH = 0.5
"""Seconds between two listings."""
MIRROR_FOLDER = "mirrors"
"""The folder of the mirrors in the cache."""
_FILES = ("manifest.json", "weights.safetensors")
_POINTERS = "task.json"
_HEADS = ("bank.json", "keys.json")
_REST = 4
"""After a slow refresh, the pause is this many times as long as the refresh: serving has priority."""
_AT_ONCE = 8
"""Number of tasks that are fetched at once."""
_LISTING = 10.0
"""Seconds that listing the bank may take before it stands still: a store may send many pages."""
_FETCHING = 60.0
"""Seconds that fetching one task may take before the others are followed without it: weights may be large."""
_STOPPING = 1.0
"""Seconds that `close` waits for a refresh in progress."""

log = logging.getLogger("adapterbank.serving")

RemoteFiles = dict[str, str]
"""The files of a task, such as `3/manifest.json`, with a stamp that changes with the file."""


def is_url(bank: str) -> bool:
    """Whether a bank needs a mirror; `file://` is a folder like any other."""
    return "://" in bank and not bank.startswith("file://")


class Mirror:
    """A copy of a bank; `refresh` brings it up to date, `follow` does so repeatedly."""

    def __init__(self, url: str, *, every: float = REFRESH) -> None:
        """Fetch the files that describe the bank, and none of its tasks yet."""
        self.url, self.every = url, every
        self.fs, self._root = _open(url)
        self._heads: RemoteFiles = {}
        self._have: dict[str, RemoteFiles] = {}
        self._sizes: dict[str, int | None] = {}
        self._missing: set[tuple[str, str]] = set()
        self._incomplete: set[tuple[str, str]] = set()
        self._odd: set[tuple[str, str]] = set()
        self._reader = TaskReader(_AT_ONCE, _FETCHING)
        self._heartbeat = Heartbeat(_LISTING)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._resources = contextlib.ExitStack()
        self.path: Path = self._resources.enter_context(_own_folder())
        """The folder, which can be opened as a bank."""
        try:
            self._fetch_heads()
        except AdapterbankError:
            self.close()
            raise
        except Exception as error:
            self.close()
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise BankError(f"{url} cannot be read ({why}); check the address and the credentials.") from error

    @property
    def refusal(self) -> str:
        """The error message for requests that would change the bank."""
        return "This server reads its bank from a URL and cannot write to it; change the bank at its source."

    def follow(self) -> None:
        """Refresh repeatedly in a thread."""
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following, and remove the folder."""
        self._stopped.set()
        if self._thread:
            self._thread.join(_STOPPING)
        self._resources.close()

    def stalled(self) -> list[str]:
        """Return what stands still; never waits."""
        return [*self._heartbeat.stalled(), *self._reader.stalled(_FETCHING)]

    def refresh(self) -> None:
        """Fetch what is new or changed and remove what is gone; raise the first error after all else is done."""
        with self._heartbeat.work("listing the bank"):
            self._fetch_heads()
            self._heartbeat.beat()
            wanted = self._confirmed(self._listed())
        changed = [name for name in {*wanted, *self._have} if wanted.get(name, {}) != self._have.get(name, {})]
        self._reader.each(sorted(changed), lambda name: self._fetch(name, wanted.get(name, {})))

    def refresh_all(self) -> None:
        """Refresh for the first time; what cannot be fetched is logged, and may be fetched later."""
        try:
            self.refresh()
        except BankError:
            raise
        except Exception as error:
            self._log_problem(f"{type(error).__name__}: {error}")

    def _log_problem(self, problem: str) -> None:
        log.error("bank", extra={"fields": {"url": self.url, "problem": problem}})

    def _follow(self) -> None:
        last, pause = "", self.every
        while not self._stopped.wait(pause):
            began = time.monotonic()
            try:
                self.refresh()
                last = ""
            except Exception as error:  # while the store is unavailable, nothing changes
                if (text := f"{type(error).__name__}: {error}") != last:
                    self._log_problem(text)
                last = text
            pause = max(self.every, _REST * (time.monotonic() - began))

    # --- listing ------------------------------------------------------------------------------------------

    def _fetch_heads(self) -> None:
        self.fs.invalidate_cache()  # other processes write there
        with contextlib.suppress(FileNotFoundError):
            found = {_leaf(info): info for info in self.fs.ls(self._root, detail=True)}
            for name in _HEADS:
                if name in found and not _is_file(found[name]):  # without its keys, a server would be open to all
                    raise BankError(f"{self.url}/{name} is not a regular file; restore it from a copy.")
            if "bank.json" in found:
                self._copy_heads({name: _stamp(found[name]) for name in _HEADS if name in found})
                return
        raise BankError(f"{self.url} is not a bank: it has no bank.json; name a bank that `adapterbank train` created.")

    def _copy_heads(self, found: RemoteFiles) -> None:
        for name, stamp in found.items():
            if self._heads.get(name) != stamp:
                data = self._cat(f"{self._root}/{name}", reading.LARGE)
                storage.atomic_write(self.path / name, data, private=True)
        for name in self._heads.keys() - found:  # keys that were removed there must not work here
            storage.discard(self.path / name)
        self._heads = found

    def _listed(self) -> dict[str, RemoteFiles]:
        """Return the files of each task; files whose names do not belong in a bank are ignored."""
        start = f"{self._root}/tasks/".lstrip("/")
        found: dict[str, RemoteFiles] = {}
        sizes: dict[str, int | None] = {}
        odd: set[tuple[str, str]] = set()
        for path, info in self.fs.find(f"{self._root}/tasks", detail=True).items():
            name, _, rest = path.lstrip("/").removeprefix(start).partition("/")
            version, _, file = rest.rpartition("/")
            if is_name(name) and not _is_file(info):
                odd.add((name, rest))
            elif is_name(name) and (rest == _POINTERS or (is_version(version) and file in _FILES)):
                found.setdefault(name, {})[rest] = _stamp(info)
                sizes[path.lstrip("/")] = info.get("size")
        self._sizes = sizes
        self._keep(odd, found)
        return found

    def _keep(self, odd: set[tuple[str, str]], found: dict[str, RemoteFiles]) -> None:
        """Add to a listing what was fetched before from a place that has something else than a file now."""
        for name, place in sorted(odd):
            have = dict(self._have.get(name, {}))
            kept = {file: stamp for file, stamp in have.items() if f"{file}/".startswith(f"{place}/" if place else "")}
            if kept:
                found.setdefault(name, {}).update(kept)
            if (name, place) not in self._odd:
                where = f"tasks/{name}/{place}".rstrip("/")
                self._log_problem(f"{where} is not a regular file; restore it, or remove the task at its source.")
        self._odd = odd

    def _confirmed(self, found: dict[str, RemoteFiles]) -> dict[str, RemoteFiles]:
        """Treat a file as removed only when two listings lack it: many stores omit what they cannot list."""
        have = list(self._have.items())
        missing = {(name, file) for name, files in have for file in files.keys() - found.get(name, {}).keys()}
        for name, file in missing - self._missing:
            found.setdefault(name, {})[file] = self._have[name][file]
        self._missing = missing
        return found

    # --- fetching -----------------------------------------------------------------------------------------

    def _fetch(self, name: str, wanted: RemoteFiles) -> None:
        """Update one task; one removed since the listing is shown by the next."""
        with contextlib.suppress(FileNotFoundError):
            self._update(name, wanted)

    def _update(self, name: str, wanted: RemoteFiles) -> None:
        folder, have = self.path / "tasks" / name, self._have.setdefault(name, {})
        if not wanted:
            if folder.exists():
                storage.discard(storage.set_aside(folder))
            del self._have[name]
            return
        storage.make_folder(folder)
        for version in sorted({_version(file) for file in wanted if file != _POINTERS}):
            self._update_version(folder, {f: s for f, s in wanted.items() if _version(f) == version}, have)
        if not self._point(folder, wanted, have):
            return
        for version in {_version(file) for file in have if file not in wanted and file != _POINTERS}:
            if not any(_version(file) == version for file in wanted):
                storage.discard(storage.set_aside(folder / version))
            for file in [file for file in have if _version(file) == version and file not in wanted]:
                storage.discard(folder / file)
                del have[file]

    def _update_version(self, folder: Path, wanted: RemoteFiles, have: RemoteFiles) -> None:
        """Fetch the changed files of one version: a new version appears complete, otherwise each file is replaced."""
        changed = {file: stamp for file, stamp in wanted.items() if have.get(file) != stamp}
        if not changed:
            return
        with storage.temporary_folder(folder.parent) as temporary:
            for file in changed:
                self._get(f"{self._root}/tasks/{folder.name}/{file}", temporary / Path(file).name)
            final = folder / _version(next(iter(changed)))
            if final.exists():
                for file in changed:
                    os.replace(temporary / Path(file).name, folder / file)
            else:
                temporary.chmod(0o755)
                os.rename(temporary, final)
        have |= changed

    def _cat(self, path: str, limit: int) -> bytes:
        """Return a file, of one that is too large only as much as its reader needs to refuse it."""
        data: bytes = self.fs.cat_file(path, end=limit + 1)
        return data

    def _get(self, path: str, target: Path) -> None:
        """Fetch a file of a version, unless it is too large."""
        limit = reading.LARGE if target.name == _FILES[0] else shutil.disk_usage(self.path).free // 2
        if (size := self._sizes.get(path.lstrip("/")) or 0) > limit:
            raise BankError(f"{path} has {size:,} bytes, more than the {limit:,} that it may have here.")
        self.fs.get_file(path, str(target))

    def _point(self, folder: Path, wanted: RemoteFiles, have: RemoteFiles) -> bool:
        """Update the pointers unless they name a version that is incomplete; return whether it did."""
        stamp = wanted.get(_POINTERS)
        if stamp == have.get(_POINTERS):
            return True
        if stamp is None:
            storage.discard(folder / _POINTERS)
            del have[_POINTERS]
            return True
        data = self._cat(f"{self._root}/tasks/{folder.name}/{_POINTERS}", reading.SMALL)
        default = _default(data)
        served = (folder / _POINTERS).exists()
        if served and default is not None and not {f"{default}/{file}" for file in _FILES} <= have.keys():
            if (folder.name, stamp) not in self._incomplete:
                self._incomplete.add((folder.name, stamp))
                log.warning("incomplete", extra={"fields": {"task": f"{folder.name}@{default}", "url": self.url}})
            return False
        storage.atomic_write(folder / _POINTERS, data)
        have[_POINTERS] = stamp
        return True


def _open(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise InputError(f"A bank behind a URL ({url}) needs fsspec: {extra_command('ray')}") from None
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(f"{url} cannot be opened: {' '.join(str(error).split())}.") from error
    return fs, root.rstrip("/")


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """Create a folder in the cache, and remove those whose processes have ended."""
    base = cache.folder() / MIRROR_FOLDER
    mine = base / f"{os.getpid()}-{uuid4().hex[:12]}"
    with contextlib.ExitStack() as claims:
        with storage.locked(base / ".lock"):
            for other in [path for path in base.iterdir() if path.is_dir()]:
                with storage.claimed(other) as free:
                    if free:
                        shutil.rmtree(other, ignore_errors=True)
            claims.enter_context(storage.claimed(mine))
        try:
            yield mine
        finally:
            shutil.rmtree(mine, ignore_errors=True)


def _version(file: str) -> str:
    """Return the version that a file of a task belongs to; empty for the pointers."""
    return file.rpartition("/")[0]


def _is_file(info: Mapping[str, Any]) -> bool:
    """Return whether an entry is a plain file, which a store's pipe or folder in place of one is not."""
    return bool(info.get("type", "file") == "file")


def _leaf(info: Mapping[str, Any]) -> str:
    return str(info["name"]).rstrip("/").rpartition("/")[2]


def _stamp(info: Mapping[str, Any]) -> str:
    """Return all that the store knows about a file: size, time, and a checksum if there is one."""
    return repr(sorted(info.items()))


def _default(data: bytes) -> int | None:
    """Return the version that the pointers name; None if they are damaged, which the reader reports."""
    try:
        found = reading.parse_json(data)["default"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if type(found) is int else None
