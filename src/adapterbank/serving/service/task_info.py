"""Turns manifests into the JSON of /v1/tasks. Knows no engine and no routes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterbank.errors import AdapterbankError
from adapterbank.methods import stored_fields
from adapterbank.storage import records
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import Manifest


def summary(manifest: Manifest, *, resident: bool) -> dict[str, Any]:
    """Return a task's row in the list."""
    task, method = manifest.task, manifest.method
    scores: Mapping[str, Mapping[str, Any]] = manifest.metrics
    return {
        "name": manifest.name,
        "version": manifest.version,
        "kind": task["kind"],
        "text": list(task["text"]),
        "labels": list(task["labels"]),
        "metric": task["metric"],
        "score": scores.get("dev", {}).get(task["metric"]),
        "test_score": scores.get("test", {}).get(task["metric"]),
        "rows": {split: found["rows"] for split, found in scores.items() if "rows" in found},
        "method": method.get("name") or method.get("method"),
        "size": stored_fields(method).get("size"),
        "params": {key: manifest.params.get(key) for key in ("trained", "encoder", "total", "percent")},
        "bytes": manifest.bytes,
        "created": manifest.created,
        "resident": resident,
    }


def details(bank: Bank, manifest: Manifest, *, resident: bool) -> dict[str, Any]:
    """Return all about a task: its manifest, its versions and its newest ablation."""
    fields = {key: value for key, value in manifest.to_json().items() if key != "fingerprint"}
    return {
        **fields,
        "backbone": {**manifest.backbone, "name": public_name(manifest.backbone["name"])},
        "resident": resident,
        "versions": bank.versions(manifest.name),
        "default": bank.default(manifest.name),
        "ablation": _ablation(bank.records_path / "ablations", f"{manifest.name}@{manifest.version}"),
    }


def public_name(backbone: str) -> str:
    """Return the name of an encoder that clients may see; for a folder on this machine, its last part."""
    return Path(backbone).name if Path(backbone).is_absolute() else backbone


def _ablation(folder: Path, ref: str) -> Any:
    """Return the newest ablation of a package that can be read, or None."""
    found = [path for path in folder.glob("*.json") if path.name.rpartition("-")[0] == ref]
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            return records.read_ablation(path)
        except (AdapterbankError, OSError):
            continue
    return None
