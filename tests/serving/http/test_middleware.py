"""Claims about the middleware: what each key may request, see and change, and how often."""

from __future__ import annotations

import pytest

from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.auth import Keys, RateLimiter
from serving.dummy import Dummy, ask, code


@pytest.fixture
def locked(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "adapterbank.serving.http.app.RateLimiter", lambda: RateLimiter(lambda: 0.0)
    )  # all in one moment
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
def test_a_server_with_keys_reveals_nothing_without_one(locked, path):
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


def test_a_key_for_one_task_cannot_use_another(locked):
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


def test_a_key_for_some_tasks_does_not_learn_the_names_of_others(tmp_path):
    keys = Keys(tmp_path / "keys.json")
    limited, free = keys.add("limited", ["predict"], tasks=["gone"]), keys.add("free", ["predict"])
    app = create_app(Dummy(), keys=keys, page=False)
    answers = [
        ask(app, "GET", "/v1/tasks/gone", headers={"authorization": f"Bearer {secret}"}) for secret in (limited, free)
    ]
    assert [code(answer) for answer in answers] == ["unknown_task"] * 2
    assert answers[0].json()["error"]["message"] == "There is no such task in the bank; see GET /v1/tasks."
    assert "'gone' is not a task" in answers[1].json()["error"]["message"]


@pytest.mark.parametrize("end", ["%0A", "%0D%0A", "%00", "%7F"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/tasks/length/rollback"), ("POST", "/v1/tasks/length/train"), ("POST", "/v1/predict"),
     ("DELETE", "/v1/tasks/length"), ("GET", "/v1/runs"), ("GET", "/v1/tasks")],
)  # fmt: skip
def test_an_address_with_a_control_character_reaches_no_route(locked, method, path, end):
    assert code(locked("root", method, path + end)) == "not_found"
    assert code(locked("reader", method, path + end)) == "not_found"


def test_unknown_addresses_and_methods_need_admin(locked):
    assert code(locked("reader", "POST", "/v1/tasks/length/erase")) == "forbidden"
    assert code(locked("reader", "PUT", "/v1/tasks")) == "forbidden"
    assert code(locked("root", "POST", "/v1/tasks/length/erase")) == "not_found"


def test_a_key_over_its_rate_is_told_when_to_retry(locked):
    assert locked("slow", "GET", "/v1/tasks").status_code == 200
    answer = locked("slow", "GET", "/v1/tasks")
    assert code(answer) == "rate_limited"
    assert answer.headers["retry-after"] == "60"


def test_a_wrong_key_and_a_missing_key_have_different_messages(locked):
    assert "not known to this server" in locked("wrong", "GET", "/v1/tasks").json()["error"]["message"]
    app = create_app(Dummy(), keys=Keys("nowhere.json"), page=False)
    for headers in ({}, {"authorization": "Basic abc"}):
        assert (
            "send the header 'Authorization: Bearer KEY'"
            in ask(app, "GET", "/v1/tasks", headers=headers).json()["error"]["message"]
        )


def test_unreadable_keys_refuse_every_request_and_the_log_names_the_file(tmp_path, caplog):
    keys = Keys(tmp_path / "keys.json")
    headers = {"authorization": f"Bearer {keys.add('reader', ['predict'])}"}
    app = create_app(Dummy(), keys=keys, page=False)
    assert ask(app, "GET", "/v1/tasks", headers=headers).status_code == 200
    kept = keys.path.read_bytes()
    keys.path.write_text("{")
    with caplog.at_level("ERROR", "adapterbank.serving"):
        answer = ask(app, "GET", "/v1/tasks", headers=headers)
    assert code(answer) == "not_ready"
    assert str(tmp_path) not in answer.text
    (record,) = caplog.records
    assert f"The key file {keys.path} cannot be read" in record.fields["problem"]
    assert "restore it from a copy" in record.fields["problem"]
    keys.path.write_bytes(kept)
    assert ask(app, "GET", "/v1/tasks", headers=headers).status_code == 200


def test_unauthorized_requests_are_counted_by_their_route(locked):
    locked("wrong", "POST", "/v1/tasks/length/predict", json={"text": "a"})
    locked("reader", "DELETE", "/v1/tasks/length@2")
    locked("wrong", "GET", "/v1/no/such")
    counted = locked("reader", "GET", "/metrics").text
    for route, status in (("/v1/tasks/{task}/predict", 401), ("/v1/tasks/{task}", 403), ("none", 401)):
        assert f'adapterbank_requests_total{{route="{route}",status="{status}"}} 1.0' in counted


def test_the_openapi_document_says_how_a_key_is_sent(locked):
    document = locked("reader", "GET", "/openapi.json").json()
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert document["security"] == [{"key": []}]
    assert document["paths"]["/healthz"]["get"]["security"] == []
    assert "security" not in ask(create_app(Dummy(), page=False), "GET", "/openapi.json").json()
