"""Threads that ask, put and remove at once: every output is right, and memory stays in bounds."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from adapterbank.inference import engine as engine_module
from adapterbank.inference.engine import Engine
from inference.slot_cache.recipes import PATIENCE, ROWS, Recipe, ask, assert_at_rest, assert_right


@pytest.mark.usefixtures("frequent_thread_switches")
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
    launch = engine_module.launch

    def slow(*given, **more):
        begun.set()
        assert go.wait(PATIENCE)
        return launch(*given, **more)

    monkeypatch.setattr(engine_module, "launch", slow)
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
