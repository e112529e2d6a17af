"""Claims about the docs page and its document: they state all routes, limits and errors."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from functools import partial

import pytest

from adapterbank import __version__
from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.auth import Keys
from adapterbank.serving.service.protocol import Limits
from serving.dummy import Dummy, ask, code


@pytest.fixture
def jobs_app(idle):
    idle.start = idle.stop = partial(asyncio.sleep, 0)
    return create_app(Dummy(), jobs=idle, page=False)


@pytest.fixture
def app():
    return create_app(Dummy(), page=False)


def test_the_document_states_the_limits_and_the_errors(app):
    document = ask(app, "GET", "/openapi.json").json()
    route = document["paths"]["/v1/tasks/{task}/predict"]["post"]
    (texts, _) = route["requestBody"]["content"]["application/json"]["schema"]["oneOf"]
    assert texts["properties"]["texts"]["maxItems"] == Limits().texts
    assert {"200", "404", "413", "415", "422", "429", "500", "503"} <= route["responses"].keys()


def test_the_docs_page_lists_all_routes_and_loads_nothing(app):
    answer = ask(app, "GET", "/docs")
    document = ask(app, "GET", "/openapi.json").json()
    for path in document["paths"]:
        assert f" {path}</code>" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert [part for part in ("://", "<script src", "<link", "<img", "@import", " src=") if part in answer.text] == []
    assert answer.text.count("<script>") == 1


def test_the_docs_page_shows_requests_and_responses(jobs_app):
    answer = ask(jobs_app, "GET", "/docs")
    sections = {part.partition("</code>")[0]: part for part in answer.text.split("<section>\n<h2><code>")[1:]}
    asking, training = sections["POST /v1/tasks/{task}/predict"], sections["POST /v1/tasks/{task}/train"]
    assert "<pre>{&quot;texts&quot;: [" in asking
    for name in ("texts", "pairs", "text", "pair", "best"):
        assert f"<code>{name}</code>" in asking
    assert "200: <code>task</code>, <code>version</code>, <code>predictions</code>" in asking
    assert "<dt><code>429</code></dt><dd>rate_limited, overloaded</dd>" in asking
    assert "The body is a file: text/csv," in training
    assert "<dt><code>epochs</code></dt><dd>Passes over the training data" in training
    folded = re.findall("<details><summary>(.*?)</summary>", sections["GET /healthz"])
    assert folded == ["Errors", "Try it"]


def test_the_policy_of_the_docs_page_allows_its_style(app):
    answer = ask(app, "GET", "/docs")
    (style,) = re.findall("<style>(.*?)</style>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in answer.headers["content-security-policy"]
    (script,) = re.findall("<script>(.*?)</script>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'; connect-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_no_address_is_redirected(app):
    answer = ask(app, "GET", "/v1/tasks/", headers={"host": "evil.example"})
    assert code(answer) == "not_found"
    assert "location" not in answer.headers


def test_each_address_has_a_form_with_its_parts_and_its_example(jobs_app):
    page = ask(jobs_app, "GET", "/docs").text
    forms = dict(re.findall(r'<form data-method="\w+" data-path="(.*?)">(.*?)</form>', page, re.DOTALL))
    assert set(forms) == set(ask(jobs_app, "GET", "/openapi.json").json()["paths"])
    predict = forms["/v1/tasks/{task}/predict"]
    assert '<input data-part name="task" required>' in predict
    assert "A warm and funny film." in predict
    assert 'name="file" type="file"' in forms["/v1/tasks/{task}/train"]
    assert 'name="query"' in forms["/v1/tasks/{task}/train"]


def test_a_browser_without_a_key_is_asked_for_one_and_told_nothing_else(tmp_path):
    keys = Keys(tmp_path / "keys.json")
    secret = keys.add("reader", ["predict"])
    app = create_app(Dummy(), page=False, keys=keys)
    answer = ask(app, "GET", "/docs", headers={"accept": "text/html,*/*"})
    assert answer.status_code == 401
    assert 'name="key" type="password"' in answer.text
    assert "/v1/" not in answer.text
    assert __version__ not in answer.text
    assert "script-src 'sha256-" in answer.headers["content-security-policy"]
    assert code(ask(app, "GET", "/docs")) == "unauthorized"
    assert code(ask(app, "GET", "/v1/tasks", headers={"accept": "text/html"})) == "unauthorized"
    whole = ask(app, "GET", "/docs", headers={"authorization": f"Bearer {secret}"})
    assert "/v1/tasks" in whole.text
    assert 'name="key" type="password"' in whole.text
