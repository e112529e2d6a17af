"""What the app and the service say to each other: plain values. Knows no HTTP library and no engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

CODES = {
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
"""Every code an answer may carry, with its status. A code never changes its meaning."""


REQUEST: ContextVar[str] = ContextVar("request", default="")
"""The id of the request that is being answered, for the log."""
FAILED = "The request failed on the server; its log says more."
"""What is told of a failure that nobody foresaw."""


class Refusal(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, code: str, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.retry_after = code, message, retry_after

    @property
    def status(self) -> int:
        """The HTTP status of its code."""
        return CODES[self.code]

    @property
    def seconds(self) -> str:
        """The value of the Retry-After header: whole seconds, at least one."""
        return str(max(1, math.ceil(self.retry_after or 0)))


@dataclass(frozen=True)
class Limits:
    """What a request may ask for."""

    body: int = 4 << 20
    """Bytes of a request's body; data files have a limit of their own."""
    texts: int = 256
    """Texts, or rows, of one request."""
    characters: int = 100_000
    """Characters of one text."""
    runs: int = 10
    """Training runs of one key that may wait; an admin's are not counted."""
    best: int = 100
    """Best answers of a span task."""


@dataclass(frozen=True)
class Ask:
    """Rows of one task within a request."""

    task: str
    texts: list[str]
    pairs: list[str] | None = None
    best: int = 0


@dataclass(frozen=True)
class Reply:
    """What a task says of the rows of an `Ask`."""

    task: str
    version: int
    predictions: list[dict[str, Any]]


class Service(Protocol):
    """What the app needs of a service; tests have one of thirty lines."""

    @property
    def ready(self) -> bool:
        """Whether the bank's tasks have been loaded."""

    async def predict(self, asks: Sequence[Ask]) -> list[Reply]:
        """Answer; cancelled, it leaves the queue. Raises `Refusal`."""

    async def tasks(self) -> dict[str, Any]:
        """Give what GET /v1/tasks answers."""

    async def task(self, ref: str) -> dict[str, Any]:
        """Give what GET /v1/tasks/{task} answers."""

    async def remove(self, ref: str) -> None:
        """Remove a task, or a version, from the bank."""

    async def rollback(self, ref: str) -> int:
        """Serve the version before this one, or the one named; gives its number."""

    def numbers(self) -> Mapping[str, float]:
        """Give what can be counted; must not wait."""

    def on_batch(self, hear: Callable[[int, int, float, float], None]) -> None:
        """Call `hear` with rows, tokens, fill (0 … 1) and seconds after each batch."""

    async def start(self) -> None:
        """Begin: load the bank's tasks, follow it."""

    async def stop(self) -> None:
        """Answer what is queued, then end."""


class Key(Protocol):
    """Who asks."""

    @property
    def name(self) -> str:
        """What it is called in the log."""

    def allows(self, scope: str, task: str | None) -> bool:
        """Whether this key may do that."""


class Keys(Protocol):
    """The keys of a server."""

    def check(self, secret: str) -> Any:
        """Give the `Key` of a secret, or None."""
