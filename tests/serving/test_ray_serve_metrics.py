"""Claims about the metrics of several replicas at one address: their labels differ, so that they can be added up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="pip install 'adapterbank[serve]'")
from prometheus_client.parser import text_string_to_metric_families

from adapterbank.serving import ray_serve
from adapterbank.serving.build import ServerSettings
from adapterbank.serving.http.app import create_app
from serving.dummy import Dummy, ask


def series(text):
    """Return the names and labels of all metrics, without their creation times."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return [(one.name, tuple(sorted(one.labels.items()))) for one in samples if not one.name.endswith("_created")]


def scraped(**options):
    return ask(create_app(Dummy(), page=False, **options), "GET", "/metrics").text


def test_every_metric_of_a_replica_has_its_label():
    found = series(scraped(replica="r1"))
    assert len(found) > 30
    assert all(dict(labels)["replica"] == "r1" for _, labels in found)


def test_metrics_of_two_replicas_are_different_series():
    assert not set(series(scraped(replica="r1"))) & set(series(scraped(replica="r2")))


def test_a_single_server_has_no_replica_label():
    found = series(scraped())
    assert found
    assert not any("replica" in dict(labels) for _, labels in found)


def test_a_task_in_two_asks_is_named_once():
    app = create_app(Dummy(), page=False, replica="r1")
    first, second = (ask(app, "GET", "/metrics").text for _ in range(2))
    assert set(series(first)) <= set(series(second))


def test_a_replica_has_rays_name(small, monkeypatch):
    serve = pytest.importorskip("ray.serve", reason="pip install 'adapterbank[ray]'")
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(replica_tag="x7y"))
    monkeypatch.setattr(ray_serve, "log_to", lambda stream: None)
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    asked = []
    monkeypatch.setattr(ray_serve, "build", lambda *given, **more: asked.append(more) or create_app(Dummy()))
    ray_serve.replica_app(ServerSettings(str(small.bank.path)), 1, ".")
    assert asked == [{"replica": "x7y"}]
