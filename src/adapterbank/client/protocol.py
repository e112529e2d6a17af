"""The calls of the HTTP interface, each described once, and when a call is sent again. Sends nothing itself.

A method of `Calls` returns a `Call`: what to send, how to read the response, and whether it may be sent again. The
decorator `sent` makes it a method that carries the call out. What happens on the way (send, wait, send again) is a
generator of steps: `Client` runs it blocking, `AsyncClient` in an event loop.
"""

from __future__ import annotations

import functools
import gzip
import inspect
import json
import random
import re
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload
from urllib.parse import quote

from adapterbank.client.replies import ENDED, HttpReply, Listing, RunStatus, ServerEvent, TaskReply, TaskSummary, make
from adapterbank.errors import InputError, ServiceError

CallParams = ParamSpec("CallParams")
Read = TypeVar("Read")

POLL = 0.5
"""Seconds between two looks at a run that is waited for."""
_BUSY = (429, 503)
"""The server has not acted on the request: any request may be sent again."""
_LOST_BY_PROXY = (500, 502, 504)
"""Without one of the server's error codes, a proxy's response: it lost the request, or the server behind it."""
_PERMANENT = ("damaged",)
"""Codes of a 503 that waiting does not change."""
_OUTAGE = 300.0
"""Seconds without a response after which `wait` gives up; a restart with many tasks takes a while."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
"""Seconds between two attempts, doubled each time. If the server asks for a longer pause, there is no other attempt."""


@dataclass(frozen=True)
class Call(Generic[Read]):
    """One request: what to send, and how to read the response."""

    method: str
    path: str
    read: Callable[[Any], Read]
    """Turns the JSON of the response into the result."""
    json: Any = None
    content: Callable[[], bytes] | None = None
    """Loads the body, where it is a file."""
    params: Mapping[str, Any] = field(default_factory=dict)
    repeatable: bool = True
    """Whether it may be sent again if the first request may have reached the server."""
    probe: bool = False
    """Whether only success matters: one attempt, no error."""

    def request(self) -> dict[str, Any]:
        """Return the arguments for httpx; loads the body."""
        body = {"content": self.content()} if self.content is not None else {"json": self.json}
        return {"method": self.method, "url": self.path, "params": dict(self.params), **body}


Steps = Generator[Call[Any] | float, HttpReply | None, Read]
"""What to do next: send a call, for which its `HttpReply` is sent back, or sleep for some seconds."""


class _Blocking(Protocol):
    def _run(self, steps: Steps[Read]) -> Read: ...


class _Awaiting(Protocol):
    async def _run(self, steps: Steps[Read]) -> Read: ...


class ClientMethod(Generic[CallParams, Read]):
    """The type of a method of `Calls`: it returns its result in `Client`, and an awaitable of it in `AsyncClient`."""

    @overload
    def __get__(self, client: None, owner: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: _Blocking, owner: type) -> Callable[CallParams, Read]: ...
    @overload
    def __get__(self, client: _Awaiting, owner: type) -> Callable[CallParams, Coroutine[Any, Any, Read]]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        """Only for type checkers: at run time the methods are plain functions."""


def stepwise(describe: Callable[Concatenate[Any, CallParams], Steps[Read]]) -> ClientMethod[CallParams, Read]:
    """Make a method of a generator of steps; it keeps the signature and the docstring, with the result's type."""

    def method(self: Any, *args: CallParams.args, **kwargs: CallParams.kwargs) -> Any:
        return self._run(describe(self, *args, **kwargs))

    functools.update_wrapper(method, describe)
    signature = inspect.signature(describe)
    result = re.sub(r"^(?:Call|Steps)\[(.*)\]$", r"\1", signature.return_annotation)
    method.__annotations__ = {**describe.__annotations__, "return": result}
    method.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
    return cast(ClientMethod[CallParams, Read], method)


def sent(describe: Callable[Concatenate[Any, CallParams], Call[Read]]) -> ClientMethod[CallParams, Read]:
    """Make a method that carries out the call that a function describes."""

    def steps(self: Any, /, *args: CallParams.args, **kwargs: CallParams.kwargs) -> Steps[Read]:
        return (yield from exchange(describe(self, *args, **kwargs), self.retries, self.url))

    functools.update_wrapper(steps, describe)
    return stepwise(steps)


def exchange(call: Call[Read], retries: int, address: str) -> Steps[Read]:
    """Send a call, and send it again where that may help."""
    for attempt in range(retries + 1):
        reply = yield call
        assert reply is not None
        if call.probe:
            return call.read(reply.status == 200)
        if 200 <= reply.status < 300:
            try:
                return call.read(reply.body)
            except (KeyError, TypeError, AttributeError) as error:
                problem = f"{address} sent a response that this release cannot read ({error!r})"
                raise ServiceError(f"{problem}; install the server's release.", "", reply.status) from error
        refusal = reply.error(address)
        busy = reply.status in _BUSY and refusal.code not in _PERMANENT
        lost = bool(reply.lost) or (reply.status in _LOST_BY_PROXY and not refusal.code)
        again = busy or (lost and (call.repeatable or reply.unsent))
        wait = pause(attempt, reply.retry_after, random.random()) if again and attempt < retries else None
        if wait is None:
            raise refusal
        yield wait
    raise AssertionError("the last attempt returns or raises")


def pause(attempt: int, retry_after: str | None, jitter: float) -> float | None:
    """Return the seconds before the next attempt, at least what the server asks for; None if that is too long.

    `jitter` between 0 and 1 spreads clients that were refused at the same time.
    """
    try:
        asked = max(0.0, float(retry_after or 0))
    except ValueError:  # a date: the clocks of two machines differ by more than a pause
        asked = 0.0
    wait = max(asked * (1 + jitter / 4), _FIRST_PAUSE * 2**attempt * (1 + jitter) / 2)
    return None if asked > _LONGEST_PAUSE else min(wait, _LONGEST_PAUSE * 1.25)


class Calls:
    """Every call of the interface; `Client` and `AsyncClient` send them."""

    url: str
    """The server's address."""
    retries: int
    """How often a request is sent again."""

    @sent
    def predict(
        self,
        task: str,
        texts: Sequence[str | Sequence[str]],
        pairs: Sequence[str] | None = None,
        best: int = 0,
        abstain: float = 0.0,
        explain: bool = False,
    ) -> Call[list[TaskReply]]:
        """Predict texts, or texts and their pairs, with one task (`name` or `name@version`).

        For tagging, a text may be the list of its words.
        With `abstain`, `label` and `labels` are None where the answer is less probable than that. With `explain`, each
        reply has an `explanation`: each word's share in the answer.
        """
        if isinstance(texts, str):
            raise InputError(f"texts is one string, {texts[:40]!r}; give a list of strings.")
        body: dict[str, Any] = {"texts": list(texts)} | ({"pairs": list(pairs)} if pairs is not None else {})
        body |= ({"best": best} if best else {}) | _asked(abstain, explain)

        def read(found: Any) -> list[TaskReply]:
            about = {"task": found["task"], "version": found["version"]}
            return [make(TaskReply, {**one, **about}) for one in found["predictions"]]

        return Call("POST", f"{_task_path(task)}/predict", read, json=body)

    @sent
    def predict_rows(
        self, rows: Sequence[Mapping[str, Any]], abstain: float = 0.0, explain: bool = False
    ) -> Call[list[TaskReply]]:
        """Predict rows of several tasks in one request; a row has `task`, `text` and optionally `pair`."""

        def read(found: Any) -> list[TaskReply]:
            return [make(TaskReply, one) for one in found["predictions"]]

        body = {"rows": [dict(row) for row in rows]} | _asked(abstain, explain)
        return Call("POST", "/v1/predict", read, json=body)

    @sent
    def tasks(self) -> Call[Listing]:
        """List the tasks with their scores and sizes."""

        def read(body: Any) -> Listing:
            found = tuple(make(TaskSummary, one) for one in body["tasks"])
            return Listing(body["backbone"], found, tuple(body.get("problems", ())))

        return Call("GET", "/v1/tasks", read)

    @sent
    def task(self, name: str) -> Call[dict[str, Any]]:
        """Return everything about one task."""
        return Call("GET", _task_path(name), dict)

    @sent
    def remove(self, task: str) -> Call[dict[str, Any]]:
        """Remove a task, or `task@version`, from the bank."""
        return Call("DELETE", _task_path(task), lambda body: dict(body or {}), repeatable=False)

    @sent
    def rollback(self, task: str) -> Call[dict[str, Any]]:
        """Serve the previous version of a task again, or the one named by `task@version`."""
        return Call("POST", f"{_task_path(task)}/rollback", lambda body: dict(body or {}), repeatable=False)

    @sent  # type: ignore[arg-type]  # mypy: `options` might contain a `self`
    def train(
        self,
        task: str,
        path: str | Path,
        *,
        dev: str | Path | None = None,
        test: str | Path | None = None,
        **options: Any,
    ) -> Call[str]:
        """Queue a training run on a data file, with the options of `adapterbank train`; return the run's id.

        `dev` and `test` are files of the same format.
        """
        formats = [Path(one).name.removesuffix(".gz").rpartition(".")[2] for one in (path, dev, test) if one]
        if len({*formats}) > 1:
            raise InputError(f"The files are {' and '.join(dict.fromkeys(formats))}; give files of one format.")
        others = {f"{name}_bytes": _load(Path(one)) for name, one in (("dev", dev), ("test", test)) if one}
        params = {"format": formats[0]} | {name: str(len(data)) for name, data in others.items()}
        params |= {name: str(value) for name, value in options.items()}
        load = functools.partial(_load, Path(path), b"".join(others.values()))
        read: Callable[[Any], str] = lambda body: str(body["id"])  # noqa: E731
        return Call("POST", f"{_task_path(task)}/train", read, content=load, params=params, repeatable=False)

    @sent
    def runs(self) -> Call[list[RunStatus]]:
        """List the runs, newest first."""
        return Call("GET", "/v1/runs", lambda body: [make(RunStatus, one) for one in body["runs"]])

    @sent
    def run(self, id: str) -> Call[RunStatus]:
        """Return the state of a run."""
        return _run_call(id)

    @sent
    def cancel(self, id: str) -> Call[RunStatus]:
        """Cancel a run that is queued or running."""
        return _run_call(id, "DELETE")

    @stepwise
    def wait(self, id: str, watch: Callable[[RunStatus], None] | None = None) -> Steps[RunStatus]:
        """Wait until a run has ended, also across a restart of the server; call `watch` at every change.

        A run that fails or is cancelled raises a `TrainingError`.
        """
        waiter = RunWaiter(watch)
        while True:
            try:
                run = yield from exchange(_run_call(id), self.retries, self.url)
            except ServiceError as error:
                waiter.missed(error)
            else:
                if waiter.update(run):
                    return run.check_done()
            yield POLL

    @sent
    def health(self) -> Call[bool]:
        """Return whether the server is alive."""
        return Call("GET", "/healthz", bool, probe=True)

    @sent
    def ready(self) -> Call[bool]:
        """Return whether the server has loaded its tasks."""
        return Call("GET", "/readyz", bool, probe=True)


def events_path(id: str) -> str:
    """Return the address of a run's event stream."""
    return f"/v1/runs/{quote(id, safe='')}/events"


def _run_call(id: str, method: str = "GET") -> Call[RunStatus]:
    return Call(method, f"/v1/runs/{quote(id, safe='')}", lambda body: make(RunStatus, body))


def _task_path(task: str) -> str:
    """Return a task's address; a name of the catalog has a slash, for which banks write a dash."""
    return f"/v1/tasks/{quote(task.replace('/', '-'), safe='@')}"


def _load(file: Path, more: bytes = b"") -> bytes:
    """Return the data of a file, with `more` after it."""
    try:
        return (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()) + more
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror or error}; name a CSV, TSV, JSON, JSONL or Parquet file."
        ) from error


class RunWaiter:
    """The state of a wait for a run; it outlasts a restart of the server."""

    def __init__(self, watch: Callable[[RunStatus], None] | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._watch, self._clock = watch, clock
        self._seen: RunStatus | None = None
        self._last = clock()

    def update(self, run: RunStatus) -> bool:
        """Take the run's state and report a change to the watcher; return whether the run has ended."""
        if self._watch and run != self._seen:
            self._watch(run)
        self._seen, self._last = run, self._clock()
        return run.over

    def missed(self, error: ServiceError) -> None:
        """Take a failed request; raise an error that is permanent or has lasted too long."""
        temporary = error.status in (0, *_BUSY) or (error.status in _LOST_BY_PROXY and not error.code)
        if not temporary or self._clock() - self._last > _OUTAGE:
            raise error


class EventStream:
    """Parses server-sent events line by line."""

    def __init__(self) -> None:
        self._kind, self._data, self._over = "", list[str](), False

    def feed(self, line: str) -> ServerEvent | None:
        """Take a line; return the event that it completes."""
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)
        elif not line and self._data:
            event = ServerEvent(self._kind, json.loads("\n".join(self._data)))
            self._kind, self._data = "", []
            if event.kind == "state":
                self._over = event.data.get("state") in ENDED
            return event
        return None

    def end(self) -> None:
        """Take the end of the stream; raise unless the run has ended."""
        if not self._over:
            why = "the server is stopping, or the key was revoked"
            raise ServiceError(f"The stream ended before its run: {why}. Call events() again, or wait().")


def _asked(abstain: float, explain: bool) -> dict[str, Any]:
    """Return the fields of a predict request that differ from their defaults."""
    return ({"abstain": abstain} if abstain else {}) | ({"explain": True} if explain else {})
