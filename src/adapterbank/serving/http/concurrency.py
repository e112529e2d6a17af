"""Places on the server that are held for long: so many in all, so many for one key. Knows not what holds them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterator

from adapterbank.serving.service.protocol import Refusal


class ConcurrencyLimit:
    """So many at once of what holds a place on the server for long, half of them for one key; the next are refused."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._inside: Counter[str | None] = Counter()

    def check(self, who: str | None) -> None:
        """Refuse where there is no place for a key; None where there are no keys."""
        count, own = self._inside.total(), self._inside[who]
        told = f"{count} {self._what}" if count >= self._most else f"{own} {self._what} with the key {who!r}"
        if count >= self._most or (who is not None and own >= max(1, self._most // 2)):
            raise Refusal("overloaded", f"{told} already; try again soon.", retry_after=10)

    @contextlib.contextmanager
    def held(self, who: str | None) -> Iterator[None]:
        """Hold a place."""
        self._inside[who] += 1
        try:
            yield
        finally:
            self._inside[who] -= 1

    async def around(self, parts: AsyncGenerator[str, None], who: str | None) -> AsyncGenerator[str, None]:
        """Hold a place while a stream is read; one that nobody begins to read holds none."""
        with self.held(who):
            async with contextlib.aclosing(parts):
                async for part in parts:
                    yield part
