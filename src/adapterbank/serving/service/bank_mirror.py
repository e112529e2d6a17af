"""A bank behind a URL as a folder of this machine: a copy that follows its source. Knows no service, no HTTP, no Ray.

    bank.json, keys.json        the source's, when they change
    tasks/<name>/<version>/     whole, by one rename
    tasks/<name>/task.json      after the versions, so that a pointer never leads to what is not here yet

The source is listed twice a second and only what is new or changed is fetched. Nothing is judged here: a package that
is damaged there is damaged here, and refused by who reads it. The folder lies in the cache, belongs to one process, and
goes with it; what a killed process left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

from adapterbank.errors import AdapterbankError, BankError, InputError
from adapterbank.storage import cache
from adapterbank.storage import files as storage
from adapterbank.storage.package import is_name, is_version

REFRESH = 0.5
"""Seconds between two listings."""
FOLDER = "mirrors"
"""Where mirrors lie in the cache."""
_FILES = ("manifest.json", "weights.safetensors")
_POINTERS = "task.json"
_HEADS = ("bank.json", "keys.json")
_REST = 4
"""A look that takes long is followed by a pause of so many times as long: serving comes first."""
_AT_ONCE = 8
"""Tasks that are fetched at once."""
_PATIENCE = 5.0
"""Seconds that a listing under way may take when the mirror is closed."""

log = logging.getLogger("adapterbank.serving")

Files = dict[str, str]
"""Files of a task, as `3/manifest.json`, and what tells that one has changed."""


def is_url(bank: str) -> bool:
    """Whether a bank needs a mirror; `file://` is a folder like any other."""
    return "://" in bank and not bank.startswith("file://")


class Mirror:
    """A copy of a bank; `refresh` makes it what the source is, `follow` does so again and again."""

    def __init__(self, url: str, *, every: float = REFRESH) -> None:
        """Fetch what says which bank it is, and none of its tasks yet."""
        self.url, self._every = url, every
        self._fs, self._root = _open(url)
        self._heads: Files = {}
        self._have: dict[str, Files] = {}
        self._gone: set[tuple[str, str]] = set()
        self._waits: set[tuple[str, str]] = set()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._held = contextlib.ExitStack()
        self.path: Path = self._held.enter_context(_own_folder())
        """The folder, which opens as a bank."""
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
        """The sentence for who wants to change the bank through its copy."""
        return "This server reads the bank from a URL and does not write to it; change it there."

    def follow(self) -> None:
        """Refresh again and again, from a thread of its own."""
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Follow no more, and leave nothing behind."""
        self._stopped.set()
        if self._thread:
            self._thread.join(_PATIENCE)
        self._held.close()

    def refresh(self) -> None:
        """Fetch what is new or changed and drop what is gone; raises what went wrong, after all else is done."""
        self._fetch_heads()
        wanted = self._confirmed(self._listed())
        changed = [name for name in {*wanted, *self._have} if wanted.get(name, {}) != self._have.get(name, {})]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="mirror") as pool:
            problems = list(pool.map(lambda name: self._try(name, wanted.get(name, {})), sorted(changed)))
        for problem in filter(None, problems):
            raise problem

    def refresh_all(self) -> None:
        """Refresh for the first time: what cannot be fetched is told in the log, and may come later."""
        try:
            self.refresh()
        except BankError:
            raise
        except Exception as error:
            self._tell(f"{type(error).__name__}: {error}")

    def _tell(self, problem: str) -> None:
        log.error("bank", extra={"fields": {"url": self.url, "problem": problem}})

    def _follow(self) -> None:
        last, pause = "", self._every
        while not self._stopped.wait(pause):
            began = time.monotonic()
            try:
                self.refresh()
                last = ""
            except Exception as error:  # a store that is away for a while leaves all as it is
                if (text := f"{type(error).__name__}: {error}") != last:
                    self._tell(text)
                last = text
            pause = max(self._every, _REST * (time.monotonic() - began))

    # --- what is there ------------------------------------------------------------------------------------

    def _fetch_heads(self) -> None:
        self._fs.invalidate_cache()  # others write there
        with contextlib.suppress(FileNotFoundError):
            found = {_leaf(info): info for info in self._fs.ls(self._root, detail=True)}
            if "bank.json" in found:
                self._copy_heads({name: _stamp(found[name]) for name in _HEADS if name in found})
                return
        raise BankError(f"{self.url} has no bank.json, so it is no bank; name one that `adapterbank train` made.")

    def _copy_heads(self, found: Files) -> None:
        for name, stamp in found.items():
            if self._heads.get(name) != stamp:
                data = self._fs.cat_file(f"{self._root}/{name}")
                storage.atomic_write(self.path / name, data, private=True)
        for name in self._heads.keys() - found:  # keys that are gone there let nobody in here
            storage.discard(self.path / name)
        self._heads = found

    def _listed(self) -> dict[str, Files]:
        """Give the files of each task; what is none of a bank's, by its name, is passed over."""
        start = f"{self._root}/tasks/".lstrip("/")
        found: dict[str, Files] = {}
        for path, info in self._fs.find(f"{self._root}/tasks", detail=True).items():
            name, _, rest = path.lstrip("/").removeprefix(start).partition("/")
            version, _, file = rest.rpartition("/")
            if is_name(name) and (rest == _POINTERS or (is_version(version) and file in _FILES)):
                found.setdefault(name, {})[rest] = _stamp(info)
        return found

    def _confirmed(self, found: dict[str, Files]) -> dict[str, Files]:
        """Believe that a file is gone when two listings say so: many stores pass over what they cannot list."""
        gone = {
            (name, file) for name, files in self._have.items() for file in files.keys() - found.get(name, {}).keys()
        }
        for name, file in gone - self._gone:
            found.setdefault(name, {})[file] = self._have[name][file]
        self._gone = gone
        return found

    # --- fetching -----------------------------------------------------------------------------------------

    def _try(self, name: str, wanted: Files) -> Exception | None:
        """Bring one task over; what goes wrong with it must not keep the others."""
        try:
            self._bring(name, wanted)
        except FileNotFoundError:  # it went between the listing and now: the next listing says so
            return None
        except Exception as error:
            return error
        return None

    def _bring(self, name: str, wanted: Files) -> None:
        folder, have = self.path / "tasks" / name, self._have.setdefault(name, {})
        if not wanted:
            if folder.exists():
                storage.discard(storage.set_aside(folder))
            del self._have[name]
            return
        storage.make_folder(folder)
        for version in sorted({_version(file) for file in wanted if file != _POINTERS}):
            self._bring_version(folder, {f: s for f, s in wanted.items() if _version(f) == version}, have)
        if not self._point(folder, wanted, have):
            return
        for version in {_version(file) for file in have if file not in wanted and file != _POINTERS}:
            if not any(_version(file) == version for file in wanted):
                storage.discard(storage.set_aside(folder / version))
            for file in [file for file in have if _version(file) == version and file not in wanted]:
                storage.discard(folder / file)
                del have[file]

    def _bring_version(self, folder: Path, wanted: Files, have: Files) -> None:
        """Fetch what differs of one version: a new one appears whole, of another each file is replaced."""
        changed = {file: stamp for file, stamp in wanted.items() if have.get(file) != stamp}
        if not changed:
            return
        with storage.temporary_folder(folder.parent) as temporary:
            for file in changed:
                self._fs.get_file(f"{self._root}/tasks/{folder.name}/{file}", str(temporary / Path(file).name))
            final = folder / _version(next(iter(changed)))
            if final.exists():
                for file in changed:
                    os.replace(temporary / Path(file).name, folder / file)
            else:
                temporary.chmod(0o755)
                os.rename(temporary, final)
        have |= changed

    def _point(self, folder: Path, wanted: Files, have: Files) -> bool:
        """Move the pointers, unless they lead to a version of which a file is still to come; says whether it did."""
        stamp = wanted.get(_POINTERS)
        if stamp == have.get(_POINTERS):
            return True
        if stamp is None:
            storage.discard(folder / _POINTERS)
            del have[_POINTERS]
            return True
        data = self._fs.cat_file(f"{self._root}/tasks/{folder.name}/{_POINTERS}")
        default = _default(data)
        served = (folder / _POINTERS).exists()
        if served and default is not None and not {f"{default}/{file}" for file in _FILES} <= have.keys():
            if (folder.name, stamp) not in self._waits:
                self._waits.add((folder.name, stamp))
                log.warning("incomplete", extra={"fields": {"task": f"{folder.name}@{default}", "url": self.url}})
            return False
        storage.atomic_write(folder / _POINTERS, data)
        have[_POINTERS] = stamp
        return True


def _open(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise InputError(f"{url} is a URL, which needs fsspec: pip install 'adapterbank[ray]'.") from None
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(f"{url} cannot be opened: {' '.join(str(error).split())}.") from error
    return fs, root.rstrip("/")


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """Have a folder in the cache, and remove those whose processes have ended."""
    base = cache.folder() / FOLDER
    mine = base / f"{os.getpid()}-{uuid4().hex[:12]}"
    with contextlib.ExitStack() as held:
        with storage.locked(base / ".lock"):
            for left in [path for path in base.iterdir() if path.is_dir()]:
                with storage.claimed(left) as free:
                    if free:
                        shutil.rmtree(left, ignore_errors=True)
            held.enter_context(storage.claimed(mine))
        try:
            yield mine
        finally:
            shutil.rmtree(mine, ignore_errors=True)


def _version(file: str) -> str:
    """Give the version that a file of a task belongs to; empty for its pointers."""
    return file.rpartition("/")[0]


def _leaf(info: Mapping[str, Any]) -> str:
    return str(info["name"]).rstrip("/").rpartition("/")[2]


def _stamp(info: Mapping[str, Any]) -> str:
    """Tell a file's state by all that its store says of it: size and time, and a checksum where there is one."""
    return repr(sorted(info.items()))


def _default(data: bytes) -> int | None:
    """Read which version the pointers lead to; none where they are damaged, which others will tell."""
    try:
        found = json.loads(data)["default"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if type(found) is int else None
