"""What a run stands on: a trained task whose additions come before its own, frozen. Knows no data and no loop.

A base's additions act first, then the run's own. Its LayerNorms and biases take the place of the encoder's: they are
frozen where the run does not train them, and the first values of those that it does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from adapterbank.config import FRESH
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

    package: Package
    plan: Plan = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)
    """Its own tensors without those of its head."""
    below: Base | None = None
    """What it stands on."""

    @property
    def ref(self) -> str:
        """Its name with the version."""
        return self.package.ref

    @property
    def reference(self) -> RequiredFields:
        """What the manifest of a package that stands on it says of it."""
        return reference(self.package)

    @cached_property
    def replaced(self) -> dict[str, Tensor]:
        """The tensors that take the place of the encoder's."""
        under = self.below.replaced if self.below else {}
        return under | {name: tensor for name, tensor in self.tensors.items() if addition_in(name) is None}

    @property
    def names(self) -> list[str]:
        """The names of all tensors that it changes or adds, with those of what it stands on."""
        return [*self.tensors, *(self.below.names if self.below else ())]

    def put(self, stacks: Stacks, known: dict[Base, int]) -> int:
        """Return its slot in stacks, where it never trains; `known` has those that are there already."""
        if self not in known:
            under = self.below.put(stacks, known) if self.below else None
            known[self] = stacks.put(self.plan, self.tensors, under, frozen=True)
        return known[self]


class Bases:
    """Finds what runs stand on in a bank; a package is read once for all of them."""

    def __init__(self, backbone: Backbone, bank: str | Path | None = None) -> None:
        """`bank` is the folder of the bank whose tasks can be named; None if there is none."""
        self._backbone, self._bank = backbone, bank
        self._found: dict[tuple[str, str], Base] = {}

    def find(self, name: str, plan: Plan) -> Base | None:
        """Return what a run with this plan stands on, None for the bare encoder; refuse what cannot carry it."""
        if name == FRESH:
            return None
        if plan.alone:
            raise ConfigError(
                [f"on is {name!r}, but method {plan.method!r} changes whole layers; use another, such as adapter."]
            )
        package = self._package(name)
        base = self._read(package)
        try:
            check_foundation(plan, [package, *foundation(package)])
        except ValueError as error:
            raise ConfigError([f"on is {name!r}, but {package.ref} cannot carry this run: {error}."]) from None
        return base

    def _read(self, package: Package) -> Base:
        """Return a package that the pass can run, with what it stands on."""
        key = package.ref, package.manifest.weights_sha256
        if key not in self._found:
            resident, source, _ = open_package(package, self._backbone)
            own = {name: torch.tensor(array, dtype=torch.float32) for name, array in source().items()}
            kept = {name: tensor for name, tensor in own.items() if "head" not in roles(name)}
            below = [self._read(one) for one in required(package)]
            self._found[key] = Base(package, resident.plan, kept, *below)
        return self._found[key]

    def _package(self, name: str) -> Package:
        if is_package_path(name):
            raise ConfigError(
                [f"on is {name!r}, a path; name a task of this bank, since both are kept and served together."]
            )
        if self._bank is None or is_unused(Path(self._bank)):
            raise ConfigError([f"on is {name!r}, but there is no bank to find it in; train that task first."])
        try:
            return Bank.open(self._bank).get(name)
        except PackageDamaged:
            raise
        except (UnknownName, InputError) as error:
            raise InputError(f"on: {error}") from None
