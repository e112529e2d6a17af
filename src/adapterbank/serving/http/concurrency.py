"""Limits how many long operations run at once, in total and per key. Does not know what they are."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterator

from adapterbank.serving.service.protocol import Refusal


class ConcurrencyLimit:
    """Counts operations of one sort; refuses those above the limit, and those above half of it for one key."""

    def __init__(self, limit: int, what: str) -> None:
        """Take the limit and what is counted, in the plural."""
        self._limit, self._what = limit, what
        self._running: Counter[str | None] = Counter()

    def check(self, key: str | None) -> None:
        """Refuse if the server, or this key, is at its limit; the key is None on a server without keys."""
        total, own = self._running.total(), self._running[key]
        count = f"{total} {self._what}" if total >= self._limit else f"{own} {self._what} of the key {key!r}"
        if total >= self._limit or (key is not None and own >= max(1, self._limit // 2)):
            raise Refusal("overloaded", f"{count} are open, which is the limit; try again soon.", retry_after=10)

    @contextlib.contextmanager
    def acquire(self, key: str | None) -> Iterator[None]:
        """Count one operation for as long as the `with` lasts."""
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1

    async def wrap(self, stream: AsyncGenerator[str, None], key: str | None) -> AsyncGenerator[str, None]:
        """Count a stream from its first read to its end; one that is never read is not counted."""
        with self.acquire(key):
            async with contextlib.aclosing(stream):
                async for part in stream:
                    yield part
