"""Small packages for the tests of the bank: what a run passes to `put`, and what is on disk afterwards."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from adapterbank.storage.bank import Bank
from adapterbank.storage.package import FORMAT, Array, Manifest

BACKBONE = {"name": "tiny", "sha256": "a" * 64}
TENSORS: dict[str, Array] = {
    "head.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "head.bias": np.zeros(2, np.float16),
}
STRANGE_NAMES = ["", ".", "..", "../x", "a/b", "/etc", "a\\b", ".tmp-x", "-x", "a b", "a\n", "a\0", "é", "x" * 101]
"""Names that could lead out of a bank, or be mistaken for something else in it."""


def draft(name: str = "sst2", **changes: Any) -> Manifest:
    """Return the manifest that a run passes to `put`."""
    values: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "version": 0,
        "task": {"kind": "classification", "text": ["text"], "labels": ["négatif", "positif"], "metric": "accuracy"},
        "method": {"name": "adapter", "adapter": {"size": 64}, "head": {"pooling": "mean"}},
        "backbone": BACKBONE,
        "recipe": {"lr": 3e-4, "epochs": 3, "max_length": 16},
        "seed": 7,
        "data": {"train": {"rows": 2, "sha256": "d" * 64}},
        "metrics": {"validation": {"accuracy": 0.91}},
        "params": {"trained": 8, "encoder": 100, "total": 108, "percent": 8.0},
        "bytes": 0,
        "weights_sha256": "",
        "library": "0.1.0",
        "created": "",
        "fingerprint": {"stamp": {"torch": "2", "precision": "fp32"}, "outputs": [[0.1, -0.25]]},
    }
    return Manifest(**values | changes)


def put(bank: Bank, *names: str) -> None:
    """Put a package for each name."""
    for name in names:
        bank.put(draft(name), TENSORS)


def contents(bank: Bank) -> dict[str, bytes]:
    """Return every file and folder of the bank but the lock, to compare before and after."""
    found = (path for path in bank.path.rglob("*") if path.name != ".lock")
    return {str(path.relative_to(bank.path)): path.read_bytes() if path.is_file() else b"" for path in found}


def pointers(bank: Bank, name: str = "sst2") -> dict[str, Any]:
    """Return task.json as it is on disk."""
    value = json.loads((bank.path / "tasks" / name / "task.json").read_text())
    return {key: value[key] for key in ("default", "previous", "last")}
