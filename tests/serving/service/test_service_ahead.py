"""Claims about a service with an asynchronous device: the next batch is launched before the last is answered."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from adapterbank.errors import PackageDamaged
from adapterbank.inference.engine import Engine
from adapterbank.serving.service.protocol import Ask
from adapterbank.serving.service.service import BankService
from adapterbank.tasks.spec import Examples
from serving.small_bank import PATIENCE, assert_same, text_of, until


class Device(Engine):
    """Computes when it is waited for, batch by batch as it is let."""

    ahead = 2

    def __init__(self, backbone):
        super().__init__(backbone, device="cpu", precision="fp32")
        self.log = []
        self.fails = lambda tasks: False
        self.begun, self.ready, self.allowed = threading.Event(), threading.Event(), threading.Semaphore(0)
        self.ready.set()
        self.waiting = threading.Event()

    def launch(self, tokens, tasks):
        self.begun.set()
        assert self.ready.wait(PATIENCE)
        number = len([what for what, _ in self.log if what == "launch"])
        self.log.append(("launch", number))

        def wait():
            self.waiting.set()
            assert self.allowed.acquire(timeout=PATIENCE)
            self.log.append(("land", number))
            if self.fails(tasks):
                raise PackageDamaged("bad@1 is not what was written; restore it.")
            return super(Device, self).launch(tokens, tasks)()

        return wait


@pytest.fixture
def serve(small):
    """Run something with a service over a bank of the tasks a and b."""
    small.put("a", 0)
    small.put("b", 1)

    def run(act):
        async def whole():
            service = BankService(small.bank, Device(small.backbone), lanes=1)
            await service.start()
            try:
                await until(lambda: service.ready)
                return await act(service, service.engine)
            finally:
                service.engine.allowed.release(10**6)
                await service.stop()

        return asyncio.run(whole())

    return run


def asked(service, *names, text="the cat sat"):
    return [asyncio.ensure_future(service.predict([Ask(name, [text])])) for name in names]


async def lined_up(service, device, *names):
    """Ask while the device is held back, so that all but the first are ready together; then let it go."""
    device.ready.clear()
    first = asked(service, names[0])
    await until(device.begun.is_set)
    rest = asked(service, *names[1:])
    await until(lambda: service.scheduler.ready == 5 * len(rest))
    device.ready.set()
    return first + rest


def test_batches_are_launched_up_to_the_limit_of_the_device_and_answered_in_order(serve):
    async def act(service, device):
        service.scheduler.budget = 5  # a row a batch
        requests = await lined_up(service, device, *"ababab")
        await until(lambda: len(device.log) == 3)
        first = list(device.log)
        device.allowed.release()
        await asyncio.wait(requests, return_when="FIRST_COMPLETED")
        await until(lambda: len(device.log) == 5)
        second, done = list(device.log), sum(one.done() for one in requests)
        device.allowed.release(5)
        await asyncio.gather(*requests)
        return first, second, done, device.log

    first, second, done, log = serve(act)
    assert first == [("launch", 0), ("launch", 1), ("launch", 2)]
    assert second == [*first, ("land", 0), ("launch", 3)]
    assert done == 1
    assert [number for what, number in log if what == "land"] == list(range(6))


def test_a_batch_that_could_grow_does_so_while_the_device_has_enough_to_do(serve):
    async def act(service, device):
        service.scheduler.budget, service.scheduler.wait = 10, 0.0  # two rows a batch; less than that is due at once
        requests = await lined_up(service, device, *"aaba")
        await until(device.waiting.is_set)
        log = list(device.log)
        device.allowed.release(10)
        await asyncio.gather(*requests)
        return log, service.numbers()

    log, numbers = serve(act)
    assert log == [("launch", 0), ("launch", 1)]  # of one row and of two; the last row is not launched behind them
    assert (numbers["batches"], numbers["rows"]) == (3, 4)


def test_predictions_equal_those_of_a_plain_engine(serve, small):
    draw = random.Random(0)
    asks = [(draw.choice("ab"), [text_of(draw) for _ in range(draw.randint(1, 9))]) for _ in range(60)]

    async def act(service, device):
        service.scheduler.budget = 64
        device.allowed.release(10**6)
        return await asyncio.gather(*(service.predict([Ask(name, texts)]) for name, texts in asks))

    alone = small.alone("a", "b")
    for (name, texts), (answer,) in zip(asks, serve(act), strict=True):
        assert answer.task == name
        assert_same(answer.predictions, alone.predict([(name, Examples(texts))])[0])


def test_a_task_that_fails_on_the_device_fails_alone(serve):
    async def act(service, device):
        good, bad = (service.registry.find(name).handle for name in "ab")
        seen = []
        device.fails = lambda tasks: seen.append(set(tasks)) or bad in tasks
        requests = await lined_up(service, device, *"abab")
        device.allowed.release(100)
        found = await asyncio.gather(*requests, return_exceptions=True)
        return found, {good, bad} in seen

    (good, bad, fine, worse), together = serve(act)
    assert together
    assert len(good[0].predictions) == len(fine[0].predictions) == 1
    assert bad.code == worse.code == "damaged"


def test_launched_batches_are_answered_when_the_service_stops(serve):
    async def act(service, device):
        service.scheduler.budget = 5
        requests = await lined_up(service, device, *"abab")
        await until(lambda: len(device.log) == 3)
        stopping = asyncio.ensure_future(service.stop())
        await until(lambda: not service.ready)
        device.allowed.release(4)
        await stopping
        return await asyncio.gather(*requests)

    assert [len(answers[0].predictions) for answers in serve(act)] == [1] * 4
