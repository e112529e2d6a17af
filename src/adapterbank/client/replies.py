"""What the server returns, as dataclasses. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from adapterbank.errors import ServiceError, TrainingError

ENDED = ("done", "failed", "cancelled")
"""The final states of a run."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class TaskReply:
    """The prediction of a task for one text; it has the fields of the task's kind, as `adapterbank.Prediction` has."""

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
    truncated: bool | None = None
    """True if the text was longer than the task's limit, so that a part was not read; otherwise not set."""
    windows: int | None = None
    """The number of windows whose outputs were pooled; not set if the text was read at once."""
    explanation: dict[str, Any] | None = None
    """On request: each word's share in the answer."""
    other: dict[str, Any] | None = None
    """Fields of a kind that are none of these, such as the entities of tagging; they are attributes too."""

    def __getattr__(self, name: str) -> Any:
        """Return a field of `other`; Python asks only for names that are not found otherwise."""
        other = vars(self).get("other") or {}
        if name not in other:
            raise AttributeError(f"a prediction has no {name!r}")
        return other[name]


@dataclass(frozen=True)
class TaskSummary:
    """A task in the server's list."""

    name: str
    version: int
    kind: str
    metric: str
    score: float | None = None
    """On the dev split."""
    rows: dict[str, int] = field(default_factory=dict)
    """How many rows each split's score is over."""
    labels: tuple[str, ...] = ()
    method: str = ""
    size: int | None = None
    params: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    created: str = ""
    resident: bool = False


@dataclass(frozen=True)
class Listing:
    """The tasks of a server; iterates over them."""

    backbone: dict[str, Any]
    tasks: tuple[TaskSummary, ...]
    problems: tuple[dict[str, str], ...] = ()
    """Tasks of the bank that cannot be served, with the reason."""

    def __iter__(self) -> Iterator[TaskSummary]:
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
    """Loss and dev score of each finished epoch."""
    version: int | None = None
    metrics: dict[str, Any] | None = None
    failure: str | None = None

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.state in ENDED

    def check_done(self) -> RunStatus:
        """Return the run itself; raise if it failed or was cancelled."""
        if self.state != "done":
            raise TrainingError(self.failure or f"Run {self.id} of {self.task!r} was {self.state}.")
        return self


@dataclass(frozen=True)
class ServerEvent:
    """One event of a run's stream."""

    kind: str
    """progress or state."""
    data: dict[str, Any]


@dataclass(frozen=True)
class HttpReply:
    """What came back: a status and a body, or the reason why nothing did."""

    status: int = 0
    body: Any = None
    retry_after: str | None = None
    lost: str = ""
    """The reason, if there is no response."""
    unsent: bool = False
    """Whether the request was lost before it could reach the server."""

    def error(self, address: str) -> ServiceError:
        """Return the server's error message, or one that says that the server cannot be reached."""
        if self.lost:
            return ServiceError(f"{address} does not respond ({self.lost}); is `adapterbank serve` running there?")
        error = self.body.get("error") if isinstance(self.body, dict) else None
        if not isinstance(error, dict):
            message = f"{address} responded with {self.status}, but not as adapterbank does; is it another service?"
            return ServiceError(message, "", self.status)
        return ServiceError(
            str(error.get("message")), str(error.get("code")), self.status, str(error.get("request_id"))
        )


def make(cls: type[Made], value: Any) -> Made:
    """Make a dataclass of the fields that it has; a newer server may send more."""
    if not isinstance(value, dict):
        raise TypeError(f"{cls.__name__} of {value!r}")
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]  # all that are made here are dataclasses
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    rest = {k: v for k, v in plain.items() if k not in known}
    return cls(
        **{k: v for k, v in plain.items() if k in known}, **({"other": rest} if rest and "other" in known else {})
    )
