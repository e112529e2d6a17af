"""Claims about the head of a request: it is bounded, and headers with one value are sent once."""

from __future__ import annotations

import pytest

from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.heads import MAX_HEAD
from serving.dummy import Dummy, ask, code


@pytest.mark.parametrize("path", ["/healthz", "/v1/tasks"])
def test_a_head_above_the_bound_is_refused(path):
    app = create_app(Dummy(), page=False)
    answer = ask(app, "GET", path, headers={"x-a": "a" * 70_000})
    assert (answer.status_code, code(answer)) == (431, "head_too_large")
    many = {f"x-{i}": "a" * 100 for i in range(700)}
    assert ask(app, "GET", path, headers=many).status_code == 431
    both = ask(app, "GET", f"{path}?{'q' * 40_000}", headers={"x-a": "a" * 30_000})
    assert both.status_code == 431
    assert ask(app, "GET", path, headers={"x-a": "a" * (MAX_HEAD - 1000)}).status_code == 200


@pytest.mark.parametrize("name", ["Host", "Authorization", "Content-Type", "Origin"])
def test_a_header_with_one_value_is_sent_once(name):
    app = create_app(Dummy(), page=False)
    for values in (("localhost", "localhost"), ("localhost", "other")):
        headers = [("Host", "localhost")] if name != "Host" else []
        answer = ask(app, "GET", "/healthz", headers=[*headers, *((name, value) for value in values)])
        assert (answer.status_code, code(answer)) == (400, "bad_header")
        assert f"'{name.lower()}' is sent more than once" in answer.json()["error"]["message"]
    assert ask(app, "GET", "/healthz", headers=[("Accept", "a/b"), ("Accept", "c/d")]).status_code == 200


@pytest.mark.parametrize("text", ["x" * 60_000, "x y " * 5_000])
def test_a_long_name_does_not_come_back_whole(text):
    app = create_app(Dummy(), page=False)
    tries = [
        ask(app, "GET", f"/v1/tasks/{text}"),
        ask(app, "POST", f"/v1/tasks/{text}/predict", json={"text": "a"}),
        ask(app, "POST", "/v1/predict", json={"rows": [{"task": text, "text": "a"}]}),
        ask(app, "POST", "/v1/predict", json={text: 1}),
        ask(app, "POST", "/v1/predict", content=b"{}", headers={"content-type": text.strip()}),
        ask(create_app(Dummy(), page=False, local=True), "GET", "/v1/tasks", headers={"host": text.strip()}),
        ask(app, "GET", f"/{text}"),
    ]
    for answer in tries:
        assert 400 <= answer.status_code < 500
        assert code(answer)
        assert len(answer.content) < 2_000
