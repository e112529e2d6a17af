"""Claims about the service: any mix of tasks under any load is answered as by a plain engine."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace

import pytest

from adapterbank import runtime
from adapterbank.errors import PackageDamaged
from adapterbank.inference.engine import Engine
from adapterbank.serving.build import ServerSettings, build
from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.telemetry import JsonLines
from adapterbank.serving.service import service as service_module
from adapterbank.serving.service.protocol import Ask, Refusal
from adapterbank.tasks.spec import Examples
from serving.dummy import calling
from serving.small_bank import PATIENCE, assert_same, running, text_of

CLIENTS, TASKS = 64, 50


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


class _no_life:
    """The service runs already."""

    def __init__(self, app):
        pass

    async def __aenter__(self):
        pass

    async def __aexit__(self, *error):
        pass


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
            launch = service.engine.launch
            bad = service.registry.find("bad").handle

            def failing(tokens, tasks):
                if bad in tasks:
                    raise PackageDamaged("bad@1 is not what was written; restore it.")
                return launch(tokens, tasks)

            service.engine.launch = failing
            asks = [[Ask("good", ["the cat"])], [Ask("bad", ["why"])], [Ask("good", ["why"]), Ask("bad", ["why"])]]
            return await asyncio.gather(*map(service.predict, asks), return_exceptions=True)

    good, bad, both = asyncio.run(run())
    assert len(good[0].predictions) == 1
    assert bad.code == both.code == "damaged"


def test_an_error_while_reporting_an_error_ends_no_lane(small, caplog, monkeypatch):
    small.put("a")

    def fail(*given):
        raise OSError("the disk has gone")

    async def run():
        async with running(small) as service:
            launch, service.engine.launch = service.engine.launch, fail
            monkeypatch.setattr(service_module, "to_refusal", fail)
            with pytest.raises(Refusal) as refused:
                await asyncio.wait_for(service.predict([Ask("a", ["why"])]), PATIENCE)
            service.engine.launch = launch
            return refused.value, await service.predict([Ask("a", ["why"])]), service.alive

    refused, found, alive = asyncio.run(run())
    assert refused.code == "internal"
    assert len(found[0].predictions) == 1
    assert alive


def test_an_unexpected_error_is_internal_and_the_service_goes_on(small, caplog):
    small.put("a")

    def fail(*given):
        raise ZeroDivisionError("a secret")

    async def run():
        async with running(small) as service:
            launch, service.engine.launch = service.engine.launch, fail
            with pytest.raises(Refusal) as refused:
                await service.predict([Ask("a", ["a secret"])])
            service.engine.launch = launch
            return refused.value, await service.predict([Ask("a", ["why"])])

    refused, found = asyncio.run(run())
    assert refused.code == "internal"
    lines = [JsonLines().format(record) for record in caplog.records]
    assert any('"problem": "ZeroDivisionError"' in line and "test_service.py" in line for line in lines)
    assert "secret" not in str([refused.message, *lines])
    assert len(found[0].predictions) == 1


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (Ask("one", ["a"], ["b"]), "reads one text per row; give no pairs"),
        (Ask("two", ["a"]), "reads two texts per row"),
        (Ask("question", ["a"]), "give pairs too"),
        (Ask("question", ["a"], ["b"], abstain=0.8), "'question' is span, which has no probabilities"),
    ],
)
def test_texts_that_do_not_fit_the_task_are_refused(small, ask, message):
    small.put("one")
    small.put("two", pair=True)
    small.put("question", kind="span")

    async def run():
        async with running(small) as service:
            await service.predict([ask])

    with pytest.raises(Refusal, match=message) as refused:
        asyncio.run(run())
    assert refused.value.code == "bad_request"


def test_a_request_without_rows_is_answered(small):
    small.put("a")

    async def run():
        async with running(small) as service:
            return await asyncio.wait_for(service.predict([Ask("a", []), Ask("a", ["why"])]), PATIENCE)

    assert [len(answer.predictions) for answer in asyncio.run(run())] == [0, 1]


def test_an_uncertain_answer_is_null_and_the_others_are_as_before(small):
    small.put("way")
    texts = ["where is the cat", "who sat", "why", "the big dog"]

    async def run():
        async with running(small) as service:
            (sure,) = await service.predict([Ask("way", texts)])
            least = sorted(max(one["probabilities"].values()) for one in sure.predictions)[2]
            (found,) = await service.predict([Ask("way", texts, abstain=least - 1e-6)])
            return sure.predictions, found.predictions

    sure, found = asyncio.run(run())
    assert sum(one["label"] is None for one in found) == 2
    for one, before in zip(found, sure, strict=True):
        assert one["label"] in (None, before["label"])
        assert one["probabilities"] == before["probabilities"]


def test_the_requested_number_of_best_answers_is_returned(small):
    small.put("where", 0, kind="span")
    texts, pairs = ["where is the cat", "who sat"], ["the cat sat on the mat", "the big dog sat in the house"]

    async def run():
        async with running(small) as service:
            found = [await service.predict([Ask("where", texts, pairs, best)]) for best in (0, 2)]
            (wanted,) = service.engine.predict([(service.engine.slots.resident[0], Examples(texts, pairs))], best=2)
            return found, wanted

    (none, two), wanted = asyncio.run(run())
    assert all("best" not in one for one in none[0].predictions)
    assert [len(one["best"]) for one in two[0].predictions] == [2, 2]
    assert_same([{**one, "best": ()} for one in two[0].predictions], [replace(one, best=()) for one in wanted])


@pytest.mark.parametrize(("ahead", "expected"), [(3, "6"), (0, None)])
def test_a_server_with_a_gpu_uses_few_threads_for_tokenising(ahead, expected, small, monkeypatch):
    small.put("a")
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")  # so that it is as before afterwards
    monkeypatch.delenv("RAYON_NUM_THREADS")
    monkeypatch.setattr(runtime, "cores", lambda: 64)
    monkeypatch.setattr(Engine, "ahead", ahead)
    build(ServerSettings(str(small.bank.path), backbone=str(small.backbone.folder), device="cpu"))
    assert os.environ.get("RAYON_NUM_THREADS") == expected
