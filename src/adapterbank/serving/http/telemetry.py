"""Prometheus metrics and structured logs. Knows no routes, and never sees a user's text.

A log line is one JSON object: time, level, event and the fields of the event.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from adapterbank.serving.heartbeat import Stalls

LOG = logging.getLogger("adapterbank.serving")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
NUMBERS = {
    "batches": ("counter", "Batches computed."),
    "rows": ("counter", "Rows computed."),
    "tokens": ("counter", "Tokens computed."),
    "evictions": ("counter", "Slots evicted from memory."),
    "loads": ("counter", "Slots loaded on demand."),
    "queue_tokens": ("gauge", "Tokens in the queue."),
    "tasks": ("gauge", "Tasks that are served."),
    "problems": ("gauge", "Tasks that cannot be served."),
    "resident": ("gauge", "Slots in memory."),
    "runs_queued": ("gauge", "Training runs in the queue."),
    "runs_running": ("gauge", "Training runs in progress."),
}
"""The names that `Service.numbers` and `JobQueue.numbers` return, with their type and description."""


class Metrics:
    """The metrics of one server."""

    def __init__(
        self, numbers: Callable[[], Mapping[str, float]], stalls: Callable[[], Stalls], replica: str = ""
    ) -> None:
        """Take functions that return the service's own numbers and its parts; they are called when metrics are read.

        Where several servers share an address, `replica` labels all metrics of this one. Without the label, a scraper
        would read the counters of different replicas as one that resets again and again.
        """
        self.replica = replica
        self.registry = CollectorRegistry()
        self.registry.register(_Numbers(numbers))
        self.registry.register(_Stalled(stalls))
        self._requests = Counter(
            "adapterbank_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self._latency = Histogram(
            "adapterbank_request_seconds", "Time to respond.", ["route"], buckets=_SECONDS, registry=self.registry
        )
        self._fill = Histogram(
            "adapterbank_batch_fill", "Share of a full batch.", buckets=_SHARES, registry=self.registry
        )
        self._batch = Histogram(
            "adapterbank_batch_seconds", "Time to compute a batch.", buckets=_SECONDS, registry=self.registry
        )

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a response."""
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def batch(self, rows: int, tokens: int, fill: float, seconds: float) -> None:
        """Count a batch."""
        self._fill.observe(fill)
        self._batch.observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(_ReplicaLabel(self.registry, self.replica) if self.replica else self.registry)


class _Numbers(Collector):
    def __init__(self, numbers: Callable[[], Mapping[str, float]]) -> None:
        self._numbers = numbers

    def describe(self) -> Iterable[Any]:
        return []

    def collect(self) -> Iterable[Any]:
        for name, value in self._numbers().items():
            kind, what = NUMBERS[name]
            family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            yield family(f"adapterbank_{name}", what, value=value)


class _Stalled(Collector):
    def __init__(self, stalls: Callable[[], Stalls]) -> None:
        self._stalls = stalls

    def describe(self) -> Iterable[Any]:
        return []

    def collect(self) -> Iterable[Any]:
        family = GaugeMetricFamily("adapterbank_stalled", "Pieces of work that stand still, by part.", labels=["part"])
        for part, work in self._stalls().items():
            family.add_metric([part], len(work))
        yield family


class _ReplicaLabel(Collector):
    """Adds the replica to the labels of all metrics."""

    def __init__(self, registry: CollectorRegistry, replica: str) -> None:
        self._registry, self._label = registry, {"replica": replica}

    def collect(self) -> Iterable[Any]:
        for family in self._registry.collect():
            family.samples = [sample._replace(labels=self._label | sample.labels) for sample in family.samples]
            yield family


def log_event(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event."""
    if LOG.isEnabledFor(level):
        LOG.log(level, event, extra={"fields": fields})


class JsonLines(logging.Formatter):
    """Formats log records as JSON, one line each."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0]:  # not the message, which may quote what a user sent
            line["problem"] = record.exc_info[0].__name__
            line["trace"] = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(record.exc_info[2])]
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to(stream: TextIO = sys.stderr, level: int = logging.INFO) -> None:
    """Send the log of the server and of the HTTP library to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    for name in ("adapterbank.serving", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name != "uvicorn" else logging.WARNING)
