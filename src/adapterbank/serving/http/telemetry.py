"""What an operator sees: Prometheus metrics and structured logs. Knows no routes and never a user's text.

A log line is one JSON object: time, level, event, and the fields that the event has.
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

LOG = logging.getLogger("adapterbank.serving")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
NUMBERS = {
    "batches": ("counter", "Batches computed."),
    "rows": ("counter", "Rows computed."),
    "tokens": ("counter", "Tokens computed."),
    "evictions": ("counter", "Slots taken out of memory for want of room."),
    "loads": ("counter", "Slots loaded again on demand."),
    "queue_tokens": ("gauge", "Tokens that wait."),
    "tasks": ("gauge", "Tasks that are served."),
    "problems": ("gauge", "Tasks that are refused."),
    "resident": ("gauge", "Slots in memory."),
    "runs_queued": ("gauge", "Training runs that wait."),
    "runs_running": ("gauge", "Training runs under way."),
}
"""What `Service.numbers` and `Jobs.numbers` give, and what it is."""


class Metrics:
    """The numbers of one server."""

    def __init__(self, numbers: Callable[[], Mapping[str, float]], replica: str = "") -> None:
        """Take where the service's own numbers come from; they are asked for when somebody looks.

        Where several servers answer at one address, `replica` names this one in a label of all its numbers: without it
        the counts of one would follow those of another, and look like a server that begins anew again and again.
        """
        self.replica = replica
        self.registry = CollectorRegistry()
        self.registry.register(_Numbers(numbers))
        self._requests = Counter(
            "adapterbank_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self._latency = Histogram(
            "adapterbank_request_seconds", "Time to answer.", ["route"], buckets=_SECONDS, registry=self.registry
        )
        self._fill = Histogram(
            "adapterbank_batch_fill", "Share of a full batch.", buckets=_SHARES, registry=self.registry
        )
        self._batch = Histogram(
            "adapterbank_batch_seconds", "Time to compute a batch.", buckets=_SECONDS, registry=self.registry
        )

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def batch(self, rows: int, tokens: int, fill: float, seconds: float) -> None:
        """Count a batch."""
        self._fill.observe(fill)
        self._batch.observe(seconds)

    def text(self) -> bytes:
        """Give all in Prometheus' text format."""
        return generate_latest(_Named(self.registry, self.replica) if self.replica else self.registry)


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


class _Named(Collector):
    """Numbers with the name of their replica."""

    def __init__(self, registry: CollectorRegistry, replica: str) -> None:
        self._registry, self._label = registry, {"replica": replica}

    def collect(self) -> Iterable[Any]:
        for family in self._registry.collect():
            family.samples = [sample._replace(labels=self._label | sample.labels) for sample in family.samples]
            yield family


def say(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event."""
    if LOG.isEnabledFor(level):
        LOG.log(level, event, extra={"fields": fields})


class JsonLines(logging.Formatter):
    """Log records as JSON, a line each."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        told |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0]:  # not its message, which may hold what a user sent
            told["problem"] = record.exc_info[0].__name__
            told["trace"] = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(record.exc_info[2])]
        return json.dumps(told, ensure_ascii=False, default=str)


def log_to(stream: TextIO = sys.stderr, level: int = logging.INFO) -> None:
    """Send the server's log, and that of the HTTP library, to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    for name in ("adapterbank.serving", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name != "uvicorn" else logging.WARNING)
