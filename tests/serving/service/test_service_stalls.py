"""Promise: a part that hangs is named, holds up no healthy task, and does not keep the service from stopping."""

from __future__ import annotations

import asyncio
import builtins
import io
import os
import threading
from contextlib import contextmanager

import pytest

from adapterbank.inference.slot_cache import SlotCache
from adapterbank.serving import heartbeat
from adapterbank.serving.service import service as services
from adapterbank.serving.service import task_reader
from adapterbank.serving.service.protocol import Ask, Refusal
from adapterbank.serving.service.service import BankService
from serving.small_bank import PATIENCE, running, until


@contextmanager
def hanging(monkeypatch, part):
    """Make the disk hang for paths that contain `part`, until the `with` ends."""
    released = threading.Event()
    calls = [(os, "stat"), (os, "open"), (os, "scandir"), (os, "listdir"), (io, "open"), (builtins, "open")]
    for module, name in calls:
        real = getattr(module, name)

        def call(path, *args, real=real, **kwargs):
            if part in str(path) and threading.current_thread() is not threading.main_thread():
                released.wait(PATIENCE)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(module, name, call)
    try:
        yield released
    finally:
        released.set()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Shorten what a test would wait for."""
    monkeypatch.setattr(task_reader, "PATIENCE", 0.3)
    monkeypatch.setattr(task_reader.TaskReader.__init__, "__defaults__", (1, 0.3))
    monkeypatch.setattr(task_reader.TaskReader.stalled, "__defaults__", (0.1,))
    monkeypatch.setattr(heartbeat.Heartbeat.__init__, "__defaults__", (0.3,))


def test_a_task_that_hangs_holds_up_no_other_and_is_served_when_the_disk_answers(small, monkeypatch):
    small.put("a")
    small.put("hung", 1)

    async def run():
        with hanging(monkeypatch, "tasks/hung") as released:
            async with running(small) as service:  # ready though one task hangs
                await until(lambda: service.stalled()["bank"])
                assert service.stalled()["bank"][0].startswith("reading hung for ")
                found = await service.tasks()
                assert [task["name"] for task in found["tasks"]] == ["a"]
                assert [problem["task"] for problem in found["problems"]] == ["hung"]
                assert service.numbers()["problems"] == 1
                for _ in range(3):
                    with pytest.raises(Refusal, match="has not answered") as refused:
                        await service.predict([Ask("hung", ["why"])])
                    assert refused.value.code == "damaged"
                assert await service.predict([Ask("a", ["why"])])
                await asyncio.to_thread(small.put, "new", 2)
                await until(lambda: service.registry.find("new"))  # changes of others are followed
                released.set()
                await until(lambda: service.registry.find("hung"))
                assert not service.stalled()["bank"]
                assert await service.predict([Ask("hung", ["why"])])

    asyncio.run(run())


def test_a_loaded_task_is_served_while_the_disk_hangs(small, monkeypatch):
    small.put("a")
    small.put("b", 1)

    async def run():
        async with running(small) as service:
            with hanging(monkeypatch, str(small.bank.path / "tasks")):
                await until(lambda: service.stalled()["bank"])
                assert service.ready
                assert await service.predict([Ask("a", ["why"]), Ask("b", ["why"])])
                await service.stop()  # and it stops

    asyncio.run(run())


def test_a_slot_that_cannot_be_loaded_again_is_refused_and_the_lane_goes_on(small, monkeypatch):
    small.put("a")
    small.put("hung", 1)

    async def run():
        async with running(small) as service:
            handle = service.registry.find("hung").handle
            with service.engine.slots.lock:
                service.engine.slots._free(handle)  # as an eviction does
            monkeypatch.setattr(SlotCache, "wants_loading", lambda self, handle: False)  # so that a lane loads it
            with hanging(monkeypatch, "tasks/hung"):
                asked = asyncio.ensure_future(service.predict([Ask("hung", ["why"])]))
                with pytest.raises(Refusal, match="has not answered") as refused:
                    await asked
                assert await service.predict([Ask("a", ["why"])])
            return refused.value.code

    assert asyncio.run(run()) == "damaged"


@pytest.mark.parametrize(("method", "part"), [("tokenise", "tokenizer"), ("launch", "lane 0")])
def test_a_part_that_all_requests_need_makes_the_service_unready_while_it_hangs(small, monkeypatch, method, part):
    small.put("a")
    released = threading.Event()

    async def run():
        async with running(small) as service:
            await service.predict([Ask("a", ["why"])])
            monkeypatch.setattr(services, "most_seconds", lambda *given, **options: 0.1)
            monkeypatch.setattr(services, "tokenising_seconds", lambda texts: 0.1)
            real = getattr(service.engine, method)

            def hang(*given):
                assert released.wait(PATIENCE)
                return real(*given)

            setattr(service.engine, method, hang)
            asked = asyncio.ensure_future(service.predict([Ask("a", ["why"])]))
            await until(lambda: service.stalled()[part])
            assert not service.ready
            released.set()
            assert await asked
            await until(lambda: service.ready)
            assert not service.stalled()[part]

    asyncio.run(run())


def test_a_lane_that_hangs_does_not_keep_the_service_from_stopping(small, monkeypatch):
    monkeypatch.setattr(services, "_STOPPING", 0.5)
    small.put("a")
    released = threading.Event()

    async def run():
        service = BankService(small.bank, small.engine(), lanes=1)
        await service.start()
        await until(lambda: service.ready)
        busy = threading.Event()
        service.engine.launch = lambda *given: (busy.set(), released.wait(PATIENCE))
        asked = asyncio.ensure_future(service.predict([Ask("a", ["why"])]))
        await until(busy.is_set)
        await service.stop()
        with pytest.raises(Refusal) as refused:
            await asked
        return refused.value.code

    try:
        assert asyncio.run(run()) == "not_ready"
    finally:
        released.set()
