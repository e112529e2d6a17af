"""The head of a bank, `bank.json`: its format and its encoder. Knows one file, no packages."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from adapterbank import errors, schema
from adapterbank.storage import files, reading
from adapterbank.storage.package import FORMAT, EncoderFields, check_format

FILE = "bank.json"
_RUNS = ("records", "runs")
"""What runs that need no encoder write before there is a bank."""
_BEFORE = ("format", "backbone", "created")
"""The fields of the file before it had a checksum."""


class BankHead(TypedDict):
    """The fields of a bank.json."""

    format: int
    backbone: EncoderFields


def is_unused(path: Path) -> bool:
    """Return whether a bank can be created here: there is nothing, or at most hidden files and records of runs."""
    with files.storage_errors(path):
        if not os.path.lexists(path):
            return True
        return path.is_dir() and all(name.startswith(".") or name in _RUNS for name in os.listdir(path))


def create(path: Path, backbone: Mapping[str, Any] | None) -> None:
    """Create a bank; if several processes do so at once, the first one decides the content and all succeed."""
    if backbone is None or not all(isinstance(backbone.get(key), str) for key in ("name", "sha256")):
        raise errors.InputError(f"To create the bank {path}, give its backbone: the name and the sha256.")
    fresh = not path.exists()
    files.make_folder(path)
    head = path / FILE
    if not is_unused(path) and not head.exists():
        raise errors.BankError(f"{path} contains other files and is not a bank; choose an empty or new folder.")
    value = {
        "format": FORMAT,
        "backbone": {"name": backbone["name"], "sha256": backbone["sha256"]},
        "created": files.now(),
    }
    try:
        with contextlib.suppress(FileExistsError):
            files.atomic_create(head, files.pretty_json(reading.seal(value)))
    except errors.StorageError:
        if fresh:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
    files.make_folder(path / "tasks")


def read_backbone(path: Path) -> dict[str, str]:
    """Read the name and sha256 of the bank's encoder from bank.json."""
    head = path / FILE
    try:
        value = reading.read_json(head, reading.SMALL)
        if isinstance(value, dict):
            check_format(value.get("format"), head)
        checked = reading.check_seal(value, before=_BEFORE)
        if problem := schema.problem(BankHead, checked):
            raise ValueError(problem)
    except FileNotFoundError as error:
        missing = "is not a bank: it has no bank.json" if path.exists() else "does not exist"
        remedy = "the first training creates it, or serve with --create; see: adapterbank train --help"
        if (path / "records").is_dir():
            missing = "has records and no tasks: a method without an encoder writes a record but no package"
            remedy = "train a task with another method, such as adapter"
        raise errors.BankError(f"{path} {missing}; {remedy}.") from error
    except (errors.InputError, ValueError) as error:
        raise errors.BankError(f"{head} is damaged; restore it from a copy of the bank.") from error
    return {"name": checked["backbone"]["name"], "sha256": checked["backbone"]["sha256"]}


def check_backbone(path: Path, own: Mapping[str, Any], other: Mapping[str, Any], what: str) -> None:
    """Refuse another encoder than the bank's own."""
    if other.get("sha256") != own["sha256"]:
        raise errors.BackboneMismatch(
            f"The bank {path} is for {_describe(own)}, but {what} is {_describe(other)}; "
            "use the same encoder, or another bank."
        )


def _describe(backbone: Mapping[str, Any]) -> str:
    return f"{backbone.get('name')} (sha256 {str(backbone.get('sha256'))[:12]}…)"
