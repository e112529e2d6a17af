"""Bytes to a server and its answer back, on a plain socket: no library corrects what is sent here."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any

READ = 1 << 16
MOST = 64 << 20
"""Bytes of an answer after which reading stops."""


@dataclass(frozen=True)
class Answer:
    """What a server answered; status 0 where it closed the connection, or fell silent, without an answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = True
    """Whether the body came to its end."""
    error: str = ""

    @property
    def kind(self) -> str:
        """The media type."""
        return self.headers.get("content-type", "").partition(";")[0].strip()

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.text)

    @property
    def text(self) -> str:
        """The body as text."""
        packed = self.headers.get("content-encoding") == "gzip"
        return (gzip.decompress(self.body) if packed else self.body).decode(errors="replace")


def connect(port: int, seconds: float) -> socket.socket:
    """Open a connection."""
    return socket.create_connection(("127.0.0.1", port), timeout=seconds)


def exchange(
    port: int, message: bytes, *, head: bool = False, pieces: int = 1, pause: float = 0.0, seconds: float = 30.0
) -> Answer:
    """Send bytes, in as many pieces with pauses, and read one answer; `head` says that it has no body."""
    with connect(port, seconds) as wire:
        size = max(1, -(-len(message) // pieces))
        with contextlib.suppress(ConnectionError):  # the server may refuse, and answer, before it has read all
            for start in range(0, len(message), size):
                wire.sendall(message[start : start + size])
                if start + size < len(message):
                    time.sleep(pause)
        return receive(wire, head=head)


def receive(wire: socket.socket, *, head: bool = False) -> Answer:
    """Read one answer."""
    data = b""
    try:
        while b"\r\n\r\n" not in data:
            part = wire.recv(READ)
            if not part:
                return Answer(error="closed")
            data += part
            if data.startswith(b"HTTP/1.1 100"):
                data = data.partition(b"\r\n\r\n")[2]
    except OSError as error:  # a timeout among them
        return Answer(error=repr(error))
    first, _, rest = data.partition(b"\r\n\r\n")
    lines = first.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    status = int(lines[0].split()[1])
    if head or status in (204, 304):
        return Answer(status, headers)
    if "content-length" in headers:
        body, whole = _read_length(wire, rest, int(headers["content-length"]))
    elif headers.get("content-type", "").startswith("text/event-stream"):
        body, whole = rest, True  # a stream ends with its run
    else:
        body, whole = _read_chunks(wire, rest)
    return Answer(status, headers, body, whole)


def _read_length(wire: socket.socket, data: bytes, length: int) -> tuple[bytes, bool]:
    with contextlib.suppress(OSError):
        while len(data) < min(length, MOST):
            part = wire.recv(READ)
            if not part:
                break
            data += part
    return data[:length], len(data) >= length


def _read_chunks(wire: socket.socket, data: bytes) -> tuple[bytes, bool]:
    """Read a chunked body; without chunks it ends with the connection."""
    with contextlib.suppress(OSError):
        while not data.endswith(b"0\r\n\r\n") and len(data) < MOST:
            part = wire.recv(READ)
            if not part:
                break
            data += part
    body, rest = b"", data
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        try:
            length = int(size.partition(b";")[0], 16)
        except ValueError:
            return data, False
        if not length:
            return body, True
        body, rest = body + rest[:length], rest[length + 2 :]
    return body, False
