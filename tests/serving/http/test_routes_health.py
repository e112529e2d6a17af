"""Claims about the routes for operators: health, readiness and metrics."""

from __future__ import annotations

import asyncio

import pytest

from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.auth import Keys
from serving.dummy import Dummy, ask, calling, code


def test_it_is_alive_before_it_is_ready():
    service = Dummy()
    service.ready = False
    app = create_app(service, page=False)
    assert ask(app, "GET", "/healthz").json() == {"status": "alive"}
    answer = ask(app, "GET", "/readyz")
    assert code(answer) == "not_ready"
    assert answer.headers["retry-after"] == "1"
    service.ready = True
    assert ask(app, "GET", "/readyz").json() == {"status": "ready", "stalled": []}
    service.standing = ["reading x for 6 s"]
    assert ask(app, "GET", "/readyz").json() == {"status": "ready", "stalled": ["bank: reading x for 6 s"]}
    service.ready = False
    assert "bank: reading x for 6 s" in ask(app, "GET", "/readyz").json()["error"]["message"]


@pytest.mark.parametrize("ready", [True, False])
def test_only_a_key_for_all_tasks_learns_what_a_part_stands_still_at(tmp_path, ready):
    keys, service = Keys(tmp_path / "keys.json"), Dummy()
    secrets = [keys.add("all", ["predict"]), keys.add("some", ["admin"], ["x"]), "abk_wrong"]
    service.ready, service.standing = ready, ["reading secret-task for 6 s", "reading x for 6 s"]
    app = create_app(service, keys=keys, page=False)
    headers = [{"Authorization": f"Bearer {secret}"} for secret in secrets]
    told = [ask(app, "GET", "/readyz", headers=one).text for one in (*headers, {})]
    assert ["secret-task" in text for text in told] == [True, False, False, False]
    assert all("bank" in text for text in told)
    if ready:
        assert ask(app, "GET", "/readyz").json() == {"status": "ready", "stalled": ["bank"]}
    keys.path.write_text("damaged")
    assert "secret-task" not in ask(app, "GET", "/readyz", headers=headers[0]).text


@pytest.mark.parametrize(("ready", "status"), [(True, 200), (False, 503)])
def test_health_accepts_head_requests(ready, status):
    service = Dummy()
    service.ready = ready
    app = create_app(service, page=False)
    assert [ask(app, "HEAD", path).status_code for path in ("/healthz", "/readyz")] == [200, status]
    assert set(app.openapi()["paths"]["/healthz"]) == {"get"}


def test_the_metrics_count_requests_batches_queue_and_slots():
    app = create_app(Dummy(), page=False)

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
        'adapterbank_stalled{part="bank"} 0.0',
    ):
        assert line in found
