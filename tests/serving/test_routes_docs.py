"""The document of the routes: it states limits and errors, and its page names them all."""

from __future__ import annotations

import pytest

from adapterbank.serving.app import create_app
from adapterbank.serving.terms import Limits
from serving.dummy import Dummy, ask, code


@pytest.fixture
def app():
    return create_app(Dummy(), page=False)


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
