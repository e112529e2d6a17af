"""Records: what each run was and gave, one JSON file a run, never edited; knows nothing of training or banks.

A record is named after the hash of its config, so that a run which has one need not be run again. The same
config run twice gives a second file, `<hash>.2.json`: what was measured once stays as it was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterbank.errors import DataError, InputError
from adapterbank.storage import files

_HASH = re.compile(r"[0-9a-f]{16}")
_REMEDY = "restore the file from a copy, or move it elsewhere and run its config again"


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the 16 hex digits that stand for a config; the order of its keys does not matter."""
    return files.sha256_json(config)[:16]


def write(folder: Path, record: Mapping[str, Any]) -> Path:
    """Add a record and return its path; an older record of the same config stays beside it."""
    config = record.get("config")
    if not isinstance(config, Mapping):
        raise InputError("A record needs the whole 'config' as a mapping; else its run cannot be repeated.")
    data = files.pretty_json(record)
    name, number = config_hash(config), 1
    while True:
        path = folder / (f"{name}.json" if number == 1 else f"{name}.{number}.json")
        try:
            files.atomic_create(path, data)
        except FileExistsError:
            number += 1
        else:
            return path


def read(path: Path) -> dict[str, Any]:
    """Read one record."""
    try:
        record = files.read_json(path)
    except FileNotFoundError as error:
        raise DataError(f"There is no record {path}; see what its folder holds.") from error
    except InputError as error:
        raise DataError(f"The record {path} is not JSON; {_REMEDY}.") from error
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise DataError(f"{path} is not a record: it has no 'config'; {_REMEDY}.")
    return record


def read_all(folder: str | Path) -> list[dict[str, Any]]:
    """Read all records of a folder by hash, then number; none where there is no folder."""
    # A hidden file is one that is still being written.
    paths = [path for path in Path(folder).glob("*.json") if not path.name.startswith(".")]
    return [read(path) for path in sorted(paths, key=_order)]


def find(folder: Path, hash: str) -> Path | None:
    """Return the first record of the config with this hash, or None when it has not been run."""
    if not _HASH.fullmatch(hash):
        raise InputError(f"{hash!r} is not the hash of a config, which has 16 digits from 0-9 a-f.")
    path = folder / f"{hash}.json"
    return path if path.exists() else None


def _order(path: Path) -> tuple[str, int]:
    """Sort `<hash>.10.json` after `<hash>.9.json`."""
    name, _, number = path.stem.partition(".")
    return name, int(number) if number.isdecimal() else 1
