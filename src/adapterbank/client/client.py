"""The HTTP client for `adapterbank serve`. Knows no torch, bank or engine.

    client = adapterbank.Client("http://127.0.0.1:8000")
    client.predict("sentiment", ["What a film!"])[0].label

`Client` and `AsyncClient` have the same methods, which `protocol.Calls` describes once; here is how they send and wait.
A refused request raises a `ServiceError` with the server's message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from adapterbank.client.protocol import Call, Calls, EventStream, Steps, events_path
from adapterbank.client.replies import HttpReply, ServerEvent
from adapterbank.errors import InputError
from adapterbank.install import extra_command

if TYPE_CHECKING:
    import httpx

Read = TypeVar("Read")

_SILENCE = 60.0
"""Seconds without a line after which an event stream counts as lost; the server sends one more often."""


class Client(Calls):
    """A client for the tasks and runs of a server; `with` closes its connections."""

    def __init__(self, url: str, key: str | None = None, *, timeout: float = 60.0, retries: int = 4) -> None:
        """Take the address of the server, and a key if the server requires one.

        A request that is refused because the server is busy, or that gets lost, is sent again up to `retries` times.
        `timeout` is in seconds, for each attempt.
        """
        self._http: httpx.Client = _library().Client(**_settings(url, key, timeout))
        self.url, self.retries = url, retries

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def events(self, id: str) -> Iterator[ServerEvent]:
        """Yield the events of a run until it ends; raise a `ServiceError` if the stream ends before."""
        stream = EventStream()
        try:
            with self._http.stream("GET", events_path(id), timeout=_SILENCE) as response:
                if response.status_code != 200:
                    response.read()
                    raise _reply(response).error(self.url)
                for line in response.iter_lines():
                    if event := stream.feed(line):
                        yield event
                stream.end()
        except _library().TransportError as error:
            raise _lost(error).error(self.url) from error

    def _run(self, steps: Steps[Read]) -> Read:
        reply: HttpReply | None = None
        try:
            while True:
                step = steps.send(reply)
                if isinstance(step, Call):
                    reply = self._send(step)
                else:
                    time.sleep(step)
        except StopIteration as end:
            result: Read = end.value
            return result

    def _send(self, call: Call[Any]) -> HttpReply:
        request = call.request()
        try:
            return _reply(self._http.request(**request))
        except _library().TransportError as error:
            return _lost(error)


class AsyncClient(Calls):
    """`Client` for programs with an event loop; `async with` closes its connections."""

    def __init__(self, url: str, key: str | None = None, *, timeout: float = 60.0, retries: int = 4) -> None:
        """Take the address of the server, and a key if the server requires one; see `Client`."""
        self._http: httpx.AsyncClient = _library().AsyncClient(**_settings(url, key, timeout))
        self.url, self.retries = url, retries

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def events(self, id: str) -> AsyncIterator[ServerEvent]:
        """Yield the events of a run until it ends; raise a `ServiceError` if the stream ends before."""
        stream = EventStream()
        try:
            async with self._http.stream("GET", events_path(id), timeout=_SILENCE) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _reply(response).error(self.url)
                async for line in response.aiter_lines():
                    if event := stream.feed(line):
                        yield event
                stream.end()
        except _library().TransportError as error:
            raise _lost(error).error(self.url) from error

    async def _run(self, steps: Steps[Read]) -> Read:
        reply: HttpReply | None = None
        try:
            while True:
                step = steps.send(reply)
                if isinstance(step, Call):
                    reply = await self._send(step)
                else:
                    await asyncio.sleep(step)
        except StopIteration as end:
            result: Read = end.value
            return result

    async def _send(self, call: Call[Any]) -> HttpReply:
        request = call.request() if call.content is None else await asyncio.to_thread(call.request)
        try:
            return _reply(await self._http.request(**request))
        except _library().TransportError as error:
            return _lost(error)


def _reply(response: httpx.Response) -> HttpReply:
    try:
        body = response.json() if response.content else None
    except ValueError:
        body = None
    return HttpReply(response.status_code, body, response.headers.get("retry-after"))


def _lost(error: httpx.TransportError) -> HttpReply:
    import httpx

    unsent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
    return HttpReply(lost=str(error) or type(error).__name__, unsent=unsent)


def _settings(url: str, key: str | None, timeout: float) -> dict[str, Any]:
    """Return the arguments of both kinds of httpx client."""
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    return {"base_url": url.rstrip("/"), "headers": headers, "timeout": timeout}


def _library() -> Any:
    try:
        import httpx
    except ImportError:
        raise InputError(f"The client needs httpx: {extra_command('serve')}") from None
    return httpx
