"""Claims about the routes for tasks: how they are documented and compressed."""

from __future__ import annotations

from adapterbank.serving.http.app import create_app
from serving.dummy import Dummy, ask


def test_the_openapi_document_lists_the_conflict_of_a_removal():
    responses = create_app(Dummy(), page=False).openapi()["paths"]["/v1/tasks/{task}"]["delete"]["responses"]
    assert responses["409"]["description"] == "conflict"


def test_tasks_are_listed_shown_and_removed():
    app = create_app(Dummy(), page=False)
    assert [task["name"] for task in ask(app, "GET", "/v1/tasks").json()["tasks"]] == Dummy().names
    assert ask(app, "GET", "/v1/tasks/length").json()["versions"] == [1]
    assert ask(app, "DELETE", "/v1/tasks/length").json() == {"removed": "length"}


def test_a_long_list_is_compressed_for_clients_that_accept_it():
    app = create_app(Dummy([f"task{i}" for i in range(100)]), page=False)
    plain = ask(app, "GET", "/v1/tasks", headers={"accept-encoding": "identity"})
    for word in ("", "br", "notgzip", "gzip;q=0", "br, gzip; q=0.0 , deflate"):
        assert "content-encoding" not in ask(app, "GET", "/v1/tasks", headers={"accept-encoding": word}).headers
    for word in ("gzip", "GZIP", "gzip;q=0.5", "deflate, gzip;q=1.0, *;q=0.5"):
        assert "content-encoding" in ask(app, "GET", "/v1/tasks", headers={"accept-encoding": word}).headers
    packed = ask(app, "GET", "/v1/tasks", headers={"accept-encoding": "br, gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.json() == plain.json()  # decompressed by the client
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 8
    assert packed.headers["vary"] == plain.headers["vary"] == "Accept-Encoding"
