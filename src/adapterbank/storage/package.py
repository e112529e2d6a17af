"""A package: one trained task as a manifest and a weights file. Knows no banks, no torch and not what tensors mean.

The name of a task is also the name of a folder, and `name@3` pins a version. The manifest has a checksum over all of
its fields, and `weights_sha256` is the checksum of the weights file: a later change is detected and refused. A checksum
says nothing of what was written, so the fields are also checked by type and range (`schema`), and the tensors must be
finite floating-point numbers, when they are put and when they are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from adapterbank import errors, schema
from adapterbank.methods import ADDITIONS, addition_name
from adapterbank.storage import files, reading
from adapterbank.tasks.catalog import bank_name

Array: TypeAlias = npt.NDArray[Any]

FORMAT = 1
"""The format of banks, and of packages that stand alone."""
STACKED = 2
"""The format of packages that stand on others, which an earlier release would read without them."""

_LATER = ("notes", "requires")
"""Fields of a manifest that not every manifest has."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
LAST_VERSION = 999_999_999
MANIFEST_BYTES = 8 << 20
"""The most bytes of a manifest."""
MOST_REQUIRED = 16
"""The most packages that a manifest requires."""
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


def is_package_path(text: str) -> bool:
    """Return whether a text is the path of a package's folder rather than a task: it has a slash, or is a dot."""
    name = text.partition("@")[0]  # of the catalog, such as glue/mrpc@2
    return bank_name(name) == name and ("/" in text or text in (".", ".."))


Count: TypeAlias = Annotated[int, {"low": 0}]


class TaskFields(TypedDict):
    """What lists show of a task; `tasks.spec.Task` checks the rest when a package is loaded."""

    kind: str
    text: list[str]
    labels: list[str]
    metric: str


class HeadFields(TypedDict):
    """What lists show of a head."""

    pooling: str


class MethodFields(TypedDict):
    """What lists show of a method; `slots.plan.Plan` checks the rest when a package is loaded."""

    name: str
    head: Annotated[dict[str, Any], HeadFields]


class EncoderFields(TypedDict):
    """The identity of an encoder."""

    name: str
    sha256: str


class PrunedFields(TypedDict):
    """What pruning removed, and what it cost. The version before it is under the key `from`."""

    removed: list[int]
    metric: str
    before: float
    after: float


class SourceFields(TypedDict):
    """A package that a run started from, or that a soup averages."""

    package: str
    weights_sha256: str


class RequiredFields(TypedDict):
    """A package that another one stands on."""

    name: str
    version: Annotated[int, {"low": 1}]
    weights_sha256: str


class RecipeFields(TypedDict):
    """The part of a recipe that prediction depends on."""

    max_length: Count
    doc_stride: NotRequired[Count]
    windows: NotRequired[Count]
    pruned: NotRequired[Annotated[dict[str, Any], PrunedFields] | None]
    start_from: NotRequired[SourceFields]
    soup: NotRequired[list[SourceFields]]


class SplitFields(TypedDict):
    """One split of the data."""

    rows: Count
    sha256: str


class ParamFields(TypedDict):
    """Numbers of parameters."""

    trained: Count
    encoder: Annotated[int, {"low": 1}]
    total: Count
    percent: float


class StampFields(TypedDict):
    """The machine that made a result; `runtime.stamp` has more fields."""

    torch: str
    precision: str


class FingerprintFields(TypedDict):
    """Outputs on the probe texts, rows of numbers or of rows of them; a package made by hand may have none."""

    stamp: NotRequired[Annotated[dict[str, Any], StampFields]]
    outputs: NotRequired[list[list[float]] | list[list[list[float]]]]


@dataclass(frozen=True)
class Manifest:
    """Everything about a package except its tensors. A draft lacks the fields that `Bank.put` fills in."""

    format: int
    """Version of this format."""
    name: str
    """The task's name in the bank."""
    version: Count
    """1, 2, 3, …; 0 in a draft."""
    task: Annotated[dict[str, Any], TaskFields]
    """Kind, text columns, label names in order, metric."""
    method: Annotated[dict[str, Any], MethodFields]
    """The method's name and its options."""
    backbone: Annotated[dict[str, Any], EncoderFields]
    """Name and sha256 of the encoder it was trained on."""
    recipe: Annotated[dict[str, Any], RecipeFields]
    """Optimiser, schedule, batch size, epochs."""
    seed: int
    """Seed of the run."""
    data: Annotated[dict[str, Any], dict[str, SplitFields]]
    """Fingerprint of the data."""
    metrics: dict[str, dict[str, float]]
    """Metric per split."""
    params: Annotated[dict[str, Any], ParamFields]
    """Numbers of parameters: trained, encoder, total, and the share that is trained in per cent."""
    bytes: Count
    """Size of the weights file; 0 in a draft."""
    weights_sha256: str
    """Sha256 of the weights file; empty in a draft."""
    library: str
    """Version of this library."""
    created: str
    """When it was added to the bank, ISO 8601 in UTC."""
    fingerprint: Annotated[dict[str, Any], FingerprintFields]
    """Outputs on fixed probe texts, which prove later that they are unchanged."""
    notes: list[str] = field(default_factory=list)
    """What the training told about its data and its result; earlier manifests have none."""
    requires: list[RequiredFields] = field(default_factory=list)
    """The packages of the same bank that it stands on; see `requirements`."""

    def problem(self) -> str | None:
        """Return what is wrong with the fields, as a part of a sentence, or None."""
        value = {one.name: getattr(self, one.name) for one in fields(self)}
        if found := schema.problem(Manifest, value):
            return found
        if len(self.requires) > MOST_REQUIRED:
            return f"requires has {len(self.requires)} packages, more than {MOST_REQUIRED}"
        return next(
            (
                f"method.{key[:100]} is not a mapping"
                for key, item in self.method.items()
                if addition_name(key) in ADDITIONS and not isinstance(item, dict | None)
            ),
            None,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as it is written, with a checksum over all other fields."""
        value = {one.name: getattr(self, one.name) for one in fields(self)}
        return reading.seal({name: item for name, item in value.items() if name != "requires" or item})

    @classmethod
    def from_json(cls, value: Any, path: Path) -> Manifest:
        """Check a value read from `path`. Keys of a later release are ignored, but the checksum covers them."""
        if not isinstance(value, dict):
            raise errors.PackageDamaged(f"{path} is not a manifest; {RESTORE}.")
        check_format(value.get("format"), path, STACKED)
        try:
            rest = reading.check_seal(value)
        except ValueError as error:
            raise errors.PackageDamaged(f"{path} {error}; {RESTORE}.") from error
        names = [one.name for one in fields(cls) if one.name in rest or one.name not in _LATER]
        if missing := [name for name in names if name not in rest]:
            raise errors.PackageDamaged(f"{path} lacks {', '.join(missing)}; {RESTORE}.")
        manifest = cls(**{name: rest[name] for name in names})
        if problem := manifest.problem():
            raise errors.PackageDamaged(f"{path} cannot be used: {problem}; {RESTORE}.")
        return manifest


@dataclass(frozen=True)
class Package:
    """One version of a trained task on disk."""

    manifest: Manifest
    path: Path

    @property
    def ref(self) -> str:
        """The name with the version, such as `sst2@3`."""
        return f"{self.manifest.name}@{self.manifest.version}"

    def tensors(self, largest: int | None = None) -> dict[str, Array]:
        """Read the tensors; the file is read once, so the bytes that are checked are the bytes that are used.

        A caller that knows what the tensors should be names the `largest` size in bytes that makes sense.
        """
        file, size = self.path / "weights.safetensors", self.manifest.bytes
        if largest is not None and size > largest:
            raise errors.PackageDamaged(f"{file} has {size:,} bytes, more than its method can need; {RESTORE}.")
        try:
            data = self._read(file, size)
        except FileNotFoundError as error:
            raise errors.PackageDamaged(f"{file} is missing; {RESTORE}.") from error
        if len(data) != size or files.sha256_bytes(data) != self.manifest.weights_sha256:
            raise errors.PackageDamaged(f"{file} has been changed: its sha256 differs; {RESTORE}.")
        try:
            # Sorted, because safetensors returns them in any order, and slots with the same order share memory.
            tensors = dict(sorted(safetensors.numpy.load(data).items()))
        except Exception as error:  # the checksum is right, so it was written like this; safetensors raises many types
            raise errors.PackageDamaged(f"{file} contains no tensors ({error}); {RESTORE}.") from error
        if problem := tensor_problem(tensors):
            raise errors.PackageDamaged(f"{file} cannot be used: {problem}; {RESTORE}.")
        return tensors

    @staticmethod
    def _read(file: Path, size: int) -> bytes:
        """Read the weights, unless their size alone shows that they have changed."""
        with reading.open_file(file) as (opened, found):
            if found != size:
                changed = f"it has {found:,} bytes instead of {size:,}"
                raise errors.PackageDamaged(f"{file} has been changed: {changed}; {RESTORE}.")
            return opened.read(size)

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
        return Manifest.from_json(reading.read_json(file, MANIFEST_BYTES), file)
    except FileNotFoundError as error:
        raise errors.PackageDamaged(f"{file} is missing; {RESTORE}.") from error
    except errors.InputError as error:
        raise errors.PackageDamaged(f"{file} is not JSON; {RESTORE}.") from error


def count_params(trained: int, *, encoder: int, new: int) -> dict[str, float]:
    """Return the `params` of a manifest: trained, encoder, total (the encoder and `new`) and percent."""
    return {"trained": trained, "encoder": encoder, "total": encoder + new, "percent": 100 * trained / encoder}


def check_format(found: Any, path: Path, newest: int = FORMAT) -> None:
    """Refuse a format that only a later release can read."""
    if isinstance(found, int) and found > newest:
        raise errors.BankError(
            f"{path} has format {found}, and this release reads up to {newest}; upgrade adapterbank."
        )


def pack(tensors: Mapping[str, Array]) -> bytes:
    """Return tensors as safetensors bytes, which do not depend on the order of the mapping."""
    # safetensors copies raw memory, so a transposed view would be read back in the wrong order.
    dense = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    if problem := tensor_problem(dense):
        raise errors.InputError(f"The tensors cannot be stored: {problem}.")
    try:
        return safetensors.numpy.save(dense)
    except SafetensorError as error:
        raise errors.InputError(f"The tensors cannot be saved: {error}.") from error


def tensor_problem(tensors: Mapping[str, Array]) -> str | None:
    """Return why tensors cannot be a slot's, as a part of a sentence: each must be finite as float32."""
    for name, tensor in tensors.items():
        if tensor.dtype.kind != "f":
            return f"{name[:100]} is {tensor.dtype}, not floating point"
        with np.errstate(over="ignore"):
            finite = np.isfinite(tensor.astype(np.float32, copy=False)).all()
        if not finite:
            return f"{name[:100]} holds a number that is not finite"
    return None
