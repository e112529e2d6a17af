"""The pointers of a task: which version is served, and which were served before. Knows one file, not the bank.

The file is sealed and names its task: a flipped bit, or the file of another task in its place, is an error.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from adapterbank import errors, schema
from adapterbank.storage import files, reading
from adapterbank.storage.package import LAST_VERSION

FILE = "task.json"
_BEFORE = ("default", "previous", "last")
"""The fields of the file before it had a name and a checksum."""


@dataclass(frozen=True)
class Pointers:
    """The version of a task that is served, the earlier defaults (oldest first), and the last number assigned."""

    default: int | None = schema.limited(low=1, high=LAST_VERSION)
    previous: tuple[int, ...] = schema.limited(low=1, high=LAST_VERSION)
    last: int = schema.limited(low=0, high=LAST_VERSION)
    gone: tuple[int, ...] = schema.limited((), low=1, high=LAST_VERSION)
    """Versions that were removed, and whose folders may still be there if that was interrupted."""

    def moved_to(self, version: int) -> Pointers:
        """Make `version` the default; a rollback returns to the old default."""
        earlier = self.previous if self.default is None else (*self.previous, self.default)
        previous = tuple(v for v in earlier if v != version)
        return Pointers(version, previous, max(self.last, version), tuple(v for v in self.gone if v != version))

    def with_version(self, version: int) -> Pointers:
        """Count a version that does not become the default, unless there is none."""
        return self.moved_to(version) if self.default is None else replace(self, last=max(self.last, version))

    def rolled_back_to(self, version: int) -> Pointers:
        """Return to an earlier default and drop those after it; otherwise the next rollback would undo this one."""
        if version not in self.previous:
            return self.moved_to(version)
        return replace(self, default=version, previous=self.previous[: self.previous.index(version)])

    @property
    def named(self) -> tuple[int, ...]:
        """The versions that a pointer leads to."""
        return (*self.previous, *(() if self.default is None else (self.default,)))

    @property
    def consistent(self) -> bool:
        """Whether every pointer is to a number that was assigned, and none to a version that was removed."""
        distinct = len({*self.named}) == len(self.named) and not {*self.named} & {*self.gone}
        return distinct and max(self.named, default=0) <= self.last

    def without(self, gone: Collection[int], left: Collection[int]) -> Pointers:
        """Drop the versions `gone`; a dropped default is replaced by the one before it, or by the highest `left`."""
        previous = tuple(version for version in self.previous if version not in gone)
        last = max(self.last, *gone, 0)  # a number is never used again, not even that of an interrupted write
        removed = tuple(sorted({*self.gone, *gone}))
        if self.default not in gone:
            return Pointers(self.default, previous, last, removed)
        if previous:
            return Pointers(previous[-1], previous[:-1], last, removed)
        return Pointers(max(left, default=None), (), last, removed)


def read(file: Path, name: str) -> Pointers:
    """Read the pointers of the task `name`; raise `PackageDamaged`, or `FileNotFoundError` if there are none."""
    try:
        value = reading.read_checked(file, reading.SMALL, before=_BEFORE)
    except (errors.InputError, errors.StorageError) as error:
        if not os.path.isdir(file.parent):  # unlike `Path.is_dir`, this never raises
            raise errors.PackageDamaged(f"{file.parent} is not a folder of a task; remove it.") from error
        raise _damaged(file, error) from error
    if problem := schema.problem(Pointers, value):
        raise _damaged(file, problem)
    if value.get("name", name) != name:
        raise _damaged(file, f"it is the file of the task {str(value['name'])[:100]!r}")
    found = Pointers(value["default"], tuple(value["previous"]), value["last"], tuple(value.get("gone", ())))
    if not found.consistent:
        raise _damaged(file, "its numbers contradict each other")
    return found


def write(file: Path, name: str, pointers: Pointers) -> None:
    """Write the pointers of the task `name`, atomically."""
    files.write_json(file, reading.seal({"name": name, **asdict(pointers)}))


def _damaged(file: Path, problem: object) -> errors.PackageDamaged:
    why = str(problem).removeprefix(f"{file} ").removesuffix(".").removesuffix("; restore it from a copy")
    return errors.PackageDamaged(f"{file} is damaged ({why}); delete it, and the highest version becomes the default.")
