"""Compiling ahead: an encoder's name, a bank and options to what `training.warm` compiles. Knows no shell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from adapterbank import config as configs
from adapterbank.encoder.backbone import Backbone, load
from adapterbank.encoder.kernels.launch import kernel_cache
from adapterbank.encoder.placed import place
from adapterbank.errors import ConfigError
from adapterbank.methods import Options
from adapterbank.runtime import find_device, find_dtype
from adapterbank.slots.plan import Head, Plan, make_plan
from adapterbank.storage.bank import Bank
from adapterbank.training.warm import check_device, warm


class Warmed(NamedTuple):
    """What was compiled."""

    forms: int
    """How many forms of tasks."""
    folder: Path
    """Where compiled kernels are kept."""


def warm_up(
    backbone: str,
    bank: str | Path | None = None,
    *,
    sizes: Sequence[int] | None = None,
    max_length: int = 128,
    device: str = "auto",
    precision: str = "auto",
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Warmed:
    """Compile what adapters of these sizes need, and the tasks of a bank; without either, those of the default size."""
    chosen = [{"size": size} for size in sizes] if sizes else [] if bank else [{}]
    wanted = [Options(size=configs.parse({**size, "max_length": max_length}).size) for size in chosen]
    target = find_device(device)
    check_device(target)
    dtype = find_dtype(precision, target)
    encoder = load(backbone)
    config = encoder.config
    if max_length > config.max_length:
        raise ConfigError([f"max_length is {max_length}, but {backbone} reads at most {config.max_length} tokens."])
    plans, longest = _plans_of(bank, encoder) if bank else ([], max_length)
    head = Head("classification", 2)
    plans += [make_plan(one, depth=config.layers, head=head, shared_layers=config.shared_layers) for one in wanted]
    forms = warm(encoder, place(encoder, target, dtype), plans, max(max_length, longest), watch)
    return Warmed(forms, kernel_cache())


def _plans_of(bank: str | Path, encoder: Backbone) -> tuple[list[Plan], int]:
    """Return the forms of a bank's tasks that the kernels cover, and the most tokens that any of them reads."""
    manifests = [package.manifest for package in Bank.open(bank, encoder.reference).listing()[0]]
    plans = [Plan.from_json(manifest.method) for manifest in manifests]
    return [plan for plan in plans if not (plan.alone or plan.fuses)], max(
        (one.recipe["max_length"] for one in manifests), default=1
    )
