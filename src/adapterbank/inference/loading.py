"""A package as the engine keeps it: task, plan and tensors, checked against the encoder. Knows no device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.windows import STRIDE
from adapterbank.errors import BackboneMismatch, InputError, PackageDamaged
from adapterbank.inference.resident import Resident
from adapterbank.kinds.table import KINDS
from adapterbank.slots.plan import MAX_ADDITIONS, Plan
from adapterbank.slots.tensors import shapes
from adapterbank.storage.package import RESTORE, Package
from adapterbank.storage.requirements import foundation, required
from adapterbank.tasks.spec import Task

Source = Callable[[], Mapping[str, np.ndarray]]
"""Reads a package's tensors."""
_NUMBER_BYTES = 8
"""The most bytes of one number of a tensor: float64."""
_TENSOR_HEADER = 1024
"""The most bytes that a weights file spends on a tensor besides its numbers."""


def content_name(package: Package) -> str:
    """Return a name in the engine that only the same manifest has; equal weights may have other labels."""
    return f"{package.ref}#{package.manifest.to_json()['checksum']}"


def open_package(package: Package, backbone: Backbone) -> tuple[Resident, Source, list[Package]]:
    """Return what the engine keeps of a package, a function that reads its tensors, and all that it stands on."""
    manifest = package.manifest
    if manifest.backbone["sha256"] != backbone.sha256:
        raise BackboneMismatch(
            f"{package.ref} was trained on backbone {manifest.backbone['name']!r} "
            f"({manifest.backbone['sha256'][:12]}), not on {backbone.name!r} ({backbone.sha256[:12]})."
        )
    recipe, below = manifest.recipe, foundation(package)
    try:
        resident = Resident(
            Task.from_json(manifest.task),
            Plan.from_json(manifest.method),
            recipe["max_length"],
            max(1, recipe.get("doc_stride", STRIDE)),
            recipe.get("windows", 0),
            tuple(map(content_name, required(package))),
        )
        expected = check_plan(resident, backbone)
        check_foundation(resident.plan, below, required(package))
    except (ValueError, InputError) as error:
        raise PackageDamaged(f"{package.ref} cannot be used ({error}); {RESTORE}.") from error
    return resident, partial(read_tensors, package, expected), below


def check_plan(resident: Resident, backbone: Backbone) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a plan's tensors; refuse a plan that the pass cannot run, which no checksum excludes."""
    task, plan, config, kind = resident.task, resident.plan, backbone.config, KINDS[resident.task.kind]
    if (plan.head.kind, plan.head.outputs) != (task.kind, kind.outputs(len(task.labels))):
        raise ValueError(f"its head has {plan.head.outputs} outputs of kind {plan.head.kind!r}")
    if plan.head.weighs and (kind.windows or resident.windows < 2):
        raise ValueError("its head weighs windows that it does not read")
    if not 0 < resident.max_length <= config.max_length:
        raise ValueError(f"max_length is {resident.max_length}")
    if any(layer >= config.layers for addition in plan.additions for layer in addition.layers):
        raise ValueError(f"it adds to layers that {backbone.name} does not have")
    return shapes(plan, config, has_pooler=backbone.has_pooler)


def check_foundation(plan: Plan, below: Sequence[Package], bases: Sequence[Package]) -> None:
    """Refuse a plan that cannot stand on its `bases`; `below` has them with all that they stand on."""
    plans = [Plan.from_json(one.manifest.method) for one in below]
    if below and any(one.alone for one in (plan, *plans)):
        raise ValueError("a package that changes whole layers carries no other and stands on none")
    if sum(len(one.additions) for one in (plan, *plans)) > MAX_ADDITIONS:
        raise ValueError(f"it has more than {MAX_ADDITIONS} additions, with those of what it stands on")
    if not plan.fuses and len(bases) > 1:
        raise ValueError("it stands on several packages side by side, which only a fusion does")
    if plan.fuses:
        _check_members(plan, bases)


def _check_members(plan: Plan, members: Sequence[Package]) -> None:
    """Refuse packages that a plan cannot fuse."""
    if len({one.ref for one in members}) < max(2, len(members)):
        raise ValueError("a fusion needs two packages or more, each of them once")
    for one in members:
        own = Plan.from_json(one.manifest.method)
        problem = next((why for fusion in plan.fusions if (why := fusion.refuses(own.additions))), None)
        if one.manifest.requires:
            problem = "is not trained on the bare encoder, but with other tasks beneath it"
        if problem:
            raise ValueError(f"{one.ref} {problem}")


def read_tensors(package: Package, expected: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Read a package's tensors, no more bytes than those of its plan can take, and refuse any others."""
    numbers = sum(map(math.prod, expected.values()))
    tensors = package.tensors(_NUMBER_BYTES * numbers + _TENSOR_HEADER * (len(expected) + 1))
    if {name: array.shape for name, array in tensors.items()} != expected:
        raise PackageDamaged(f"{package.ref} has other tensors than its method; {RESTORE}.")
    return tensors
