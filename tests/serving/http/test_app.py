"""The routes, over a service that computes nothing: what is answered, logged and counted, from a start to a stop."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest

from adapterbank.serving.http import telemetry
from adapterbank.serving.http.app import create_app
from serving.dummy import Dummy, ask, calling, code, post
from serving.small_bank import until


@pytest.fixture
def app():
    return create_app(Dummy(), page=False)


def test_texts_are_answered_in_their_order(app):
    answer = post(app, "/v1/tasks/length/predict", {"texts": ["a", "abc", "ab"]})
    assert answer.status_code == 200
    assert answer.json() == {
        "task": "length",
        "version": 1,
        "predictions": [{"value": 1.0}, {"value": 3.0}, {"value": 2.0}],
    }


def test_one_text_may_be_given_by_itself(app):
    assert post(app, "/v1/tasks/length/predict", {"text": "abc"}).json()["predictions"] == [{"value": 3.0}]


def test_pairs_and_best_reach_the_service():
    service = Dummy()
    app = create_app(service, page=False)
    post(app, "/v1/tasks/length@3/predict", {"texts": ["a", "b"], "pairs": ["c", "d"], "best": 2})
    post(app, "/v1/tasks/length/predict", {"text": "a", "pair": "c"})
    first, second = service.asked
    assert (first.task, first.texts, first.pairs, first.best) == ("length@3", ["a", "b"], ["c", "d"], 2)
    assert (second.texts, second.pairs, second.best) == (["a"], ["c"], 0)


def test_rows_of_many_tasks_are_answered_in_the_order_of_the_rows(app):
    rows = [("length", "a"), ("other", "ab"), ("length", "abc"), ("other", "abcd")]
    answer = post(app, "/v1/predict", {"rows": [{"task": task, "text": text} for task, text in rows]})
    assert [(row["task"], row["version"], row["value"]) for row in answer.json()["predictions"]] == [
        (task, 1, float(len(text))) for task, text in rows
    ]


def test_rows_of_one_task_go_to_the_service_together():
    service = Dummy()
    rows = [{"task": "length", "text": "a"}, {"task": "other", "text": "b"}, {"task": "length", "text": "c"}]
    post(create_app(service, page=False), "/v1/predict", {"rows": rows})
    assert [(one.task, one.texts) for one in service.asked] == [("length", ["a", "c"]), ("other", ["b"])]


def test_tasks_are_listed_and_told(app):
    assert [task["name"] for task in ask(app, "GET", "/v1/tasks").json()["tasks"]] == Dummy().names
    assert ask(app, "GET", "/v1/tasks/length").json()["versions"] == [1]
    assert ask(app, "DELETE", "/v1/tasks/length").json() == {"removed": "length"}


def test_a_failure_is_told_without_its_cause_and_logged_without_the_text(app, lines):
    answer = post(app, "/v1/tasks/broken/predict", {"text": "a secret"})
    assert code(answer) == "internal"
    assert "secret" not in answer.text
    failed = next(line for line in lines() if line["event"] == "failed")
    assert (failed["problem"], failed["request_id"]) == ("RuntimeError", answer.headers["x-request-id"])
    assert any("dummy.py" in place for place in failed["trace"])
    assert "secret" not in json.dumps(lines())


@pytest.fixture
def lines():
    stream = io.StringIO()
    before = [
        (logging.getLogger(name), vars(logging.getLogger(name)).copy()) for name in ("adapterbank.serving", "uvicorn")
    ]
    telemetry.log_to(stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    for logger, state in before:
        logger.handlers, logger.propagate = state["handlers"], state["propagate"]
        logger.setLevel(state["level"])


def test_a_request_is_logged_with_its_id_and_without_its_text(app, lines):
    post(app, "/v1/tasks/length/predict?text=secret", {"texts": ["a secret", "b"]}, headers={"x-request-id": "mine-1"})
    (line,) = lines()
    assert line.pop("ms") >= 0
    assert line.pop("time")
    assert line == {
        **{"level": "info", "event": "request", "request_id": "mine-1", "method": "POST"},
        **{"route": "/v1/tasks/{task}/predict", "status": 200, "rows": 2, "task": "length@1"},
    }


@pytest.mark.parametrize(("given", "kept"), [("a-B_1.2:3", True), ("x" * 65, False), ("a b", False), ("", False)])
def test_a_sane_request_id_is_kept_and_any_other_replaced(app, given, kept):
    found = ask(app, "GET", "/healthz", headers={"x-request-id": given}).headers["x-request-id"]
    assert (found == given) is kept
    assert len(found) == 32 or kept


def test_it_is_alive_before_it_is_ready():
    service = Dummy()
    service.ready = False
    app = create_app(service, page=False)
    assert ask(app, "GET", "/healthz").json() == {"status": "alive"}
    answer = ask(app, "GET", "/readyz")
    assert code(answer) == "not_ready"
    assert answer.headers["retry-after"] == "1"
    service.ready = True
    assert ask(app, "GET", "/readyz").json() == {"status": "ready"}


def test_while_it_stops_it_refuses_what_is_new_and_answers_the_rest():
    service = Dummy()
    app = create_app(service, page=False)

    async def run():
        async with calling(app) as client:
            waiting = asyncio.ensure_future(client.post("/v1/tasks/slow/predict", json={"text": "abc"}))
            await until(lambda: service.release is not None)
            app.state.draining = True
            new = await client.post("/v1/tasks/length/predict", json={"text": "abc"})
            ready = await client.get("/readyz")
            service.release.set()
            return await waiting, new, ready

    old, new, ready = asyncio.run(run())
    assert old.json()["predictions"] == [{"value": 3.0}]
    assert code(new) == code(ready) == "not_ready"
    assert new.headers["retry-after"] == "1"


def test_the_metrics_count_requests_batches_queue_and_slots(app):
    async def run():
        async with calling(app) as client:
            await client.post("/v1/tasks/length/predict", json={"text": "abc"})
            await client.post("/v1/tasks/none/predict", json={"text": "abc"})
            return (await client.get("/metrics")).text

    found = asyncio.run(run())
    for line in (
        'adapterbank_requests_total{route="/v1/tasks/{task}/predict",status="200"} 1.0',
        'adapterbank_requests_total{route="/v1/tasks/{task}/predict",status="404"} 1.0',
        'adapterbank_request_seconds_count{route="/v1/tasks/{task}/predict"} 2.0',
        "adapterbank_batch_fill_sum 0.5",
        "adapterbank_queue_tokens 7.0",
        "adapterbank_resident 2.0",
        "adapterbank_evictions_total 1.0",
        "adapterbank_loads_total 1.0",
    ):
        assert line in found


def test_the_log_names_the_tasks_that_answered_and_no_other_word_of_a_request(app, caplog):
    rows = [{"task": task, "text": "a secret"} for task in ("length", "length", "other")]
    with caplog.at_level("INFO", "adapterbank.serving"):
        post(app, "/v1/tasks/length/predict", {"text": "a secret"})
        post(app, "/v1/predict", {"rows": rows[:2]})
        post(app, "/v1/predict", {"rows": rows})
        post(app, "/v1/predict", {"rows": [*rows, {"task": "length@2", "text": "a secret"}]})
        post(app, "/v1/predict", {"rows": [{"task": f"length@{i}", "text": "a secret"} for i in (1, 2)]})
        post(app, "/v1/tasks/a secret/predict", {"text": "abc"})
    said = [record.fields for record in caplog.records if record.getMessage() == "request"]
    assert [fields.get("task") for fields in said] == ["length@1", "length@1", "2 tasks", "2 tasks", "length", None]
    assert "secret" not in str(said)


def test_a_long_list_of_tasks_is_packed_for_who_takes_that():
    app = create_app(Dummy([f"task{i}" for i in range(100)]), page=False)
    plain = ask(app, "GET", "/v1/tasks", headers={"accept-encoding": "identity"})
    for word in ("", "br", "notgzip", "gzip;q=0", "br, gzip; q=0.0 , deflate"):
        assert "content-encoding" not in ask(app, "GET", "/v1/tasks", headers={"accept-encoding": word}).headers
    for word in ("gzip", "GZIP", "gzip;q=0.5", "deflate, gzip;q=1.0, *;q=0.5"):
        assert "content-encoding" in ask(app, "GET", "/v1/tasks", headers={"accept-encoding": word}).headers
    packed = ask(app, "GET", "/v1/tasks", headers={"accept-encoding": "br, gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.json() == plain.json()  # unpacked by the client
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 8
    assert packed.headers["vary"] == plain.headers["vary"] == "Accept-Encoding"


def test_a_client_that_goes_away_takes_its_request_with_it():
    service = Dummy()
    app = create_app(service, page=False)
    sent = []

    async def run():
        body = b'{"text": "abc"}'
        left = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/tasks/slow/predict", "query_string": b""}
        scope |= {"headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http"}
        call = asyncio.ensure_future(app(scope, receive, send))
        await until(lambda: service.release is not None)
        left.set()
        await call

    asyncio.run(run())
    assert service.cancelled == 1
    assert sent[0]["status"] == 499


@pytest.mark.parametrize(("ready", "status"), [(True, 200), (False, 503)])
def test_health_may_be_asked_for_without_a_body(ready, status):
    service = Dummy()
    service.ready = ready
    app = create_app(service, page=False)
    assert [ask(app, "HEAD", path).status_code for path in ("/healthz", "/readyz")] == [200, status]
    assert set(app.openapi()["paths"]["/healthz"]) == {"get"}
