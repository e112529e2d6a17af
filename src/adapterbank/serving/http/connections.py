"""Limits the size of a request's head and the time it may take. Knows the HTTP library only.

Anyone can open a connection and send a head without a key. One of uvicorn's parsers buffers a head of any length, and
neither limits the time.
"""

from __future__ import annotations

from typing import Any

from adapterbank.serving.http.heads import MAX_HEAD

HEAD_TIMEOUT = 30.0
"""Seconds within which a head must arrive: from the start of the connection, later from the head's first bytes."""

_H11_HEAD = 1 << 20
"""h11's own limit, which it answers as a malformed request; the one above is reached first."""
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def bounded(protocol: Any) -> type[Any]:
    """Return a subclass of a uvicorn protocol that enforces the limits."""

    class Bounded(protocol):  # type: ignore[misc]
        _head, _in_body, _ended = 0, False, False

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            config.h11_max_incomplete_event_size = _H11_HEAD
            super().__init__(config, *args, **kwargs)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._timeout = self.loop.call_later(HEAD_TIMEOUT, self._time_out)

        def connection_lost(self, exc: Exception | None) -> None:
            self._timeout.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._ended = False
            super().data_received(data)
            self._head = 0 if self._head_is_complete() else self._head + len(data)
            if self._head > MAX_HEAD:
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(_TOO_LARGE)
                self.transport.close()
            elif not self._head:
                self._timeout.cancel()
            elif self._timeout.cancelled():
                self._timeout = self.loop.call_later(HEAD_TIMEOUT, self._time_out)

        def on_headers_complete(self) -> None:
            self._in_body = True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_body, self._ended = False, True
            super().on_message_complete()

        def _head_is_complete(self) -> bool:
            if hasattr(protocol, "on_headers_complete"):
                return bool(self._in_body or self._ended)
            return not self.conn.trailing_data[0] or str(self.conn.their_state) != "IDLE"  # h11 keeps this state

        def _time_out(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()
            else:  # the head of the next request, sent before the response to this one
                self._timeout = self.loop.call_later(HEAD_TIMEOUT, self._time_out)

    return Bounded
