"""Records: the config and the results of each run, one JSON file per run, never edited. Knows no training and no banks.

A record is named after the hash of its config, so a run that has a record need not be run again. There is one way to
name and encode a record, and two ways to store it: `write` always stores it and numbers repeated runs of one config
(`<hash>.2.json`), `add` stores it only if its config has no record yet. Neither replaces a file. A record of format 1
is sealed with a checksum; one without a format is older, and has none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterbank.errors import DataError, InputError, StorageError
from adapterbank.storage import files, reading

FORMAT = 1
_HASH = re.compile(r"[0-9a-f]{16}")
_ABLATION = ("package", "layers", "whole", "spans", "backbone", "task")
"""Fields that every ablation has."""
_REMEDY = "restore the file from a copy, or move it elsewhere and run its config again"


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the 16 hex digits that identify a config; the order of its keys does not matter."""
    return files.sha256_json(config)[:16]


def encode(record: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return the hash that names a record and the bytes of its file."""
    config = record.get("config")
    if not isinstance(config, Mapping):
        raise InputError("A record needs the whole 'config' as a mapping; without it the run cannot be repeated.")
    data = files.pretty_json(reading.seal({"format": FORMAT, **record}))
    if len(data) > reading.LARGE:
        raise InputError(f"The record has {len(data):,} bytes, and {reading.LARGE:,} are possible; use fewer epochs.")
    return config_hash(config), data


def write(folder: Path, record: Mapping[str, Any]) -> Path:
    """Store a record and return its path; earlier records of the same config are kept."""
    name, data = encode(record)
    path, number = folder / f"{name}.json", 1
    while not _create(path, data):
        number += 1
        path = folder / f"{name}.{number}.json"
    return path


def add(folder: Path, record: Mapping[str, Any]) -> bool:
    """Store a record unless its config has one; return whether it was stored."""
    name, data = encode(record)
    return _create(folder / f"{name}.json", data)


def _create(path: Path, data: bytes) -> bool:
    """Create a file; return False if the name is taken."""
    try:
        files.atomic_create(path, data)
    except FileExistsError:
        return False
    return True


def read(path: Path) -> dict[str, Any]:
    """Read one record."""
    try:
        return decode(reading.read_file(path, reading.LARGE), path.name)
    except FileNotFoundError as error:
        raise DataError(f"There is no record {path}; list its folder to see which records exist.") from error
    except (StorageError, ValueError) as error:
        what = str(error) if isinstance(error, StorageError) else f"The record {path} {error}"
        raise DataError(f"{what.removesuffix('.')}; {_REMEDY}.") from error


def decode(data: bytes, file: str) -> dict[str, Any]:
    """Return the record in the bytes of the file of this name; raise `ValueError` with what is wrong with them."""
    try:
        value = reading.parse_json(data)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("config"), dict):
        raise ValueError("is not a record: it has no 'config'")
    record, name = _unsealed(value), order(file)[0]
    if _HASH.fullmatch(name) and name != config_hash(record["config"]):
        raise ValueError("is the record of another config")
    return record


def _unsealed(value: Any) -> dict[str, Any]:
    """Return a record or an ablation without its format and checksum; an older one has neither."""
    if isinstance(value, dict) and "format" not in value and reading.CHECKSUM not in value:
        return value
    found = reading.check_seal(value)
    if found.pop("format", None) != FORMAT:
        raise ValueError(f"has another format than {FORMAT}; upgrade adapterbank")
    return found


def read_all(folder: str | Path) -> list[dict[str, Any]]:
    """Read all records of a folder, sorted by hash, then number; an absent folder has none."""
    return [read(path) for path in paths(folder)]


def paths(folder: str | Path) -> list[Path]:
    """List the files of a folder's records, sorted by hash, then number."""
    return sorted(
        (path for path in Path(folder).glob("*.json") if is_record(path.name)), key=lambda path: order(path.name)
    )


def find(folder: Path, hash: str) -> Path | None:
    """Return the first record of the config with this hash, or None if the config has not been run."""
    if not _HASH.fullmatch(hash):
        raise InputError(f"{hash!r} is not the hash of a config, which has 16 digits from 0-9 a-f.")
    path = folder / f"{hash}.json"
    return path if path.exists() else None


def write_ablation(path: Path, found: Mapping[str, Any]) -> None:
    """Store an ablation, or replace the one of the same package and rows."""
    files.write_json(path, reading.seal({"format": FORMAT, **found}))


def read_ablation(path: Path) -> dict[str, Any]:
    """Read an ablation; raise `InputError` or `StorageError` if the file is none, or was changed."""
    try:
        found = _unsealed(reading.read_json(path))
    except ValueError as error:
        raise InputError(f"The ablation {path} {error}; make it again.") from error
    if missing := [name for name in _ABLATION if name not in found]:
        raise InputError(f"{path} is not an ablation: it has no {missing[0]!r}.")
    return found


def is_record(name: str) -> bool:
    """Return whether a file name is that of a record; a hidden file is still being written."""
    return name.endswith(".json") and not name.startswith(".")


def order(name: str) -> tuple[str, int]:
    """Return the sort key of a record's file name: `<hash>.10.json` comes after `<hash>.9.json`."""
    hash, _, number = name.removesuffix(".json").partition(".")
    return hash, int(number) if number.isdecimal() else 1
