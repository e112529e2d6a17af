"""The HTTP client: a program on another machine and `adapterbank serve`. Knows no torch, bank or engine.

    client = adapterbank.Client("http://127.0.0.1:8000")
    client.predict("sentiment", ["What a film!"])[0].label

`Client` and `AsyncClient` have the same methods and differ in the sending and the waiting alone; `calls` says what is
sent and how an answer is read. What is refused is a `ServiceError` with the server's own sentence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from adapterbank.client import protocol
from adapterbank.client.protocol import Call, HttpReply, Listing, RunEventLine, RunStatus, TaskReply
from adapterbank.errors import InputError, ServiceError

if TYPE_CHECKING:
    import httpx

Read = TypeVar("Read")

_POLL = 0.5
"""Seconds between two looks at a run."""
_FALLS_SILENT = 60.0
"""Seconds without a line after which a stream of events counts as lost; the server sends one more often."""


class Client:
    """A server's tasks and runs; `with` closes its connections."""

    def __init__(self, url: str, key: str | None = None, *, timeout: float = 60.0, retries: int = 4) -> None:
        """Name the server, and the key where it wants one.

        A request that is refused for overload or lost on the way is sent again up to `retries` times; `timeout` is for
        each, in seconds.
        """
        self._http: httpx.Client = _library().Client(**_settings(url, key, timeout))
        self._url, self._retries = url, retries

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def predict(
        self, task: str, texts: Sequence[str], pairs: Sequence[str] | None = None, best: int = 0
    ) -> list[TaskReply]:
        """Ask one task (`name` or `name@version`) about texts, or texts and their pairs."""
        return self._call(protocol.predict(task, texts, pairs, best))

    def predict_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[TaskReply]:
        """Ask any tasks in one request: rows of `task`, `text` and perhaps `pair`."""
        return self._call(protocol.predict_rows(rows))

    def tasks(self) -> Listing:
        """List the tasks with their scores and sizes."""
        return self._call(protocol.tasks())

    def task(self, name: str) -> dict[str, Any]:
        """Tell all that is known of one task."""
        return self._call(protocol.about(name))

    def remove(self, task: str) -> dict[str, Any]:
        """Take a task, or `task@version`, out of the bank."""
        return self._call(protocol.remove(task))

    def rollback(self, task: str) -> dict[str, Any]:
        """Make the version before the default one, or the one named, the default."""
        return self._call(protocol.rollback(task))

    def train(self, task: str, path: str | Path, **options: Any) -> str:
        """Queue a training on a data file, with the options of `adapterbank train`; gives the run's id."""
        return self._call(protocol.train(task, path, options))

    def runs(self) -> list[RunStatus]:
        """List the runs, newest first."""
        return self._call(protocol.runs())

    def run(self, id: str) -> RunStatus:
        """Tell where a run stands."""
        return self._call(protocol.run(id))

    def cancel(self, id: str) -> RunStatus:
        """Cancel a run that is queued or running."""
        return self._call(protocol.run(id, "DELETE"))

    def wait(self, id: str, watch: Callable[[RunStatus], None] | None = None) -> RunStatus:
        """Wait until a run is done, also while the server is started again; `watch` hears of every change.

        A run that fails or is cancelled is a `TrainingError`.
        """
        waiting = protocol.Waiting(watch)
        while True:
            try:
                run = self.run(id)
            except ServiceError as error:
                waiting.missed(error)
            else:
                if waiting.heard(run):
                    return protocol.finished(run)
            time.sleep(_POLL)

    def events(self, id: str) -> Iterator[RunEventLine]:
        """Follow a run as it goes; ends with the run. A `ServiceError` where the stream ends before."""
        stream = protocol.Stream()
        try:
            with self._http.stream("GET", protocol.events_path(id), timeout=_FALLS_SILENT) as response:
                if response.status_code != 200:
                    response.read()
                    raise _reply(response).error(self._url)
                for line in response.iter_lines():
                    if event := stream.feed(line):
                        yield event
                stream.end()
        except _library().TransportError as error:
            raise _lost(error).error(self._url) from error

    def health(self) -> bool:
        """Whether the server is alive."""
        return self._send(protocol.HEALTH).status == 200

    def ready(self) -> bool:
        """Whether the server answers for its tasks by now."""
        return self._send(protocol.READY).status == 200

    def _call(self, call: Call[Read]) -> Read:
        talk = protocol.talk(call, self._retries, self._url)
        try:
            wanted = next(talk)
            while True:
                if wanted is None:
                    wanted = talk.send(self._send(call))
                else:
                    time.sleep(wanted)
                    wanted = next(talk)
        except StopIteration as end:
            found: Read = end.value
            return found

    def _send(self, call: Call[Any]) -> HttpReply:
        try:
            return _reply(self._http.request(**call.request()))
        except _library().TransportError as error:
            return _lost(error)


class AsyncClient:
    """`Client` for programs with an event loop; `async with` closes its connections."""

    def __init__(self, url: str, key: str | None = None, *, timeout: float = 60.0, retries: int = 4) -> None:
        """Name the server, and the key where it wants one; see `Client`."""
        self._http: httpx.AsyncClient = _library().AsyncClient(**_settings(url, key, timeout))
        self._url, self._retries = url, retries

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def predict(
        self, task: str, texts: Sequence[str], pairs: Sequence[str] | None = None, best: int = 0
    ) -> list[TaskReply]:
        """Ask one task (`name` or `name@version`) about texts, or texts and their pairs."""
        return await self._call(protocol.predict(task, texts, pairs, best))

    async def predict_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[TaskReply]:
        """Ask any tasks in one request: rows of `task`, `text` and perhaps `pair`."""
        return await self._call(protocol.predict_rows(rows))

    async def tasks(self) -> Listing:
        """List the tasks with their scores and sizes."""
        return await self._call(protocol.tasks())

    async def task(self, name: str) -> dict[str, Any]:
        """Tell all that is known of one task."""
        return await self._call(protocol.about(name))

    async def remove(self, task: str) -> dict[str, Any]:
        """Take a task, or `task@version`, out of the bank."""
        return await self._call(protocol.remove(task))

    async def rollback(self, task: str) -> dict[str, Any]:
        """Make the version before the default one, or the one named, the default."""
        return await self._call(protocol.rollback(task))

    async def train(self, task: str, path: str | Path, **options: Any) -> str:
        """Queue a training on a data file, with the options of `adapterbank train`; gives the run's id."""
        return await self._call(await asyncio.to_thread(protocol.train, task, path, options))

    async def runs(self) -> list[RunStatus]:
        """List the runs, newest first."""
        return await self._call(protocol.runs())

    async def run(self, id: str) -> RunStatus:
        """Tell where a run stands."""
        return await self._call(protocol.run(id))

    async def cancel(self, id: str) -> RunStatus:
        """Cancel a run that is queued or running."""
        return await self._call(protocol.run(id, "DELETE"))

    async def wait(self, id: str, watch: Callable[[RunStatus], None] | None = None) -> RunStatus:
        """Wait until a run is done, also while the server is started again; `watch` hears of every change.

        A run that fails or is cancelled is a `TrainingError`.
        """
        waiting = protocol.Waiting(watch)
        while True:
            try:
                run = await self.run(id)
            except ServiceError as error:
                waiting.missed(error)
            else:
                if waiting.heard(run):
                    return protocol.finished(run)
            await asyncio.sleep(_POLL)

    async def events(self, id: str) -> AsyncIterator[RunEventLine]:
        """Follow a run as it goes; ends with the run. A `ServiceError` where the stream ends before."""
        stream = protocol.Stream()
        try:
            async with self._http.stream("GET", protocol.events_path(id), timeout=_FALLS_SILENT) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _reply(response).error(self._url)
                async for line in response.aiter_lines():
                    if event := stream.feed(line):
                        yield event
                stream.end()
        except _library().TransportError as error:
            raise _lost(error).error(self._url) from error

    async def health(self) -> bool:
        """Whether the server is alive."""
        return (await self._send(protocol.HEALTH)).status == 200

    async def ready(self) -> bool:
        """Whether the server answers for its tasks by now."""
        return (await self._send(protocol.READY)).status == 200

    async def _call(self, call: Call[Read]) -> Read:
        talk = protocol.talk(call, self._retries, self._url)
        try:
            wanted = next(talk)
            while True:
                if wanted is None:
                    wanted = talk.send(await self._send(call))
                else:
                    await asyncio.sleep(wanted)
                    wanted = next(talk)
        except StopIteration as end:
            found: Read = end.value
            return found

    async def _send(self, call: Call[Any]) -> HttpReply:
        try:
            return _reply(await self._http.request(**call.request()))
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
    """Give what both kinds of httpx client are made with."""
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    return {"base_url": url.rstrip("/"), "headers": headers, "timeout": timeout}


def _library() -> Any:
    try:
        import httpx
    except ImportError:
        raise InputError("The client needs httpx: pip install 'adapterbank[serve]'") from None
    return httpx
