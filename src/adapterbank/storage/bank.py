"""A bank: the packages of one backbone in one folder; knows nothing of torch or of what the tensors mean.

    bank.json                   format, backbone (name, sha256), created
    tasks/<name>/task.json      {"default": 3, "previous": [1, 2], "last": 3}
    tasks/<name>/<version>/     manifest.json and weights.safetensors, never changed once there
    records/, runs/             left to others
    .lock                       held for moments, never while weights are written

A bank is plain files without absolute paths: `cp -r` copies it. `last` outlives the versions, so that a
version number never means two things. Readers take no lock: a read-only bank can be served.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from adapterbank import errors
from adapterbank.storage import files
from adapterbank.storage.package import (
    FORMAT,
    RESTORE,
    Array,
    Manifest,
    Package,
    check_format,
    check_name,
    is_name,
    is_version,
    pack,
    parse_ref,
    read_manifest,
)


@dataclass(frozen=True)
class Pointers:
    """Which version of a task is served, which were before it (oldest first), and the last number given."""

    default: int | None
    previous: tuple[int, ...]
    last: int

    def moved_to(self, version: int) -> Pointers:
        """Make `version` the default; the old default is where a rollback goes."""
        earlier = self.previous if self.default is None else (*self.previous, self.default)
        return Pointers(version, tuple(v for v in earlier if v != version), max(self.last, version))

    def rolled_back_to(self, version: int) -> Pointers:
        """Go back and forget what was served in between, else the next rollback would undo this one."""
        if version not in self.previous:
            return self.moved_to(version)
        return replace(self, default=version, previous=self.previous[: self.previous.index(version)])

    def without(self, gone: Collection[int], left: Collection[int]) -> Pointers:
        """Forget the versions `gone`; a lost default falls to the one before it, or to the highest `left`."""
        previous = tuple(version for version in self.previous if version not in gone)
        if self.default not in gone:
            return replace(self, previous=previous)
        if previous:
            return replace(self, default=previous[-1], previous=previous[:-1])
        return replace(self, default=max(left, default=None), previous=())


class Removed(NamedTuple):
    """Something that `Bank.gc` removed, or would remove."""

    path: Path
    bytes: int
    reason: str


@dataclass(frozen=True)
class Bank:
    """A folder of packages for one backbone; `Bank.open` makes or opens it."""

    path: Path
    backbone: dict[str, str]
    """Name and sha256 of the encoder that all packages belong to."""

    @classmethod
    def open(cls, path: Path | str, backbone: Mapping[str, Any] | None = None, create: bool = False) -> Bank:
        """Open a bank, checked against `backbone` (name, sha256) if given; `create` makes a missing one."""
        path = Path(path)
        with files.refusals_explained(path):
            if path.exists() and not path.is_dir():
                raise errors.BankError(f"{path} is a file, and a bank is a folder; choose another path.")
            if create and not (path / "bank.json").exists():
                _create(path, backbone)
            bank = cls(path, _read_backbone(path))
        if backbone is not None:
            bank._check_backbone(backbone, "the backbone given")
        return bank

    @property
    def records_path(self) -> Path:
        """Where the records of runs go; nothing here reads or removes them."""
        return self.path / "records"

    @property
    def runs_path(self) -> Path:
        """Where runs keep what they need to go on; nothing here reads or removes it."""
        return self.path / "runs"

    def put(self, draft: Manifest, tensors: Mapping[str, Array]) -> Package:
        """Add a package as a new version of its task and make it the default: wholly, or not at all."""
        check_name(draft.name)
        self._check_backbone(draft.backbone, f"the package {draft.name!r}")
        weights = pack(tensors)
        filled = replace(
            draft,
            format=FORMAT,
            bytes=len(weights),
            weights_sha256=files.sha256_bytes(weights),
            created=files.now(),
        )
        with files.temporary_folder(self._tasks) as temporary:
            files.atomic_write(temporary / "weights.safetensors", weights)
            with self._locked():
                return self._publish(filled, temporary)

    def get(self, ref: str) -> Package:
        """Return the package `name@version`, or the default version of `name`."""
        name, version = parse_ref(ref)
        default = self._known(name).default
        return self._package(name, default if version is None else version)

    def listing(self) -> tuple[list[Package], list[str]]:
        """Return the default package of each task by name, and a sentence for each that cannot be used."""
        packages, problems = [], []
        for name in self.folders():
            try:
                if version := self._pointers(name).default:
                    packages.append(self._package(name, version))
            except errors.AdapterbankError as error:
                problems.append(str(error))
        return packages, problems

    def tasks(self) -> list[Package]:
        """Return the default package of each task by name, without those that `listing` finds unusable."""
        return self.listing()[0]

    def names(self) -> list[str]:
        """Return the names of all tasks, sorted. One whose pointers are damaged is still a task."""
        living = []
        for name in self.folders():
            with contextlib.suppress(errors.PackageDamaged):
                if self._pointers(name).default is None:
                    continue
            living.append(name)
        return living

    def default(self, name: str) -> int | None:
        """Return the version of a task that is served; None for a task that is not there."""
        return self._pointers(check_name(name)).default

    def versions(self, name: str) -> list[int]:
        """Return the versions of a task that are there, lowest first."""
        self._known(name)
        return self._versions(name)

    def set_default(self, name: str, version: int) -> None:
        """Serve `version` from now on; a rollback goes to what was served until now."""
        with self._locked():
            pointers = self._known(name)
            self._package(name, version)
            self._point(name, pointers.moved_to(version))

    def rollback(self, name: str, to: int | None = None) -> int:
        """Serve the default before this one again, or the version `to`; returns which it is."""
        with self._locked():
            pointers = self._known(name)
            if to is None and not pointers.previous:
                there = _listed(self._versions(name))
                raise errors.BankError(f"{name!r} has no earlier default; name one of its versions: {there}.")
            version = pointers.previous[-1] if to is None else to
            self._package(name, version)
            self._point(name, pointers.rolled_back_to(version))
        return version

    def remove(self, ref: str) -> None:
        """Remove a version, or the whole task when `ref` names none; their numbers are not given again."""
        name, version = parse_ref(ref)
        with self._locked():
            versions = self.versions(name)
            if version is not None and version not in versions:
                raise self._no_version(name, version)
            hidden = self._hide(name, versions if version is None else [version])
        for path in hidden:
            files.discard(path)

    def gc(self, dry_run: bool = False, older_than_seconds: float = 3600) -> list[Removed]:
        """Remove what interrupted writes left, and versions neither served nor next in a rollback."""
        folders = [self.path, self._tasks, *(self._tasks / name for name in self.folders())]
        hidden = files.leftovers(folders, older_than_seconds)
        removed = [Removed(path, files.size_of(path), "left by an interrupted write") for path in hidden]
        with contextlib.nullcontext() if dry_run else self._locked():
            for name in self.folders():
                loose = self._loose(name)
                paths = [self._tasks / name / str(version) for version in loose]
                removed += [Removed(path, files.size_of(path), "no pointer leads to it") for path in paths]
                hidden += self._hide(name, loose) if loose and not dry_run else []
        for path in [] if dry_run else hidden:
            files.discard(path)
        return removed

    def total_bytes(self) -> int:
        """Return the bytes that all versions of all tasks take on disk."""
        return files.size_of(self._tasks)

    @property
    def _tasks(self) -> Path:
        return self.path / "tasks"

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return files.locked(self.path / ".lock")

    def _publish(self, filled: Manifest, temporary: Path) -> Package:
        """Give a finished folder the next version and point to it; undo that when pointing fails."""
        name, pointers = filled.name, self._pointers(filled.name)
        version = 1 + max(pointers.last, *self._versions(name), 0)
        files.write_json(temporary / "manifest.json", replace(filled, version=version).to_json())
        final = self._tasks / name / str(version)
        try:
            files.make_folder(final.parent)
            files.publish_folder(temporary, final)
            self._point(name, pointers.moved_to(version))
        except BaseException:
            pointed = (final.parent / "task.json").exists() and self._pointers(name).default == version
            if not pointed:
                if not temporary.exists():
                    os.rename(final, temporary)
                with contextlib.suppress(OSError):
                    final.parent.rmdir()  # which works only on the empty folder of a new task
            raise
        return self._package(name, version)

    def _package(self, name: str, version: int | None) -> Package:
        path = self._tasks / name / str(version)
        if not path.is_dir():
            raise self._no_version(name, version)
        manifest = read_manifest(path)
        if (manifest.name, manifest.version) != (name, version):
            raise errors.PackageDamaged(f"{path} holds {manifest.name}@{manifest.version}; {RESTORE}.")
        self._check_backbone(manifest.backbone, f"the package {name}@{version}")
        return Package(manifest, path)

    def _no_version(self, name: str, version: int | None) -> errors.BankError:
        there = _listed(self._versions(name))
        return errors.BankError(f"{name!r} has no version {version}; its versions are {there}.")

    def folders(self) -> list[str]:
        """Name the folders that may be tasks, sorted; that of a removed task stays."""
        tasks = self._tasks
        with (
            files.refusals_explained(tasks),
            contextlib.suppress(FileNotFoundError),
            os.scandir(tasks) as found,
        ):
            return sorted(entry.name for entry in found if is_name(entry.name) and entry.is_dir())
        return []

    def _versions(self, name: str) -> list[int]:
        folder = self._tasks / name
        with files.refusals_explained(folder), contextlib.suppress(FileNotFoundError):
            return sorted(int(entry) for entry in os.listdir(folder) if is_version(entry))
        return []

    def _known(self, name: str) -> Pointers:
        """Return the pointers of a task that is there."""
        pointers = self._pointers(check_name(name))
        if pointers.default is None:
            near = sorted(difflib.get_close_matches(name, self.names(), n=20, cutoff=0.0))
            raise errors.UnknownName(name, "a task of this bank", near, see=f"adapterbank tasks --bank {self.path}")
        return pointers

    def _pointers(self, name: str) -> Pointers:
        """Read the pointers; where task.json is lost, the highest version is the default."""
        file = self._tasks / name / "task.json"
        try:
            value = files.read_json(file)
            pointers = Pointers(value["default"], tuple(value["previous"]), value["last"])
            # Whole numbers only: a text such as "../.." would be followed as a path.
            if all(type(v) is int for v in (pointers.default or 0, pointers.last, *pointers.previous)):
                return pointers
            raise TypeError("a version is not a whole number")
        except FileNotFoundError:
            versions = self._versions(name)
            return Pointers(max(versions, default=None), (), max(versions, default=0))
        except (errors.InputError, KeyError, TypeError) as error:
            remedy = "delete it, and the highest version becomes the default"
            raise errors.PackageDamaged(f"{file} is damaged; {remedy}.") from error

    def _point(self, name: str, pointers: Pointers) -> None:
        files.write_json(self._tasks / name / "task.json", asdict(pointers))

    def _loose(self, name: str) -> list[int]:
        """Return the old versions that no pointer leads to; none where the pointers are lost or damaged.

        Versions newer than the default stay: a rollback may be undone.
        """
        if not (self._tasks / name / "task.json").exists():
            return []
        try:
            pointers = self._pointers(name)
        except errors.PackageDamaged:
            return []
        served = pointers.default or pointers.last + 1
        return [v for v in self._versions(name) if v < served and v not in pointers.previous[-1:]]

    def _hide(self, name: str, doomed: list[int]) -> list[Path]:
        """Drop versions from the pointers, then from sight: a crash in between leaves work for `gc`."""
        left = set(self._versions(name)) - set(doomed)
        self._point(name, self._pointers(name).without(doomed, left))
        return [files.set_aside(self._tasks / name / str(version)) for version in doomed]

    def _check_backbone(self, other: Mapping[str, Any], what: str) -> None:
        if other.get("sha256") != self.backbone["sha256"]:
            raise errors.BackboneMismatch(
                f"The bank {self.path} is for {_named(self.backbone)}, but {what} is {_named(other)}; "
                "use the same encoder, or another bank."
            )


def _named(backbone: Mapping[str, Any]) -> str:
    return f"{backbone.get('name')} (sha256 {str(backbone.get('sha256'))[:12]}…)"


def _listed(versions: list[int]) -> str:
    return ", ".join(map(str, versions)) or "none"


def _create(path: Path, backbone: Mapping[str, Any] | None) -> None:
    """Make a bank; of several processes that do so at once, the first decides and all succeed."""
    if backbone is None or not all(isinstance(backbone.get(key), str) for key in ("name", "sha256")):
        raise errors.InputError(f"To make the bank {path}, give its backbone: the name and the sha256.")
    fresh = not path.exists()
    files.make_folder(path)
    others = [name for name in os.listdir(path) if not name.startswith(".")]
    head = path / "bank.json"
    if others and not head.exists():
        raise errors.BankError(f"{path} has other files in it and is no bank; choose an empty or new folder.")
    value = {
        "format": FORMAT,
        "backbone": {"name": backbone["name"], "sha256": backbone["sha256"]},
        "created": files.now(),
    }
    try:
        with contextlib.suppress(FileExistsError):
            files.atomic_create(head, files.pretty_json(value))
    except errors.StorageError:
        if fresh:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
    files.make_folder(path / "tasks")


def _read_backbone(path: Path) -> dict[str, str]:
    """Read from bank.json which encoder the bank is for."""
    head = path / "bank.json"
    try:
        value = files.read_json(head)
        found, backbone = value["format"], value["backbone"]
        name, sha256 = backbone["name"], backbone["sha256"]
    except FileNotFoundError as error:
        missing = "is not a bank, it has no bank.json" if path.exists() else "does not exist"
        remedy = "the first training makes it, or serve with --create; see: adapterbank train --help"
        raise errors.BankError(f"{path} {missing}; {remedy}.") from error
    except (errors.InputError, KeyError, TypeError) as error:
        raise errors.BankError(f"{head} is damaged; restore it from a copy of the bank.") from error
    check_format(found, head)
    return {"name": name, "sha256": sha256}
