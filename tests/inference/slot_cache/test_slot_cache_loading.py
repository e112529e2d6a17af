"""`inference.slot_cache`: loading a slot does not block other tasks, and a call keeps the tasks that it found."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from adapterbank.errors import PackageDamaged, UnknownName
from adapterbank.slots.stack import Stacks
from adapterbank.tasks.spec import Examples
from inference.slot_cache.recipes import PATIENCE, Recipe, ask, assert_at_rest, assert_right


class Gate:
    """A source that reports when it is called, and returns when it is opened."""

    def __init__(self, tensors):
        self.tensors, self.called, self.open = tensors, threading.Event(), threading.Event()

    def __call__(self):
        self.called.set()
        assert self.open.wait(PATIENCE)
        return self.tensors


def gated(engine, recipe, name):
    """Add a task with a gate as its source, and evict it."""
    gate = Gate(recipe.tensors)
    recipe.put_into(engine, name, gate)
    budget, engine.slots.budget = engine.slots.budget, 0
    with engine.slots.using([]):
        pass  # on exit, slots beyond the budget are evicted
    engine.slots.budget = budget
    assert name not in engine.slots.resident
    return gate


def test_calls_for_other_tasks_do_not_wait_for_a_load(alike, engine_of, threads):
    engine = engine_of(alike[:2], None)
    gate = gated(engine, alike[2], "slow")
    waiting = threads.submit(ask, engine, "t0", "slow")
    assert gate.called.wait(PATIENCE)
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


def test_concurrent_loads_of_one_task_add_it_once(alike, engine_of, threads):
    engine = engine_of([], None)
    gate = gated(engine, alike[0], "slow")
    waiting = [threads.submit(ask, engine, "slow") for _ in range(3)]
    assert gate.called.wait(PATIENCE)
    gate.open.set()
    for call in waiting:
        assert_right(call.result(PATIENCE)["slow"], alike[0])
    assert engine.slots.loads == 1
    assert_at_rest(engine)


def test_a_slot_in_use_is_not_evicted(alike, engine_of):
    engine = engine_of(alike[:2], alike[0].bytes)
    with engine.slots.using([engine.slots.find("t0")]) as first:
        with engine.slots.using([engine.slots.find("t1")]) as other:
            assert set(engine.slots.resident) == {"t0", "t1"}  # beyond the budget while both are in use
            assert set(first.values()).isdisjoint(other.values())
            assert len(engine.stacks) == 2
        assert engine.slots.resident == ["t0"]
    assert_at_rest(engine)


@pytest.mark.parametrize("what", ["replace", "remove", "both"])
@pytest.mark.parametrize("when", ["before it is loaded", "after"])
def test_a_running_call_keeps_the_task_that_it_found(what, when, alike, engine_of, threads):
    """The call uses the old task even if it is replaced or removed, and nothing of it is left afterwards."""
    engine = engine_of(alike[:1], None)
    first, second = gated(engine, alike[1], "a"), gated(engine, alike[2], "b")
    waiting = threads.submit(ask, engine, "a", "b")
    assert first.called.wait(PATIENCE)
    if when == "after":
        first.open.set()
        assert second.called.wait(PATIENCE)
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


def test_a_running_call_keeps_the_labels_of_the_task_that_it_found(bert, new_slot, engine_of, threads):
    old, new = Recipe(bert, new_slot, 1, labels=4), Recipe(bert, new_slot, 2, labels=2)
    engine = engine_of([], None)
    request = [("a", Examples(["the cat sat", "why was it"]))]
    old.put_into(engine, "a")
    wanted = engine.predict(request)
    gate = gated(engine, old, "a")
    waiting = threads.submit(engine.predict, request)
    assert gate.called.wait(PATIENCE)
    new.put_into(engine, "a")
    gate.open.set()
    assert waiting.result(PATIENCE) == wanted


def test_a_call_uses_a_task_that_was_removed_before_its_part_started(alike, engine_of, threads):
    """A call for more tasks than fit runs them in parts, one after the other."""
    engine = engine_of([], alike[0].bytes)
    gate = gated(engine, alike[0], "a")
    alike[1].put_into(engine, "b")
    waiting = threads.submit(ask, engine, "a", "b")
    assert gate.called.wait(PATIENCE)
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
def test_a_package_that_is_damaged_on_reload_fails_only_the_calls_for_it(budget, alike, engine_of, threads):
    engine = engine_of(alike[:2], None if budget is None else budget * alike[0].bytes)
    source = Damaged(alike[2].tensors)
    alike[2].put_into(engine, "bad", source)
    engine.slots.budget, kept = 0, engine.slots.budget
    engine.slots.put("t0", alike[0].plan, alike[0].tensors, alike[0].source)  # evicts the others
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
def test_a_slot_that_cannot_be_added_leaves_no_rows(why, alike, engine_of, monkeypatch):
    """Its tensors do not match its plan, or memory runs out for its last row."""
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


def test_slots_loaded_ahead_stay_until_used_and_take_at_most_half_the_budget(alike, engine_of):
    engine = engine_of(alike[:4], 2 * alike[0].bytes)  # two slots fit, one of them loaded ahead
    slots, handles = engine.slots, [engine.slots.find(f"t{k}") for k in range(4)]
    assert slots.resident == ["t2", "t3"]
    slots.load_ahead(handles[0])
    slots.load_ahead(handles[0])  # already loaded
    slots.load_ahead(handles[1])  # does not fit
    assert (sorted(slots.resident), slots.loads) == (["t0", "t3"], 1)
    for k in (1, 2, 3):
        assert_right(ask(engine, f"t{k}")[f"t{k}"], alike[k])
        assert "t0" in slots.resident
    assert_right(ask(engine, "t0")["t0"], alike[0])
    assert slots.loads == 4  # t1, t2 and t3, but not t0 again
    slots.load_ahead(handles[1])  # t0 was used, so that another can be loaded ahead
    assert "t1" in slots.resident
    assert_at_rest(engine)


def test_a_task_that_is_removed_during_a_load_ahead_leaves_no_slot(alike, engine_of):
    engine = engine_of(alike[:2], alike[0].bytes)
    handle = engine.slots.find("t0")
    source = handle.source
    handle.source = lambda: (engine.remove("t0"), source())[1]
    engine.slots.load_ahead(handle)
    engine.slots.load_ahead(handle)
    assert (handle.slot, engine.slots.loads) == (None, 0)
    assert_at_rest(engine)
    alike[0].put_into(engine, "t2")
    assert "t2" in engine.slots.resident  # a removed task reserves no memory
