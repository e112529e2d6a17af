"""The connections of the server: the head of a request is bounded in bytes and time. Knows the HTTP library alone.

Who has no key can open a connection and send a head. One of the library's parsers keeps a head however long it grows,
and none of them minds how long it takes.
"""

from __future__ import annotations

from typing import Any

HEAD = 64 << 10
"""Bytes of a request's head."""
PATIENCE = 30.0
"""Seconds in which a head must have come: from the connection's beginning, and later from its own first bytes."""


def bounded(protocol: Any) -> type[Any]:
    """Give a protocol of uvicorn with bounds."""

    class Bounded(protocol):  # type: ignore[misc]
        _head, _in_body, _ended = 0, False, False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._late = self.loop.call_later(PATIENCE, self._give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            self._late.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._ended = False
            super().data_received(data)
            self._head = 0 if self._head_is_over() else self._head + len(data)
            if self._head > HEAD:
                self.transport.abort()
            elif not self._head:
                self._late.cancel()
            elif self._late.cancelled():
                self._late = self.loop.call_later(PATIENCE, self._give_up)

        def on_headers_complete(self) -> None:
            self._in_body = True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_body, self._ended = False, True
            super().on_message_complete()

        def _head_is_over(self) -> bool:
            if hasattr(protocol, "on_headers_complete"):
                return bool(self._in_body or self._ended)
            return not self.conn.trailing_data[0] or str(self.conn.their_state) != "IDLE"  # h11 says it itself

        def _give_up(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()
            else:  # the head of the next request, sent before the answer to this one
                self._late = self.loop.call_later(PATIENCE, self._give_up)

    return Bounded
