"""A package: one trained task as a manifest and a weights file. Knows no banks, no torch and not what tensors mean.

The name of a task is also the name of a folder, and `name@3` pins a version. The manifest has a checksum over all of
its fields, and `weights_sha256` is the checksum of the weights file: a later change is detected and refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from adapterbank import errors
from adapterbank.storage import files
from adapterbank.tasks.catalog import bank_name

Array: TypeAlias = npt.NDArray[Any]

FORMAT = 1
"""The newest format of bank and manifest that this library reads, and the one it writes."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
RESTORE = "restore it from a copy of the bank, or remove this version and train it again"
"""The remedy for a damaged package, as the end of a sentence."""


def is_name(text: str) -> bool:
    """Return whether a text is a valid task name; other folders on disk are ignored."""
    return _NAME.fullmatch(text) is not None


def is_version(text: str) -> bool:
    """Return whether a text is a valid version: a whole number from 1 on, without leading zeros."""
    return _VERSION.fullmatch(text) is not None


def check_name(name: str) -> str:
    """Return a task name if it is safe as a folder name; refuse one that could lead out of the bank."""
    if not is_name(name):
        allowed = "1 to 100 of A-Z a-z 0-9 . _ - that start with a letter or digit"
        raise errors.InputError(f"{name!r} cannot be a task name; use {allowed}.")
    return name


def parse_ref(ref: str) -> tuple[str, int | None]:
    """Split `name@3` into the name and the version; `name` alone has version None, the default.

    A catalog name is accepted: `glue/mrpc` is stored as `glue-mrpc`.
    """
    name, at, version = ref.partition("@")
    name = check_name(bank_name(name))
    if at and not is_version(version):
        raise errors.InputError(f"{ref!r} has no version after the @; write a number, as in '{name}@1'.")
    return name, int(version) if at else None


@dataclass(frozen=True)
class Manifest:
    """Everything about a package except its tensors. A draft lacks the fields that `Bank.put` fills in."""

    format: int
    """Version of this format."""
    name: str
    """The task's name in the bank."""
    version: int
    """1, 2, 3, …; 0 in a draft."""
    task: dict[str, Any]
    """Kind, text columns, label names in order, metric."""
    method: dict[str, Any]
    """The method's name and its options."""
    backbone: dict[str, Any]
    """Name and sha256 of the encoder it was trained on."""
    recipe: dict[str, Any]
    """Optimiser, schedule, batch size, epochs."""
    seed: int
    """Seed of the run."""
    data: dict[str, Any]
    """Fingerprint of the data."""
    metrics: dict[str, Any]
    """Metric per split."""
    params: dict[str, Any]
    """Numbers of parameters: trained, total."""
    bytes: int
    """Size of the weights file; 0 in a draft."""
    weights_sha256: str
    """Sha256 of the weights file; empty in a draft."""
    library: str
    """Version of this library."""
    created: str
    """When it was added to the bank, ISO 8601 in UTC."""
    fingerprint: dict[str, Any]
    """Outputs on fixed probe texts, which prove later that they are unchanged."""

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as it is written, with a checksum over all other fields."""
        value = {field.name: getattr(self, field.name) for field in fields(self)}
        return value | {"checksum": files.sha256_json(value)}

    @classmethod
    def from_json(cls, value: Any, path: Path) -> Manifest:
        """Check a value read from `path`. Keys of a later release are ignored, but the checksum covers them."""
        if not isinstance(value, dict):
            raise errors.PackageDamaged(f"{path} is not a manifest; {RESTORE}.")
        check_format(value.get("format"), path)
        rest = {key: item for key, item in value.items() if key != "checksum"}
        if value.get("checksum") != files.sha256_json(rest, parsed=True):
            raise errors.PackageDamaged(f"{path} was changed after it was written; {RESTORE}.")
        names = [field.name for field in fields(cls)]
        if missing := [name for name in names if name not in rest]:
            raise errors.PackageDamaged(f"{path} lacks {', '.join(missing)}; {RESTORE}.")
        return cls(**{name: rest[name] for name in names})


@dataclass(frozen=True)
class Package:
    """One version of a trained task on disk."""

    manifest: Manifest
    path: Path

    @property
    def ref(self) -> str:
        """The name with the version, such as `sst2@3`."""
        return f"{self.manifest.name}@{self.manifest.version}"

    def tensors(self) -> dict[str, Array]:
        """Read the tensors; the file is read once, so the bytes that are checked are the bytes that are used."""
        file = self.path / "weights.safetensors"
        try:
            with files.storage_errors(file):
                data = file.read_bytes()
        except FileNotFoundError as error:
            raise errors.PackageDamaged(f"{file} is missing; {RESTORE}.") from error
        if files.sha256_bytes(data) != self.manifest.weights_sha256:
            raise errors.PackageDamaged(f"{file} has been changed: its sha256 differs; {RESTORE}.")
        try:
            # Sorted, because safetensors returns them in any order, and slots with the same order share memory.
            return dict(sorted(safetensors.numpy.load(data).items()))
        except Exception as error:  # the checksum is right, so it was written like this; safetensors raises many types
            raise errors.PackageDamaged(f"{file} contains no tensors ({error}); {RESTORE}.") from error

    def verify(self) -> list[str]:
        """Check the files and return a sentence for each problem; empty if there is none."""
        problems = []
        for check in (lambda: read_manifest(self.path), self.tensors):
            try:
                check()
            except errors.AdapterbankError as error:
                problems.append(str(error))
        return problems


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of the package folder `path`."""
    file = path / "manifest.json"
    try:
        return Manifest.from_json(files.read_json(file), file)
    except FileNotFoundError as error:
        raise errors.PackageDamaged(f"{file} is missing; {RESTORE}.") from error
    except errors.InputError as error:
        raise errors.PackageDamaged(f"{file} is not JSON; {RESTORE}.") from error


def count_params(trained: int, *, encoder: int, new: int) -> dict[str, float]:
    """Return the `params` of a manifest: trained, encoder, total (the encoder and `new`) and percent."""
    return {"trained": trained, "encoder": encoder, "total": encoder + new, "percent": 100 * trained / encoder}


def check_format(found: Any, path: Path) -> None:
    """Refuse a format that only a later release can read."""
    if isinstance(found, int) and found > FORMAT:
        raise errors.BankError(
            f"{path} has format {found}, and this release reads up to {FORMAT}; upgrade adapterbank."
        )


def pack(tensors: Mapping[str, Array]) -> bytes:
    """Return tensors as safetensors bytes, which do not depend on the order of the mapping."""
    # safetensors copies raw memory, so a transposed view would be read back in the wrong order.
    dense = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    if odd := [name for name, tensor in dense.items() if tensor.dtype.kind not in "fiub"]:
        raise errors.InputError(f"These tensors have a type that cannot be stored; use float32: {', '.join(odd)}.")
    try:
        return safetensors.numpy.save(dense)
    except SafetensorError as error:
        raise errors.InputError(f"The tensors cannot be saved: {error}.") from error
