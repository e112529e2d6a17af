"""Claims about the service's threads: parallel lanes, one start, and a stop that answers what is queued."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading

import pytest
import torch

from adapterbank.serving.service.protocol import Ask, Refusal
from adapterbank.serving.service.service import BankService
from serving.small_bank import PATIENCE, Gate, running, until


def test_on_a_cpu_each_core_has_a_lane_with_one_thread(small, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    small.put("a")
    service = BankService(small.bank, small.engine())
    assert (service.lanes, service.scheduler.lanes, service.scheduler.budget) == (3, 3, 1024)
    one = BankService(small.bank, small.engine(), lanes=1)
    assert (one.lanes, one.scheduler.budget) == (1, one.engine.tokens_at_once)


def test_the_switch_interval_is_shorter_while_the_service_runs(small):
    before = sys.getswitchinterval()

    async def run():
        async with running(small):
            return sys.getswitchinterval()

    assert asyncio.run(run()) == pytest.approx(min(before, 0.001))
    assert sys.getswitchinterval() == before


def test_lanes_compute_at_the_same_time(small):
    small.put("a")
    meeting = threading.Barrier(2, timeout=PATIENCE)

    async def run():
        async with running(small, lanes=2) as service:
            launch = service.engine.launch
            service.engine.launch = lambda *given: (meeting.wait(), launch(*given))[1]
            service.scheduler.budget = 1  # a row a batch
            answers = await asyncio.gather(*(service.predict([Ask("a", ["why"])]) for _ in range(2)))
            return [one.predictions for (one,) in answers]

    first, second = asyncio.run(run())
    assert first == second


def test_a_stopping_service_answers_what_is_queued_and_refuses_the_rest(small):
    small.put("a")

    async def run():
        async with running(small) as service:
            gate = Gate(service)
            queued = [asyncio.ensure_future(service.predict([Ask("a", ["why"])])) for _ in range(5)]
            await until(gate.busy.is_set)
            stopping = asyncio.ensure_future(service.stop())
            await until(lambda: not service.ready)
            with pytest.raises(Refusal) as refused:
                await service.predict([Ask("a", ["why"])])
            gate.opened.set()
            await stopping
            return refused.value, await asyncio.gather(*queued)

    refused, found = asyncio.run(run())
    assert refused.code == "not_ready"
    assert len(found) == 5


def test_a_service_starts_once_and_may_be_stopped_twice(small):
    small.put("a")

    def lanes():
        return [thread.name for thread in threading.enumerate()].count("compute 0")

    before = lanes()

    async def run():
        async with running(small) as service:
            await service.start()
            assert lanes() == before + 1
            found = await service.predict([Ask("a", ["why"])])
            await asyncio.gather(service.stop(), service.stop())
            with pytest.raises(RuntimeError, match="create another"):
                await service.start()
            never = BankService(small.bank, small.engine())
            await never.stop()
            return found

    assert len(asyncio.run(run())[0].predictions) == 1


def test_a_request_of_an_ended_event_loop_blocks_no_one(small):
    small.put("a")

    async def run():
        async with running(small) as service:
            gate = Gate(service)

            def elsewhere():
                loop = asyncio.new_event_loop()
                asked = loop.create_task(service.predict([Ask("a", ["why"])]))
                while not gate.busy.is_set():
                    loop.run_until_complete(asyncio.sleep(0.005))
                asked.cancel()
                loop.run_until_complete(asyncio.gather(asked, return_exceptions=True))
                loop.close()

            await asyncio.to_thread(elsewhere)
            gate.opened.set()
            return await service.predict([Ask("a", ["why"])])

    assert len(asyncio.run(run())[0].predictions) == 1


def test_a_task_whose_folder_was_just_deleted_is_unknown(small):
    small.put("a")

    async def run():
        async with running(small) as service:
            service.registry.stop()  # it would notice within half a second
            assert (await service.task("a"))["name"] == "a"
            shutil.rmtree(small.bank.path / "tasks" / "a")
            with pytest.raises(Refusal) as refused:
                await service.task("a")
            return refused.value.code

    assert asyncio.run(run()) == "unknown_task"
