"""Limits the size of a request's head, the time it may take, and clients that do not read. Knows the HTTP library only.

Anyone can open a connection and send a head without a key. One of uvicorn's parsers buffers a head of any length, and
neither limits the time. A response that the client does not read would stay in memory.
"""

from __future__ import annotations

from typing import Any

from adapterbank.serving.http.heads import MAX_HEAD

HEAD_TIMEOUT = 30.0
"""Seconds within which a head must arrive: from the start of the connection, later from the head's first bytes."""
WRITE_TIMEOUT = 30.0
"""Seconds within which a client must read something of a response that it has not read whole."""
_H11_HEAD = 1 << 20
"""h11's own limit, which it answers as a malformed request; the one above is reached first."""
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def bounded(protocol: Any) -> type[Any]:
    """Return a subclass of a uvicorn protocol that enforces the limits."""
    return _with_bounded_heads(_with_bounded_bodies(_with_readers(protocol)))


def _with_bounded_heads(protocol: Any) -> type[Any]:
    class BoundedHeads(protocol):  # type: ignore[misc]
        _head = 0

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
            super().data_received(data)
            self._head = 0 if self._head_is_complete() else self._head + len(data)
            if self._head > MAX_HEAD:
                if self._is_answered(idle=True):
                    self.transport.write(_TOO_LARGE)
                self.transport.close()
            elif not self._head:
                self._timeout.cancel()
            elif self._timeout.cancelled():
                self._timeout = self.loop.call_later(HEAD_TIMEOUT, self._time_out)

        def _time_out(self) -> None:
            if self._is_answered(idle=True):
                self.transport.abort()
            else:  # the head of the next request, sent before the response to this one
                self._timeout = self.loop.call_later(HEAD_TIMEOUT, self._time_out)

    return BoundedHeads


def _with_bounded_bodies(protocol: Any) -> type[Any]:
    calls_back = hasattr(protocol, "on_headers_complete")  # httptools does, h11 has states

    class BoundedBodies(protocol):  # type: ignore[misc]
        _in_body = _ended = False
        _late: Any = None

        def connection_lost(self, exc: Exception | None) -> None:
            self._bound_late_body(late=False)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._ended = False
            super().data_received(data)
            in_body = self._in_body if calls_back else str(self.conn.their_state) == "SEND_BODY"
            self._bound_late_body(late=in_body and self._is_answered(idle=False))

        def on_headers_complete(self) -> None:
            self._in_body = True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_body, self._ended = False, True
            super().on_message_complete()

        def _head_is_complete(self) -> bool:
            if calls_back:
                return bool(self._in_body or self._ended)
            return not self.conn.trailing_data[0] or str(self.conn.their_state) != "IDLE"  # h11 keeps this state

        def _is_answered(self, *, idle: bool) -> bool:
            """Whether the last request has its whole response; `idle` if there was none yet."""
            return bool(idle if self.cycle is None else self.cycle.response_complete)

        def _bound_late_body(self, *, late: bool) -> None:
            """Bound the time of a body that still arrives though the request was answered, such as with a refusal."""
            if late and self._late is None:
                self._late = self.loop.call_later(HEAD_TIMEOUT, self.transport.abort)
            elif not late and self._late is not None:
                self._late.cancel()
                self._late = None

    return BoundedBodies


def _with_readers(protocol: Any) -> type[Any]:
    class Readers(protocol):  # type: ignore[misc]
        _unread: Any = None

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_unread()
            super().connection_lost(exc)

        def pause_writing(self) -> None:  # the client reads more slowly than the response is written
            self._expect_reading()
            super().pause_writing()

        def resume_writing(self) -> None:
            self._cancel_unread()
            super().resume_writing()

        def _expect_reading(self, before: int | None = None) -> None:
            """End the connection unless what is left of the response shrinks in time."""
            left = self.transport.get_write_buffer_size()
            if before is not None and left >= before:
                self.transport.abort()
            else:
                self._unread = self.loop.call_later(WRITE_TIMEOUT, self._expect_reading, left)

        def _cancel_unread(self) -> None:
            if self._unread is not None:
                self._unread.cancel()

    return Readers
