"""Claims about the service's queue: shared batches, floods, cancelled requests and overload."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from adapterbank.serving.service.protocol import Ask, Refusal
from serving.small_bank import PATIENCE, occupied, running, until


def test_rows_that_wait_together_share_a_batch(small):
    small.put("a", 0)
    small.put("b", 1)

    async def run():
        async with running(small) as service:
            gate, first = await occupied(service)
            rest = [asyncio.ensure_future(service.predict([Ask(n, ["the cat", "dog"])])) for n in "abab"]
            await until(lambda: service.scheduler.ready == 28)
            gate.opened.set()
            await asyncio.gather(first, *rest)
            return service.numbers()

    numbers = asyncio.run(run())
    assert (numbers["batches"], numbers["rows"]) == (2, 9)


def test_texts_are_tokenised_while_the_device_computes(small):
    small.put("a")

    async def run():
        async with running(small) as service:
            gate, first = await occupied(service)
            second = asyncio.ensure_future(service.predict([Ask("a", ["the cat sat"])]))
            await until(lambda: service.scheduler.ready == 5)
            done = first.done()
            gate.opened.set()
            await asyncio.gather(first, second)
            return done

    assert asyncio.run(run()) is False


def test_texts_that_arrive_together_are_tokenised_one_batch_at_a_time(small):
    small.put("a")
    entered, seen = threading.Event(), []

    async def run():
        async with running(small) as service:
            service.scheduler.budget = 20  # an ask of two texts is guessed at as 8 tokens
            tokenise, held = service.engine.tokenise, threading.Event()

            def slowly(requests):
                entered.set()
                assert held.wait(PATIENCE)
                seen.append([examples.texts for _, examples in requests])
                return tokenise(requests)

            service.engine.tokenise = slowly
            asked = [asyncio.ensure_future(service.predict([Ask("a", ["the cat"])]))]
            await until(entered.is_set)
            asked += [asyncio.ensure_future(service.predict([Ask("a", ["the cat", word])])) for word in "abcdefghij"]
            await until(lambda: len(service.arrived) == 10)
            gone = [asked[i] for i in (2, 4, 9, 10)]  # b and d, and all that would be left for the last time
            for one in gone:
                one.cancel()
            await asyncio.wait(gone)
            held.set()
            await asyncio.gather(*(one for one in asked if one not in gone))
            await until(lambda: not service.arrived)
            late = await service.predict([Ask("a", ["dog"])])
            return len(late[0].predictions), service.scheduler.waiting

    assert asyncio.run(run()) == (1, 0)
    assert [[texts[-1] for texts in together] for together in seen] == [["the cat"], [*"ace"], [*"fgh"], ["dog"]]


@pytest.mark.parametrize("texts", [[], ["\ud800"], ["why"]], ids=["none", "no text", "one"])
def test_a_service_stops_after_requests_for_the_tokenizer_were_cancelled(texts, small):
    small.put("a")

    async def run():
        async with running(small, lanes=2) as service:
            service.scheduler.budget = 8
            tokenise, entered, held = service.engine.tokenise, threading.Event(), threading.Event()
            service.engine.tokenise = lambda *given: (entered.set(), held.wait(PATIENCE), tokenise(*given))[2]
            first = asyncio.ensure_future(service.predict([Ask("a", texts)]))
            await until(entered.is_set)
            asked = [asyncio.ensure_future(service.predict([Ask("a", ["the cat", "dog"])])) for _ in range(2)]
            await until(lambda: len(service.arrived) == 2)
            for one in asked:
                one.cancel()
            await asyncio.wait(asked)
            take = service._take_arrived
            service._take_arrived = lambda: (time.sleep(0.1), take())[1]  # the lanes are to wait for these before
            stopping = asyncio.ensure_future(service.stop())
            await until(lambda: not service.ready)
            held.set()
            done, _ = await asyncio.wait([stopping], timeout=20)
            with service._condition:
                service._condition.notify_all()
            await asyncio.gather(first, stopping, return_exceptions=True)
            return bool(done)

    assert asyncio.run(run())


def test_a_panic_of_the_tokenizer_fails_only_its_own_request(small):
    small.put("a")

    class Panic(BaseException):
        pass

    async def run():
        async with running(small) as service:
            service.scheduler.budget = 8
            tokenise = service.engine.tokenise

            def panics(requests):
                if any("boom" in examples.texts for _, examples in requests):
                    raise Panic
                return tokenise(requests)

            service.engine.tokenise = panics
            words = ["boom", "cat", "boom", "dog"]
            asked = [asyncio.ensure_future(service.predict([Ask("a", ["the", word])])) for word in words]
            done, _ = await asyncio.wait(asked, timeout=PATIENCE)
            late = await asyncio.wait_for(service.predict([Ask("a", ["dog"])]), PATIENCE)
            return [type(one.exception()).__name__ for one in asked if one in done], len(late)

    assert asyncio.run(run()) == (["Refusal", "NoneType", "Refusal", "NoneType"], 1)


def test_the_first_of_many_texts_are_computed_before_the_last_are_tokenised(small):
    small.put("a")
    last = threading.Event()

    async def run():
        async with running(small) as service:
            service.scheduler.budget = 20
            tokenise = service.engine.tokenise

            def held(requests):
                assert all("z" not in examples.texts for _, examples in requests) or last.wait(PATIENCE / 4)
                return tokenise(requests)

            service.engine.tokenise = held
            asked = [asyncio.ensure_future(service.predict([Ask("a", ["the cat sat", w])])) for w in "abcdefgz"]
            await asyncio.gather(*asked[:4])
            early = not asked[-1].done()
            last.set()
            await asyncio.gather(*asked)
            return early

    assert asyncio.run(run())


def test_a_cancelled_request_leaves_the_queue(small):
    small.put("a")

    async def run():
        async with running(small) as service:
            gate, first = await occupied(service)
            second = asyncio.ensure_future(service.predict([Ask("a", ["the cat sat"])]))
            await until(lambda: service.scheduler.ready == 5)
            second.cancel()
            await asyncio.wait([second])
            left = service.scheduler.waiting
            gate.opened.set()
            await first
            return left, service.numbers()["rows"]

    assert asyncio.run(run()) == (0, 1)


def test_overload_is_refused_at_once_and_the_other_requests_are_answered(small):
    small.put("a")
    small.put("b", 1)

    async def run():
        async with running(small, queue=64) as service:
            gate, first = await occupied(service)
            kept, refused = [], []
            for _ in range(30):
                one = asyncio.ensure_future(service.predict([Ask("a", ["the cat sat"])]))
                await until(lambda one=one: one.done() or service.scheduler.ready == 5 * len(kept) + 5)
                (refused if one.done() else kept).append(one)
            other = asyncio.ensure_future(service.predict([Ask("b", ["why"])]))  # there is room for another task
            await until(lambda: other.done() or service.scheduler.ready > 5 * len(kept))
            assert not other.done()
            most = service.scheduler.waiting
            gate.opened.set()
            found = await asyncio.gather(first, other, *kept)
            return most, [one.exception() for one in refused], found

    most, refused, found = asyncio.run(run())
    assert most <= 64
    assert refused
    assert all(error.code == "overloaded" and 1 <= error.retry_after <= 60 for error in refused)
    assert len({str(answer.predictions) for answers in found[2:] for answer in answers}) == 1


def test_an_idle_service_accepts_a_request_that_is_larger_than_its_queue(small):
    for seed, name in enumerate("abc"):
        small.put(name, seed)

    async def run():
        async with running(small, queue=16) as service:
            return await service.predict([Ask(name, ["the cat sat"] * 4) for name in "abc"])

    assert [len(answer.predictions) for answer in asyncio.run(run())] == [4, 4, 4]


def test_a_refused_request_counts_none_of_its_rows(small):
    small.put("a")
    small.put("b", 1)

    async def run():
        async with running(small, queue=40) as service:
            gate, first = await occupied(service)
            second = asyncio.ensure_future(service.predict([Ask("a", ["the cat sat"])]))
            await until(lambda: service.scheduler.ready)
            waiting = service.scheduler.waiting
            request = [Ask("a", ["the cat"]), Ask("b", ["the cat sat on the mat"] * 9)]
            with pytest.raises(Refusal, match="The server is busy"):
                await asyncio.wait_for(service.predict(request), PATIENCE / 2)
            left = service.scheduler.waiting
            gate.opened.set()
            await asyncio.gather(first, second)
            return waiting, left

    waiting, left = asyncio.run(run())
    assert waiting == left > 0


def test_a_flooding_task_does_not_delay_another(small):
    small.put("flood")
    small.put("other", 1)
    batches = threading.Semaphore(0)

    async def run():
        async with running(small) as service:
            service.scheduler.budget = 64  # eight rows a batch
            launch = service.engine.launch
            service.engine.launch = lambda *given: batches.acquire(timeout=PATIENCE) and launch(*given)
            texts = ["the cat sat on the mat"] * 40
            flood = [asyncio.ensure_future(service.predict([Ask("flood", texts)])) for _ in range(5)]
            await until(lambda: service.scheduler.ready >= 1500)
            other = asyncio.ensure_future(service.predict([Ask("other", texts[:2])]))
            await until(lambda: "other" in str(service.scheduler.tasks))
            batches.release(2)  # the one under way, and the next
            found = await asyncio.wait_for(other, PATIENCE)
            waiting = not any(one.done() for one in flood)
            batches.release(100)
            await asyncio.gather(*flood)
            return waiting, len(found[0].predictions)

    assert asyncio.run(run()) == (True, 2)


def test_a_request_with_one_failing_task_is_refused_at_once_and_leaves_the_queue(small):
    small.put("a")
    small.put("b", 1)

    async def run():
        async with running(small) as service:
            gate, first = await occupied(service)
            with pytest.raises(Refusal) as refused:  # while the device is held
                await asyncio.wait_for(service.predict([Ask("a", ["why"]), Ask("b", ["\ud800"])]), PATIENCE / 2)
            left = service.scheduler.waiting
            gate.opened.set()
            await first
            return refused.value.code, left

    assert asyncio.run(run()) == ("bad_request", 0)
