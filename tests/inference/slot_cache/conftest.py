"""Fixtures: engines whose tasks are in and out of memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from adapterbank.inference.engine import Engine
from inference.slot_cache.recipes import Recipe


@pytest.fixture(scope="module")
def recipes(bert, new_slot):
    """Return tasks of three sizes, each with its own numbers."""
    shapes = [(3, 3, "adapter"), (8, 2, "adapter"), (64, 5, "layernorm")]
    return [Recipe(bert, new_slot, seed, *shapes[seed % 3]) for seed in range(9)]


@pytest.fixture
def alike(bert, new_slot):
    """Return tasks of one size."""
    return [Recipe(bert, new_slot, seed) for seed in range(5)]


@pytest.fixture
def engine_of(bert):
    """Return a function that creates engines with tasks `t0`, `t1` and so on, and a budget."""

    def make(recipes, budget):
        engine = Engine(bert, device="cpu", precision="fp32", budget=budget)
        for k, recipe in enumerate(recipes):
            recipe.reads = 0
            recipe.put_into(engine, f"t{k}")
        return engine

    return make


@pytest.fixture
def threads():
    """Return a pool of eight threads."""
    with ThreadPoolExecutor(8) as pool:
        yield pool
