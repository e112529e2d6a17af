"""What can be asked of `adapterbank serve`, how its answers are read, and when to ask again. Sends nothing itself.

A `Call` is one question: what to send and how to read what comes back. `talk` holds the conversation of one call;
whoever drives it (`client`) sends and waits as it is told.
"""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from adapterbank.errors import InputError, ServiceError, TrainingError

_OVER = ("done", "failed", "cancelled")
"""States of a run to which nothing more will happen."""

Read = TypeVar("Read")
Made = TypeVar("Made")

_BUSY = (429, 503)
"""The server has done nothing with the request: it may be sent again, whatever it asks."""
_BETWEEN = (500, 502, 504)
"""Not in the server's own words, a proxy's: the server behind it was lost with the request."""
_FOR_GOOD = ("damaged",)
"""Answered with 503, and no better a second later."""
_OUTAGE = 300.0
"""Seconds without an answer after which a server will not come back: starting again with many tasks takes a while."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
"""Seconds between two tries, doubled each time. Where a server asks for a longer pause, there is no other try."""


@dataclass(frozen=True)
class TaskReply:
    """What a task says of one text; the fields that its kind has are set, as in `adapterbank.Prediction`."""

    task: str
    version: int
    label: str | None = None
    labels: tuple[str, ...] | None = None
    value: float | None = None
    answer: str | None = None
    start: int | None = None
    end: int | None = None
    null_odds: float | None = None
    best: tuple[dict[str, Any], ...] | None = None
    probabilities: dict[str, float] | None = None


@dataclass(frozen=True)
class Served:
    """A task as the server lists it."""

    name: str
    version: int
    kind: str
    metric: str
    score: float | None = None
    """On dev."""
    labels: tuple[str, ...] = ()
    method: str = ""
    size: int | None = None
    params: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    created: str = ""
    resident: bool = False


@dataclass(frozen=True)
class Listing:
    """All that a server serves; iterates over the tasks."""

    backbone: dict[str, Any]
    tasks: tuple[Served, ...]
    problems: tuple[dict[str, str], ...] = ()
    """Tasks of the bank that cannot be served, and why."""

    def __iter__(self) -> Iterator[Served]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


@dataclass(frozen=True)
class RunStatus:
    """A training run of the server."""

    id: str
    task: str
    state: str
    """queued, running, done, failed or cancelled."""
    options: dict[str, Any] = field(default_factory=dict)
    created: str | None = None
    started: str | None = None
    ended: str | None = None
    progress: dict[str, Any] | None = None
    history: tuple[dict[str, Any], ...] = ()
    """Loss and dev score of every epoch so far."""
    version: int | None = None
    metrics: dict[str, Any] | None = None
    failure: str | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in _OVER


@dataclass(frozen=True)
class RunEventLine:
    """One message of a run's stream."""

    kind: str
    """progress or state."""
    data: dict[str, Any]


@dataclass(frozen=True)
class Call(Generic[Read]):
    """One question: what to send, and how to read what comes back."""

    method: str
    path: str
    read: Callable[[Any], Read]
    json: Any = None
    content: bytes | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    repeatable: bool = True
    """Whether it may be sent again when nobody knows if it had arrived."""

    def request(self) -> dict[str, Any]:
        """Give what an HTTP library is called with."""
        body = {"content": self.content} if self.content is not None else {"json": self.json}
        return {"method": self.method, "url": self.path, "params": dict(self.params), **body}


@dataclass(frozen=True)
class HttpReply:
    """What came back: a status and a body, or the reason why nothing did."""

    status: int = 0
    body: Any = None
    retry_after: str | None = None
    lost: str = ""
    unsent: bool = False
    """Lost before it could have arrived."""

    def error(self, address: str) -> ServiceError:
        """Put what went wrong in the server's words, or say that it cannot be reached."""
        if self.lost:
            return ServiceError(f"{address} does not answer ({self.lost}); is `adapterbank serve` running there?")
        told = self.body.get("error") if isinstance(self.body, dict) else None
        if not isinstance(told, dict):
            return ServiceError(
                f"{address} answers {self.status}, not as adapterbank does; is another service there?", "", self.status
            )
        return ServiceError(str(told.get("message")), str(told.get("code")), self.status, str(told.get("request_id")))


def _some(cls: type[Made], value: Any) -> Made:
    """Make a dataclass of the fields that it knows: a later server may tell more."""
    if not isinstance(value, dict):
        raise TypeError(f"{cls.__name__} of {value!r}")
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]  # all that are made here are dataclasses
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items() if k in known})


def _place(task: str) -> str:
    """Give a task's path; a name of the catalog has a slash, for which banks write a dash."""
    return f"/v1/tasks/{quote(task.replace('/', '-'), safe='@')}"


def tasks() -> Call[Listing]:
    """List the tasks."""

    def read(body: Any) -> Listing:
        found = tuple(_some(Served, one) for one in body["tasks"])
        return Listing(body["backbone"], found, tuple(body.get("problems", ())))

    return Call("GET", "/v1/tasks", read)


def about(task: str) -> Call[dict[str, Any]]:
    """Tell all of one task."""
    return Call("GET", _place(task), dict)


def remove(task: str) -> Call[dict[str, Any]]:
    """Take a task out of the bank."""
    return Call("DELETE", _place(task), lambda body: dict(body or {}), repeatable=False)


def rollback(task: str) -> Call[dict[str, Any]]:
    """Make an earlier version the default."""
    return Call("POST", f"{_place(task)}/rollback", lambda body: dict(body or {}), repeatable=False)


def predict(task: str, texts: Sequence[str], pairs: Sequence[str] | None, best: int) -> Call[list[TaskReply]]:
    """Ask one task about texts."""
    if isinstance(texts, str):
        raise InputError(f"texts is one string, {texts[:40]!r}; give a list of strings.")
    body: dict[str, Any] = {"texts": list(texts)} | ({"pairs": list(pairs)} if pairs is not None else {})
    body |= {"best": best} if best else {}

    def read(found: Any) -> list[TaskReply]:
        about = {"task": found["task"], "version": found["version"]}
        return [_some(TaskReply, {**one, **about}) for one in found["predictions"]]

    return Call("POST", f"{_place(task)}/predict", read, json=body)


def predict_rows(rows: Sequence[Mapping[str, Any]]) -> Call[list[TaskReply]]:
    """Ask many tasks about a text each."""

    def read(found: Any) -> list[TaskReply]:
        return [_some(TaskReply, one) for one in found["predictions"]]

    return Call("POST", "/v1/predict", read, json={"rows": [dict(row) for row in rows]})


def train(task: str, path: str | Path, options: Mapping[str, Any]) -> Call[str]:
    """Queue a training."""
    file = Path(path)
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror or error}; name a CSV, TSV, JSONL or Parquet file."
        ) from error
    params = {"format": file.name.removesuffix(".gz").rpartition(".")[2]} | {k: str(v) for k, v in options.items()}
    place = f"{_place(task)}/train"
    return Call("POST", place, lambda body: str(body["id"]), content=data, params=params, repeatable=False)


def run(id: str, method: str = "GET") -> Call[RunStatus]:
    """Look at a run, or cancel it."""
    return Call(method, f"/v1/runs/{quote(id, safe='')}", lambda body: _some(RunStatus, body))


def runs() -> Call[list[RunStatus]]:
    """List the runs."""
    return Call("GET", "/v1/runs", lambda body: [_some(RunStatus, one) for one in body["runs"]])


def events_path(id: str) -> str:
    """Give where a run's events stream from."""
    return f"/v1/runs/{quote(id, safe='')}/events"


HEALTH = Call("GET", "/healthz", lambda body: None)
READY = Call("GET", "/readyz", lambda body: None)


def finished(run: RunStatus) -> RunStatus:
    """Refuse a run that left no version."""
    if run.state != "done":
        raise TrainingError(run.failure or f"Run {run.id} of {run.task!r} was {run.state}.")
    return run


class Waiting:
    """What is known while a run is waited for; a server that is being restarted is waited for too."""

    def __init__(self, watch: Callable[[RunStatus], None] | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._watch, self._clock = watch, clock
        self._seen: RunStatus | None = None
        self._last = clock()

    def heard(self, run: RunStatus) -> bool:
        """Take what the server says of the run, and tell the watcher what is new; gives whether it is over."""
        if self._watch and run != self._seen:
            self._watch(run)
        self._seen, self._last = run, self._clock()
        return run.over

    def missed(self, error: ServiceError) -> None:
        """Take that the server did not answer; what will not pass, or goes on for too long, is raised."""
        passes = error.status in (0, *_BUSY) or (error.status in _BETWEEN and not error.code)
        if not passes or self._clock() - self._last > _OUTAGE:
            raise error


def pause(attempt: int, retry_after: str | None, luck: float) -> float | None:
    """Say how many seconds to wait before the next try: no fewer than the server asks for; None: too many.

    `luck` between 0 and 1 spreads the clients that were refused together.
    """
    try:
        asked = max(0.0, float(retry_after or 0))
    except ValueError:  # a date: the clocks of two machines differ by more than a pause
        asked = 0.0
    wait = max(asked * (1 + luck / 4), _FIRST_PAUSE * 2**attempt * (1 + luck) / 2)
    return None if asked > _LONGEST_PAUSE else min(wait, _LONGEST_PAUSE * 1.25)


def talk(call: Call[Read], retries: int, address: str) -> Generator[float | None, HttpReply | None, Read]:
    """Hold the conversation of one call: yields None to have it sent, a number to have as many seconds waited."""
    for attempt in range(retries + 1):
        reply = yield None
        assert reply is not None
        if 200 <= reply.status < 300:
            try:
                return call.read(reply.body)
            except (KeyError, TypeError, AttributeError) as error:
                problem = f"{address} answers what this release cannot read ({error!r}); use the server's release."
                raise ServiceError(problem, "", reply.status) from error
        refusal = reply.error(address)
        busy = reply.status in _BUSY and refusal.code not in _FOR_GOOD
        lost = bool(reply.lost) or (reply.status in _BETWEEN and not refusal.code)
        again = busy or (lost and (call.repeatable or reply.unsent))
        wait = pause(attempt, reply.retry_after, random.random()) if again and attempt < retries else None
        if wait is None:
            raise refusal
        yield wait
    raise AssertionError("the last try returns or raises")


class Stream:
    """Server-sent events, line by line."""

    def __init__(self) -> None:
        self._kind, self._data, self._over = "", list[str](), False

    def feed(self, line: str) -> RunEventLine | None:
        """Take a line; give the event that it ends."""
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)
        elif not line and self._data:
            event = RunEventLine(self._kind, json.loads("\n".join(self._data)))
            self._kind, self._data = "", []
            if event.kind == "state":
                self._over = event.data.get("state") in _OVER
            return event
        return None

    def end(self) -> None:
        """Take the end of the stream, which should be that of its run."""
        if not self._over:
            why = "the server is stopping, or the key was revoked"
            raise ServiceError(f"The stream has ended, and its run has not: {why}. Follow it again, or wait().")
