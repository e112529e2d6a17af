"""`inference.slot_cache`: outputs are right and memory is bounded with threads that predict, add and remove."""

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
def test_eight_threads_with_a_tiny_budget_get_the_right_outputs(fit, recipes, engine_of, threads):
    """All threads use the permanent tasks; each thread also adds, uses and removes tasks of its own."""
    permanent = recipes[:5]
    engine = engine_of(permanent, fit * max(recipe.bytes for recipe in recipes))

    def work(number):
        chance, own = random.Random(number), {}
        for _ in range(25):
            action = chance.random()
            if action < 0.2:
                name, recipe = f"own {number} {chance.randrange(3)}", chance.choice(recipes)
                recipe.put_into(engine, name)  # a new task, or a replacement
                own[name] = recipe
            elif action < 0.3 and own:
                name = chance.choice(sorted(own))
                del own[name]
                engine.remove(name)
            elif action < 0.4:
                k = chance.randrange(len(permanent))
                permanent[k].put_into(engine, f"t{k}")  # the same task, while others use it
            else:
                available = {**{f"t{k}": recipe for k, recipe in enumerate(permanent)}, **own}
                chosen = chance.sample(sorted(available), chance.randint(1, 4))
                for name, found in ask(engine, *chosen).items():
                    assert_right(found, available[name])
        return sorted(own)

    left = [name for done in [threads.submit(work, k) for k in range(8)] for name in done.result(4 * PATIENCE)]
    assert_at_rest(engine)
    assert set(engine.residents) == {*left, *(f"t{k}" for k in range(len(permanent)))}
    for name in left:
        engine.remove(name)
    for k, recipe in enumerate(permanent):
        assert_right(ask(engine, f"t{k}")[f"t{k}"], recipe)
    assert_at_rest(engine)


def test_outputs_are_right_while_tasks_are_added_and_removed(bert, new_slot):
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
            for round, count in enumerate((70, 3, 140)):  # blocks grow, become empty, and grow again
                for i in range(count):
                    guest.put_into(engine, f"guest {i}")
                for i in range(count):
                    engine.remove(f"guest {i}")
                while len(batches) <= round and not computing.done():  # a busy machine may be slow
                    done.wait(0.001)
        finally:
            done.set()
        computing.result(PATIENCE)
    assert len(batches) >= 3
    assert not wrong


def test_adding_a_task_does_not_wait_for_a_running_batch(bert, new_slot, monkeypatch):
    engine = Engine(bert, device="cpu", precision="fp32")
    first, second = Recipe(bert, new_slot, 0), Recipe(bert, new_slot, 1)
    first.put_into(engine, "first")
    started, go = threading.Event(), threading.Event()
    launch = engine_module.launch

    def slow(*arguments, **options):
        started.set()
        assert go.wait(PATIENCE)
        return launch(*arguments, **options)

    monkeypatch.setattr(engine_module, "launch", slow)
    with ThreadPoolExecutor(1) as pool:
        computing = pool.submit(engine.outputs, ROWS, ["first"] * len(ROWS))
        try:
            assert started.wait(PATIENCE)
            second.put_into(engine, "second")
            engine.remove("second")
            assert not computing.done()
        finally:
            go.set()
        found = computing.result(PATIENCE)
    assert all(abs(a - b).max() <= 1e-5 for a, b in zip(found, first.answers, strict=True))
