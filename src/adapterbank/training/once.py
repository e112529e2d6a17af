"""Adds the package of a run to the bank once, also if the run is killed just after that and goes on. Trains nothing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterbank.config import Config
from adapterbank.errors import AdapterbankError
from adapterbank.storage import files
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import Array, Manifest, Package, parse_ref
from adapterbank.training.builder import RECIPE, ResolvedRun, RunBuilder

Scores = Mapping[str, Mapping[str, float]]
_ALWAYS = frozenset(RECIPE)
"""What the recipe of every run says, but for some that a fitted head, or an earlier release, leaves out."""
_ROUNDING = 1e-4
"""How far the scores of two runs of one config may be from each other."""


@dataclass(frozen=True)
class PutOnce:
    """A bank for the package of a run that may have been killed after it was added."""

    bank: Bank
    after: int = 0
    """The newest version that cannot be that of the run."""

    def put(self, draft: Manifest, tensors: Mapping[str, Array], default: str = "new") -> Package:
        """Return the version of this very run, or add it.

        Runs that train together may be grouped otherwise when they go on, which changes the last digits of weights; so
        a version is the run's own if its data, method, seed and recipe are, and its scores are up to rounding.
        """
        wanted = _identity(draft.to_json())
        for package in _later(self.bank, draft.name, self.after):
            made = package.manifest
            if _identity(made.to_json()) == wanted and _are_close(made.metrics, draft.metrics):
                return self.bank.finish(package, default)
        return self.bank.put(draft, tensors, default)

    def served(self, name: str) -> Manifest | None:
        """Return the manifest of a task's default version."""
        return self.bank.served(name)


def find_added(bank: Bank, run: ResolvedRun, after: int) -> Package | None:
    """Return the version after `after` that this very run has added to the bank."""
    for package in _later(bank, run.config.task, after):
        if is_version_of(package.manifest, run):
            return bank.finish(package, run.config.default)
    return None


def resolve_again(builder: RunBuilder, config: Config, bank: Path, newest: int | None = None) -> ResolvedRun:
    """Return an interrupted run as it was resolved at first, if it started from its own task's default.

    Killed after its put, it has replaced that default. `newest` is the task's newest version when the run began; by
    default a saved state, or else the version before the newest one, says what the run began with.
    """
    found = builder.resolve(config)
    if found.start is None or config.start_from != config.task:
        return found
    made = found.start.package.manifest
    if newest is None:
        newest = made.version if (bank / "runs" / found.hash).exists() else Bank.open(bank).newest(config.task) - 1
    before = made.recipe.get("start_from", {}).get("package", "")
    if made.version <= newest or not before or parse_ref(before)[0] != config.task:
        return found
    with contextlib.suppress(AdapterbankError):  # that version is gone
        first = builder.resolve(config, start_from=before)
        return first if is_version_of(made, first) else found
    return found


def is_version_of(made: Manifest, run: ResolvedRun) -> bool:
    """Return whether a version has the data, the method, the seed and the recipe of a run."""
    said = {name: value for name, value in run.recipe.items() if name in made.recipe or name not in _ALWAYS}
    recipe = dict.fromkeys(made.recipe) | said
    recipe |= {"start_from": run.start.about()} if run.start else {}
    method = made.method if run.narrows else run.plan.to_json()  # which units are kept follows from the rest
    about = {"data": run.data.about(), "method": method, "seed": run.config.seed, "recipe": recipe}
    about |= {"requires": run.base.references} if run.base else {}
    return _identity(made.to_json()) == _identity(about)


def _identity(about: Mapping[str, Any]) -> str:
    made = [about[name] for name in ("data", "method", "seed", "recipe")]
    return files.canonical_json([*made, about.get("requires", [])])


def _are_close(ours: Scores, theirs: Scores) -> bool:
    """Return whether the scores of two runs are equal up to rounding."""
    left, right = ({(split, name): score for split, one in scores.items() for name, score in one.items()}
                   for scores in (ours, theirs))  # fmt: skip
    return left.keys() == right.keys() and all(
        math.isclose(left[key], right[key], rel_tol=_ROUNDING, abs_tol=_ROUNDING) for key in left
    )


def _later(bank: Bank, task: str, after: int) -> Iterator[Package]:
    """Yield the readable versions after a number, newest first."""
    versions: list[int] = []
    with contextlib.suppress(AdapterbankError):
        versions = bank.versions(task)
    for version in reversed([version for version in versions if version > after]):
        with contextlib.suppress(AdapterbankError):
            yield bank.get(f"{task}@{version}")
