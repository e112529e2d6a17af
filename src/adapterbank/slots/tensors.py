"""The tensors of a plan: their names, shapes and initial values."""

from __future__ import annotations

import torch
from torch import Tensor

from adapterbank.draws import RandomStream
from adapterbank.encoder.families import EncoderConfig
from adapterbank.slots import heads
from adapterbank.slots.plan import Plan, trained


def added_shapes(plan: Plan, config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a plan's additions, by its full name."""
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


def initial(plan: Plan, config: EncoderConfig, sigma: float, seed: int) -> dict[str, Tensor]:
    """Draw the initial tensors of a plan's additions and head, each by its own name; `sigma` is for adapter weights."""
    drawn = {}
    for name, shape in added_shapes(plan, config).items():
        drawn[name] = torch.zeros(shape)
        _, number, part = plan.split(name) or ("", 0, "")
        plan.additions[number].fill(part, drawn[name], sigma, RandomStream(seed, name))
    return drawn | heads.initial(plan.head, config.hidden, seed)
