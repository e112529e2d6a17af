"""Which slots are in memory: whatever comes and goes, every call gets the right answer, and memory stays in bounds."""

from __future__ import annotations

import random
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adapterbank import engine as engine_module
from adapterbank.encoder.packed import Tokens
from adapterbank.engine import Engine
from adapterbank.errors import PackageDamaged, UnknownName
from adapterbank.methods import Head, Options, make_plan
from adapterbank.residency import Residency
from adapterbank.slots.stack import LARGEST, Stacks
from adapterbank.tasks.spec import Examples, Task

LABELS = tuple("abcdefgh")
PATIENCE = 120.0
"""Seconds that a thread may take for what takes milliseconds."""


def rows_of(count, seed=0):
    numbers = np.random.default_rng(seed)
    sizes = numbers.integers(2, 9, count)
    return [Tokens(numbers.integers(5, 100, n), np.zeros(n, np.int64)) for n in sizes]


ROWS = rows_of(4)


class Recipe:
    """A task's plan, tensors and answers; `reads` counts how often its tensors were asked for again."""

    def __init__(self, backbone, new_slot, seed, size=3, labels=3, method="adapter"):
        options = Options(method=method, size=size)
        self.plan = make_plan(options, depth=backbone.anatomy.layers, head=Head("classification", labels))
        self.task = Task(f"t{seed}", "classification", ("text",), "label", LABELS[:labels], "accuracy")
        self.tensors = {name: t.numpy() for name, t in new_slot(backbone, self.plan, seed=seed).items()}
        self.reads = 0
        alone = Engine(backbone, device="cpu", precision="fp32")
        alone.put("x", self.task, self.plan, self.tensors, 64)
        self.answers = alone.outputs(ROWS, ["x"] * len(ROWS))
        self.bytes = alone.stacks.size(self.plan, {name: array.shape for name, array in self.tensors.items()})

    def source(self):
        self.reads += 1
        return self.tensors

    def put_into(self, engine, name, source=None):
        engine.put(name, self.task, self.plan, self.tensors, 64, source=source or self.source)


@pytest.fixture(scope="module")
def recipes(bert, new_slot):
    """Give tasks of three sizes, each with numbers of its own."""
    shapes = [(3, 3, "adapter"), (8, 2, "adapter"), (64, 5, "layernorm")]
    return [Recipe(bert, new_slot, seed, *shapes[seed % 3]) for seed in range(9)]


@pytest.fixture
def alike(bert, new_slot):
    """Give tasks of one size."""
    return [Recipe(bert, new_slot, seed) for seed in range(5)]


@pytest.fixture
def engine_of(bert):
    def make(recipes, budget):
        engine = Engine(bert, device="cpu", precision="fp32", budget=budget)
        for k, recipe in enumerate(recipes):
            recipe.reads = 0
            recipe.put_into(engine, f"t{k}")
        return engine

    return make


def ask(engine, *names):
    """Ask all tasks for all rows in one call; gives the outputs by task."""
    given = engine.outputs(ROWS * len(names), [name for name in names for _ in ROWS])
    return {name: given[k * len(ROWS) : (k + 1) * len(ROWS)] for k, name in enumerate(names)}


def assert_right(found, recipe):
    """Within rounding: what else is in a batch may change the last digit."""
    for mine, wanted in zip(found, recipe.answers, strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-5, rtol=1e-5)


def assert_at_rest(engine):
    """Ask for what must hold whenever no call is running."""
    slots = engine.slots
    assert all(known.users == 0 for known in slots._known.values())
    held = [known for known in slots._known.values() if known.slot is not None]
    assert slots.bytes == sum(known.bytes for known in held)
    assert len(engine.stacks) == len(held)  # nothing is left of what was removed or replaced
    if slots.budget is not None:
        assert slots.bytes <= slots.budget
    assert slots.resident == [name for name, known in slots._known.items() if known.slot is not None]


# --- the budget


def test_without_a_budget_everything_stays(recipes, engine_of):
    engine = engine_of(recipes, None)
    for k, recipe in enumerate(recipes):
        assert_right(ask(engine, f"t{k}")[f"t{k}"], recipe)
    assert (engine.slots.loads, engine.slots.evictions) == (0, 0)
    assert all(recipe.reads == 0 for recipe in recipes)
    assert len(engine.slots.resident) == len(recipes)


@pytest.mark.parametrize("share", [0.0, 0.15, 0.4, 0.75, 1.0])
def test_the_budget_is_kept_whenever_nothing_is_in_use(share, recipes, engine_of):
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


def test_a_budget_is_bytes_of_memory(alike, engine_of):
    engine = engine_of(alike, 3 * alike[0].bytes)
    assert len(engine.slots.resident) == 3
    held = sum(block.tensor[0].nbytes * sum(o is not None for o in block.owners) for block in engine.stacks.blocks)
    assert held == 3 * alike[0].bytes
    engine = engine_of(alike, 3 * alike[0].bytes - 1)
    assert len(engine.slots.resident) == 2


def test_the_bytes_of_resident_slots_are_told(alike, engine_of):
    engine = engine_of(alike, 3 * alike[0].bytes)
    assert engine.slots.bytes == 3 * alike[0].bytes
    engine.remove("t4")
    assert engine.slots.bytes == 2 * alike[0].bytes


def test_the_least_recently_used_goes_first(alike, engine_of):
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
    alike[2].put_into(engine, "t2")  # replaced: used now
    ask(engine, "t3")
    assert engine.slots.resident == ["t1", "t2", "t3"]


def test_one_large_task_takes_the_place_of_several_small_ones(bert, new_slot, engine_of):
    small = [Recipe(bert, new_slot, seed) for seed in range(4)]
    large = Recipe(bert, new_slot, 9, size=16)
    assert large.bytes > 2 * small[0].bytes
    engine = engine_of(small, large.bytes + small[0].bytes)
    large.put_into(engine, "large")
    assert engine.slots.resident == ["t3", "large"]
    assert_right(ask(engine, "t0")["t0"], small[0])
    assert_right(ask(engine, "large")["large"], large)


@pytest.mark.parametrize("fit", [0, 1, 2])
def test_a_call_naming_more_tasks_than_fit_is_answered_in_full(fit, recipes, engine_of):
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
    for i, mine in zip(at, found, strict=True):
        wanted = bare if i is None else recipes[i % len(names)].answers[i // len(names)]
        np.testing.assert_allclose(mine, wanted, atol=1e-5, rtol=1e-5)
    assert_at_rest(engine)


def test_a_task_that_was_dropped_and_loaded_again_gives_the_same_bits(recipes, engine_of):
    engine = engine_of(recipes, max(recipe.bytes for recipe in recipes))
    names = [f"t{k}" for k in range(len(recipes))]
    first = {name: ask(engine, name)[name] for name in names}
    for name in random.Random(0).sample(names * 3, 3 * len(names)):
        for mine, wanted in zip(ask(engine, name)[name], first[name], strict=True):
            assert np.array_equal(mine, wanted)
    assert engine.slots.loads >= 2 * len(names)
    together = engine_of(recipes, None)
    for name in names:
        for mine, wanted in zip(ask(together, name)[name], first[name], strict=True):
            assert np.array_equal(mine, wanted)


def test_without_a_source_the_tensors_are_kept_to_be_loaded_again(alike, bert):
    engine = Engine(bert, device="cpu", precision="fp32", budget=0)
    for k, recipe in enumerate(alike):
        engine.put(f"t{k}", recipe.task, recipe.plan, recipe.tensors, 64)
    for k, recipe in enumerate(alike):
        assert_right(ask(engine, f"t{k}")[f"t{k}"], recipe)
    assert engine.slots.resident == []


# --- memory and work


def test_trim_gives_the_memory_of_empty_blocks_back(bert, new_slot):
    plan = make_plan(Options(size=3), depth=3, head=Head("classification", 2))
    stacks = Stacks(bert.tensors)
    tensors = new_slot(bert, plan)
    slots = [stacks.put(plan, tensors) for _ in range(2 * LARGEST + 3)]
    seen = [weakref.ref(block.tensor) for block in stacks.blocks]
    count = len(seen) // 3
    assert len(stacks.blocks) == 3 * count
    for slot in slots[LARGEST : 2 * LARGEST]:
        stacks.remove(slot)
    assert len(stacks.blocks) == 3 * count  # a place that is free is used again
    stacks.trim()
    assert sum(block() is not None for block in seen) == len(stacks.blocks) == 2 * count
    again = [stacks.put(plan, tensors) for _ in range(LARGEST)]
    assert len(stacks.blocks) == 3 * count
    for slot in [*slots[:LARGEST], *slots[2 * LARGEST :], *again]:
        stacks.remove(slot)
    stacks.trim()
    assert stacks.blocks == []
    assert all(block() is None for block in seen)
    stacks.put(plan, tensors)
    assert all(torch.equal(t, tensors[name]) for name, t in stacks.take(stacks._next - 1).items())


def test_tasks_that_are_dropped_or_removed_give_their_memory_back(alike, engine_of):
    engine = engine_of(alike, None)
    for k in range(5):
        engine.remove(f"t{k}")
    assert engine.stacks.blocks == []
    engine = engine_of(alike, 0)
    assert engine.stacks.blocks == []
    ask(engine, "t1", "t2")
    assert engine.stacks.blocks == []


class Copies(TorchDispatchMode):
    """Counts the bytes that operations write, and how many operations there are."""

    def __init__(self):
        super().__init__()
        self.bytes = self.calls = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        given = op(*args, **(kwargs or {}))
        self.calls += 1
        if not op.is_view and isinstance(given, torch.Tensor):
            self.bytes += given.nbytes
        return given


@pytest.mark.parametrize("fit", [None, 200])
def test_the_thousandth_task_copies_no_more_than_the_first_ones(fit, bert, new_slot):
    plan = make_plan(Options(size=3, layers="1", train_norms=False), depth=3, head=Head("classification", 2))
    tensors = {name: t.numpy() for name, t in new_slot(bert, plan).items()}
    stacks = Stacks(bert.tensors)
    size = stacks.size(plan, {name: array.shape for name, array in tensors.items()})
    slots = Residency(stacks, None if fit is None else fit * size)
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


# --- several threads


class Gate:
    """A source that says when it was asked, and answers when it is let."""

    def __init__(self, tensors):
        self.tensors, self.asked, self.open = tensors, threading.Event(), threading.Event()

    def __call__(self):
        self.asked.set()
        assert self.open.wait(PATIENCE)
        return self.tensors


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def gated(engine, recipe, name):
    """Put a task in whose tensors come through a gate, and drop it."""
    gate = Gate(recipe.tensors)
    recipe.put_into(engine, name, gate)
    budget, engine.slots.budget = engine.slots.budget, 0
    with engine.slots.lock:
        engine.slots._make_room(0)
    engine.slots.budget = budget
    assert name not in engine.slots.resident
    return gate


def test_who_asks_for_other_tasks_does_not_wait_for_one_that_is_loaded(alike, engine_of, threads):
    engine = engine_of(alike[:2], None)
    gate = gated(engine, alike[2], "slow")
    waiting = threads.submit(ask, engine, "t0", "slow")
    assert gate.asked.wait(PATIENCE)
    for k in (0, 1):
        assert_right(threads.submit(ask, engine, f"t{k}").result(PATIENCE)[f"t{k}"], alike[k])
    threads.submit(alike[3].put_into, engine, "t3").result(PATIENCE)
    threads.submit(engine.remove, "t1").result(PATIENCE)
    assert not waiting.done()
    gate.open.set()
    found = waiting.result(PATIENCE)
    assert_right(found["t0"], alike[0])
    assert_right(found["slow"], alike[2])
    assert_at_rest(engine)


def test_two_who_load_the_same_task_at_once_put_it_in_once(alike, engine_of, threads):
    engine = engine_of([], None)
    gate = gated(engine, alike[0], "slow")
    waiting = [threads.submit(ask, engine, "slow") for _ in range(3)]
    assert gate.asked.wait(PATIENCE)
    gate.open.set()
    for mine in waiting:
        assert_right(mine.result(PATIENCE)["slow"], alike[0])
    assert engine.slots.loads == 1
    assert_at_rest(engine)


def test_a_slot_in_use_is_not_dropped_for_another(alike, engine_of):
    engine = engine_of(alike[:2], alike[0].bytes)
    with engine.slots.using([engine.slots.find("t0")]) as mine:
        with engine.slots.using([engine.slots.find("t1")]) as other:
            assert set(engine.slots.resident) == {"t0", "t1"}  # beyond the budget, for as long as it lasts
            assert set(mine.values()).isdisjoint(other.values())
            assert len(engine.stacks) == 2
        assert engine.slots.resident == ["t0"]
    assert_at_rest(engine)


@pytest.mark.parametrize("what", ["replace", "remove", "both"])
@pytest.mark.parametrize("when", ["before it is loaded", "after"])
def test_a_call_that_runs_is_answered_with_what_it_found(what, when, alike, engine_of, threads):
    """Replaced or removed meanwhile: the running call still has the old one, and nothing is left of it afterwards."""
    engine = engine_of(alike[:1], None)
    first, second = gated(engine, alike[1], "a"), gated(engine, alike[2], "b")
    waiting = threads.submit(ask, engine, "a", "b")
    assert first.asked.wait(PATIENCE)
    if when == "after":
        first.open.set()
        assert second.asked.wait(PATIENCE)
    if what in ("replace", "both"):
        alike[3].put_into(engine, "a")
        assert_right(ask(engine, "a")["a"], alike[3])
    if what in ("remove", "both"):
        engine.remove("a")
        with pytest.raises(UnknownName):
            ask(engine, "a")
    assert not waiting.done()
    first.open.set()
    second.open.set()
    found = waiting.result(PATIENCE)
    assert_right(found["a"], alike[1])
    assert_right(found["b"], alike[2])
    assert_at_rest(engine)


def test_a_call_that_runs_is_answered_with_the_labels_of_the_task_it_found(bert, new_slot, engine_of, threads):
    old, new = Recipe(bert, new_slot, 1, labels=4), Recipe(bert, new_slot, 2, labels=2)
    engine = engine_of([], None)
    request = [("a", Examples(["the cat sat", "why was it"]))]
    old.put_into(engine, "a")
    wanted = engine.predict(request)
    gate = gated(engine, old, "a")
    waiting = threads.submit(engine.predict, request)
    assert gate.asked.wait(PATIENCE)
    new.put_into(engine, "a")
    gate.open.set()
    assert waiting.result(PATIENCE) == wanted


def test_a_task_removed_before_its_turn_still_answers_the_call_that_found_it(alike, engine_of, threads):
    """A call for more than fits comes to its second task when the first is answered."""
    engine = engine_of([], alike[0].bytes)
    gate = gated(engine, alike[0], "a")
    alike[1].put_into(engine, "b")
    waiting = threads.submit(ask, engine, "a", "b")
    assert gate.asked.wait(PATIENCE)
    engine.remove("b")
    gate.open.set()
    found = waiting.result(PATIENCE)
    assert_right(found["a"], alike[0])
    assert_right(found["b"], alike[1])
    assert_at_rest(engine)


class Damaged:
    def __init__(self, tensors):
        self.tensors, self.broken = tensors, True

    def __call__(self):
        if self.broken:
            raise PackageDamaged("a@1 is damaged.")
        return self.tensors


@pytest.mark.parametrize("budget", [None, 0, 1])
def test_a_package_that_is_damaged_when_it_is_loaded_again_spoils_only_the_call_for_it(
    budget, alike, engine_of, threads
):
    engine = engine_of(alike[:2], None if budget is None else budget * alike[0].bytes)
    source = Damaged(alike[2].tensors)
    alike[2].put_into(engine, "bad", source)
    engine.slots.budget, kept = 0, engine.slots.budget
    engine.slots.put("t0", alike[0].plan, alike[0].tensors, alike[0].source)  # takes the others out
    engine.slots.budget = kept
    assert "bad" not in engine.slots.resident
    for _ in range(3):
        for names in (["bad"], ["t0", "bad"], ["bad", "t1"], ["t0", "bad", "t1"]):
            with pytest.raises(PackageDamaged):
                ask(engine, *names)
            assert_at_rest(engine)
        for k in (0, 1):
            assert_right(threads.submit(ask, engine, f"t{k}").result(PATIENCE)[f"t{k}"], alike[k])
    source.broken = False
    assert_right(ask(engine, "bad")["bad"], alike[2])
    engine.remove("bad")
    assert_at_rest(engine)


@pytest.mark.parametrize("why", ["shapes", "memory"])
def test_a_slot_that_cannot_be_put_in_keeps_no_place(why, alike, engine_of, monkeypatch):
    """Its tensors are not its plan's, or there is no memory for the last of its rows."""
    engine = engine_of(alike[:1], None)
    if why == "shapes":
        name = next(name for name in alike[1].tensors if name.endswith("down.weight"))
        alike[1].tensors[name] = np.ones((40, 32), np.float32)
    else:
        calls, original = [], Stacks._free_row

        def scarce(stacks, layout):
            calls.append(layout)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return original(stacks, layout)

        monkeypatch.setattr(Stacks, "_free_row", scarce)
    with pytest.raises(RuntimeError):
        alike[1].put_into(engine, "bad")
    assert "bad" not in engine.residents
    assert_right(ask(engine, "t0")["t0"], alike[0])
    engine.remove("t0")
    assert engine.stacks.blocks == []


@pytest.fixture
def hasty():
    """Let threads take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("fit", [0, 1, 3])
def test_eight_threads_ask_put_and_remove_within_a_tiny_budget_and_every_answer_is_right(
    fit, recipes, engine_of, threads
):
    """Names that stay are asked for by all; each thread puts, asks for and removes names of its own beside them."""
    steady = recipes[:5]
    engine = engine_of(steady, fit * max(recipe.bytes for recipe in recipes))

    def work(number):
        chance, mine = random.Random(number), {}
        for _ in range(25):
            turn = chance.random()
            if turn < 0.2:
                name, recipe = f"own {number} {chance.randrange(3)}", chance.choice(recipes)
                recipe.put_into(engine, name)  # new, or in the place of another
                mine[name] = recipe
            elif turn < 0.3 and mine:
                name = chance.choice(sorted(mine))
                del mine[name]
                engine.remove(name)
            elif turn < 0.4:
                k = chance.randrange(len(steady))
                steady[k].put_into(engine, f"t{k}")  # the same again, while others use it
            else:
                known = {**{f"t{k}": recipe for k, recipe in enumerate(steady)}, **mine}
                chosen = chance.sample(sorted(known), chance.randint(1, 4))
                for name, found in ask(engine, *chosen).items():
                    assert_right(found, known[name])
        return sorted(mine)

    left = [name for done in [threads.submit(work, k) for k in range(8)] for name in done.result(4 * PATIENCE)]
    assert_at_rest(engine)
    assert set(engine.residents) == {*left, *(f"t{k}" for k in range(len(steady)))}
    for name in left:
        engine.remove(name)
    for k, recipe in enumerate(steady):
        assert_right(ask(engine, f"t{k}")[f"t{k}"], recipe)
    assert_at_rest(engine)


def test_tasks_come_and_go_while_batches_are_computed_and_every_output_is_right(bert, new_slot):
    engine = Engine(bert, device="cpu", precision="fp32")
    kept = [Recipe(bert, new_slot, seed) for seed in range(3)]
    guest = Recipe(bert, new_slot, 9)
    for seed, recipe in enumerate(kept):
        recipe.put_into(engine, f"kept {seed}")
    done, wrong, batches = threading.Event(), [], []

    def compute():
        names = [f"kept {seed}" for seed in range(3) for _ in ROWS]
        while not done.is_set():
            found = engine.outputs([*ROWS] * 3, names)
            wanted = [out for recipe in kept for out in recipe.answers]
            wrong.extend(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if abs(a - b).max() > 1e-5)
            batches.append(len(found))

    with ThreadPoolExecutor(1) as pool:
        computing = pool.submit(compute)
        try:
            for round, count in enumerate((70, 3, 140)):  # blocks grow, are left empty, and grow again
                for i in range(count):
                    guest.put_into(engine, f"guest {i}")
                for i in range(count):
                    engine.remove(f"guest {i}")
                while len(batches) <= round and not computing.done():  # a busy machine may take its time
                    done.wait(0.001)
        finally:
            done.set()
        computing.result(PATIENCE)
    assert len(batches) >= 3
    assert not wrong


def test_putting_a_task_in_does_not_wait_for_the_batch_under_way(bert, new_slot, monkeypatch):
    engine = Engine(bert, device="cpu", precision="fp32")
    first, second = Recipe(bert, new_slot, 0), Recipe(bert, new_slot, 1)
    first.put_into(engine, "first")
    begun, go = threading.Event(), threading.Event()
    outputs = engine_module.outputs

    def slow(*given, **more):
        begun.set()
        assert go.wait(PATIENCE)
        return outputs(*given, **more)

    monkeypatch.setattr(engine_module, "outputs", slow)
    with ThreadPoolExecutor(1) as pool:
        computing = pool.submit(engine.outputs, ROWS, ["first"] * len(ROWS))
        try:
            assert begun.wait(PATIENCE)
            second.put_into(engine, "second")
            engine.remove("second")
            assert not computing.done()
        finally:
            go.set()
        found = computing.result(PATIENCE)
    assert all(abs(a - b).max() <= 1e-5 for a, b in zip(found, first.answers, strict=True))


def test_a_slot_that_is_loaded_ahead_stays_until_it_is_used_and_takes_half_the_budget_at_most(alike, engine_of):
    engine = engine_of(alike[:4], 2 * alike[0].bytes)  # two fit, one of them ahead
    slots, known = engine.slots, [engine.slots.find(f"t{k}") for k in range(4)]
    assert slots.resident == ["t2", "t3"]
    slots.load_ahead(known[0])
    slots.load_ahead(known[0])  # it is there
    slots.load_ahead(known[1])  # for which there is no room
    assert (sorted(slots.resident), slots.loads) == (["t0", "t3"], 1)
    for k in (1, 2, 3):
        assert_right(ask(engine, f"t{k}")[f"t{k}"], alike[k])
        assert "t0" in slots.resident
    assert_right(ask(engine, "t0")["t0"], alike[0])
    assert (slots.loads, slots._ahead) == (4, {})  # t1 and those that made room, but not t0 again
    assert_at_rest(engine)


def test_a_task_that_is_removed_while_it_is_loaded_ahead_leaves_no_slot(alike, engine_of):
    engine = engine_of(alike[:2], alike[0].bytes)
    known = engine.slots.find("t0")
    source = known.source
    known.source = lambda: (engine.remove("t0"), source())[1]
    engine.slots.load_ahead(known)
    engine.slots.load_ahead(known)
    assert (known.slot, engine.slots._ahead, engine.slots.loads) == (None, {}, 0)
    assert_at_rest(engine)
