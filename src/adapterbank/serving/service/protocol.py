"""The interface between the app and the service: plain values. Knows no HTTP library and no engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from adapterbank.serving.heartbeat import Stalls

CODES = {
    "bad_header": 400,
    "head_too_large": 431,
    "bad_request": 422,
    "too_many_texts": 422,
    "text_too_long": 422,
    "too_large": 413,
    "unsupported": 415,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "unknown_task": 404,
    "unknown_version": 404,
    "unknown_run": 404,
    "method_not_allowed": 405,
    "too_slow": 408,
    "conflict": 409,
    "overloaded": 429,
    "rate_limited": 429,
    "too_many_runs": 429,
    "internal": 500,
    "damaged": 503,
    "not_ready": 503,
}
"""Every error code, with its HTTP status. A code never changes its meaning."""
REQUEST: ContextVar[str] = ContextVar("request", default="")
"""The id of the current request, for the log."""
FAILED = "The request failed on the server; the server's log has the reason."
"""The message of an unexpected error."""
STOPPING = "The server is stopping; try again soon."
_SHOWN = 112
"""Characters of a name that a message quotes: more than any task's name and version have."""


def shown(name: str) -> str:
    """Return a name from a request as messages quote it: of one that is too long to exist, its beginning."""
    return name if len(name) <= _SHOWN else f"{name[:_SHOWN]}…"


class Refusal(Exception):
    """Raised to answer a request with an error."""

    def __init__(self, code: str, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.retry_after = code, message, retry_after

    @property
    def status(self) -> int:
        """The HTTP status of the code."""
        return CODES[self.code]

    @property
    def seconds(self) -> str:
        """The value of the Retry-After header: whole seconds, at least one."""
        return str(max(1, math.ceil(self.retry_after or 0)))


@dataclass(frozen=True)
class Limits:
    """What one request may contain."""

    body: int = 4 << 20
    """Bytes of the body; data files have a limit of their own."""
    texts: int = 256
    """Texts or rows."""
    characters: int = 100_000
    """Characters of one text."""
    runs: int = 10
    """Training runs of one key that may be queued; runs of an admin are not limited."""
    best: int = 100
    """Best answers of a span task."""


@dataclass(frozen=True)
class Ask:
    """Rows for one task."""

    task: str
    texts: list[str]
    pairs: list[str] | None = None
    best: int = 0
    abstain: float = 0.0
    explain: int = 0
    """The most rows that explanations of the request may take; 0 for none."""


@dataclass(frozen=True)
class Reply:
    """The predictions for the rows of an `Ask`."""

    task: str
    version: int
    predictions: list[dict[str, Any]]
    rows: int = 0
    """The rows that were computed, if they are more than the predictions."""


class Service(Protocol):
    """What the app needs from a service; the tests have one of thirty lines."""

    @property
    def ready(self) -> bool:
        """Whether requests can be answered: the bank's tasks are loaded, and what all requests need does not hang."""

    async def predict(self, asks: Sequence[Ask]) -> list[Reply]:
        """Return predictions; cancelling it removes its rows from the queue. Raises `Refusal`."""

    async def tasks(self) -> dict[str, Any]:
        """Return the response of GET /v1/tasks."""

    async def task(self, ref: str) -> dict[str, Any]:
        """Return the response of GET /v1/tasks/{task}."""

    async def remove(self, ref: str) -> None:
        """Remove a task, or a version, from the bank."""

    async def rollback(self, ref: str) -> int:
        """Serve the previous version, or the one named; return its number."""

    def stalled(self) -> Stalls:
        """Return every part of the service, with what stands still in it, without waiting."""

    def numbers(self) -> Mapping[str, float]:
        """Return the service's counters and gauges without waiting."""

    def on_batch(self, callback: Callable[[int, int, float, float], None]) -> None:
        """Call `callback` with rows, tokens, fill (0 … 1) and seconds after each batch."""

    async def start(self) -> None:
        """Load the bank's tasks and follow its changes."""

    async def stop(self) -> None:
        """Answer what is queued, for at most 30 s, then stop."""


class AccessKey(Protocol):
    """What the app needs from a key; `http.auth.Key` is one."""

    @property
    def name(self) -> str:
        """The name of the key in the log."""

    def allows(self, scope: str, task: str | None) -> bool:
        """Whether the key has this scope for this task."""


class KeyStore(Protocol):
    """What the app needs from the keys of a server; `http.auth.Keys` is one."""

    def check(self, secret: str) -> Any:
        """Return the `AccessKey` of a secret, or None."""
