"""Artificial records: small runs with scores that can be checked by hand."""

from __future__ import annotations

import hashlib
from typing import Any

from adapterbank.config import parse, resolve
from adapterbank.storage import files, records

ENCODER = 1_000_000
TRAINED = {"full": ENCODER, "layernorm": 500, "feature": 100, "automl": 0}


def mark(backbone: str) -> str:
    """Return an encoder's sha256, which differs for each name."""
    return hashlib.sha256(backbone.encode()).hexdigest()


def record(
    task: str = "glue-cola",
    method: str = "adapter",
    dev: float = 0.5,
    test: float | None = None,
    *,
    metric: str = "accuracy",
    kind: str = "classification",
    trained: int | None = None,
    sha256: str = "",
    calibration: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return a record as a run would write it, with this score on dev."""
    parsed = method if method != "automl" else "feature"
    config = resolve(parse({"task": task, "train": "t.csv", "method": parsed, **options})).to_json()
    share = {"adapter": 1000 * config["size"], "top": 80_000 * config["top"]}
    count = trained if trained is not None else {**TRAINED, **share}[method]
    scores = {"dev": {metric: dev, "rows": 100}} | ({"test": {metric: test, "rows": 50}} if test is not None else {})
    return {
        "config": {
            **config,
            "method": method,
            "backbone_sha256": sha256 or mark(config["backbone"]),
            "data": {"train": {"rows": 1000, "sha256": "t"}, "dev": {"rows": 100, "sha256": "d"}},
        },
        "package": f"{task}@1",
        "task": {"name": task, "kind": kind, "metric": metric, "labels": ["no", "yes"]},
        "metrics": scores,
        "history": [{"loss": 1 / (k + 1), "score": dev * (k + 1) / 3, "seconds": 4.0} for k in range(3)],
        "params": {"trained": count, "encoder": ENCODER, "total": ENCODER + count, "percent": 100 * count / ENCODER},
        "seconds": 12.0,
        "created": "2026-01-01T00:00:00+00:00",
        **({"calibration": calibration} if calibration else {}),
    }


def measured(right: int, rows: int = 10, confidence: float = 0.8) -> dict[str, Any]:
    """Return the calibration of a split whose rows all have the same confidence."""
    bins = [{"from": 0.733333, "to": 0.8, "rows": rows, "confidence": confidence, "accuracy": right / rows}]
    covered = [{"coverage": share, "abstain": confidence, "accuracy": right / rows} for share in (1.0, 0.5)]
    error = abs(right / rows - confidence)
    return {"calibration_error": error, "reliability": bins, "coverage": covered}


def ablation(package: str = "glue-cola@1", layers: int = 3, backbone: str = "minilm") -> dict[str, Any]:
    """Return an ablation in which each removed layer costs one per cent."""
    spans = [
        {
            "first": i,
            "last": j,
            "scores": {"accuracy": 0.8 * (1 - 0.01 * (j - i + 1))},
            "change": {"accuracy": i - j - 1.0},
        }
        for i in range(layers)
        for j in range(i, layers)
    ]
    return {
        "package": package,
        "task": {"name": package.split("@")[0], "kind": "classification", "metric": "accuracy"},
        "backbone": {"name": backbone, "sha256": mark(backbone)},
        "layers": list(range(layers)),
        "metric": "accuracy",
        "whole": {"accuracy": 0.8},
        "spans": spans,
        "data": {"rows": 100, "sha256": "d" * 64},
    }


def write(folder, *found: dict[str, Any], ablations: tuple[dict[str, Any], ...] = ()):
    """Write records and ablations into a folder."""
    files.make_folder(folder)
    for one in found:
        records.write(folder, one)
    for one in ablations:
        files.make_folder(folder / "ablations")
        files.write_json(folder / "ablations" / f"{one['package']}.json", one)
    return folder
