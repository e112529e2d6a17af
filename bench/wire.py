"""Cheap HTTP/1.1 clients with persistent connections, because they share the cores with what they measure."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Request = tuple[str, bytes]
"""Path and JSON body."""
Check = Callable[[int, Any], bool]
"""Number of a request and its answer -> whether it is right."""


@dataclass
class Tally:
    """What the clients measured."""

    seconds: float = 0.0
    times: list[float] = field(default_factory=list, repr=False)
    """Seconds of each answered request."""
    statuses: dict[int, int] = field(default_factory=dict)
    wrong: int = 0

    @property
    def requests_per_second(self) -> float:
        """Answered requests per second."""
        return len(self.times) / self.seconds

    def summary(self) -> dict[str, Any]:
        """Return rates, and percentiles in milliseconds."""
        ordered = sorted(self.times)
        at = {
            f"p{q}_ms": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 1) for q in (50, 90, 99)
        }
        found = {"requests": len(ordered), "requests_per_second": round(self.requests_per_second, 1), **at}
        return {**found, "max_ms": round(1000 * ordered[-1], 1), "statuses": self.statuses, "wrong": self.wrong}


class Connection:
    """One client."""

    def __init__(self, host: str, port: int) -> None:
        """Prepare a client; `ask` connects, and reconnects if the server closed the connection."""
        self.host, self.port = host, port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request and return status and body."""
        if self.writer is None or self.writer.is_closing():
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        assert self.reader is not None
        size = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{size}"
        self.writer.write(head.encode() + b"\r\n" + body)
        lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        length = next(int(line[15:]) for line in lines if line[:15].lower() == b"content-length:")
        found = await self.reader.readexactly(length)
        if any(line.lower() == b"connection: close" for line in lines):
            self.close()
        return int(lines[0].split()[1]), found

    def close(self) -> None:
        """Close the connection."""
        if self.writer is not None:
            self.writer.close()


async def press(
    host: str, port: int, make: Callable[[int], Request], *, clients: int, seconds: float, check: Check | None = None
) -> Tally:
    """Let clients send the next request as soon as they get an answer."""
    ends = time.perf_counter() + seconds

    async def work(k: int, tally: Tally) -> None:
        connection, number = Connection(host, port), k
        while time.perf_counter() < ends:
            await _one(connection, make, number, tally, time.perf_counter(), check)
            number += clients
        connection.close()

    return await _all([lambda tally, k=k: work(k, tally) for k in range(clients)])  # type: ignore[misc]


async def pace(
    host: str,
    port: int,
    make: Callable[[int], Request],
    *,
    clients: int,
    seconds: float,
    rate: float,
    check: Check | None = None,
) -> Tally:
    """Send requests at a given rate, whether or not earlier ones are answered; a late start counts as waiting."""
    began = time.perf_counter()

    async def work(k: int, tally: Tally) -> None:
        connection, number = Connection(host, port), k
        while (due := began + number / rate) < began + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await _one(connection, make, number, tally, due, check)
            number += clients
        connection.close()

    return await _all([lambda tally, k=k: work(k, tally) for k in range(clients)])  # type: ignore[misc]


async def _one(
    connection: Connection, make: Callable[[int], Request], number: int, tally: Tally, since: float, check: Check | None
) -> None:
    status, found = await connection.ask(*make(number))
    if status != 200 and status < 429:
        raise SystemExit(f"{status}: {found.decode()}")  # no load: the request itself is wrong
    tally.times.append(time.perf_counter() - since)
    tally.statuses[status] = tally.statuses.get(status, 0) + 1
    if check is not None and (status != 200 or not check(number, json.loads(found))):
        tally.wrong += status == 200


async def _all(work: Sequence[Callable[[Tally], Awaitable[None]]]) -> Tally:
    tally, began = Tally(), time.perf_counter()
    await asyncio.gather(*(one(tally) for one in work))
    tally.seconds = time.perf_counter() - began
    return tally
