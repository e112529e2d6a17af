"""One training run: its fields, and what a row of the table must look like. Knows no table, reads no files.

A row is checked when it is read, because parts of it become names of files. One that this library cannot have written
is a failed run of which only the id and the task are believed; it hides no other run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, NotRequired, TypedDict

from adapterbank import schema
from adapterbank.storage import reading
from adapterbank.storage.package import is_name
from adapterbank.tasks.tables import READERS

ENDED = ("done", "failed", "cancelled")
"""The final states of a run; before them it is queued or running."""
FORMATS = tuple(ending.removeprefix(".") for ending in READERS)
"""The formats of data files: every extension of a table."""
JSON = ("options", "data", "progress", "notes", "metrics")
"""The columns that hold JSON."""
_ID = re.compile(r"[0-9a-f]{8,64}")
_FOLDER = re.compile(r"[0-9a-f]+(-[0-9]+)?")
"""The name of the state of an unfinished run: the hash of its config, and a process id if another run has that."""
_NO_PROGRESS = {"epoch": 0, "epochs": 0, "step": 0, "steps": 0, "loss": None, "rows_per_second": None}


class UploadFields(TypedDict):
    """What is known of a data file."""

    format: Annotated[str, {"choices": FORMATS}]
    bytes: int
    sha256: str
    dev: NotRequired[int]
    """Bytes of the dev data, the first after the training data; only if there is some."""
    test: NotRequired[int]


class EpochFields(TypedDict):
    """What every finished epoch has."""

    epoch: int


@dataclass(frozen=True)
class TrainingRun:
    """A row of the table."""

    number: int
    id: str
    task: str
    state: Annotated[str, {"choices": ("queued", "running", *ENDED)}]
    """queued, running, done, failed or cancelled."""
    options: dict[str, Any]
    data: Annotated[dict[str, Any], UploadFields]
    """The uploaded files: `format`, and the `bytes` and `sha256` of all; the bytes of `dev` and `test` among them."""
    asked_by: str | None
    """The name of the key, on a server with keys."""
    created: str
    started: str | None
    ended: str | None
    progress: dict[str, Any] | None
    history: list[Annotated[dict[str, Any], EpochFields]]
    """A row for each finished epoch: `epoch`, `loss`, `score`, `seconds`."""
    notes: list[str]
    version: int | None
    """The version that a finished run added to the bank."""
    metrics: dict[str, Any] | None
    failure: str | None
    attempts: int
    """How often it was started since its last new epoch; more than once if a process was killed."""
    cancelling: int
    kept: str | None
    """The folder, below the bank's runs, of the state that it resumes from."""
    newest: int | None
    """The task's newest version when the run was first started; 0 for none."""
    spent: float
    """Seconds that it has run, in all its attempts."""
    turn: int | None
    """Its place among all starts of runs, which decides whose turn is next; None before it starts."""
    changes: int
    """How often this row was written."""

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state in ENDED

    def to_json(self) -> dict[str, Any]:
        """Return the fields that clients may see."""
        shown = ("id", "task", "state", "options", "data", "created", "started", "ended", "progress", "history")
        found = {name: getattr(self, name) for name in (*shown, "notes")}
        found["progress"] = self.progress or {**_NO_PROGRESS, "epochs": self.options.get("epochs") or 0}
        return found | {
            name: value for name in ("version", "metrics", "failure") if (value := getattr(self, name)) is not None
        }


COLUMNS = tuple(f.name for f in fields(TrainingRun) if f.name != "history")


def read_row(values: Mapping[str, Any], epochs: Iterable[Any]) -> TrainingRun | None:
    """Return the run of a row: a failed one if the row is damaged, None if not even its id and task are valid."""
    try:
        parsed = {name: parse(value) if name in JSON else value for name, value in values.items()}
        return _checked({**parsed, "history": [parse(told) for told in epochs]})
    except ValueError as error:
        return _failed(values, f"The table of runs is damaged here ({error}), so the run has failed; start it again.")


def parse(value: Any) -> Any:
    """Parse the JSON of a column; raise `ValueError` if it has none."""
    if not isinstance(value, str):
        raise ValueError("a column has no text")
    return reading.parse_json(value.encode())


def _checked(values: Mapping[str, Any]) -> TrainingRun:
    """Return the run of parsed values; raise `ValueError` unless this library can have written them."""
    if problem := schema.problem(TrainingRun, values):
        raise ValueError(problem)
    run = TrainingRun(**values)
    if not _nameable(values):
        raise ValueError("its id or its task is not a name")
    if run.kept is not None and not _FOLDER.fullmatch(run.kept):
        raise ValueError("kept is not the name of a state")
    return run


def _nameable(values: Mapping[str, Any]) -> bool:
    return isinstance(values["id"], str) and bool(_ID.fullmatch(values["id"])) and is_task(values["task"])


def is_task(task: Any) -> bool:
    """Return whether a column has a valid task name."""
    return isinstance(task, str) and is_name(task)


def _failed(values: Mapping[str, Any], failure: str) -> TrainingRun | None:
    """Return the failed run in place of a damaged row: nothing else of the row is believed."""
    if not _nameable(values):
        return None
    asked_by, created = (values[name] if isinstance(values[name], str) else None for name in ("asked_by", "created"))
    changes = values["changes"] if isinstance(values["changes"], int) else 0
    empty: dict[str, Any] = dict.fromkeys(("started", "ended", "progress", "version", "metrics", "newest", "turn"))
    empty |= {"options": {}, "data": {}, "history": [], "notes": [], "attempts": 0, "cancelling": 0, "kept": None}
    empty |= {name: values[name] for name in ("number", "id", "task")}
    empty |= {"asked_by": asked_by, "created": created or "", "spent": 0.0, "changes": changes}
    return TrainingRun(**empty, state="failed", failure=failure)
