"""A bank: the packages of one backbone in one folder. Knows no torch and not what the tensors mean.

    bank.json                   format, backbone (name, sha256), created
    tasks/<name>/task.json      {"name": …, "default": 3, "previous": [1, 2], "last": 3, "gone": [], "checksum": …}
    tasks/<name>/<version>/     manifest.json and weights.safetensors, never changed
    records/, runs/             written by training and studies
    .lock                       held briefly, never while weights are written

A bank is plain files without absolute paths: `cp -r` copies it. `last` is kept when versions are removed, so a version
number is never reused. Readers take no lock, so a read-only bank can be served.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from adapterbank import errors
from adapterbank.storage import bank_head, files, pointers, requirements
from adapterbank.storage.comparison import compare
from adapterbank.storage.package import (
    FORMAT,
    LAST_VERSION,
    MANIFEST_BYTES,
    RESTORE,
    STACKED,
    Array,
    Manifest,
    Package,
    check_name,
    is_name,
    is_version,
    pack,
    parse_ref,
    read_manifest,
)
from adapterbank.storage.pointers import Pointers

_UNFINISHED = ".unfinished"
"""A file in a version whose pointers are not written yet."""


class Removed(NamedTuple):
    """Something that `Bank.gc` removed, or would remove."""

    path: Path
    bytes: int
    reason: str


@dataclass(frozen=True)
class Bank:
    """A folder of packages for one backbone; `Bank.open` opens or creates it."""

    path: Path
    backbone: dict[str, str]
    """Name and sha256 of the encoder that all packages were trained on."""

    @classmethod
    def open(cls, path: Path | str, backbone: Mapping[str, Any] | None = None, create: bool = False) -> Bank:
        """Open a bank, check it against `backbone` (name, sha256) if given, and with `create` create a missing one."""
        path = Path(path)
        with files.storage_errors(path):
            if path.exists() and not path.is_dir():
                raise errors.BankError(f"{path} is a file, and a bank is a folder; choose another path.")
            if create and not (path / "bank.json").exists():
                bank_head.create(path, backbone)
            bank = cls(path, bank_head.read_backbone(path))
        if backbone is not None:
            bank._check_backbone(backbone, "the backbone given")
        return bank

    @property
    def records_path(self) -> Path:
        """The folder of the runs' records; this class neither reads nor removes them."""
        return self.path / "records"

    @property
    def runs_path(self) -> Path:
        """The folder of the state of unfinished runs; this class neither reads nor removes it."""
        return self.path / "runs"

    def put(self, draft: Manifest, tensors: Mapping[str, Array], default: str = "new") -> Package:
        """Add a package as a new version and, atomically, the default; with `better`, only if that scores no higher."""
        check_name(draft.name)
        if problem := draft.problem():
            raise errors.InputError(f"The package {draft.name!r} cannot be stored: {problem}.")
        self._check_backbone(draft.backbone, f"the package {draft.name!r}")
        weights = pack(tensors)
        filled = replace(
            draft,
            format=STACKED if draft.requires else FORMAT,
            bytes=len(weights),
            weights_sha256=files.sha256_bytes(weights),
            created=files.now(),
        )
        with files.temporary_folder(self._tasks) as temporary:
            files.atomic_write(temporary / "weights.safetensors", weights)
            with self._locked():
                requirements.check(filled, self._tasks)
                return self._publish(filled, temporary, default)

    def get(self, ref: str) -> Package:
        """Return the package `name@version`, or the default version of `name`."""
        name, version = parse_ref(ref)
        default = self._existing(name).default
        return self._package(name, default if version is None else version)

    def listing(self) -> tuple[list[Package], list[str]]:
        """Return the default package of each task by name, and a sentence for each task that cannot be used."""
        packages, problems = [], []
        for name in self.folders():
            try:
                if version := self._read_pointers(name).default:
                    requirements.foundation(package := self._package(name, version))
                    packages.append(package)
            except errors.AdapterbankError as error:
                problems.append(str(error))
        return packages, problems

    def tasks(self) -> list[Package]:
        """Return the default package of each task by name, without those that `listing` reports as unusable."""
        return self.listing()[0]

    def names(self) -> list[str]:
        """Return the names of all tasks, sorted, including those whose pointers are damaged."""
        names = []
        for name in self.folders():
            with contextlib.suppress(errors.PackageDamaged):
                if self._read_pointers(name).default is None:
                    continue
            names.append(name)
        return names

    def default(self, name: str) -> int | None:
        """Return the version of a task that is served; None if there is no such task."""
        return self._read_pointers(check_name(name)).default

    def versions(self, name: str) -> list[int]:
        """Return the existing versions of a task, lowest first."""
        self._existing(name)
        return self._versions(name)

    def newest(self, name: str) -> int:
        """Return the newest version of a task; 0 if there is none, or its pointers are damaged."""
        with contextlib.suppress(errors.AdapterbankError):
            return max(self.versions(name), default=0)
        return 0

    def set_default(self, name: str, version: int) -> None:
        """Make `version` the default; a rollback returns to the present default."""
        with self._locked():
            now = self._existing(name)
            self._package(name, version)
            self._write_pointers(name, now.moved_to(version))

    def rollback(self, name: str, to: int | None = None) -> int:
        """Make the previous default, or the version `to`, the default again; return its number."""
        with self._locked():
            now = self._existing(name)
            if to is None and not now.previous:
                there = _join(self._versions(name))
                raise errors.BankError(f"{name!r} has no earlier default; name one of its versions: {there}.")
            version = now.previous[-1] if to is None else to
            requirements.foundation(self._package(name, version))
            self._write_pointers(name, now.rolled_back_to(version))
        return version

    def remove(self, ref: str) -> None:
        """Remove a version, or the whole task if `ref` has no version; their numbers are not reused."""
        name, version = parse_ref(ref)
        with self._locked():
            # A pointer may lead to a version that is gone: its folder was deleted, or a removal was interrupted.
            known = [*self._existing(name).named, *self._versions(name)]
            if version is not None and version not in known:
                raise self._no_version(name, version)
            doomed = known if version is None else [version]
            requirements.refuse_removal(self._tasks, name, doomed)
            hidden = self._hide(name, doomed)
        for path in hidden:
            files.discard(path)

    def gc(self, dry_run: bool = False, older_than_seconds: float = 3600) -> list[Removed]:
        """Remove leftovers of interrupted writes, and versions that are neither served nor next in a rollback."""
        folders = [self.path, self._tasks, *(self._tasks / name for name in self.folders())]
        hidden = files.leftovers(folders, older_than_seconds)
        removed = [Removed(path, files.size_of(path), "left by an interrupted write") for path in hidden]
        for path in [] if dry_run else hidden:  # first, because what follows needs space to write
            files.discard(path)
        hidden = []
        with contextlib.nullcontext() if dry_run else self._locked():
            standing = requirements.dependants(self._tasks)
            for name in self.folders():
                old = self._unreferenced(name, older_than_seconds)
                unreferenced = [version for version in old if f"{name}@{version}" not in standing]
                paths = [self._tasks / name / str(version) for version in unreferenced]
                removed += [Removed(path, files.size_of(path), "no pointer leads to it") for path in paths]
                if not dry_run:
                    hidden += self._hide(name, unreferenced) if unreferenced else []
                    self._unmark(name)
                if self._is_bare(name, older_than_seconds):
                    removed.append(Removed(self._tasks / name, 0, "left by an interrupted write"))
                    hidden += [] if dry_run else [files.set_aside(self._tasks / name)]
        for path in hidden:
            files.discard(path)
        return removed

    def unfinished(self) -> list[str]:
        """Return the versions that an interrupted write or removal left, and that belong to no task."""
        found = []
        for name in self.folders():
            with contextlib.suppress(errors.AdapterbankError):
                now = self._read_pointers(name)
                left = [version for version in self._versions(name) if now.default is None or version in now.gone]
                found += [f"{name}@{version}" for version in left]
        return found

    def total_bytes(self) -> int:
        """Return the size on disk of all versions of all tasks, in bytes."""
        return files.size_of(self._tasks)

    @property
    def _tasks(self) -> Path:
        return self.path / "tasks"

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return files.locked(self.path / ".lock")

    def _publish(self, filled: Manifest, temporary: Path, default: str) -> Package:
        """Rename a finished folder to the next version and move the pointers; undo the rename if that fails."""
        name, now = filled.name, self._read_pointers(filled.name)
        version = 1 + max(now.last, *self._versions(name), 0)
        if version > LAST_VERSION:
            raise errors.BankError(f"{name!r} has a version {version - 1}, the highest possible; remove it.")
        manifest = files.pretty_json(replace(filled, version=version).to_json())
        if len(manifest) > MANIFEST_BYTES:
            raise errors.InputError(
                f"The manifest of {name!r} has {len(manifest):,} bytes, and {MANIFEST_BYTES:,} are possible; "
                "use fewer or shorter labels."
            )
        files.atomic_write(temporary / "manifest.json", manifest)
        (temporary / _UNFINISHED).touch()  # until the pointers are written, so that `gc` knows what a kill left
        final = self._tasks / name / str(version)
        try:
            files.make_folder(final.parent)
            files.publish_folder(temporary, final)
            self._write_pointers(name, self._moved(now, filled, version, default))
        except BaseException:
            published = (final.parent / pointers.FILE).exists() and self._read_pointers(name).last == version
            if not published:
                if not temporary.exists():
                    os.rename(final, temporary)
                with contextlib.suppress(OSError):
                    final.parent.rmdir()  # succeeds only for the empty folder of a new task
            raise
        (final / _UNFINISHED).unlink(missing_ok=True)
        return self._package(name, version)

    def _moved(self, now: Pointers, new: Manifest, version: int, default: str) -> Pointers:
        """Return the pointers after a new version; a default that cannot be read is not kept."""
        if default == "better" and now.default is not None:
            with contextlib.suppress(errors.AdapterbankError):
                found = compare(new, self._package(new.name, now.default).manifest)
                return now.with_version(version) if found and found.is_lower else now.moved_to(version)
        return now.moved_to(version)

    def finish(self, package: Package, default: str = "new") -> Package:
        """Write the pointers to a version whose write was interrupted before that; others stay as they are."""
        name, version = package.manifest.name, package.manifest.version
        with self._locked():
            if (now := self._read_pointers(name)).last < version:
                self._write_pointers(name, self._moved(now, package.manifest, version, default))
        return package

    def served(self, name: str) -> Manifest | None:
        """Return the manifest of a task's default version; None if there is none that can be read."""
        with contextlib.suppress(errors.AdapterbankError):
            return self.get(name).manifest
        return None

    def _package(self, name: str, version: int | None) -> Package:
        path = self._tasks / name / str(version)
        with files.storage_errors(path):
            if not path.is_dir():
                raise self._no_version(name, version)
        manifest = read_manifest(path)
        if (manifest.name, manifest.version) != (name, version):
            raise errors.PackageDamaged(f"{path} contains {manifest.name}@{manifest.version}; {RESTORE}.")
        self._check_backbone(manifest.backbone, f"the package {name}@{version}")
        return Package(manifest, path)

    def _no_version(self, name: str, version: int | None) -> errors.BankError:
        there = _join(self._versions(name))
        return errors.BankError(f"{name!r} has no version {version}; its versions are {there}.")

    def folders(self) -> list[str]:
        """Return the names of all task folders, sorted; the folder of a removed task is among them.

        A file in place of a folder is among them too, so that whoever reads it says what is wrong; one with an ending,
        such as notes.txt, is not.
        """
        tasks = self._tasks
        with (
            files.storage_errors(tasks),
            contextlib.suppress(FileNotFoundError),
            os.scandir(tasks) as found,
        ):
            return sorted(entry.name for entry in found if is_name(entry.name) and files.may_be_folder(entry))
        return []

    def _versions(self, name: str) -> list[int]:
        folder = self._tasks / name
        with files.storage_errors(folder), contextlib.suppress(FileNotFoundError):
            return sorted(int(entry) for entry in os.listdir(folder) if is_version(entry))
        return []

    def _existing(self, name: str) -> Pointers:
        """Return the pointers of a task; raise `UnknownName` if there is no such task."""
        found = self._read_pointers(check_name(name))
        if found.default is None:
            near = sorted(difflib.get_close_matches(name, self.names(), n=20, cutoff=0.0))
            raise errors.UnknownName(name, "a task of this bank", near, see=f"adapterbank tasks --bank {self.path}")
        return found

    def _read_pointers(self, name: str) -> Pointers:
        """Read the pointers; if task.json is missing, the highest version is the default."""
        try:
            return pointers.read(self._tasks / name / pointers.FILE, name)
        except FileNotFoundError:
            versions = self._versions(name)
            return Pointers(max(versions, default=None), (), max(versions, default=0))

    def _write_pointers(self, name: str, value: Pointers) -> None:
        value = replace(value, gone=tuple(version for version in self._versions(name) if version in value.gone))
        pointers.write(self._tasks / name / pointers.FILE, name, value)

    def _unreferenced(self, name: str, older_than_seconds: float) -> list[int]:
        """Return the old versions without a pointer; none if the pointers are missing or damaged.

        Versions newer than the default are kept, because a rollback may be undone, except those that were removed, and
        those that a write left which was interrupted before its pointers were written.
        """
        if not os.path.lexists(self._tasks / name / pointers.FILE):
            return []
        try:
            now = self._read_pointers(name)
        except errors.PackageDamaged:
            return []
        served = now.default or now.last + 1
        versions = self._versions(name)
        old = [v for v in versions if v in now.gone or (v < served and v not in now.previous[-1:])]
        marked = [v for v in versions if v > now.last and (self._tasks / name / str(v) / _UNFINISHED).exists()]
        return old + [v for v in marked if files.is_old(self._tasks / name / str(v), older_than_seconds)]

    def _unmark(self, name: str) -> None:
        """Finish writes that were interrupted after their pointers were written."""
        with contextlib.suppress(errors.AdapterbankError):
            last = self._read_pointers(name).last
            for version in (version for version in self._versions(name) if version <= last):
                files.discard(self._tasks / name / str(version) / _UNFINISHED)

    def _is_bare(self, name: str, older_than_seconds: float) -> bool:
        """Return whether a task's folder is empty: the write of its first version was interrupted."""
        folder = self._tasks / name
        return os.path.isdir(folder) and not os.listdir(folder) and files.is_old(folder, older_than_seconds)

    def _hide(self, name: str, doomed: list[int]) -> list[Path]:
        """Remove versions from the pointers, then hide their folders; if it crashes in between, `gc` removes them.

        On a full disk the pointers cannot be written, so the folders are deleted first. If it crashes in between then,
        the pointers lead to a version that is gone, and the same removal can be repeated.
        """
        now = self._read_pointers(name)
        left = now.without(doomed, set(self._versions(name)) - {*doomed, *now.gone})
        try:
            if left != now:
                self._write_pointers(name, left)
        except errors.StorageError as error:
            if not files.is_full(error):
                raise
            for path in self._set_aside(name, doomed):
                files.discard(path)
            self._write_pointers(name, left)
        return self._set_aside(name, doomed)

    def _set_aside(self, name: str, versions: list[int]) -> list[Path]:
        folders = [self._tasks / name / str(version) for version in versions]
        return [files.set_aside(folder) for folder in folders if os.path.lexists(folder)]

    def _check_backbone(self, other: Mapping[str, Any], what: str) -> None:
        bank_head.check_backbone(self.path, self.backbone, other, what)


def _join(versions: list[int]) -> str:
    return ", ".join(map(str, versions)) or "none"
