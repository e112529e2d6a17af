"""Soups: a new version of a task as the average of packages that began at one start. Trains nothing.

Weights can be averaged where training moved them from the same point: each tensor below the head must have had the same
first values in all packages. That holds if they started from the same package (by checksum), or from new tensors that
were drawn with the same seed or are not drawn at all. The heads may come from different seeds if they are linear, as
the average of linear heads is a head whose outputs are the average; a hidden layer must have begun alike too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from adapterbank import __version__
from adapterbank.config import Config
from adapterbank.encoder.backbone import Backbone
from adapterbank.errors import InputError
from adapterbank.inference.audit import fingerprint
from adapterbank.inference.engine import Engine
from adapterbank.slots.plan import Plan
from adapterbank.slots.tensors import initial
from adapterbank.storage.bank import Bank
from adapterbank.storage.comparison import shortfall
from adapterbank.storage.package import Manifest, Package
from adapterbank.storage.requirements import ref_of
from adapterbank.tasks.spec import Examples, Task
from adapterbank.training.final_scores import fitted_task, score_split

_READING = ("max_length", "doc_stride", "windows")
"""The parts of a recipe that say how texts are read."""
_SOUP = "soup"


def soup(
    engine: Engine,
    bank: Bank,
    packages: Sequence[Package],
    *,
    name: str = "",
    examples: Examples | None = None,
    default: str = "new",
) -> Package:
    """Add the average of packages to the bank, as a new version of their task or of the task `name`.

    With labelled `examples`, as of dev, the average is scored on them, and its probabilities are calibrated; then
    `default` better keeps a present default that scores higher. The engine
    should hold no other task and run no programs, because it computes the fingerprint of the new package.
    """
    parts = [_read(engine, package) for package in packages]
    check_soup(packages, engine.backbone)
    names = sorted({package.manifest.name for package in packages})
    if not name and len(names) > 1:
        raise InputError(f"The packages are of the tasks {' and '.join(names)}; name the new version's task with --as.")
    task, tensors = replace(_bare_task(packages[0].manifest), name=name or names[0]), average(parts)
    draft = _draft(packages, task)
    held = engine.residents[engine.load(packages[0], _SOUP)]
    engine.enter(_SOUP, replace(held, task=task), tensors)
    draft = draft if examples is None else _scored(engine, draft, examples)
    lower = shortfall(draft, served, default) if (served := bank.served(task.name)) else []
    draft = replace(draft, fingerprint=fingerprint(engine, _SOUP), notes=[*draft.notes, *lower])
    engine.remove(_SOUP)
    return bank.put(draft, tensors, default)


def _read(engine: Engine, package: Package) -> dict[str, np.ndarray]:
    """Return a package's tensors once the engine has accepted them."""
    engine.remove(engine.load(package, _SOUP))
    return package.tensors()


def _draft(packages: Sequence[Package], task: Task) -> Manifest:
    """Return the manifest of a soup that nothing has scored; of the data it names the rows that all have trained on."""
    first, *others = (package.manifest for package in packages)
    same = {split: rows for split, rows in first.data.items() if all(one.data.get(split) == rows for one in others)}
    return replace(
        first,
        name=task.name,
        version=0,
        task=task.to_json(),
        recipe=common_recipe(packages),
        data={split: rows for split, rows in same.items() if split == "train"},
        metrics={},
        library=__version__,
        notes=[f"The average of {', '.join(package.ref for package in packages)}."],
    )


def _scored(engine: Engine, draft: Manifest, examples: Examples) -> Manifest:
    """Return the manifest with what is chosen on labelled rows after training, and the score on them, as of dev."""
    (given,) = engine.head_outputs([(_SOUP, examples)], keep=True)
    task, notes = fitted_task(given, calibrated=True), list(draft.notes)
    scores = score_split(replace(given, task=task), True, notes)
    return replace(
        draft,
        task=task.to_json(),
        metrics={"dev": {key: value for key, value in scores.items() if isinstance(value, int | float)}},
        data={**draft.data, "dev": {"rows": len(examples), "sha256": examples.fingerprint()}},
        notes=notes,
    )


def average(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the mean of tensors by name, computed in float64."""
    return {
        name: np.mean([part[name].astype(np.float64) for part in parts], axis=0).astype(np.float32) for name in parts[0]
    }


def common_recipe(packages: Sequence[Package]) -> dict[str, Any]:
    """Return the entries that the recipes have in common, and the packages that are averaged."""
    first, *rest = (package.manifest.recipe for package in packages)
    same = {key: value for key, value in first.items() if all(key in one and one[key] == value for one in rest)}
    parents = [{"package": one.ref, "weights_sha256": one.manifest.weights_sha256} for one in packages]
    return {**same, "soup": parents}


def check_soup(packages: Sequence[Package], backbone: Backbone) -> None:
    """Refuse packages that are not of one task, one form and one start."""
    refs = [package.ref for package in packages]
    if len(refs) < 2 or len(set(refs)) < len(refs):
        named = ", ".join(refs) or "none"
        raise InputError(f"A soup needs two packages or more, each of them once; these are {named}.")
    first, *others = packages
    for other in others:
        if problem := _difference(first.manifest, other.manifest) or _start_difference(first, other, backbone):
            raise InputError(f"{first.ref} and {other.ref} cannot be averaged: {problem}.")


def _difference(one: Manifest, other: Manifest) -> str | None:
    """Return how the tasks or the slots of two packages differ, as a part of a sentence."""
    tasks = [_definition(made) for made in (one, other)]
    if changed := [key for key in tasks[0] if tasks[0][key] != tasks[1][key]]:
        return f"their tasks differ in {', '.join(changed)}; average versions of one task"
    if one.method != other.method:
        return "their slots or heads have different forms; use the same method, options and labels for each"
    if one.requires != other.requires:
        stand = [", ".join(map(ref_of, made.requires)) or "nothing" for made in (one, other)]
        return f"they stand on different packages, {stand[0]} and {stand[1]}; train each with the same --on"
    if changed := [key for key in _READING if one.recipe.get(key) != other.recipe.get(key)]:
        return f"they read texts with another {changed[0]}; use the same for each"
    return None


def _definition(made: Manifest) -> dict[str, Any]:
    """Return what defines a task: all but its name and what was fitted on dev."""
    return replace(_bare_task(made), name="").to_json()


def _bare_task(made: Manifest) -> Task:
    return replace(Task.from_json(made.task), threshold=None, temperature=None, thresholds=())


def _start_difference(one: Package, other: Package, backbone: Backbone) -> str | None:
    """Return how the starts of two packages of one form differ, as a part of a sentence."""
    for made in (one, other):
        if "narrow_after" in made.manifest.recipe:
            narrowed = f"{made.ref} was narrowed in training (size {made.manifest.recipe['size']})"
            return f"{narrowed}, to units of its own; average versions that start from it"
    froms = [made.manifest.recipe.get("start_from") or {} for made in (one, other)]
    checksums = [start.get("weights_sha256") for start in froms]
    if checksums[0] != checksums[1]:
        names = [start.get("package", "new tensors") for start in froms]
        return f"they began at different starts, {names[0]} and {names[1]}; train each with the same --start-from"
    mixes = [made.manifest.recipe.get("mix", 1) for made in (one, other)]
    if mixes[0] != mixes[1] and not checksums[0]:
        return f"their new tensors are the means of {mixes[0]} and of {mixes[1]} copies; train each with the same --mix"
    plan = Plan.from_json(one.manifest.method)
    drawn = [_drawn(made.manifest, plan, backbone) for made in (one, other)]
    below = [name for name in drawn[0] if not name.startswith("head.")] if not checksums[0] else []
    head = [name for name in drawn[0] if name.startswith("head.")] if plan.head.hidden else []
    if any(not torch.equal(drawn[0][name], drawn[1][name]) for name in (*below, *head)):
        seeds = f"the seeds {one.manifest.seed} and {other.manifest.seed}"
        what = "the new tensors of their slots" if below else "the hidden layers of their heads"
        return f"{what} were drawn from {seeds}, which are different starts; use one seed, or the same --start-from"
    return None


def _drawn(made: Manifest, plan: Plan, backbone: Backbone) -> dict[str, torch.Tensor]:
    return initial(plan, backbone.config, made.recipe.get("sigma", Config.sigma), made.seed)
