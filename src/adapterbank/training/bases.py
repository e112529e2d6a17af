"""What a run stands on: a trained task whose additions come before its own, or several that it fuses, frozen.

A base's additions act first, then the run's own. Its LayerNorms and biases take the place of the encoder's: they are
frozen where the run does not train them, and the first values of those that it does. Of tasks that are fused, only the
adapters are read. Knows no data and no loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from adapterbank.config import FRESH, Config, fused_tasks
from adapterbank.encoder.backbone import Backbone
from adapterbank.errors import ConfigError, InputError, PackageDamaged, UnknownName
from adapterbank.inference.loading import check_foundation, open_package
from adapterbank.methods import addition_in, roles
from adapterbank.slots.plan import Plan
from adapterbank.slots.stack import Stacks
from adapterbank.storage.bank import Bank
from adapterbank.storage.bank_head import is_unused
from adapterbank.storage.package import Package, RequiredFields, is_package_path
from adapterbank.storage.requirements import foundation, reference, required


@dataclass(frozen=True, eq=False)
class Base:
    """A package that runs stand on."""

    option: ClassVar[str] = "on"
    """The option that names it."""
    package: Package
    plan: Plan = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)
    """Its own tensors without those of its head."""
    below: Base | Members | None = None
    """What it stands on."""

    @property
    def ref(self) -> str:
        """Its name with the version."""
        return self.package.ref

    @property
    def packages(self) -> list[Package]:
        """The packages that a package requires which stands on it."""
        return [self.package]

    @property
    def references(self) -> list[RequiredFields]:
        """What the manifest of such a package says of them."""
        return [reference(self.package)]

    def about(self) -> dict[str, Any]:
        """Return what the record of a run that stands on it says of it."""
        return {"on": reference(self.package)}

    def identity(self) -> dict[str, Any]:
        """Return what identifies it in the config of that record."""
        return {"on_sha256": self.package.manifest.weights_sha256}

    @cached_property
    def replaced(self) -> dict[str, Tensor]:
        """The tensors that take the place of the encoder's."""
        under = self.below.replaced if self.below else {}
        return under | {name: tensor for name, tensor in self.tensors.items() if addition_in(name) is None}

    @property
    def names(self) -> list[str]:
        """The names of all tensors that it changes or adds, with those of what it stands on."""
        return [*self.tensors, *(self.below.names if self.below else ())]

    def put(self, stacks: Stacks, known: dict[Base, int]) -> list[int]:
        """Return its slot in stacks, where it never trains; `known` has those that are there already."""
        if self not in known:
            under = self.below.put(stacks, known) if self.below else ()
            known[self] = stacks.put(self.plan, self.tensors, *under, frozen=True)
        return [known[self]]


@dataclass(frozen=True)
class Members:
    """The packages whose adapters runs fuse; `Base` says what its attributes are."""

    bases: tuple[Base, ...]
    option: ClassVar[str] = "fuse"
    names: ClassVar[list[str]] = []  # where their adapters are read, the fusion has tensors of its own
    replaced: ClassVar[dict[str, Tensor]] = {}

    @property
    def ref(self) -> str:
        """Their names with the versions."""
        return ", ".join(package.ref for package in self.packages)

    @property
    def packages(self) -> list[Package]:
        """See `Base`."""
        return [base.package for base in self.bases]

    @property
    def references(self) -> list[RequiredFields]:
        """See `Base`."""
        return [reference(package) for package in self.packages]

    def about(self) -> dict[str, Any]:
        """See `Base`."""
        return {"fuse": self.references}

    def identity(self) -> dict[str, Any]:
        """See `Base`."""
        return {"fuse_sha256": [package.manifest.weights_sha256 for package in self.packages]}

    def put(self, stacks: Stacks, known: dict[Base, int]) -> list[int]:
        """See `Base`."""
        return [slot for base in self.bases for slot in base.put(stacks, known)]


class Bases:
    """Finds what runs stand on in a bank; a package is read once for all of them."""

    def __init__(self, backbone: Backbone, bank: str | Path | None = None) -> None:
        """`bank` is the folder of the bank whose tasks can be named; None if there is none."""
        self._backbone, self._bank = backbone, bank
        self._found: dict[tuple[str, str], Base] = {}

    def find(self, config: Config, plan: Plan) -> Base | Members | None:
        """Return what a run with this plan stands on, None for the bare encoder; refuse what cannot carry it."""
        if plan.fuses:
            return Members(tuple(self._read(one) for one in self._carrying("fuse", fused_tasks(config), plan)))
        if config.on == FRESH:
            return None
        if plan.alone:
            raise ConfigError(
                [f"on is {config.on!r}, but method {plan.method!r} changes whole layers; use another, such as adapter."]
            )
        (package,) = self._carrying("on", [config.on], plan)
        return self._read(package)

    def _carrying(self, option: str, names: Sequence[str], plan: Plan) -> list[Package]:
        """Return the packages that an option names, in order; refuse those that cannot carry a run with this plan."""
        packages = [self._package(option, name) for name in names]
        for package in packages:
            self._read(package)
        below = {one.ref: one for package in packages for one in (*foundation(package), package)}
        try:
            check_foundation(plan, list(below.values()), packages)
        except ValueError as error:
            given, which = ",".join(names), ", ".join(package.ref for package in packages)
            raise ConfigError([f"{option} is {given!r}, but {which} cannot carry this run: {error}."]) from None
        return packages

    def _read(self, package: Package) -> Base:
        """Return a package that the pass can run, with what it stands on."""
        key = package.ref, package.manifest.weights_sha256
        if key not in self._found:
            resident, source, _ = open_package(package, self._backbone)
            own = {name: torch.tensor(array, dtype=torch.float32) for name, array in source().items()}
            kept = {name: tensor for name, tensor in own.items() if "head" not in roles(name)}
            below = tuple(self._read(one) for one in required(package))
            under = Members(below) if resident.plan.fuses else next(iter(below), None)
            self._found[key] = Base(package, resident.plan, kept, under)
        return self._found[key]

    def _package(self, option: str, name: str) -> Package:
        if is_package_path(name):
            raise ConfigError(
                [f"{option} is {name!r}, a path; name a task of this bank, since both are kept and served together."]
            )
        if self._bank is None or is_unused(Path(self._bank)):
            raise ConfigError([f"{option} is {name!r}, but there is no bank to find it in; train that task first."])
        try:
            return Bank.open(self._bank).get(name)
        except PackageDamaged:
            raise
        except (UnknownName, InputError) as error:
            raise InputError(f"{option}: {error}") from None
