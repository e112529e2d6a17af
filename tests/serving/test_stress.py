"""Promise: with several lanes, evicted slots and replaced tasks no prediction is swapped, mixed up or lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from adapterbank.serving.service.protocol import Ask, Refusal
from adapterbank.tasks.spec import Examples
from serving.small_bank import running, text_of

SEEDS, CLIENTS, REQUESTS = 6, 12, 25
SIZES = (3, 8, 4)
GONE = {"unknown_task", "unknown_version"}
"""The errors of a task that is removed from time to time."""


@pytest.mark.usefixtures("frequent_thread_switches")
def test_lanes_predict_like_a_plain_engine_while_slots_are_evicted_and_tasks_replaced(small):
    draw = random.Random(0)
    texts = [text_of(draw, 30) for _ in range(6)]
    seeds = {}

    def put(name, seed):
        seeds[name, small.put(name, seed, size=SIZES[seed % 3]).manifest.version] = seed

    for seed in range(SEEDS):
        put(f"steady-{seed}", seed)
    put("guest", 0)
    put("moving", 0)
    alone = small.alone(*(f"steady-{seed}" for seed in range(SEEDS)))
    wanted = [[one.to_json() for one in alone.predict([(f"steady-{k}", Examples(texts))])[0]] for k in range(SEEDS)]
    fit = int(2.5 * max(known.bytes for known in alone.slots._handles.values()))
    names = [*(f"steady-{seed}" for seed in range(SEEDS)), "guest", "moving", "moving@1"]
    left, answers, refused = [CLIENTS], [], []

    async def client(number, service):
        mine = random.Random(number)
        for _ in range(REQUESTS):
            rows = [mine.sample(range(len(texts)), mine.randint(1, 4)) for _ in range(mine.randint(1, 3))]
            asks = [Ask(mine.choice(names), [texts[i] for i in row]) for row in rows]
            asked = asyncio.ensure_future(service.predict(asks))
            if mine.random() < 0.1:
                await asyncio.sleep(0.005 * mine.random())
                asked.cancel()
            try:
                answers.extend(zip(rows, await asked, strict=True))
            except Refusal as error:
                refused.append(error.code)
            except asyncio.CancelledError:
                pass
        left[0] -= 1

    async def change(service):
        turn = 0
        while left[0]:
            turn += 1
            await asyncio.to_thread(put, "moving", turn % SEEDS)
            await (service.remove("guest") if turn % 2 else asyncio.to_thread(put, "guest", turn % SEEDS))
            await asyncio.to_thread(service.registry.scan, thorough=turn % 3 == 0)

    async def run():
        async with running(small, lanes=3, budget=fit) as service:
            service.scheduler.budget = 64
            await asyncio.gather(change(service), *(client(number, service) for number in range(CLIENTS)))
            known = service.engine.slots._handles
            return service.scheduler, service.numbers(), sum(one.users for one in known.values()), len(known)

    scheduler, numbers, users, known = asyncio.run(run())
    assert len(answers) > CLIENTS * REQUESTS / 2
    assert set(refused) <= GONE
    assert min(numbers["loads"], numbers["evictions"]) > CLIENTS
    for row, answer in answers:
        for i, found in zip(row, answer.predictions, strict=True):
            expected = wanted[seeds[answer.task, answer.version]][i]
            assert found["label"] == expected["label"]
            assert found["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-5)
    assert (scheduler.waiting, scheduler.ready, scheduler.counts, users) == (0, 0, {}, 0)
    assert known <= SEEDS + 3
