"""Pruning: a new version of a trained task without its idle adapters, with the scores before and after.

From the lowest layer up, the adapters of a layer are removed if the task, without them and without those removed
before, stays within the tolerance of its score on dev. LayerNorms and the head remain; nothing is trained again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from adapterbank.config import TOLERANCE, check_tolerance
from adapterbank.errors import InputError
from adapterbank.inference.audit import fingerprint
from adapterbank.inference.engine import Engine
from adapterbank.inference.resident import Resident
from adapterbank.kinds import scoring
from adapterbank.methods import stored_fields
from adapterbank.runtime import stamp
from adapterbank.storage import records
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import Manifest, Package, count_params
from adapterbank.studies.ablation import without
from adapterbank.tasks.spec import Examples
from adapterbank.training.dataset import Dataset
from adapterbank.training.run import Result


def find_idle(score: Callable[[tuple[int, ...]], float], layers: tuple[int, ...], tolerance: float) -> dict[str, Any]:
    """Choose the layers whose adapters are removed, from the lowest up.

    `score` returns the score of the task without the adapters of some layers. The result has the removed layers, the
    scores before and after, and each step: the layer, the score without it, and whether it was removed.
    """
    before = after = score(())
    removed: list[int] = []
    steps = []
    for layer in layers:
        found = score((*removed, layer))
        idle = 100 * (before - found) <= tolerance + 1e-9
        steps.append({"layer": layer, "score": found, "removed": idle})
        if idle:
            removed.append(layer)
            after = found
    return {"removed": removed, "before": before, "after": after, "tolerance": tolerance, "steps": steps}


def prune(
    engine: Engine,
    bank: Bank,
    package: Package,
    splits: Mapping[str, Examples],
    *,
    tolerance: float = TOLERANCE,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, Any], Result | None]:
    """Remove a package's idle adapters, chosen on dev; return the findings, and the new version with its record.

    The engine should hold no other task and run no programs, because it computes the fingerprint of the new package.
    All `splits` are scored again. If no adapter is idle, there is no new version.
    """
    check_tolerance(tolerance)
    began = time.perf_counter()
    source = _source(bank, package)  # a damaged record is reported before a new version exists
    held = engine.residents[engine.load(package, f"{package.ref} whole")]
    if not held.plan.removable:
        raise InputError(f"{package.ref} was trained with {held.plan.method!r}, which has no adapters to remove.")
    for base in held.bases:
        engine.ask(base)
    tensors, layers = package.tensors(), held.plan.removable_layers
    tried = iter(range(1, len(layers) + 2))

    def score(removed: tuple[int, ...]) -> float:
        _put(engine, held, tensors, removed)
        found: float = _scores(engine, held, splits["dev"])[held.task.metric]
        watch(next(tried), len(layers) + 1)
        return found

    found = {"from": package.ref, "metric": held.task.metric, **find_idle(score, layers, tolerance)}
    for name in (_TRIAL, f"{package.ref} whole"):
        engine.remove(name)
    if not found["removed"]:
        _remove(engine, held.bases)
        return found, None
    rest = _put(engine, held, tensors, tuple(found["removed"]))  # the only task in the engine, as in an audit
    result = _publish(engine, bank, package, splits, rest, found, source, began)
    _remove(engine, (_TRIAL, *held.bases))
    return found, result


def prune_result(
    engine: Engine, result: Result, data: Dataset, *, tolerance: float, note: Callable[[str], None]
) -> Result:
    """Prune the package of a run on the data of that run, and pass a summary to `note`."""
    splits = {name: rows for name, rows in data.splits.items() if name != "train"}
    assert result.package is not None  # methods with adapters leave one
    if "dev" not in splits:
        note("Nothing is pruned: with few labels there are no dev rows to compare on; name some with --dev.")
        return result
    bank = Bank.open(result.package.path.parents[2])
    found, pruned = prune(engine, bank, result.package, splits, tolerance=tolerance)
    note(describe(found))
    return pruned or result


def describe(found: Mapping[str, Any]) -> str:
    """Return one sentence about what was removed and how the score changed."""
    if found.get("steps") == []:
        return f"{found['from']} has no adapters left to remove."
    if not found["removed"]:
        return f"No adapter of {found['from']} is idle: each costs more than {found['tolerance']:g} points on dev."
    layers = ", ".join(map(str, found["removed"]))
    return (
        f"Without the adapters of layers {layers}: {found['metric']} {found['before']:.4f} before, "
        f"{found['after']:.4f} after."
    )


_TRIAL = "pruned"


def _put(
    engine: Engine, held: Resident, tensors: Mapping[str, np.ndarray], removed: tuple[int, ...]
) -> dict[str, np.ndarray]:
    plan, rest = without(held.plan, tensors, removed)
    engine.enter(_TRIAL, replace(held, plan=plan), rest)
    return rest


def _remove(engine: Engine, names: Sequence[str]) -> None:
    for name in names:
        engine.remove(name)


def _scores(engine: Engine, held: Resident, examples: Examples) -> dict[str, Any]:
    (decisions,) = engine.decide([(_TRIAL, examples)], keep=True)
    return scoring.report(held.task, decisions, examples.targets or [])


def _publish(
    engine: Engine,
    bank: Bank,
    package: Package,
    splits: Mapping[str, Examples],
    tensors: Mapping[str, np.ndarray],
    found: Mapping[str, Any],
    source: Mapping[str, Any],
    began: float,
) -> Result:
    """Add the smaller slot to the bank as a new version, and write its record."""
    old, held = package.manifest, engine.residents[_TRIAL]
    scores = {name: _scores(engine, held, examples) for name, examples in splits.items()}
    count = sum(array.size for array in tensors.values())
    encoder, gone = int(old.params["encoder"]), int(old.params["trained"]) - count
    params = count_params(count, encoder=encoder, new=int(old.params["total"]) - encoder - gone)
    draft = replace(
        old,
        version=0,
        method=held.plan.to_json(),
        recipe={**old.recipe, "pruned": dict(found)},
        metrics={name: {k: v for k, v in s.items() if isinstance(v, int | float)} for name, s in scores.items()},
        params=params,
        fingerprint=fingerprint(engine, _TRIAL),
    )
    made = bank.put(draft, tensors, source["config"].get("default", "new"))
    record = {
        **{name: value for name, value in source.items() if name != "calibration"},  # that of the whole package
        "config": {**source["config"], "pruned": {"from": package.ref, "tolerance": found["tolerance"]}},
        "package": made.ref,
        "task": made.manifest.task,
        "metrics": scores,
        "params": params,
        "bytes": made.manifest.bytes,
        "created": made.manifest.created,
        "pruned": dict(found),
        "seconds": time.perf_counter() - began,
        "stamp": stamp(engine.device, engine.dtype, engine.layout),
        "notes": [],
    }
    return Result(record, records.write(bank.records_path, record), made, ())


def _source(bank: Bank, package: Package) -> dict[str, Any]:
    """Return the record of the run that made a package; if it is missing, the config according to the manifest."""
    for record in records.read_all(bank.records_path):
        if record.get("package") == package.ref:
            return record
    return {"config": _config(package.manifest)}


def _config(manifest: Manifest) -> dict[str, Any]:
    return {
        "task": manifest.name,
        "method": manifest.method["name"],
        "size": stored_fields(manifest.method).get("size"),
        "backbone": manifest.backbone["name"],
        "backbone_sha256": manifest.backbone["sha256"],
        "data": manifest.data,
        "seed": manifest.seed,
        **manifest.recipe,
    }
