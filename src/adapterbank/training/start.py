"""What a run starts from: the adapters, LayerNorms and other tensors of a task that is trained. Knows no data, no loop.

The head is always new: labels, outputs and the scale of numbers belong to the task that trains. Everything else of the
slot must have the same form in both tasks, so that nothing is resized or left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapterbank.config import AUTO, FRESH
from adapterbank.encoder.backbone import Backbone
from adapterbank.errors import AdapterbankError, BackboneMismatch, ConfigError, InputError, PackageDamaged, UnknownName
from adapterbank.inference.loading import read_tensors
from adapterbank.methods import roles, size_text
from adapterbank.slots.plan import Plan
from adapterbank.slots.tensors import shapes
from adapterbank.storage import records
from adapterbank.storage.bank import Bank
from adapterbank.storage.bank_head import is_unused
from adapterbank.storage.package import (
    RESTORE,
    Manifest,
    Package,
    RequiredFields,
    is_package_path,
    parse_ref,
    read_manifest,
)
from adapterbank.storage.requirements import ref_of
from adapterbank.training.bases import Base, Members


@dataclass(frozen=True)
class Start:
    """The package that a run starts from."""

    package: Package
    plan: Plan = field(repr=False)
    backbone: Backbone = field(repr=False)

    @property
    def ref(self) -> str:
        """Its name with the version."""
        return self.package.ref

    @property
    def sha256(self) -> str:
        """The checksum of its weights."""
        return self.package.manifest.weights_sha256

    def about(self) -> dict[str, str]:
        """Return what the manifest of the new package says of it."""
        return {"package": self.ref, "weights_sha256": self.sha256}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors without those of its head, read once for all runs that start from it."""
        expected = shapes(self.plan, self.backbone.config, has_pooler=self.backbone.has_pooler)
        stored = read_tensors(self.package, expected)
        kept = {name: array for name, array in stored.items() if "head" not in roles(name)}
        return {name: torch.tensor(array, dtype=torch.float32) for name, array in kept.items()}


class Starts:
    """Finds the packages that runs start from, in a bank or in folders; a package is read once for all of them."""

    def __init__(self, backbone: Backbone, bank: str | Path | None = None) -> None:
        """`bank` is the folder of the bank whose tasks can be named; None if only folders of packages can."""
        self._backbone, self._bank = backbone, bank
        self._found: dict[str, Start] = {}

    def find(self, name: str, plan: Plan, base: Base | Members | None = None) -> Start | None:
        """Return what a run with this plan starts from, or None if its tensors are new.

        Refuse another form of slot, and one that stands on something else than the run's `base`.
        """
        if name == FRESH:
            return None
        if plan.only_head:
            mistake = f"start_from is {name!r}, but method {plan.method!r} trains only a head, which is always new"
            raise ConfigError([f"{mistake}; leave it out, or use another method, such as adapter."])
        if name not in self._found:
            self._found[name] = self._read(name)
        start = self._found[name]
        pruned = start.package.manifest.recipe.get("pruned")
        problem = difference(plan, start.plan)
        if pruned and problem:
            problem = f"was pruned, and has no adapters in some layers; name {pruned.get('from')}"
        problem = problem or _other_base(start.package.manifest.requires, base)
        if problem:
            raise ConfigError([f"start_from is {name!r}, but {start.ref} {problem}."])
        return start

    def fitting(
        self, plan: Plan, may: Callable[[Manifest], bool], most: int, base: Base | Members | None = None
    ) -> tuple[list[Start], dict[str, str]]:
        """Return the default versions that a run with this plan may start from, and why others are left out.

        At most so many are returned, those that were trained on the most rows; `may` chooses among all.
        """
        found: list[Start] = []
        left_out: dict[str, str] = {}
        if plan.only_head or self._bank is None or is_unused(Path(self._bank)):
            return found, left_out
        packages = [package for package in Bank.open(self._bank).tasks() if may(package.manifest)]
        for package in sorted(packages, key=_trained_rows, reverse=True):
            try:
                start = self.find(package.ref, plan, base)
                if start and len(found) < most and start.tensors:
                    found.append(start)
                else:
                    left_out[package.ref] = f"the {most} tasks that are compared were trained on more rows"
            except AdapterbankError as error:
                left_out[package.ref] = str(error)
        return found, left_out

    def _read(self, name: str) -> Start:
        package = self._package(name)
        stored = package.manifest.backbone
        if stored["sha256"] != self._backbone.sha256:
            raise BackboneMismatch(
                f"start_from is {name!r}, which was trained on backbone {stored['name']!r} ({stored['sha256'][:12]}), "
                f"not on {self._backbone.name!r} ({self._backbone.sha256[:12]}); name a task of the same encoder."
            )
        try:
            plan = Plan.from_json(package.manifest.method)
        except (ValueError, InputError) as error:
            raise PackageDamaged(f"{package.ref} cannot be used ({error}); {RESTORE}.") from error
        return Start(package, plan, self._backbone)

    def _package(self, name: str) -> Package:
        if is_package_path(name):
            folder = Path(name).expanduser()
            if not os.path.lexists(folder / "manifest.json"):
                what = f"start_from is {name!r}, but that is not the folder of a package: it has no manifest.json"
                raise InputError(f"{what}; name such a folder, as in bank/tasks/mnli/1, or a task of the bank.")
            return Package(read_manifest(folder), folder)
        if name == AUTO:
            raise ConfigError(["start_from is 'auto', which only train can use; name tasks, or none."])
        if self._bank is None or is_unused(Path(self._bank)):
            what = f"start_from is {name!r}, but there is no bank to find it in"
            raise ConfigError([f"{what}; name a bank that has this task, or the folder of a package."])
        return _in_bank(Bank.open(self._bank), name)


def _trained_rows(package: Package) -> int:
    return int(package.manifest.data.get("train", {}).get("rows", 0))


def _in_bank(bank: Bank, name: str) -> Package:
    """Return a package of a bank; the error for a task whose method writes no package names the method."""
    try:
        return bank.get(name)
    except UnknownName as error:
        task = parse_ref(name)[0]
        runs = (record for record in records.read_all(bank.records_path) if record["config"].get("task") == task)
        method = next((run["config"].get("method") for run in runs if run.get("package", "") is None), None)
        if method is None:
            raise InputError(f"start_from: {error}") from None
        raise InputError(
            f"start_from is {name!r}, which was run with method {method!r} and has no package to start from; "
            "train it with another method, such as adapter."
        ) from None


def difference(plan: Plan, other: Plan) -> str | None:
    """Return how the slots of two plans differ beside their heads, as the end of a sentence about the `other` one."""
    if plan.method != other.method:
        remedy = f"use --method {other.method}"
        if plan.fuses:
            remedy = "name a task that fuses the same ones, or leave one of the options out"
        return f"was trained with method {other.method!r}, and this run uses {plan.method!r}; {remedy}"
    mine, its = plan.to_json(), other.to_json()
    for key in plan.keys if plan.keys == other.keys else ():
        for name, own in _options(mine[key]).items():
            if own != (its_own := _options(its[key])[name]):
                needed = _as_option(its_own)
                option = f"--{name.replace('_', '-')} {needed}"
                return f"has {name} {needed}, and this run {name} {_as_option(own)}; use {option}"
    if plan.keys != other.keys or plan.trains != other.trains:
        return "trains other tensors than this run; use the same options of the method"
    return None


def _other_base(requires: Sequence[RequiredFields], base: Base | Members | None) -> str | None:
    """Return how a package stands on something else than a run, as the end of a sentence."""
    if list(requires) == (base.references if base else []):
        return None
    own, option = (base.ref, base.option) if base else ("nothing", "on")
    return f"stands on {', '.join(map(ref_of, requires)) or 'nothing'}, and this run on {own}; use the same --{option}"


def _options(addition: Mapping[str, Any]) -> dict[str, Any]:
    """Return an addition's fields as options, which say widths by layer as a size."""
    fields = {**addition}
    if widths := fields.pop("widths", ()):
        fields["size"] = size_text(widths, len(addition["sites"]))
    return fields


def _as_option(value: Any) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
