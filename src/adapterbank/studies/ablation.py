"""Adapters removed without retraining, span of layers by span, and what that costs. Knows no shell and draws nothing.

A span is a run of neighbouring layers that have adapters; n of them have n(n+1)/2 spans (Houlsby et al. 2019, section
3.6, figure 6). Every span is a path of the same rows through two slots of one batch: the task's own, and the same one
without adapters. Below its first layer a span's path is the whole model's, and up to its last layer it is that of every
longer span from there; so both are computed once, 376 instead of 936 layers a row for 12 layers. Nothing is
approximated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from adapterbank import metrics
from adapterbank.encoder.batch import Tokens, by_length, pack
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.forward import hidden_below, run_layers
from adapterbank.errors import InputError
from adapterbank.inference.engine import Engine
from adapterbank.inference.predictions import decide
from adapterbank.inference.runner import by_row
from adapterbank.methods import Plan
from adapterbank.runtime import stamp
from adapterbank.slots import heads
from adapterbank.slots.routing import Route, Segment
from adapterbank.slots.stack import Stacks
from adapterbank.storage import files
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import Package
from adapterbank.tasks.spec import Examples

Removed = tuple[int, int] | None
"""The first and last layer whose adapters are gone; None for the model as it was trained."""
Held = TypeVar("Held")

_TOKENS_AT_ONCE = {"cpu": 1 << 14, "cuda": 1 << 18}
"""Tokens of all paths together: enough for a device's matrix products, few enough for its memory."""


def without(plan: Plan, tensors: Mapping[str, Held], layers: Collection[int]) -> tuple[Plan, dict[str, Held]]:
    """Take the adapters of some layers out of a slot; its LayerNorms and its head stay."""
    if plan.adapter is None:
        raise InputError(f"Method {plan.method!r} has no adapters to remove; name a task trained with 'adapter'.")
    left = tuple(layer for layer in plan.adapter.layers if layer not in layers)
    gone = tuple(f"layers.{layer}.{site}.adapter." for layer in layers for site in plan.adapter.sites)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(gone)}
    return replace(plan, adapter=replace(plan.adapter, layers=left)), kept


def spans(layers: Sequence[int]) -> list[tuple[int, int]]:
    """List the first and last layer of every run of neighbours among the layers that have adapters."""
    return [(first, last) for k, first in enumerate(layers) for last in layers[k:]]


def span_outputs(
    config: EncoderConfig,
    stacks: Stacks,
    tokens: Sequence[Tokens],
    slots: tuple[int, int],
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Removed, list[np.ndarray]]:
    """Give each row's head outputs for the whole model and for every span; `slots`: the task's, and without adapters.

    `watch` is told how many rows of how many are done.
    """
    adapter = stacks.plan(slots[0]).adapter
    assert adapter is not None
    widest = len(spans(adapter.layers)) + len(adapter.layers)
    found: dict[Removed, list[Any]] = {span: [None] * len(tokens) for span in (None, *spans(adapter.layers))}
    done = 0
    with torch.inference_mode():
        for chosen in by_length(tokens, max(1, _TOKENS_AT_ONCE[stacks.device.type] // widest)):
            for span, given in _paths(config, stacks, [tokens[i] for i in chosen], slots, adapter.layers).items():
                for i, out in zip(chosen, given, strict=True):
                    found[span][i] = out
            done += len(chosen)
            watch(done, len(tokens))
    return found


def _paths(
    config: EncoderConfig, stacks: Stacks, rows: Sequence[Tokens], slots: tuple[int, int], layers: Sequence[int]
) -> dict[Removed, list[np.ndarray]]:
    """Send rows through all spans, layer by layer.

    A path is known by its span. While the span goes on, its last layer is the one that was run last: at the next layer
    the path forks into one that ends the span there and one that goes on without adapters.
    """
    batch, size = pack(rows, stacks.device), sum(map(len, rows))
    whole = Route(stacks, [Segment(slots[0], len(rows), size)])
    paths: dict[Removed, Tensor] = {None: hidden_below(config, whole, batch, 0)}
    last = -1  # the layer with adapters that was run last
    for layer in range(config.layers):
        bare: dict[Removed, Tensor] = {}
        if layer in layers:
            bare = {(span[0], layer): x for span, x in paths.items() if span is not None and span[1] == last}
            bare |= {(layer, layer): paths[None]}
            last = layer
        counts = [(slots[0], len(paths)), (slots[1], len(bare))]
        route = Route(stacks, [Segment(slot, n * len(rows), n * size) for slot, n in counts if n])
        many = pack([*rows] * (len(paths) + len(bare)), stacks.device)
        x = run_layers(config, route, many, torch.cat([*paths.values(), *bare.values()]), [layer])
        paths = dict(zip([*paths, *bare], x.split(size), strict=True))
    many = pack([*rows] * len(paths), stacks.device)
    parts = [Segment(slots[0], len(paths) * len(rows), len(paths) * size)]
    given = heads.outputs(torch.cat([*paths.values()]), many, Route(stacks, parts))
    flat = by_row(given, parts, stacks, many.lengths)
    return {span: flat[k * len(rows) : (k + 1) * len(rows)] for k, span in enumerate(paths)}


def ablate(
    engine: Engine, package: Package, examples: Examples, watch: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Score a task on labelled rows, whole and without the adapters of every span; `save` keeps what this gives."""
    began = time.perf_counter()
    names = (engine.load(package, f"{package.ref} whole"), f"{package.ref} bare")
    held = engine.residents[names[0]]
    plan, tensors = without(held.plan, package.tensors(), held.plan.adapter.layers if held.plan.adapter else ())
    if held.plan.adapter and not held.plan.adapter.layers:
        raise InputError(f"{package.ref} has no adapters left to remove; name an earlier version of the task.")
    engine.put(names[1], held.task, plan, tensors, held.max_length, held.stride)
    rows = engine.rows(names[0], examples, keep=True)
    known = [found for name in names if (found := engine.slots.find(name))]
    with engine.slots.using(known) as numbers:
        slots = numbers[known[0]], numbers[known[1]]
        given = span_outputs(engine.backbone.config, engine.stacks, rows.tokens, slots, watch)
    for name in names:
        engine.remove(name)
    scores = {}
    for span, outs in given.items():
        said = decide(held.task, examples, rows, outs)
        report = metrics.report(held.task.kind, said, examples.targets or [], held.task.labels, held.task.metric)
        scores[span] = {key: value for key, value in report.items() if isinstance(value, float)}
    whole = scores.pop(None)
    assert held.plan.adapter is not None
    return {
        "package": package.ref,
        "weights_sha256": package.manifest.weights_sha256,
        "task": package.manifest.task,
        "backbone": package.manifest.backbone,
        "size": held.plan.adapter.size,
        "layers": list(held.plan.adapter.layers),
        "data": {"rows": len(examples), "sha256": examples.fingerprint()},
        "metric": held.task.metric,
        "whole": whole,
        "spans": [
            {"first": span[0], "last": span[1], "scores": mine, "change": changes(mine, whole)}
            for span, mine in sorted((span, mine) for span, mine in scores.items() if span)
        ],
        "stamp": stamp(engine.device, engine.dtype),
        "seconds": time.perf_counter() - began,
        "created": files.now(),
    }


def changes(scores: Mapping[str, float], whole: Mapping[str, float]) -> dict[str, float | None]:
    """Give each score's change in per cent of the whole model's, as the paper does; None where that is not positive."""
    return {
        name: 100 * (score - whole[name]) / whole[name] if whole[name] > 0 else None
        for name, score in scores.items()
        if name != "majority"
    }


def save(bank: Bank, found: Mapping[str, Any]) -> Path:
    """Keep an ablation beside the records; one on other rows stands beside it."""
    path = bank.records_path / "ablations" / f"{found['package']}-{found['data']['sha256'][:8]}.json"
    files.make_folder(path.parent)
    files.write_json(path, dict(found))
    return path
