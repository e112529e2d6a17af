"""The routes, over a service that computes nothing: what is taken, what is refused, and how that is told."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest
from pydantic import ValidationError

from adapterbank.serving import routes_predict, watch
from adapterbank.serving.app import create_app
from adapterbank.serving.keys import Keys, Pace
from adapterbank.serving.terms import CODES, Limits, Refusal
from adapterbank.serving.wire import PredictRequest, RowsRequest
from serving.dummy import Dummy, ask, calling
from serving.small_bank import until


@pytest.fixture
def app():
    return create_app(Dummy(), page=False)


def post(app, path, value, **options):
    return ask(app, "POST", path, json=value, **options)


def code(answer):
    """Give an error's code, after a look at its shape."""
    error = answer.json()["error"]
    assert answer.json().keys() == {"error"}
    assert error.keys() == {"code", "message", "request_id"}
    assert error["request_id"] == answer.headers["x-request-id"]
    assert error["message"].endswith((".", "/docs"))
    assert "Traceback" not in answer.text
    assert CODES[error["code"]] == answer.status_code
    return error["code"]


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


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, "bad_request"),
        ({"texts": []}, "bad_request"),
        ({"texts": "abc"}, "bad_request"),
        ({"texts": ["a"], "text": "a"}, "bad_request"),
        ({"texts": ["a", 1]}, "bad_request"),
        ({"texts": [None]}, "bad_request"),
        ({"texts": ["a"], "pairs": ["b", "c"]}, "bad_request"),
        ({"texts": ["a"], "pair": "b"}, "bad_request"),
        ({"texts": ["a"], "best": -1}, "bad_request"),
        ({"texts": ["a"], "best": "1"}, "bad_request"),
        ({"texts": ["a"], "more": 1}, "bad_request"),
        ({"texts": ["a"] * 6}, "too_many_texts"),
        ({"texts": ["a" * 101]}, "text_too_long"),
        ({"texts": ["a"], "pairs": ["a" * 101]}, "text_too_long"),
        ({"texts": ["a" * 100] * 5, "pairs": ["b" * 100] * 5}, "too_large"),
        ([], "bad_request"),
        ("text", "bad_request"),
        (None, "bad_request"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_its_code(body, expected):
    app = create_app(Dummy(), page=False, limits=Limits(body=900, texts=5, characters=100))
    assert code(post(app, "/v1/tasks/length/predict", body)) == expected


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"texts": ["\\ud800"]}', b'{"texts": [NaN]}', b"[" * 500])
def test_a_body_that_is_no_json_is_refused(app, body):
    headers = {"content-type": "application/json"}
    assert code(ask(app, "POST", "/v1/tasks/length/predict", content=body, headers=headers)) == "bad_request"
    assert code(ask(app, "POST", "/v1/predict", content=body, headers=headers)) == "bad_request"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], "bad_request"),
        ([{"task": "length"}], "bad_request"),
        ([{"text": "a"}], "bad_request"),
        ([{"task": "length", "text": "a"}] * 6, "too_many_texts"),
        ([{"task": "length", "text": "a" * 101}], "text_too_long"),
        ([{"task": "length", "text": "a"}, {"task": "none", "text": "a"}], "unknown_task"),
    ],
)
def test_rows_that_cannot_be_answered_are_refused_with_their_code(rows, expected):
    app = create_app(Dummy(), page=False, limits=Limits(texts=5, characters=100))
    assert code(post(app, "/v1/predict", {"rows": rows})) == expected


def test_a_body_is_given_up_as_soon_as_it_is_too_large():
    app = create_app(Dummy(), page=False, limits=Limits(body=1000))
    sent = []

    async def stream():
        for _ in range(100):
            sent.append(1)
            yield b"x" * 100

    headers = {"content-type": "application/json"}
    answer = ask(app, "POST", "/v1/predict", content=stream(), headers=headers)
    assert code(answer) == "too_large"
    assert len(sent) <= 12
    assert code(ask(app, "POST", "/v1/predict", content=b"x" * 1001, headers=headers)) == "too_large"


@pytest.mark.parametrize(
    ("form", "body"),
    [(PredictRequest, {"texts": [1] * 1000}), (PredictRequest, {"texts": ["a"], "pairs": [None] * 1000}),
     (RowsRequest, {"rows": [{}] * 1000})],
)  # fmt: skip
def test_a_body_full_of_mistakes_is_read_to_the_first(form, body):
    with pytest.raises(ValidationError) as found:
        form.model_validate_json(json.dumps(body))
    assert found.value.error_count() <= 3


def test_of_very_many_mistakes_only_their_number_is_told(app):
    answer = post(app, "/v1/predict", {str(i): i for i in range(1000)})
    assert code(answer) == "bad_request"
    assert answer.json()["error"]["message"] == "The body has 1,001 mistakes; see /docs."


@pytest.mark.parametrize("pause", [0.2, 0.03], ids=["stands still", "trickles"])
def test_a_body_that_does_not_come_is_given_up(app, monkeypatch, pause):
    monkeypatch.setattr(routes_predict, "WHOLE", 0.1)
    sent = []

    async def stream():
        for _ in range(50):
            await asyncio.sleep(pause)
            sent.append(1)
            yield b"x"

    headers = {"content-type": "application/json"}
    assert code(ask(app, "POST", "/v1/predict", content=stream(), headers=headers)) == "too_slow"
    assert len(sent) < 10


def test_another_content_type_is_refused(app):
    headers = {"content-type": "text/csv"}
    assert code(ask(app, "POST", "/v1/predict", content=b"{}", headers=headers)) == "unsupported"


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nothing", "not_found"),
        ("GET", "/v1", "not_found"),
        ("PUT", "/v1/tasks", "method_not_allowed"),
        ("GET", "/v1/predict", "method_not_allowed"),
        ("GET", "/v1/tasks/none", "unknown_task"),
        ("POST", "/v1/tasks/length/rollback", "conflict"),
    ],
)
def test_what_the_framework_refuses_has_the_same_shape(app, method, path, expected):
    assert code(ask(app, method, path)) == expected


def test_a_method_that_is_not_taken_is_answered_with_those_that_are(app):
    assert ask(app, "PUT", "/v1/tasks/length").headers["allow"] == "DELETE, GET"
    assert ask(app, "DELETE", "/v1/predict").headers["allow"] == "POST"


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
    watch.log_to(stream)
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
        **{"route": "/v1/tasks/{task}/predict", "status": 200, "rows": 2},
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


def test_overload_is_429_with_the_seconds_to_wait():
    service = Dummy()

    async def full(asks):
        raise Refusal("overloaded", "Too much is waiting.", retry_after=2.2)

    service.predict = full
    answer = post(create_app(service, page=False), "/v1/tasks/length/predict", {"text": "a"})
    assert (answer.status_code, code(answer), answer.headers["retry-after"]) == (429, "overloaded", "3")


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


# --- keys ---------------------------------------------------------------------------------------------------


@pytest.fixture
def locked(tmp_path, monkeypatch):
    monkeypatch.setattr("adapterbank.serving.app.Pace", lambda: Pace(lambda: 0.0))  # all in one moment
    keys = Keys(tmp_path / "keys.json")
    secrets = {
        "reader": keys.add("reader", ["predict"]),
        "one": keys.add("one", ["predict"], tasks=["length"]),
        "root": keys.add("root", ["admin"]),
        "slow": keys.add("slow", ["predict"], rate=1),
    }
    app = create_app(Dummy(), keys=keys, page=False)
    return lambda name, method, path, **options: ask(
        app, method, path, headers={"authorization": f"Bearer {secrets.get(name, name)}"}, **options
    )


@pytest.mark.parametrize("path", ["/v1/tasks", "/v1/tasks/length", "/metrics", "/docs", "/openapi.json", "/nothing"])
def test_with_keys_on_nothing_is_told_without_one(locked, path):
    answer = locked("wrong", "GET", path)
    assert code(answer) == "unauthorized"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert locked("reader", "GET", path).status_code in (200, 404)


def test_health_needs_no_key(locked):
    assert [locked("wrong", "GET", path).status_code for path in ("/healthz", "/readyz")] == [200, 200]


def test_a_key_does_what_its_scope_says(locked):
    assert locked("reader", "POST", "/v1/tasks/length/predict", json={"text": "a"}).status_code == 200
    assert code(locked("reader", "DELETE", "/v1/tasks/length")) == "forbidden"
    assert code(locked("reader", "POST", "/v1/tasks/length/rollback")) == "forbidden"
    assert code(locked("reader", "POST", "/v1/tasks/length/train")) == "forbidden"
    assert code(locked("reader", "GET", "/v1/runs")) == "forbidden"
    assert locked("root", "DELETE", "/v1/tasks/length").status_code == 200


def test_a_key_for_one_task_asks_no_other(locked):
    assert locked("one", "POST", "/v1/tasks/length@1/predict", json={"text": "a"}).status_code == 200
    assert code(locked("one", "POST", "/v1/tasks/other/predict", json={"text": "a"})) == "forbidden"
    rows = [{"task": "length", "text": "a"}, {"task": "other", "text": "a"}]
    assert code(locked("one", "POST", "/v1/predict", json={"rows": rows})) == "forbidden"
    assert locked("one", "POST", "/v1/predict", json={"rows": rows[:1]}).status_code == 200


def test_a_key_for_one_task_sees_no_other(locked):
    assert [task["name"] for task in locked("one", "GET", "/v1/tasks").json()["tasks"]] == ["length"]
    assert [task["name"] for task in locked("reader", "GET", "/v1/tasks").json()["tasks"]] == Dummy().names
    assert locked("one", "GET", "/v1/tasks/length@1").status_code == 200
    assert code(locked("one", "GET", "/v1/tasks/other@1")) == "forbidden"


def test_a_key_for_some_tasks_is_not_told_the_names_of_others(tmp_path):
    keys = Keys(tmp_path / "keys.json")
    held, free = keys.add("held", ["predict"], tasks=["gone"]), keys.add("free", ["predict"])
    app = create_app(Dummy(), keys=keys, page=False)
    told = [ask(app, "GET", "/v1/tasks/gone", headers={"authorization": f"Bearer {secret}"}) for secret in (held, free)]
    assert [code(answer) for answer in told] == ["unknown_task"] * 2
    assert told[0].json()["error"]["message"] == "There is no such task in the bank; see GET /v1/tasks."
    assert "'gone' is not a task" in told[1].json()["error"]["message"]


@pytest.mark.parametrize("end", ["%0A", "%0D%0A", "%00", "%7F"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/tasks/length/rollback"), ("POST", "/v1/tasks/length/train"), ("POST", "/v1/predict"),
     ("DELETE", "/v1/tasks/length"), ("GET", "/v1/runs"), ("GET", "/v1/tasks")],
)  # fmt: skip
def test_an_address_with_a_line_end_reaches_no_route(locked, method, path, end):
    assert code(locked("root", method, path + end)) == "not_found"
    assert code(locked("reader", method, path + end)) == "not_found"


def test_what_nobody_thought_of_is_for_admin(locked):
    assert code(locked("reader", "POST", "/v1/tasks/length/erase")) == "forbidden"
    assert code(locked("reader", "PUT", "/v1/tasks")) == "forbidden"
    assert code(locked("root", "POST", "/v1/tasks/length/erase")) == "not_found"


def test_a_key_that_asks_too_often_is_told_when_to_come_again(locked):
    assert locked("slow", "GET", "/v1/tasks").status_code == 200
    answer = locked("slow", "GET", "/v1/tasks")
    assert code(answer) == "rate_limited"
    assert answer.headers["retry-after"] == "60"


# --- the document -------------------------------------------------------------------------------------------


def test_the_document_states_the_limits_and_the_errors(app):
    document = ask(app, "GET", "/openapi.json").json()
    route = document["paths"]["/v1/tasks/{task}/predict"]["post"]
    (texts, _) = route["requestBody"]["content"]["application/json"]["schema"]["oneOf"]
    assert texts["properties"]["texts"]["maxItems"] == Limits().texts
    assert {"200", "404", "413", "415", "422", "429", "500", "503"} <= route["responses"].keys()


def test_the_page_of_routes_names_them_all_and_fetches_nothing(app):
    answer = ask(app, "GET", "/docs")
    document = ask(app, "GET", "/openapi.json").json()
    for path in document["paths"]:
        assert f" {path}</code>" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert [part for part in ("://", "<script", "<link", "<img") if part in answer.text] == []


def test_an_address_is_never_led_on_to_another(app):
    answer = ask(app, "GET", "/v1/tasks/", headers={"host": "evil.example"})
    assert code(answer) == "not_found"
    assert "location" not in answer.headers
