"""`inference.slot_cache`: the budget holds whatever is added and removed, and every call gets the right outputs."""

from __future__ import annotations

import random
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adapterbank.inference.engine import Engine
from adapterbank.inference.slot_cache import SlotCache
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.stack import LARGEST, Stacks
from inference.slot_cache.recipes import ROWS, Recipe, ask, assert_at_rest, assert_right


def test_without_a_budget_nothing_is_evicted(recipes, engine_of):
    engine = engine_of(recipes, None)
    for k, recipe in enumerate(recipes):
        assert_right(ask(engine, f"t{k}")[f"t{k}"], recipe)
    assert (engine.slots.loads, engine.slots.evictions) == (0, 0)
    assert all(recipe.reads == 0 for recipe in recipes)
    assert len(engine.slots.resident) == len(recipes)


@pytest.mark.parametrize("share", [0.0, 0.15, 0.4, 0.75, 1.0])
def test_the_budget_holds_whenever_nothing_is_in_use(share, recipes, engine_of):
    budget = int(share * sum(recipe.bytes for recipe in recipes))
    engine = engine_of([], budget)
    chance = random.Random(0)
    for k, recipe in enumerate(recipes):
        recipe.put_into(engine, f"t{k}")
        assert_at_rest(engine)
    for _ in range(20):
        chosen = chance.sample(range(len(recipes)), chance.randint(1, 5))
        for k, found in zip(chosen, ask(engine, *(f"t{k}" for k in chosen)).values(), strict=True):
            assert_right(found, recipes[k])
        assert_at_rest(engine)
    assert engine.slots.evictions > 0 or share == 1.0


def test_the_budget_counts_bytes_of_memory(alike, engine_of):
    engine = engine_of(alike, 3 * alike[0].bytes)
    assert len(engine.slots.resident) == 3
    used = sum(block.tensor[0].nbytes * sum(o is not None for o in block.owners) for block in engine.stacks.blocks)
    assert used == 3 * alike[0].bytes
    engine = engine_of(alike, 3 * alike[0].bytes - 1)
    assert len(engine.slots.resident) == 2


def test_bytes_counts_the_resident_slots(alike, engine_of):
    engine = engine_of(alike, 3 * alike[0].bytes)
    assert engine.slots.bytes == 3 * alike[0].bytes
    engine.remove("t4")
    assert engine.slots.bytes == 2 * alike[0].bytes


def test_the_least_recently_used_slot_is_evicted_first(alike, engine_of):
    engine = engine_of(alike[:3], 3 * alike[0].bytes)
    assert engine.slots.resident == ["t0", "t1", "t2"]
    ask(engine, "t0")
    assert engine.slots.resident == ["t1", "t2", "t0"]
    alike[3].put_into(engine, "t3")
    assert engine.slots.resident == ["t2", "t0", "t3"]
    ask(engine, "t2", "t0")
    ask(engine, "t1")
    assert engine.slots.resident == ["t2", "t0", "t1"]
    assert [recipe.reads for recipe in alike[:4]] == [0, 1, 0, 0]
    assert (engine.slots.loads, engine.slots.evictions) == (1, 2)
    alike[2].put_into(engine, "t2")  # a replaced task counts as used
    ask(engine, "t3")
    assert engine.slots.resident == ["t1", "t2", "t3"]


def test_one_large_task_evicts_several_small_ones(bert, new_slot, engine_of):
    small = [Recipe(bert, new_slot, seed) for seed in range(4)]
    large = Recipe(bert, new_slot, 9, size=16)
    assert large.bytes > 2 * small[0].bytes
    engine = engine_of(small, large.bytes + small[0].bytes)
    large.put_into(engine, "large")
    assert engine.slots.resident == ["t3", "large"]
    assert_right(ask(engine, "t0")["t0"], small[0])
    assert_right(ask(engine, "large")["large"], large)


@pytest.mark.parametrize("fit", [0, 1, 2])
def test_a_call_for_more_tasks_than_fit_gets_all_outputs(fit, recipes, engine_of):
    engine = engine_of(recipes, fit * max(recipe.bytes for recipe in recipes))
    names = [f"t{k}" for k in range(len(recipes))]
    tokens = [row for row in ROWS for _ in names]
    asked = names * len(ROWS)
    at = [*range(len(tokens)), *[None] * 3]
    random.Random(fit).shuffle(at)
    found = engine.outputs(
        [ROWS[0] if i is None else tokens[i] for i in at], [None if i is None else asked[i] for i in at]
    )
    bare = engine.outputs(ROWS[:1], [None])[0]
    for i, output in zip(at, found, strict=True):
        expected = bare if i is None else recipes[i % len(names)].answers[i // len(names)]
        np.testing.assert_allclose(output, expected, atol=1e-5, rtol=1e-5)
    assert_at_rest(engine)


def test_a_task_that_was_evicted_and_loaded_again_gives_the_same_bits(recipes, engine_of):
    engine = engine_of(recipes, max(recipe.bytes for recipe in recipes))
    names = [f"t{k}" for k in range(len(recipes))]
    first = {name: ask(engine, name)[name] for name in names}
    for name in random.Random(0).sample(names * 3, 3 * len(names)):
        for output, expected in zip(ask(engine, name)[name], first[name], strict=True):
            assert np.array_equal(output, expected)
    assert engine.slots.loads >= 2 * len(names)
    together = engine_of(recipes, None)
    for name in names:
        for output, expected in zip(ask(together, name)[name], first[name], strict=True):
            assert np.array_equal(output, expected)


def test_without_a_source_the_tensors_stay_in_memory_for_the_next_load(alike, bert):
    engine = Engine(bert, device="cpu", precision="fp32", budget=0)
    for k, recipe in enumerate(alike):
        engine.put(f"t{k}", recipe.task, recipe.plan, recipe.tensors, 64)
    for k, recipe in enumerate(alike):
        assert_right(ask(engine, f"t{k}")[f"t{k}"], recipe)
    assert engine.slots.resident == []


def test_trim_frees_the_memory_of_empty_blocks(bert, new_slot):
    plan = make_plan(Options(size=3), depth=3, head=Head("classification", 2))
    stacks = Stacks(bert.tensors)
    tensors = new_slot(bert, plan)
    slots = [stacks.put(plan, tensors) for _ in range(2 * LARGEST + 3)]
    seen = [weakref.ref(block.tensor) for block in stacks.blocks]
    count = len(seen) // 3
    assert len(stacks.blocks) == 3 * count
    for slot in slots[LARGEST : 2 * LARGEST]:
        stacks.remove(slot)
    assert len(stacks.blocks) == 3 * count  # free rows are reused
    stacks.trim()
    assert sum(block() is not None for block in seen) == len(stacks.blocks) == 2 * count
    again = [stacks.put(plan, tensors) for _ in range(LARGEST)]
    assert len(stacks.blocks) == 3 * count
    for slot in [*slots[:LARGEST], *slots[2 * LARGEST :], *again]:
        stacks.remove(slot)
    stacks.trim()
    assert stacks.blocks == []
    assert all(block() is None for block in seen)
    slot = stacks.put(plan, tensors)
    assert all(torch.equal(t, tensors[name]) for name, t in stacks.take(slot).items())


def test_evicted_and_removed_tasks_free_their_memory(alike, engine_of):
    engine = engine_of(alike, None)
    for k in range(5):
        engine.remove(f"t{k}")
    assert engine.stacks.blocks == []
    engine = engine_of(alike, 0)
    assert engine.stacks.blocks == []
    ask(engine, "t1", "t2")
    assert engine.stacks.blocks == []


class Copies(TorchDispatchMode):
    """Count operations and the bytes that they write."""

    def __init__(self):
        super().__init__()
        self.bytes = self.calls = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        self.calls += 1
        if not op.is_view and isinstance(result, torch.Tensor):
            self.bytes += result.nbytes
        return result


@pytest.mark.parametrize("fit", [None, 200])
def test_the_thousandth_task_copies_no_more_than_the_first_ones(fit, bert, new_slot):
    plan = make_plan(Options(size=3, layers="1", train_norms=False), depth=3, head=Head("classification", 2))
    tensors = {name: t.numpy() for name, t in new_slot(bert, plan).items()}
    stacks = Stacks(bert.tensors)
    size = stacks.size(plan, {name: array.shape for name, array in tensors.items()})
    slots = SlotCache(stacks, None if fit is None else fit * size)
    written, calls = [], []
    for k in range(LARGEST * 16):
        with Copies() as seen:
            slots.put(f"t{k}", plan, tensors)
        written.append(seen.bytes)
        calls.append(seen.calls)
    assert max(calls[LARGEST:]) <= max(calls[:LARGEST])
    assert max(written[LARGEST:]) <= max(written[:LARGEST])
    first, last = sum(written[:LARGEST]), sum(written[-LARGEST:])
    assert last <= first < 8 * LARGEST * size
    assert len(slots.resident) == (fit or LARGEST * 16)
