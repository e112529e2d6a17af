"""Claims about slots that are not in memory: loaded on demand, while rows of other tasks are computed."""

from __future__ import annotations

import asyncio
import threading

import pytest

from adapterbank.errors import PackageDamaged
from adapterbank.serving.service.protocol import Ask
from adapterbank.tasks.spec import Examples
from serving.small_bank import PATIENCE, assert_same, occupied, running, until


def test_beyond_the_budget_slots_are_loaded_on_demand(small):
    names = [f"task-{i}" for i in range(6)]
    for i, name in enumerate(names):
        small.put(name, seed=i)
    alone = small.alone(*names)
    each = alone.slots.bytes // 6

    async def run():
        async with running(small, budget=2 * each) as service:
            for _ in range(2):
                found = await asyncio.gather(*(service.predict([Ask(name, ["the cat"])]) for name in names))
            listed = await service.tasks()
            return found, service.numbers(), [task["resident"] for task in listed["tasks"]]

    found, numbers, resident = asyncio.run(run())
    for name, (answer,) in zip(names, found, strict=True):
        assert_same(answer.predictions, alone.predict([(name, Examples(["the cat"]))])[0])
    assert numbers["evictions"] >= 4
    assert numbers["loads"] >= 4
    assert 1 <= numbers["resident"] == sum(resident) <= 2


def test_a_task_is_added_while_a_batch_is_computed(small):
    small.put("a")

    async def run():
        async with running(small) as service:
            gate, first = await occupied(service)
            await asyncio.to_thread(small.put, "b", 1)
            await until(lambda: service.registry.find("b") is not None)
            waited = not first.done()
            gate.opened.set()
            await first
            return waited

    assert asyncio.run(run())


def evicted(service, name):
    """Evict a task's slot from memory; return its handle."""
    known, slots = service.registry.find(name).handle, service.engine.slots
    with slots.lock:
        slots._free(known)
    return known


def test_rows_of_other_tasks_do_not_wait_for_a_slot_that_is_loaded(small):
    small.put("a")
    small.put("slow", 1)

    async def run():
        async with running(small, budget=10**9) as service:
            known, go = evicted(service, "slow"), threading.Event()
            source = known.source
            known.source = lambda: go.wait(PATIENCE) and source()
            waiting = asyncio.ensure_future(service.predict([Ask("slow", ["why"])]))
            await until(lambda: service.scheduler.waiting)
            (other,) = await service.predict([Ask("a", ["why"])])
            waited = not waiting.done()
            go.set()
            return waited, other, await waiting, service.engine.slots

    waited, other, (found,), slots = asyncio.run(run())
    assert waited
    assert len(other.predictions) == 1
    assert_same(found.predictions, small.alone("slow").predict([("slow", Examples(["why"]))])[0])
    assert (slots.loads, slots._ahead) == (1, {})


@pytest.mark.parametrize("end", ["cancelled", "damaged", "unknown_task"])
def test_a_request_that_ends_while_its_slot_is_loaded_leaves_nothing(small, end):
    small.put("a")

    async def run():
        async with running(small, budget=10**9) as service:
            known, begun, go = evicted(service, "a"), threading.Event(), threading.Event()
            source = known.source

            def slowly():
                begun.set()
                assert go.wait(PATIENCE)
                if end != "cancelled":
                    raise PackageDamaged("a@1 is not what was written; restore it.")
                return source()

            known.source = slowly
            asked = asyncio.ensure_future(service.predict([Ask("a", ["why"])]))
            await until(begun.is_set)
            if end == "cancelled":
                asked.cancel()
                await asyncio.wait([asked])
            elif end == "unknown_task":
                await asyncio.to_thread(small.bank.remove, "a")
            go.set()
            (found,) = await asyncio.gather(asked, return_exceptions=True)
            await until(lambda: not service.scheduler.waiting)
            await asyncio.to_thread(service._loader.submit(lambda: None).result)
            return found, service.engine.slots._ahead, known.users

    found, ahead, users = asyncio.run(run())
    assert isinstance(found, asyncio.CancelledError) if end == "cancelled" else found.code == end
    assert (ahead, users) == ({}, 0)
