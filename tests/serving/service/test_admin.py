"""Claims about the administration of tasks: changed, removed and rolled back under load, with the right errors."""

from __future__ import annotations

import asyncio

import pytest

from adapterbank.serving.service.protocol import Ask, Refusal
from adapterbank.tasks.spec import Examples
from serving.small_bank import damage, occupied, running, until


def test_tasks_change_under_load_and_every_prediction_is_right(small):
    small.put("steady", 0)
    wanted = small.alone("steady").predict([("steady", Examples(["the cat"]))])[0][0].to_json()
    stop, found = [], []

    async def load(service):
        while not stop:
            (answer,) = await service.predict([Ask("steady", ["the cat"])])
            found.append(answer.predictions[0])

    async def come_and_go(service):
        for seed in range(3):
            await asyncio.to_thread(small.put, "guest", seed)
            await until(lambda: service.registry.find("guest") is not None)
            (answer,) = await service.predict([Ask("guest", ["the cat"])])
            assert answer.version == seed + 1
            await service.remove("guest")
            with pytest.raises(Refusal, match="'guest' is not a task"):
                await service.predict([Ask("guest", ["the cat"])])
        await until(lambda: len(found) > 10)
        stop.append(True)

    async def run():
        async with running(small) as service:
            await asyncio.gather(come_and_go(service), *(load(service) for _ in range(4)))

    asyncio.run(run())
    assert all(one["label"] == wanted["label"] for one in found)
    assert all(one["probabilities"] == pytest.approx(wanted["probabilities"], abs=1e-5) for one in found)


def test_a_queued_request_is_answered_by_the_version_that_was_served_when_it_arrived(small):
    small.put("a", 0)
    old = small.alone("a@1").predict([("a@1", Examples(["the cat"]))])[0][0].to_json()

    async def run():
        async with running(small) as service:
            gate, first = await occupied(service)
            asked = asyncio.ensure_future(service.predict([Ask("a", ["the cat"])]))
            await until(lambda: service.scheduler.ready)
            await asyncio.to_thread(small.put, "a", 5)
            await until(lambda: service.registry.find("a").package.ref == "a@2")
            assert not asked.done()
            gate.opened.set()
            await first
            return await asked, await service.predict([Ask("a", ["the cat"])])

    (before,), (after,) = asyncio.run(run())
    assert (before.version, after.version) == (1, 2)
    assert before.predictions[0]["probabilities"] == pytest.approx(old["probabilities"], abs=1e-5)
    assert after.predictions[0]["probabilities"] != pytest.approx(old["probabilities"], abs=1e-3)


def test_problems_are_listed_and_distinguished_from_unknown_tasks(small):
    small.put("good")
    damage(small.put("bad", 1))

    async def run():
        async with running(small) as service:
            with pytest.raises(Refusal) as refused:
                await service.predict([Ask("bad", ["why"])])
            return refused.value.code, await service.tasks(), await service.task("good")

    code, listed, details = asyncio.run(run())
    assert code == "damaged"
    assert [task["name"] for task in listed["tasks"]] == ["good"]
    assert [problem["task"] for problem in listed["problems"]] == ["bad"]
    assert (details["versions"], details["default"], details["ablation"]) == ([1], 1, None)


def test_a_rollback_without_an_earlier_version_is_a_conflict(small):
    small.put("a")

    async def run():
        async with running(small) as service:
            with pytest.raises(Refusal) as refused:
                await service.rollback("a")
            await asyncio.to_thread(small.put, "a", 1)
            return refused.value.code, await service.rollback("a"), service.registry.find("a").package.ref

    assert asyncio.run(run()) == ("conflict", 1, "a@1")
