"""Ablation: the score of a task without the adapters of each span of layers, without retraining. Draws nothing.

A span is a sequence of adjacent layers with adapters; n layers have n(n+1)/2 spans (Houlsby et al. 2019, section 3.6,
figure 6). Every span is a path of the same rows through two slots of one batch: the task's own slot, and the same slot
without adapters. Below its first layer the path of a span is that of the whole model, and up to its last layer it is
that of every longer span with the same first layer. Both are computed once, which takes 376 instead of 936 layer passes
per row for 12 layers. Nothing is approximated.
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

from adapterbank.encoder.batch import Tokens, by_length, pack
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.forward import hidden_below, run_layers
from adapterbank.errors import InputError
from adapterbank.inference.engine import Engine
from adapterbank.inference.predictions import decide
from adapterbank.inference.runner import by_row
from adapterbank.kinds import scoring
from adapterbank.runtime import stamp
from adapterbank.slots import heads
from adapterbank.slots.plan import Plan
from adapterbank.slots.routing import Route, Segment
from adapterbank.slots.stack import Stacks
from adapterbank.storage import files, records
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import Package
from adapterbank.tasks.spec import Examples

RemovedSpan = tuple[int, int] | None
"""The first and last layer whose adapters are removed; None for the model as it was trained."""
TensorLike = TypeVar("TensorLike")

_TOKENS_AT_ONCE = {"cpu": 1 << 14, "cuda": 1 << 18}
"""Tokens of all paths in one batch: enough for efficient matrix products, few enough for the device's memory."""


def without(
    plan: Plan, tensors: Mapping[str, TensorLike], layers: Collection[int]
) -> tuple[Plan, dict[str, TensorLike]]:
    """Remove the adapters of some layers from a slot; its LayerNorms and its head remain."""
    if not plan.removable:
        raise InputError(f"Method {plan.method!r} has no adapters to remove; name a task trained with 'adapter'.")
    return plan.without(layers), {name: held for name, held in tensors.items() if not plan.removes(name, layers)}


def spans(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last layer of every span of the layers that have adapters."""
    return [(first, last) for k, first in enumerate(layers) for last in layers[k:]]


def span_outputs(
    config: EncoderConfig,
    stacks: Stacks,
    tokens: Sequence[Tokens],
    slots: tuple[int, int],
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> dict[RemovedSpan, list[np.ndarray]]:
    """Return each row's head outputs for the whole model and for every span.

    `slots` are the task's own slot and the same without adapters. `watch` is called with the number of rows that are
    done, and of all rows.
    """
    layers = stacks.plan(slots[0]).removable_layers
    widest = len(spans(layers)) + len(layers)
    found: dict[RemovedSpan, list[Any]] = {span: [None] * len(tokens) for span in (None, *spans(layers))}
    done = 0
    with torch.inference_mode():
        for chosen in by_length(tokens, max(1, _TOKENS_AT_ONCE[stacks.device.type] // widest)):
            for span, given in _paths(config, stacks, [tokens[i] for i in chosen], slots, layers).items():
                for i, out in zip(chosen, given, strict=True):
                    found[span][i] = out
            done += len(chosen)
            watch(done, len(tokens))
    return found


def _paths(
    config: EncoderConfig, stacks: Stacks, rows: Sequence[Tokens], slots: tuple[int, int], layers: Sequence[int]
) -> dict[RemovedSpan, list[np.ndarray]]:
    """Compute the outputs of rows on all paths, layer by layer.

    A path is identified by its span. While a span is open, its last layer is the layer computed last. At the next layer
    the path forks: one path ends the span there, the other continues without adapters.
    """
    batch, size = pack(rows, stacks.device), sum(map(len, rows))
    whole = Route(stacks, [Segment(slots[0], len(rows), size)])
    paths: dict[RemovedSpan, Tensor] = {None: hidden_below(config, whole, batch, 0)}
    last = -1  # the layer with adapters that was computed last
    for layer in range(config.layers):
        bare: dict[RemovedSpan, Tensor] = {}
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
    """Score a task on labelled rows, whole and without the adapters of every span; `save` stores the result."""
    began = time.perf_counter()
    names = (engine.load(package, f"{package.ref} whole"), f"{package.ref} bare")
    held = engine.residents[names[0]]
    layers = held.plan.removable_layers
    plan, tensors = without(held.plan, package.tensors(), layers)
    if not layers:
        raise InputError(f"{package.ref} has no adapters left to remove; name an earlier version of the task.")
    engine.enter(names[1], replace(held, plan=plan), tensors)
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
        report = scoring.report(held.task, said, examples.targets or [])
        scores[span] = {key: value for key, value in report.items() if isinstance(value, float)}
    whole = scores.pop(None)
    return {
        "package": package.ref,
        "weights_sha256": package.manifest.weights_sha256,
        "task": package.manifest.task,
        "backbone": package.manifest.backbone,
        "size": held.plan.removable[0].size,
        "layers": list(layers),
        "data": {"rows": len(examples), "sha256": examples.fingerprint()},
        "metric": held.task.metric,
        "whole": whole,
        "spans": [
            {"first": span[0], "last": span[1], "scores": mine, "change": changes(mine, whole)}
            for span, mine in sorted((span, mine) for span, mine in scores.items() if span)
        ],
        "stamp": stamp(engine.device, engine.dtype, engine.layout),
        "seconds": time.perf_counter() - began,
        "created": files.now(),
    }


def changes(scores: Mapping[str, float], whole: Mapping[str, float]) -> dict[str, float | None]:
    """Return each score's change in per cent of the whole model's, as the paper does; None if that is not positive."""
    return {
        name: 100 * (score - whole[name]) / whole[name] if whole[name] > 0 else None
        for name, score in scores.items()
        if name != "majority"
    }


def save(bank: Bank, found: Mapping[str, Any]) -> Path:
    """Store an ablation beside the records and return its path; one on other rows has its own file."""
    path = bank.records_path / "ablations" / f"{found['package']}-{found['data']['sha256'][:8]}.json"
    files.make_folder(path.parent)
    records.write_ablation(path, found)
    return path
