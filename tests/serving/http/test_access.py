"""Claims about access: every route declares its scope, and each key gets the same answers as ever."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import APIRouter

from adapterbank.serving.http.access import ANY, OPEN, access, declared
from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.auth import SCOPES, Keys
from serving.dummy import Dummy, calling

KEYS = {
    "none": None,
    "reader": (["predict"], None),
    "one": (["predict"], ["length"]),
    "trainer": (["train"], None),
    "train-one": (["train"], ["length"]),
    "root": (["admin"], None),
}
STATUSES = [
    # method, path, then the status for each of the keys above
    ("GET", "/", [200, 200, 200, 200, 200, 200]),
    ("POST", "/", [405, 405, 405, 405, 405, 405]),
    ("HEAD", "/healthz", [200, 200, 200, 200, 200, 200]),
    ("PUT", "/readyz", [405, 405, 405, 405, 405, 405]),
    ("GET", "/favicon.ico", [404, 404, 404, 404, 404, 404]),
    ("GET", "/page/nothing.js", [404, 404, 404, 404, 404, 404]),
    ("GET", "/page", [401, 404, 404, 404, 404, 404]),
    ("GET", "/metrics", [401, 200, 200, 200, 200, 200]),
    ("GET", "/docs", [401, 200, 200, 200, 200, 200]),
    ("GET", "/openapi.json", [401, 200, 200, 200, 200, 200]),
    ("HEAD", "/openapi.json", [401, 403, 403, 403, 403, 200]),
    ("GET", "/nothing", [401, 404, 404, 404, 404, 404]),
    ("POST", "/nothing", [401, 403, 403, 403, 403, 404]),
    ("OPTIONS", "/v1/tasks", [401, 403, 403, 403, 403, 405]),
    ("GET", "/v1/tasks", [401, 200, 200, 200, 200, 200]),
    ("HEAD", "/v1/tasks", [401, 403, 403, 403, 403, 405]),
    ("PUT", "/v1/tasks", [401, 403, 403, 403, 403, 405]),
    ("GET", "/v1/tasks/length", [401, 200, 200, 200, 200, 200]),
    ("GET", "/v1/tasks/other", [401, 200, 403, 200, 403, 200]),
    ("DELETE", "/v1/tasks/other", [401, 403, 403, 403, 403, 200]),
    ("POST", "/v1/tasks/length/predict", [401, 200, 200, 403, 403, 200]),
    ("POST", "/v1/tasks/other/predict", [401, 200, 403, 403, 403, 200]),
    ("GET", "/v1/tasks/other/predict", [401, 405, 405, 405, 405, 405]),
    ("POST", "/v1/predict", [401, 200, 200, 403, 403, 200]),
    ("GET", "/v1/predict", [401, 405, 405, 405, 405, 405]),
    ("POST", "/v1/tasks/length/rollback", [401, 403, 403, 403, 403, 409]),
    ("GET", "/v1/runs/none", [401, 403, 403, 404, 404, 404]),
    ("GET", "/v1/runs/x/y/z", [401, 403, 403, 404, 404, 404]),
    ("GET", "/v1/runsx", [401, 404, 404, 404, 404, 404]),
]
TRAINING = [
    # the same for a server that trains, then for one that does not
    ("POST", "/v1/tasks/length/train", [401, 403, 403, 415, 415, 415], [401, 403, 403, 404, 404, 404]),
    ("POST", "/v1/tasks/other/train", [401, 403, 403, 415, 403, 415], [401, 403, 403, 404, 403, 404]),
    ("GET", "/v1/runs", [401, 403, 403, 200, 200, 200], [401, 403, 403, 404, 404, 404]),
    ("PUT", "/v1/runs", [401, 403, 403, 405, 405, 405], [401, 403, 403, 404, 404, 404]),
    ("HEAD", "/v1/runs/none", [401, 403, 403, 405, 405, 405], [401, 403, 403, 404, 404, 404]),
]
BODIES = {"/v1/predict": {"rows": [{"task": "length", "text": "a"}]}}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return the statuses of all the requests above for each key, on a server that trains and on one that does not."""
    from adapterbank.serving.jobs.queue import JobQueue
    from adapterbank.storage.bank import Bank

    folder = tmp_path_factory.mktemp("access")
    bank = Bank.open(folder / "bank", {"name": "tiny", "sha256": "a" * 64}, create=True)
    keys = Keys(folder / "keys.json")
    headers = {
        name: {"authorization": f"Bearer {keys.add(name, *about)}"} if about else {} for name, about in KEYS.items()
    }
    requests = [(method, path) for method, path, *_ in (*STATUSES, *TRAINING)]

    async def ask(jobs):
        app = create_app(Dummy(["length", "other"]), keys=keys, jobs=jobs)
        if jobs:
            app.router.lifespan_context = create_app(Dummy()).router.lifespan_context  # no run is started
        async with calling(app) as client:
            return {
                (method, path, name): (
                    await client.request(method, path, headers=sent, **_body(method, path))
                ).status_code
                for method, path in requests
                for name, sent in headers.items()
            }

    return asyncio.run(ask(JobQueue(bank.path, threads=1))), asyncio.run(ask(None))


def _body(method, path):
    return {"json": BODIES.get(path, {"text": "a"})} if path.endswith("/predict") and method == "POST" else {}


@pytest.mark.parametrize(("method", "path", "statuses"), STATUSES)
def test_each_key_gets_the_status_of_its_scope(answers, method, path, statuses):
    for found in answers:
        assert [found[method, path, name] for name in KEYS] == statuses


@pytest.mark.parametrize(("method", "path", "training", "not_training"), TRAINING)
def test_a_server_that_does_not_train_reveals_that_only_to_keys_that_may(answers, method, path, training, not_training):
    assert [answers[0][method, path, name] for name in KEYS] == training
    assert [answers[1][method, path, name] for name in KEYS] == not_training


def test_a_route_without_a_scope_cannot_be_added():
    router = APIRouter()

    @router.get("/v1/new")
    async def new():
        """Declare nothing."""

    with pytest.raises(ValueError, match=r"\['GET'\] /v1/new declares no scope; decorate it with @access"):
        declared(router)
    access("train")(new)
    (route,) = declared(router)
    assert (route.path, route.methods, route.access.scope) == ("/v1/new", {"GET"}, "train")


def test_every_route_of_the_document_has_a_scope_in_the_table(idle):
    app = create_app(Dummy(), jobs=idle)
    table = app.state.access
    documented = {(path, method.upper()) for path, methods in app.openapi()["paths"].items() for method in methods}
    assert {
        (route.path, method) for route in table.routes if route.documented for method in route.methods
    } == documented
    assert {route.access.scope for route in table.routes} == {OPEN, ANY, *SCOPES}
