"""Claims about the app over a service that computes nothing: what is answered and logged, from start to stop."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest

from adapterbank.serving.http import telemetry
from adapterbank.serving.http.app import create_app
from adapterbank.serving.service.service import BankService
from serving.dummy import Dummy, ask, calling, code, post
from serving.small_bank import until


@pytest.fixture
def app():
    return create_app(Dummy(), page=False)


def test_an_error_is_reported_without_its_cause_and_logged_without_the_text(app, lines):
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
def test_a_valid_request_id_is_kept_and_any_other_replaced(app, given, kept):
    found = ask(app, "GET", "/healthz", headers={"x-request-id": given}).headers["x-request-id"]
    assert (found == given) is kept
    assert len(found) == 32 or kept


def test_a_stopping_server_refuses_new_requests_and_answers_the_others():
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


def test_the_log_names_the_tasks_that_answered_and_nothing_else_of_a_request(app, caplog):
    rows = [{"task": task, "text": "a secret"} for task in ("length", "length", "other")]
    with caplog.at_level("INFO", "adapterbank.serving"):
        post(app, "/v1/tasks/length/predict", {"text": "a secret"})
        post(app, "/v1/predict", {"rows": rows[:2]})
        post(app, "/v1/predict", {"rows": rows})
        post(app, "/v1/predict", {"rows": [*rows, {"task": "length@2", "text": "a secret"}]})
        post(app, "/v1/predict", {"rows": [{"task": f"length@{i}", "text": "a secret"} for i in (1, 2)]})
        post(app, "/v1/tasks/a secret/predict", {"text": "abc"})
    logged = [record.fields for record in caplog.records if record.getMessage() == "request"]
    assert [fields.get("task") for fields in logged] == ["length@1", "length@1", "2 tasks", "2 tasks", "length", None]
    assert "secret" not in str(logged)


def test_a_failed_batch_is_logged_with_the_id_of_its_request(small, lines):
    small.put("a")
    service = BankService(small.bank, small.engine(), lanes=1)

    def broken(*given):
        raise RuntimeError("cannot compute 'a secret'")

    service.engine.launch = broken

    async def run():
        async with calling(create_app(service, page=False)) as client:
            await until(lambda: service.ready)
            path, body = "/v1/tasks/a/predict", {"text": "a secret"}
            return [await client.post(path, json=body, headers={"X-Request-Id": f"r-{i}"}) for i in range(2)]

    answers = asyncio.run(run())
    assert [answer.json()["error"]["request_id"] for answer in answers] == ["r-0", "r-1"]
    failed = [line for line in lines() if line["event"] == "failed"]
    assert [(line["request_id"], line["problem"]) for line in failed] == [
        ("r-0", "RuntimeError"),
        ("r-1", "RuntimeError"),
    ]
    assert "secret" not in json.dumps(lines())
