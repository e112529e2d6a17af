"""Claims about the numbers of several replicas at one address: each is told apart, so that they can be added up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="pip install 'adapterbank[serve]'")
from prometheus_client.parser import text_string_to_metric_families

from adapterbank.serving import replicas
from adapterbank.serving.app import create_app
from adapterbank.serving.settings import Settings
from serving.dummy import Dummy, ask

SCRAPED = """
import json, socket, time
import httpx
from adapterbank.serving.replicas import Scale, deployed
from adapterbank.serving.settings import Settings

with socket.socket() as door:
    door.bind(("127.0.0.1", 0))
    port = door.getsockname()[1]
texts, end = [], time.monotonic() + 120
with deployed(Settings("bank", device="cpu", page=False), Scale(2, 2), host="127.0.0.1", port=port):
    while len({text.partition('replica="')[2].partition('"')[0] for text in texts}) < 2 and time.monotonic() < end:
        httpx.post(f"http://127.0.0.1:{port}/v1/tasks/a/predict", json={"text": "the cat"}).raise_for_status()
        texts.append(httpx.get(f"http://127.0.0.1:{port}/metrics").raise_for_status().text)
print(json.dumps(texts))
"""


def series(text):
    """Give the names and labels of all numbers, without when they began."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return [(one.name, tuple(sorted(one.labels.items()))) for one in samples if not one.name.endswith("_created")]


def scraped(**options):
    return ask(create_app(Dummy(), page=False, **options), "GET", "/metrics").text


def test_every_number_of_a_replica_has_its_name():
    found = series(scraped(replica="r1"))
    assert len(found) > 30
    assert all(dict(labels)["replica"] == "r1" for _, labels in found)


def test_numbers_of_two_replicas_are_different_series():
    assert not set(series(scraped(replica="r1"))) & set(series(scraped(replica="r2")))


def test_a_server_that_is_alone_has_no_such_label():
    found = series(scraped())
    assert found
    assert not any("replica" in dict(labels) for _, labels in found)


def test_asking_twice_names_it_once():
    app = create_app(Dummy(), page=False, replica="r1")
    first, second = (ask(app, "GET", "/metrics").text for _ in range(2))
    assert set(series(first)) <= set(series(second))


def test_a_replica_is_called_as_ray_calls_it(small, monkeypatch):
    serve = pytest.importorskip("ray.serve", reason="pip install 'adapterbank[ray]'")
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(replica_tag="x7y"))
    monkeypatch.setattr(replicas, "log_to", lambda stream: None)
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    asked = []
    monkeypatch.setattr(replicas, "build", lambda *given, **more: asked.append(more) or create_app(Dummy()))
    replicas._app(Settings(str(small.bank.path)), 1, ".")
    assert asked == [{"replica": "x7y"}]


@pytest.mark.slow
def test_a_scraper_of_a_cluster_learns_of_both_replicas(small, tmp_path):
    pytest.importorskip("ray.serve", reason="pip install 'adapterbank[ray]'")
    small.put("a")
    quiet = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", SCRAPED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **quiet},
    )
    assert found.returncode == 0, found.stderr[-3000:]
    texts = json.loads(found.stdout.splitlines()[-1])
    assert len({dict(labels)["replica"] for text in texts for _, labels in series(text)}) == 2
