"""What packages stand on: other packages of their bank, by name, version and checksum of the weights. Knows no torch.

A package whose manifest has `requires` is computed with these packages beneath it. They are found beside it, in the
same bank, and a package that is missing or has other weights makes only those unusable that stand on it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from adapterbank import errors
from adapterbank.storage import files, leases
from adapterbank.storage.package import Manifest, Package, RequiredFields, is_name, is_version, read_manifest

DEEPEST = 8
"""The most packages that stand one on the other."""


def reference(package: Package) -> RequiredFields:
    """Return what the manifest of a package that stands on this one says of it."""
    made = package.manifest
    return {"name": made.name, "version": made.version, "weights_sha256": made.weights_sha256}


def ref_of(wanted: RequiredFields) -> str:
    """Return the name with the version of a required package."""
    return f"{wanted['name']}@{wanted['version']}"


def required(package: Package) -> list[Package]:
    """Return the packages that a package stands on, in the order of its manifest; refuse any other in their place."""
    return [_find(package.ref, package.manifest, one, package.path.parents[1]) for one in package.manifest.requires]


def check(draft: Manifest, tasks: Path) -> None:
    """Refuse to store a package beside which the packages it stands on are not."""
    for one in draft.requires:
        _find(f"The package {draft.name!r}", draft, one, tasks)


def stands_on(package: Package) -> list[str]:
    """Return the names with versions of all that a package stands on; those that are missing too, which may arrive."""
    found: dict[str, None] = {}
    waiting = list(package.manifest.requires)
    while waiting:
        one = waiting.pop()
        if ref_of(one) not in found and is_name(one["name"]):
            found[ref_of(one)] = None
            with contextlib.suppress(errors.AdapterbankError):
                waiting += read_manifest(package.path.parents[1] / one["name"] / str(one["version"])).requires
    return list(found)


def foundation(package: Package) -> list[Package]:
    """Return all packages that a package stands on, each once, the lowest first; refuse a circle."""
    found: dict[str, Package] = {}
    _walk(package, [package.ref], found)
    return list(found.values())


def _walk(package: Package, trail: list[str], found: dict[str, Package]) -> None:
    for one in required(package):
        if one.ref in trail:
            circle = " on ".join([*trail[trail.index(one.ref) :], one.ref])
            raise errors.PackageDamaged(f"{trail[0]} stands in a circle: {circle}; remove it and train it again.")
        if one.ref in found:
            continue
        if len(trail) > DEEPEST:
            raise errors.PackageDamaged(f"{trail[0]} stands on more than {DEEPEST} packages, one on the other.")
        _walk(one, [*trail, one.ref], found)
        found[one.ref] = one


def _find(who: str, made: Manifest, wanted: RequiredFields, tasks: Path) -> Package:
    ref, remedy = ref_of(wanted), "restore that version from a copy of the bank, or train the task again"
    if not is_name(wanted["name"]):
        raise errors.PackageDamaged(f"{who} stands on {wanted['name'][:100]!r}, which is no name of a task; {remedy}.")
    folder = tasks / wanted["name"] / str(wanted["version"])
    if not os.path.lexists(folder):
        raise errors.PackageDamaged(f"{who} stands on {ref}, which is not in this bank; {remedy}.")
    try:
        manifest = read_manifest(folder)
    except errors.AdapterbankError as error:
        raise errors.PackageDamaged(f"{who} stands on {ref}, which cannot be used: {error}") from error
    if (manifest.name, manifest.version) != (wanted["name"], wanted["version"]):
        raise errors.PackageDamaged(f"{who} stands on {ref}, but {folder} contains another package; {remedy}.")
    if manifest.weights_sha256 != wanted["weights_sha256"]:
        raise errors.PackageDamaged(
            f"{who} stands on {ref} with the weights {wanted['weights_sha256'][:12]}, but the {ref} of this bank has "
            f"others ({manifest.weights_sha256[:12]}); {remedy}."
        )
    if manifest.backbone["sha256"] != made.backbone["sha256"]:
        raise errors.BackboneMismatch(
            f"{who} stands on {ref}, which was trained on backbone {manifest.backbone['name']!r} "
            f"({manifest.backbone['sha256'][:12]}), not on {made.backbone['name']!r} ({made.backbone['sha256'][:12]})."
        )
    return Package(manifest, folder)


def below(packages: Iterable[Package]) -> list[Manifest]:
    """Return the manifests of all that packages stand on, each once; a package that cannot be used stands on none."""
    found: dict[str, Manifest] = {}
    for package in packages:
        with contextlib.suppress(errors.AdapterbankError):
            found |= {one.ref: one.manifest for one in foundation(package)}
    return list(found.values())


def dependants(tasks: Path) -> dict[str, list[str]]:
    """Return what stands directly on each package, by name and version: packages of the bank, and unfinished runs."""
    found = leases.unfinished(tasks.parent / "runs")
    for folder in _versions(tasks):
        try:
            requires = read_manifest(folder).requires
        except errors.AdapterbankError:
            continue  # it cannot be used in any case
        for one in requires:
            found.setdefault(ref_of(one), []).append(f"{folder.parent.name}@{folder.name}")
    return found


def refuse_removal(tasks: Path, name: str, versions: Collection[int]) -> None:
    """Refuse to remove versions of a task on which others stand; in a circle, none of which works, any may go."""
    doomed, standing = {f"{name}@{version}": version for version in versions}, dependants(tasks)
    for ref in sorted(doomed):
        others = sorted({*standing.get(ref, ())} - doomed.keys())
        if others and (others := sorted({*others} - {*_beneath(tasks / name / str(doomed[ref]))})):
            stand = "stands" if len(others) == 1 else "stand"
            them = "it" if len(others) == 1 else "them"
            state = "" if all("@" in other for other in others) else "; let a run end, or remove its state by gc --runs"
            raise errors.PackageRequired(
                f"{ref} cannot be removed, because {', '.join(others)} {stand} on it; remove {them} first{state}."
            )


def _beneath(folder: Path) -> list[str]:
    """Return what a package stands on; nothing if it cannot be read."""
    with contextlib.suppress(errors.AdapterbankError):
        return stands_on(Package(read_manifest(folder), folder))
    return []


def _versions(tasks: Path) -> Iterator[Path]:
    with files.storage_errors(tasks):
        for name in sorted(os.listdir(tasks)) if os.path.isdir(tasks) else ():
            if is_name(name) and os.path.isdir(tasks / name):  # never raises, unlike `Path.is_dir`
                yield from (tasks / name / one for one in sorted(os.listdir(tasks / name)) if is_version(one))
