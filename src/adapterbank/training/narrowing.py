"""Which hidden units of wide adapters are kept, and the job that continues with them. Trains nothing.

A unit's effect is what the loss would change to the first order if the unit were switched off (Molchanov et al. 2017):

    effect(u) = mean over batches of |dL/dg_u| = |sum_j U[j,u] dL/dU[j,u]|       g_u: a factor of the unit, which is 1
                                                                               U: weight of the up-projection
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from adapterbank.slots.addition import size_class
from adapterbank.slots.additions.adapter import Adapter
from adapterbank.slots.plan import Plan
from adapterbank.training.job import TrainingJob

SMALLEST = 8
"""A site keeps an eighth of its units, rounded up to a power of two, or a larger power of two, or all, or none.

Tensors are stored as wide as a power of two (`slots.stack`), so that other widths would save no memory.
"""
_DIMENSION = {"down.weight": 0, "down.bias": 0, "up.weight": 1}
"""The dimension of each part that counts hidden units."""

Units = Mapping[str, list[int]]
"""The hidden units that each site keeps, in rising order; empty for a site that loses its adapter."""


def unit_effects(plan: Plan, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the effect of each unit in one batch, by site, from a slot's tensors and their gradients."""
    found = {}
    for name, weight in weights.items():
        site, _, part = plan.split(name) or ("", 0, "")
        if part == "up.weight":
            found[site] = (weight * gradients[name]).sum(0).abs()
    return found


def choose_units(effects: Mapping[str, Tensor], mean: int) -> dict[str, list[int]]:
    """Return the units to keep: those with the largest effects, `mean` by site at most.

    A site has its units in order of effect, and keeps as many as a level has (`SMALLEST`). Those units that lead to a
    site's next level are added next whose mean effect is the largest among all sites, if they fit.
    """
    order = {site: torch.argsort(effect, descending=True, stable=True).tolist() for site, effect in effects.items()}
    kept, left = dict.fromkeys(effects, 0), mean * len(effects)
    steps = [
        (float(effects[site][order[site][low:high]].mean()), site, low, high)
        for site in effects
        for low, high in _steps(len(order[site]), mean)
    ]
    for _, site, low, high in sorted(steps, key=lambda step: (-step[0], step[2])):
        if kept[site] == low and high - low <= left:
            kept[site], left = high, left - (high - low)
    return {site: sorted(order[site][:count]) for site, count in kept.items()}


def _steps(size: int, mean: int) -> Iterable[tuple[int, int]]:
    """Return the levels of a site as pairs: from so many units to so many; the first fits into any budget."""
    first = max(1, min(size_class(size) // SMALLEST, 1 << (mean.bit_length() - 1)))
    levels = [0, *(first << step for step in range(size.bit_length()) if first << step < size), size]
    return pairwise(levels)


def narrow_plan(plan: Plan, units: Units) -> Plan:
    """Return the plan whose adapters have only some units."""
    (adapter,) = plan.additions
    assert isinstance(adapter, Adapter)
    widths = [len(units[f"layers.{layer}.{site}"]) for layer, site in adapter.places]
    return replace(plan, additions=(adapter.with_widths(widths),))


def narrow_tensors(plan: Plan, tensors: Mapping[str, Tensor], units: Units) -> dict[str, Tensor]:
    """Return a slot's tensors, or their moments, with only some units of its adapters."""
    found = {}
    for name, tensor in tensors.items():
        site, _, part = plan.split(name) or ("", 0, "")
        if site and not units[site]:
            continue
        kept = torch.tensor(units[site]) if part in _DIMENSION else None
        found[name] = tensor if kept is None else tensor.index_select(_DIMENSION[part], kept)
    return found


def wide_job(job: TrainingJob) -> TrainingJob:
    """Return the part of a job before its adapters are narrowed."""
    assert job.narrowing
    return replace(job, pause=job.narrowing.after, patience=0, averages=False, narrowing=None)


def narrow_job(job: TrainingJob, units: Units) -> TrainingJob:
    """Return the part of a job after its adapters are narrowed; if it begins again, it does so with these units."""
    plan, first = narrow_plan(job.plan, units), narrow_tensors(job.plan, job.initial, units)
    return replace(job, plan=plan, initial=first, narrowing=None)


def fits(plan: Plan, units: Units) -> bool:
    """Return whether some units are units of a plan's adapters."""
    adapter = plan.additions[0]
    if not isinstance(adapter, Adapter) or units.keys() != adapter.width_at.keys() or not any(units.values()):
        return False
    return all(
        kept == sorted(set(kept)) and all(0 <= unit < adapter.width_at[site] for unit in kept)
        for site, kept in units.items()
    )


def mean_width(units: Units) -> float:
    """Return the mean width of all sites."""
    return float(np.mean([len(kept) for kept in units.values()]))
