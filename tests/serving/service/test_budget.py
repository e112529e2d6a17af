"""Promise: `--budget` holds for all lanes at every moment, and no request waits for ever or without need."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from adapterbank.serving.service.protocol import Ask
from adapterbank.tasks.spec import Examples
from serving.small_bank import running, text_of, until

PATIENCE = 20
NAMES = [f"task-{i}" for i in range(6)]


@pytest.fixture
def filled(small):
    """A bank of six tasks of one size."""
    for seed, name in enumerate(NAMES):
        small.put(name, seed=seed)
    return small


@pytest.fixture
def each(filled):
    """The bytes of one of its slots."""
    return filled.alone(*NAMES).slots.bytes // len(NAMES)


def watched(slots):
    """Note how many slots are in memory whenever one has been put in."""
    most, put = [0], slots.stacks.put

    def seen(*given):
        slot = put(*given)
        most.append(len(slots.stacks))
        return slot

    slots.stacks.put = seen
    return most


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def loaded(filled, budget):
    """Return an engine with the bank's tasks, its slots and the handle of each."""
    engine = filled.engine(budget=budget)
    for name in NAMES:
        engine.load(filled.bank.get(name), name)
    return engine, engine.slots, [engine.slots.find(name) for name in NAMES]


@pytest.mark.parametrize("fit", [1, 2, 3])
def test_no_number_of_lanes_has_more_in_memory_than_the_budget(filled, each, fit):
    draw = random.Random(fit)
    asks = [Ask(name, [text_of(draw)]) for name in NAMES * 20]
    alone = filled.alone(*NAMES)

    async def run():
        async with running(filled, lanes=4, budget=fit * each) as service:
            most = watched(service.engine.slots)
            service.scheduler.budget = 16  # a few rows a batch, so that all lanes have some
            return most, await asyncio.gather(*(service.predict([ask]) for ask in asks)), service.numbers()

    most, answers, numbers = asyncio.run(run())
    assert max(most) <= fit
    assert numbers["loads"] > fit
    for ask, (answer,) in zip(asks, answers, strict=True):
        wanted = alone.predict([(ask.task, Examples(ask.texts))])[0][0]
        assert answer.predictions[0]["probabilities"] == pytest.approx(wanted.probabilities, abs=1e-5)


def test_a_task_that_arrives_while_all_memory_is_in_use_is_loaded_later(filled, each):
    engine = filled.engine(budget=each)
    most = watched(engine.slots)
    engine.load(filled.bank.get(NAMES[0]), NAMES[0])
    with engine.slots.using([engine.slots.find(NAMES[0])]):
        engine.load(filled.bank.get(NAMES[1]), NAMES[1])
        assert engine.slots.resident == [NAMES[0]]
        assert max(most) == 1
    assert len(engine.outputs(engine.rows(NAMES[1], Examples(["the cat"])).tokens, [NAMES[1]])) == 1
    assert engine.slots.resident == [NAMES[1]]


def test_a_request_for_more_memory_than_is_free_waits_for_it(filled, each, threads):
    _, slots, known = loaded(filled, 2 * each)
    entered, go = threading.Event(), threading.Event()

    def use(wanted):
        with slots.using(wanted):
            entered.set()
            assert go.wait(PATIENCE)
            return slots.bytes

    with slots.using(known[:1]):
        waiting = threads.submit(use, known[1:3])
        assert not entered.wait(0.2)
        assert slots.resident.count(NAMES[0]) == 1
    go.set()
    assert waiting.result(PATIENCE) == 2 * each


def test_a_slot_in_use_needs_no_further_memory(filled, each, threads):
    _, slots, known = loaded(filled, each)

    def use():
        with slots.using(known[:1]):
            return slots.bytes

    with slots.using(known[:1]):
        assert threads.submit(use).result(PATIENCE) == each


def test_a_large_request_for_slots_is_not_overtaken_by_smaller_ones(filled, each, threads):
    _, slots, known = loaded(filled, 3 * each)
    order = []

    def use(wanted, name):
        with slots.using(wanted):
            order.append(name)

    def queued(count):
        end = time.monotonic() + PATIENCE
        while len(slots._queue) < count:
            assert time.monotonic() < end
            time.sleep(0.001)

    with slots.using(known[:1]):
        first = threads.submit(use, known[1:4], "large")
        queued(1)
        second = threads.submit(use, known[4:5], "small")
        queued(2)
        assert order == []
    first.result(PATIENCE)
    second.result(PATIENCE)
    assert order == ["large", "small"]


def test_more_than_the_budget_is_used_alone(filled, each, threads):
    _, slots, known = loaded(filled, each // 2)
    inside, most = [], []

    def use(number):
        with slots.using([known[number]]):
            inside.append(number)
            most.append(len(inside))
            inside.remove(number)

    for work in [threads.submit(use, i % len(NAMES)) for i in range(60)]:
        work.result(PATIENCE)
    assert max(most) == 1
    assert slots.bytes == 0


def test_threads_that_use_any_slots_in_any_order_all_get_them(filled, each, threads):
    _, slots, known = loaded(filled, 2 * each)
    most = watched(slots)

    def use(seed):
        draw = random.Random(seed)
        for _ in range(40):
            with slots.using(draw.sample(known, draw.randint(1, 2))) as numbers:
                assert all(number is not None for number in numbers.values())

    for work in [threads.submit(use, seed) for seed in range(8)]:
        work.result(PATIENCE)
    assert max(most) <= 2
    assert (slots._used, list(slots._queue), sum(one.users for one in known)) == (0, [], 0)


def test_a_slot_that_cannot_be_loaded_blocks_no_one(filled, each, threads):
    _, slots, known = loaded(filled, each)

    def fails():
        raise RuntimeError("gone")

    known[1].source = fails

    def use(one):
        with slots.using([one]):
            return True

    with slots.using(known[:1]):
        works = [threads.submit(use, known[i]) for i in (1, 2, 1, 3)]
    errors = [work.exception(PATIENCE) for work in works]
    assert [isinstance(error, RuntimeError) for error in errors] == [True, False, True, False]
    assert slots._used == 0


def test_slots_loaded_ahead_are_evicted_for_slots_in_use(filled, each):
    _, slots, known = loaded(filled, 2 * each)
    slots.load_ahead(known[0])
    assert NAMES[0] in slots.resident
    with slots.using(known[1:3]):
        assert slots.bytes == 2 * each
        slots.load_ahead(known[3])  # for which there is no room now
        assert slots.bytes == 2 * each
    assert slots._ahead == {}


def test_with_all_slots_in_memory_no_request_waits_for_one(filled, each, monkeypatch):
    async def run():
        async with running(filled, lanes=3, budget=len(NAMES) * each) as service:
            monkeypatch.setattr(service.engine.slots, "_wait_for", None)  # which cannot be called
            await until(lambda: service.numbers()["resident"] == len(NAMES))
            await asyncio.gather(*(service.predict([Ask(name, ["the cat"])]) for name in NAMES * 10))
            return service.numbers()

    numbers = asyncio.run(run())
    assert (numbers["rows"], numbers["loads"], numbers["evictions"]) == (60, 0, 0)
