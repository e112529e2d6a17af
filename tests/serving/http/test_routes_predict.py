"""Claims about the routes that predict, over a service that computes nothing: what is answered and what is refused."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest
from pydantic import ValidationError

from adapterbank.serving.http import bodies
from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.schemas import PredictRequest, RowsRequest
from adapterbank.serving.service.protocol import Limits, Refusal
from serving.dummy import Dummy, ask, code, post
from serving.small_bank import until


@pytest.fixture
def app():
    return create_app(Dummy(), page=False)


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
        ({"texts": ["a"], "abstain": 1.01}, "bad_request"),
        ({"texts": ["a"], "abstain": -0.1}, "bad_request"),
        ({"texts": ["a"], "abstain": "0.8"}, "bad_request"),
        ({"texts": ["a"], "abstain": True}, "bad_request"),
        ({"texts": ["a"], "abstain": None}, "bad_request"),
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
def test_invalid_requests_are_refused_with_their_code(body, expected):
    app = create_app(Dummy(), page=False, limits=Limits(body=900, texts=5, characters=100))
    assert code(post(app, "/v1/tasks/length/predict", body)) == expected


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"texts": ["\\ud800"]}', b'{"texts": [NaN]}', b"[" * 500])
def test_a_body_that_is_not_json_is_refused(app, body):
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


def test_reading_stops_as_soon_as_a_body_is_too_large():
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
def test_validation_stops_at_the_first_mistakes(form, body):
    with pytest.raises(ValidationError) as found:
        form.model_validate_json(json.dumps(body))
    assert found.value.error_count() <= 3


def test_only_the_number_of_very_many_mistakes_is_reported(app):
    answer = post(app, "/v1/predict", {str(i): i for i in range(1000)})
    assert code(answer) == "bad_request"
    assert answer.json()["error"]["message"] == "The body has 1,001 errors; see /docs."


@pytest.mark.parametrize("pause", [0.2, 0.03], ids=["stands still", "trickles"])
def test_a_body_that_stalls_is_refused(app, monkeypatch, pause):
    monkeypatch.setattr(bodies, "BODY_TIMEOUT", 0.1)
    sent = []

    async def stream():
        for _ in range(50):
            await asyncio.sleep(pause)
            sent.append(1)
            yield b"x"

    headers = {"content-type": "application/json"}
    assert code(ask(app, "POST", "/v1/predict", content=stream(), headers=headers)) == "too_slow"
    assert len(sent) < 10


def test_a_compressed_body_is_refused(app):
    packed = {"content": gzip.compress(b'{"text": "abc"}'), "headers": {"content-encoding": "gzip"}}
    answer = ask(app, "POST", "/v1/tasks/length/predict", **packed)
    assert (code(answer), "'gzip'; send the body uncompressed" in answer.text) == ("unsupported", True)


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
def test_errors_of_the_framework_have_the_same_shape(app, method, path, expected):
    assert code(ask(app, method, path)) == expected


def test_a_wrong_method_is_answered_with_the_allowed_ones(app):
    assert ask(app, "PUT", "/v1/tasks/length").headers["allow"] == "DELETE, GET"
    assert ask(app, "DELETE", "/v1/predict").headers["allow"] == "POST"


def test_overload_is_429_with_the_seconds_to_wait():
    service = Dummy()

    async def full(asks):
        raise Refusal("overloaded", "Too much is waiting.", retry_after=2.2)

    service.predict = full
    answer = post(create_app(service, page=False), "/v1/tasks/length/predict", {"text": "a"})
    assert (answer.status_code, code(answer), answer.headers["retry-after"]) == (429, "overloaded", "3")


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


def test_a_request_is_cancelled_when_its_client_disconnects():
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
    assert sent == []


def test_the_confidence_that_is_asked_for_reaches_the_service():
    service = Dummy()
    app = create_app(service, page=False)
    assert post(app, "/v1/tasks/length/predict", {"text": "abc", "abstain": 0.8}).status_code == 200
    assert post(app, "/v1/tasks/length/predict", {"text": "abc", "abstain": 1}).status_code == 200
    rows = [{"task": "length", "text": "a"}, {"task": "other", "text": "b"}]
    assert post(app, "/v1/predict", {"rows": rows, "abstain": 0.5}).status_code == 200
    assert code(post(app, "/v1/predict", {"rows": rows, "abstain": 2})) == "bad_request"
    assert [ask.abstain for ask in service.asked] == [0.8, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/tasks/length/predict",
            {"text": "a", "txets": ["a"]},
            "txets: there is no such field; did you mean 'texts'? "
            "The fields are texts, pairs, text, pair, best, abstain, explain.",
        ),
        (
            "/v1/predict",
            {"rows": [{"task": "length", "text": "a"}, {"task": "length", "text": "a", "pairs": "b"}]},
            "rows.1.pairs: there is no such field; did you mean 'pair'? The fields are task, text, pair.",
        ),
        (
            "/v1/predict",
            {"rows": [{"task": "length", "text": "a"}], "zzz": 1},
            "zzz: there is no such field. The fields are rows, best, abstain, explain.",
        ),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest_known_one(app, path, body, message):
    answer = ask(app, "POST", path, json=body)
    assert code(answer) == "bad_request"
    assert answer.json()["error"]["message"] == message


def test_explanations_may_take_as_many_rows_as_a_request_may_have_texts():
    service = Dummy()
    app = create_app(service, page=False, limits=Limits(texts=7))
    assert post(app, "/v1/tasks/length/predict", {"text": "a b", "explain": True}).status_code == 200
    row = {"task": "length", "text": "a b"}
    assert post(app, "/v1/predict", {"rows": [row], "explain": True}).status_code == 200
    assert post(app, "/v1/predict", {"rows": [row]}).status_code == 200
    assert [ask.explain for ask in service.asked] == [7, 7, 0]
    assert code(post(app, "/v1/tasks/length/predict", {"text": "a b", "explain": 1})) == "bad_request"
