"""The service: any mix of tasks under any load is answered as by the engine alone, and one request harms no other."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
import torch

from adapterbank.errors import PackageDamaged
from adapterbank.serving.app import create_app
from adapterbank.serving.service import BankService
from adapterbank.serving.terms import Ask, Refusal
from adapterbank.serving.watch import JsonLines
from adapterbank.tasks.spec import Examples
from serving.dummy import calling
from serving.small_bank import PATIENCE, Gate, occupied, running, text_of, until

CLIENTS, TASKS = 64, 50


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for mine, expected in zip(found, wanted, strict=True):
        theirs = expected.to_json()
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            if isinstance(value, (str, list, tuple)) or key in ("start", "end"):
                assert list(mine[key]) == list(value) if isinstance(value, (list, tuple)) else mine[key] == value
            else:
                assert mine[key] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("lanes", [1, 3])
def test_64_clients_on_50_tasks_get_the_answers_of_the_engine_alone(small, lanes):
    kinds = ["classification", "multilabel", "regression", "span"]
    names = [f"task-{i}" for i in range(TASKS)]
    for i, name in enumerate(names):
        small.put(name, seed=i, kind=kinds[i % 4 if i % 5 else 0], pair=i % 7 == 0, size=(3, 4, 8)[i % 3])
    alone = small.alone(*names)
    about = {name: alone.residents[name].task for name in names}
    got = []

    async def client(number, http):
        draw = random.Random(number)
        for _ in range(4):
            rows = [(draw.choice(names), text_of(draw), text_of(draw, 40)) for _ in range(draw.randint(1, 8))]
            if draw.random() < 0.5:
                name = rows[0][0]
                pairs = {"pairs": [two for _, _, two in rows]} if len(about[name].text) == 2 else {}
                body = {"texts": [one for _, one, _ in rows], **pairs}
                answer = (await http.post(f"/v1/tasks/{name}/predict", json=body)).json()
                got.extend((name, one, two, p) for (_, one, two), p in zip(rows, answer["predictions"], strict=True))
            else:
                body = [
                    {"task": name, "text": one, **({"pair": two} if len(about[name].text) == 2 else {})}
                    for name, one, two in rows
                ]
                answer = (await http.post("/v1/predict", json={"rows": body})).json()
                for (name, one, two), p in zip(rows, answer["predictions"], strict=True):
                    assert (p.pop("task"), p.pop("version")) == (name, 1)
                    got.append((name, one, two, p))

    async def run():
        async with running(small, lanes=lanes) as service:
            app = create_app(service, page=False)
            app.router.lifespan_context = _no_life
            async with calling(app) as http:
                await asyncio.gather(*(client(number, http) for number in range(CLIENTS)))
            return service.numbers()

    numbers = asyncio.run(run())
    assert len(got) > 4 * CLIENTS
    assert numbers["rows"] >= len(got)  # windows of long documents are rows too
    assert numbers["batches"] < len(got) / 4, "rows of many requests should have shared batches"
    for name, one, two, found in got:
        examples = Examples([one], [two] if len(about[name].text) == 2 else None)
        assert_same([found], alone.predict([(name, examples)])[0])


def test_on_a_cpu_each_core_has_a_lane_with_one_thread_of_its_own(small, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    small.put("a")
    service = BankService(small.bank, small.engine())
    assert (service.lanes, service.batching.lanes, service.batching.budget) == (3, 3, 1024)
    one = BankService(small.bank, small.engine(), lanes=1)
    assert (one.lanes, one.batching.budget) == (1, one.engine.tokens_at_once)


def test_lanes_compute_at_the_same_time(small):
    small.put("a")
    meeting = threading.Barrier(2, timeout=PATIENCE)

    async def run():
        async with running(small, lanes=2) as service:
            compute = service.engine.compute
            service.engine.compute = lambda *given: (meeting.wait(), compute(*given))[1]
            service.batching.budget = 1  # a row a batch
            answers = await asyncio.gather(*(service.predict([Ask("a", ["why"])]) for _ in range(2)))
            return [one.predictions for (one,) in answers]

    first, second = asyncio.run(run())
    assert first == second


class _no_life:
    """The service runs already."""

    def __init__(self, app):
        pass

    async def __aenter__(self):
        pass

    async def __aexit__(self, *error):
        pass


def test_rows_that_wait_together_share_a_batch(small):
    small.put("a", 0)
    small.put("b", 1)

    async def run():
        async with running(small) as service:
            gate, first = await occupied(service)
            rest = [asyncio.ensure_future(service.predict([Ask(n, ["the cat", "dog"])])) for n in "abab"]
            await until(lambda: service.batching.ready == 28)
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
            await until(lambda: service.batching.ready == 5)
            done = first.done()
            gate.opened.set()
            await asyncio.gather(first, second)
            return done

    assert asyncio.run(run()) is False


def test_a_cancelled_request_leaves_the_queue(small):
    small.put("a")

    async def run():
        async with running(small) as service:
            gate, first = await occupied(service)
            second = asyncio.ensure_future(service.predict([Ask("a", ["the cat sat"])]))
            await until(lambda: service.batching.ready == 5)
            second.cancel()
            await asyncio.wait([second])
            left = service.batching.waiting
            gate.opened.set()
            await first
            return left, service.numbers()["rows"]

    assert asyncio.run(run()) == (0, 1)


def test_overload_is_answered_at_once_and_the_rest_as_if_nothing_were(small):
    small.put("a")
    small.put("b", 1)

    async def run():
        async with running(small, queue=64) as service:
            gate, first = await occupied(service)
            kept, refused = [], []
            for _ in range(30):
                one = asyncio.ensure_future(service.predict([Ask("a", ["the cat sat"])]))
                await until(lambda one=one: one.done() or service.batching.ready == 5 * len(kept) + 5)
                (refused if one.done() else kept).append(one)
            other = asyncio.ensure_future(service.predict([Ask("b", ["why"])]))  # there is room for another task
            await until(lambda: other.done() or service.batching.ready > 5 * len(kept))
            assert not other.done()
            most = service.batching.waiting
            gate.opened.set()
            found = await asyncio.gather(first, other, *kept)
            return most, [one.exception() for one in refused], found

    most, refused, found = asyncio.run(run())
    assert most <= 64
    assert refused
    assert all(error.code == "overloaded" and 1 <= error.retry_after <= 60 for error in refused)
    assert len({str(answer.predictions) for answers in found[2:] for answer in answers}) == 1


def test_a_refused_request_counts_none_of_its_rows(small):
    small.put("a")
    small.put("b", 1)

    async def run():
        async with running(small, queue=40) as service:
            gate, first = await occupied(service)
            with pytest.raises(Refusal, match="Too much is waiting"):
                await service.predict([Ask("a", ["the cat"]), Ask("b", ["the cat sat on the mat"] * 9)])
            left = service.batching.waiting
            gate.opened.set()
            await first
            return left

    assert asyncio.run(run()) == 0


def test_a_flooding_task_does_not_hold_up_another(small):
    small.put("flood")
    small.put("other", 1)
    batches = threading.Semaphore(0)

    async def run():
        async with running(small) as service:
            service.batching.budget = 64  # eight rows a batch
            compute = service.engine.compute
            service.engine.compute = lambda *given: batches.acquire(timeout=PATIENCE) and compute(*given)
            texts = ["the cat sat on the mat"] * 40
            flood = [asyncio.ensure_future(service.predict([Ask("flood", texts)])) for _ in range(5)]
            await until(lambda: service.batching.ready >= 1500)
            other = asyncio.ensure_future(service.predict([Ask("other", texts[:2])]))
            await until(lambda: "other" in str(list(service.batching._lines)))
            batches.release(2)  # the one under way, and the next
            found = await asyncio.wait_for(other, PATIENCE)
            waiting = not any(one.done() for one in flood)
            batches.release(100)
            await asyncio.gather(*flood)
            return waiting, len(found[0].predictions)

    assert asyncio.run(run()) == (True, 2)


def test_one_bad_text_fails_alone(small):
    small.put("a")

    async def run():
        async with running(small) as service:
            asks = [[Ask("a", ["the cat"])], [Ask("a", ["\ud800"])], [Ask("a", ["why"])]]
            return await asyncio.gather(*map(service.predict, asks), return_exceptions=True)

    good, bad, fine = asyncio.run(run())
    assert bad.code == "bad_request"
    assert "not a text that can be tokenised" in bad.message
    assert len(good[0].predictions) == len(fine[0].predictions) == 1


def test_a_task_that_cannot_be_computed_fails_alone(small):
    small.put("good")
    small.put("bad", 1)

    async def run():
        async with running(small) as service:
            compute = service.engine.compute
            bad = service.shelf.find("bad").known

            def failing(tokens, tasks):
                if bad in tasks:
                    raise PackageDamaged("bad@1 is not what was written; restore it.")
                return compute(tokens, tasks)

            service.engine.compute = failing
            asks = [[Ask("good", ["the cat"])], [Ask("bad", ["why"])], [Ask("good", ["why"]), Ask("bad", ["why"])]]
            return await asyncio.gather(*map(service.predict, asks), return_exceptions=True)

    good, bad, both = asyncio.run(run())
    assert len(good[0].predictions) == 1
    assert bad.code == both.code == "damaged"


def test_an_unforeseen_failure_is_internal_and_the_service_goes_on(small, caplog):
    small.put("a")

    def fail(*given):
        raise ZeroDivisionError("a secret")

    async def run():
        async with running(small) as service:
            compute, service.engine.compute = service.engine.compute, fail
            with pytest.raises(Refusal) as refused:
                await service.predict([Ask("a", ["a secret"])])
            service.engine.compute = compute
            return refused.value, await service.predict([Ask("a", ["why"])])

    refused, found = asyncio.run(run())
    assert refused.code == "internal"
    lines = [JsonLines().format(record) for record in caplog.records]
    assert any('"problem": "ZeroDivisionError"' in line and "test_service.py" in line for line in lines)
    assert "secret" not in str([refused.message, *lines])
    assert len(found[0].predictions) == 1


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (Ask("one", ["a"], ["b"]), "reads one text a row; give no pairs"),
        (Ask("two", ["a"]), "reads two texts a row"),
        (Ask("question", ["a"]), "give pairs too"),
    ],
)
def test_texts_that_do_not_fit_the_task_are_refused(small, ask, said):
    small.put("one")
    small.put("two", pair=True)
    small.put("question", kind="span")

    async def run():
        async with running(small) as service:
            await service.predict([ask])

    with pytest.raises(Refusal, match=said) as refused:
        asyncio.run(run())
    assert refused.value.code == "bad_request"


def test_when_it_stops_it_answers_what_is_queued_and_refuses_the_rest(small):
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


def test_a_task_is_put_in_while_a_batch_is_computed(small):
    small.put("a")

    async def run():
        async with running(small) as service:
            gate, first = await occupied(service)
            await asyncio.to_thread(small.put, "b", 1)
            await until(lambda: service.shelf.find("b") is not None)
            waited = not first.done()
            gate.opened.set()
            await first
            return waited

    assert asyncio.run(run())


def evicted(service, name):
    """Take a task's slot out of memory; gives what the engine knows of it."""
    known, slots = service.shelf.find(name).known, service.engine.slots
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
            await until(lambda: service.batching.waiting)
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
            await until(lambda: not service.batching.waiting)
            await asyncio.to_thread(service._loader.submit(lambda: None).result)
            return found, service.engine.slots._ahead, known.users

    found, ahead, users = asyncio.run(run())
    assert isinstance(found, asyncio.CancelledError) if end == "cancelled" else found.code == end
    assert (ahead, users) == ({}, 0)


def test_a_request_that_asks_nothing_is_answered(small):
    small.put("a")

    async def run():
        async with running(small) as service:
            return await asyncio.wait_for(service.predict([Ask("a", []), Ask("a", ["why"])]), PATIENCE)

    assert [len(answer.predictions) for answer in asyncio.run(run())] == [0, 1]


def test_a_request_of_which_one_task_fails_is_refused_at_once_and_leaves_the_queue(small):
    small.put("a")
    small.put("b", 1)

    async def run():
        async with running(small) as service:
            gate, first = await occupied(service)
            with pytest.raises(Refusal) as refused:  # while the device is held
                await asyncio.wait_for(service.predict([Ask("a", ["why"]), Ask("b", ["\ud800"])]), PATIENCE / 2)
            left = service.batching.waiting
            gate.opened.set()
            await first
            return refused.value.code, left

    assert asyncio.run(run()) == ("bad_request", 0)


def test_it_starts_once_stops_more_than_once_and_does_not_start_again(small):
    small.put("a")

    async def run():
        async with running(small) as service:
            await service.start()
            assert len(service._threads) == 1
            found = await service.predict([Ask("a", ["why"])])
            await asyncio.gather(service.stop(), service.stop())
            with pytest.raises(RuntimeError, match="make another"):
                await service.start()
            never = BankService(small.bank, small.engine())
            await never.stop()
            return found

    assert len(asyncio.run(run())[0].predictions) == 1


def test_who_waits_in_a_loop_that_has_ended_holds_up_nobody(small):
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
