"""Claims about servers without keys: programs and pages of this machine may use them, pages of other sites may not."""

from __future__ import annotations

import pytest

from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.auth import Keys
from serving.dummy import Dummy, ask


@pytest.fixture
def app():
    return create_app(Dummy(), local=True)


def status(app, method, path, **headers):
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    options = {"json": {"text": "a"}} if method == "POST" else {}
    return ask(app, method, path, headers=given, **options).status_code


PREDICT = ("POST", "/v1/tasks/length/predict")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.8.8.8", "[::1]:8000"])
def test_loopback_host_names_are_allowed(app, host):
    assert status(app, "GET", "/v1/tasks", host=host) == 200
    assert status(app, *PREDICT, host=host) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example:8000", "192.168.1.7:8000", "127.0.0.1.evil.example", "["],
)
def test_a_host_name_that_is_not_loopback_is_refused(app, host):
    for method, path in (PREDICT, ("GET", "/v1/tasks"), ("GET", "/metrics"), ("DELETE", "/v1/tasks/length")):
        answer = ask(app, method, path, headers={"host": host})
        assert answer.json()["error"]["code"] == "forbidden"
        assert "adapterbank keys add" in answer.json()["error"]["message"]
    assert status(app, "GET", "/healthz", host=host) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://localhost:8000", "sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_a_page_of_another_site_cannot_change_anything(app, headers):
    for method, path in (PREDICT, ("POST", "/v1/tasks/length/rollback"), ("DELETE", "/v1/tasks/length")):
        assert status(app, method, path, host="localhost:8000", **headers) == 403
    assert status(app, "GET", "/", host="localhost:8000", **headers) == 200  # a link may lead here


def test_the_servers_own_page_and_other_programs_are_allowed(app):
    own = {"host": "localhost:8000", "origin": "http://localhost:8000"}
    assert status(app, *PREDICT, **own) == 200
    assert status(app, *PREDICT, **own, sec_fetch_site="same-origin") == 200
    assert status(app, *PREDICT, host="localhost:8000", sec_fetch_site="none") == 200


def test_an_app_that_is_not_local_answers_to_any_host_but_to_no_page_of_another_site():
    app = create_app(Dummy())
    assert status(app, *PREDICT, host="bank.example") == 200
    assert status(app, *PREDICT, host="bank.example", origin="http://evil.example") == 403


def test_on_a_server_with_keys_only_the_key_matters(tmp_path):
    keys = Keys(tmp_path / "keys.json")
    bearer = {"authorization": f"Bearer {keys.add('me', ['predict'])}"}
    app = create_app(Dummy(), keys=keys, local=True)
    assert status(app, *PREDICT, host="bank.example", origin="https://other.example", **bearer) == 200
