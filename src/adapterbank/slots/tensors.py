"""Which tensors a plan has: their shapes, their initial values, and whether given ones fit. The one place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from adapterbank.encoder.families import EncoderConfig
from adapterbank.methods import POOLINGS
from adapterbank.slots import heads
from adapterbank.slots.plan import Plan, trained


def added_shapes(plan: Plan, config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a plan's additions have, by its full name."""
    return {
        f"{site}.{key}.{part}": shape
        for key, addition in zip(plan.keys, plan.additions, strict=True)
        for (site, part), shape in addition.shapes(config).items()
    }


def shapes(plan: Plan, config: EncoderConfig, *, has_pooler: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a slot of this plan trains and saves."""
    frozen = config.shapes(has_pooler)
    own = {name: frozen[name] for name in trained(frozen, plan)}
    return heads.shapes(plan.head, config.hidden) | added_shapes(plan, config) | own


def initial(plan: Plan, config: EncoderConfig, sigma: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw what a plan adds: its additions in order, then its head; `sigma` is the width of an adapter's weights."""
    found = {}
    for name, shape in added_shapes(plan, config).items():
        found[name] = torch.zeros(shape)
        _, number, part = plan.split(name) or ("", 0, "")
        plan.additions[number].fill(part, found[name], sigma, generator)
    return found | heads.initial(plan.head, config.hidden, generator)


def problems(plan: Plan, given: Mapping[str, tuple[int, ...]], config: EncoderConfig, *, has_pooler: bool) -> list[str]:
    """List why the pass cannot run a plan with tensors of these shapes; a package's checksums exclude neither."""
    found = [] if plan.head.pooling in POOLINGS else [f"pooling {plan.head.pooling!r}"]
    found += [problem for addition in plan.additions for problem in addition.problems()]
    if not found and dict(given) != shapes(plan, config, has_pooler=has_pooler):
        found.append("other tensors than its plan's")
    return found
