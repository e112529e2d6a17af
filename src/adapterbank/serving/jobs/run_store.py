"""The table of training runs, in SQLite: what was asked for, where it stands, what came of it. Starts no process.

Any number of processes may read and write it. Every call opens the file for itself, so that threads share nothing. A
run's finished epochs have a table of their own, so that the ten-thousandth costs no more to write down than the first.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from adapterbank.errors import InputError, StorageError
from adapterbank.storage import files

ENDED = ("done", "failed", "cancelled")
"""The states that a run stays in; before them it is queued or running."""
KEPT = 1000
"""So many ended runs are remembered, the newest."""
_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    task TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'queued',
    options TEXT NOT NULL,
    data TEXT NOT NULL,
    asked_by TEXT,
    created TEXT NOT NULL,
    started TEXT,
    ended TEXT,
    progress TEXT NOT NULL DEFAULT 'null',
    notes TEXT NOT NULL DEFAULT '[]',
    version INTEGER,
    metrics TEXT NOT NULL DEFAULT 'null',
    failure TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    cancelling INTEGER NOT NULL DEFAULT 0,
    kept TEXT,
    newest INTEGER,
    changes INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS by_state ON runs (state, number);
CREATE TABLE IF NOT EXISTS epochs (
    run INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    told TEXT NOT NULL,
    PRIMARY KEY (run, epoch)
) WITHOUT ROWID;
"""
_JSON = ("options", "data", "progress", "notes", "metrics")
_NO_PROGRESS = {"epoch": 0, "epochs": 0, "step": 0, "steps": 0, "loss": None, "rows_per_second": None}


class UnknownRun(InputError):
    """There is no run of that name. Others are not listed: not everyone may see them."""


@dataclass(frozen=True)
class TrainingRun:
    """A row of the table."""

    number: int
    id: str
    task: str
    state: str
    """queued, running, done, failed or cancelled."""
    options: dict[str, Any]
    data: dict[str, Any]
    """The file that was sent: `format`, `bytes`, `sha256`."""
    asked_by: str | None
    """The name of the key, where there are keys."""
    created: str
    started: str | None
    ended: str | None
    progress: dict[str, Any] | None
    history: list[dict[str, Any]]
    """A row for each finished epoch: `epoch`, `loss`, `score`, `seconds`."""
    notes: list[str]
    version: int | None
    """What a run that is done has put into the bank."""
    metrics: dict[str, Any] | None
    failure: str | None
    attempts: int
    """How often it was begun since its last new epoch; more than once where a process was killed."""
    cancelling: int
    kept: str | None
    """The folder, below the bank's runs, of what it needs to go on."""
    newest: int | None
    """The task's newest version when the run was first begun; 0 for none."""
    changes: int
    """How often this row was written."""

    @property
    def over(self) -> bool:
        """Whether it stays as it is."""
        return self.state in ENDED

    def to_json(self) -> dict[str, Any]:
        """Give what may be shown."""
        shown = ("id", "task", "state", "options", "data", "created", "started", "ended", "progress", "history")
        found = {name: getattr(self, name) for name in (*shown, "notes")}
        found["progress"] = self.progress or {**_NO_PROGRESS, "epochs": self.options.get("epochs") or 0}
        return found | {
            name: value for name in ("version", "metrics", "failure") if (value := getattr(self, name)) is not None
        }


_NAMES = tuple(f.name for f in fields(TrainingRun) if f.name != "history")
_COLUMNS = ", ".join(_NAMES)


class RunStore:
    """The table in one file."""

    def __init__(self, path: Path) -> None:
        """Open the file; made if it is not there."""
        self.path = path
        files.make_folder(path.parent)
        with self._open() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, 1, _VERSION):
                raise StorageError(
                    f"{path} has format {version}, and this version reads {_VERSION}; update adapterbank."
                )
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(_SCHEMA)
            db.execute("BEGIN IMMEDIATE")
            _update_format(db)
            db.execute("COMMIT")

    def add(
        self,
        task: str,
        options: Mapping[str, Any],
        data: Mapping[str, Any],
        asked_by: str | None,
        id: str = "",
        admit: Callable[[int, int], None] = lambda queued, own: None,
    ) -> TrainingRun:
        """Queue a run; `admit` hears how many are queued, in all and by who asks, and may raise."""
        row = (id or new_id(), task, json.dumps(options), json.dumps(data), asked_by, files.now())
        with self._open("IMMEDIATE") as db:
            admit(*_waiting(db, asked_by))
            db.execute("INSERT INTO runs (id, task, options, data, asked_by, created) VALUES (?, ?, ?, ?, ?, ?)", row)
        return self.get(row[0])

    def waiting(self, asked_by: str | None) -> tuple[int, int]:
        """Count the runs that are queued, in all and by one key."""
        with self._open() as db:
            return _waiting(db, asked_by)

    def counts(self) -> dict[str, int]:
        """Count the runs in each state; who asks is not kept waiting by a table that is held."""
        with self._open(patience=0.5) as db:
            return dict(db.execute("SELECT state, count(*) FROM runs GROUP BY state").fetchall())

    def get(self, id: str, after: int = 0) -> TrainingRun:
        """Give a run, with its epochs after a number."""
        with self._open("DEFERRED") as db:
            row = db.execute(f"SELECT {_COLUMNS} FROM runs WHERE id = ?", (id,)).fetchone()
            if row is None:
                raise UnknownRun(f"There is no run {id!r}; see the list of runs.")
            return _run(db, row, after)

    def cancelling(self, id: str) -> bool:
        """Whether somebody wants a run to stop; asked often, so no more is read."""
        with self._open() as db:
            row = db.execute("SELECT cancelling FROM runs WHERE id = ?", (id,)).fetchone()
        return bool(row and row[0])

    def list(
        self, limit: int = 100, state: str | None = None, may: Callable[[str], bool] = lambda task: True
    ) -> list[TrainingRun]:
        """Give runs, newest first, of tasks that may be seen."""
        where, values = ("state = ?", [state]) if state else ("1", [])
        with self._open("DEFERRED") as db:
            tasks = [task for (task,) in db.execute("SELECT DISTINCT task FROM runs") if may(task)]
            where += f" AND task IN ({', '.join('?' * len(tasks))})"
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM runs WHERE {where} ORDER BY number DESC LIMIT ?", (*values, *tasks, limit)
            ).fetchall()
            return [_run(db, row) for row in rows]

    def begin(self) -> TrainingRun | None:
        """Take the oldest queued run: it is running now, and nobody else gets it."""
        with self._open("IMMEDIATE") as db:
            rows = db.execute(
                "UPDATE runs SET state = 'running', started = coalesce(started, ?), attempts = attempts + 1,"
                " changes = changes + 1 WHERE number = (SELECT min(number) FROM runs WHERE state = 'queued')"
                f" RETURNING {_COLUMNS}",
                (files.now(),),
            ).fetchall()
            return _run(db, rows[0]) if rows else None

    def update(self, id: str, **values: Any) -> None:
        """Write down how a running run stands.

        `epochs` are rows of finished epochs, which come after those that are there; one that is done again takes the
        place of its like and all after it. `history` are the rows of all epochs, in the place of those that are there.
        """
        if values:
            self._set(id, "running", values)

    def end(self, id: str, state: str, **values: Any) -> bool:
        """Let a run end in a state; False where it is not running any more."""
        return self._set(id, "running", {"state": state, "ended": files.now(), **values})

    def put_back(self, id: str, *, counts: bool) -> None:
        """Queue a running run again, at its old place; `counts` says whether that was an attempt."""
        with self._open() as db:
            db.execute(
                "UPDATE runs SET state = 'queued', attempts = attempts - ?, changes = changes + 1"
                " WHERE id = ? AND state = 'running'",
                (0 if counts else 1, id),
            )

    def cancel(self, id: str) -> TrainingRun:
        """End a queued run, or ask that a running one be stopped; one that has ended stays as it is."""
        with self._open() as db:
            db.execute(
                "UPDATE runs SET state = 'cancelled', ended = ?, cancelling = 1, changes = changes + 1"
                " WHERE id = ? AND state = 'queued'",
                (files.now(), id),
            )
            db.execute("UPDATE runs SET cancelling = 1 WHERE id = ? AND state = 'running'", (id,))
        return self.get(id)

    def forget_old(self) -> None:
        """Drop the ended runs beyond those that are remembered."""
        ended = f"SELECT number FROM runs WHERE state IN {ENDED} ORDER BY number DESC LIMIT -1 OFFSET {KEPT}"
        with self._open("IMMEDIATE") as db:
            db.execute(f"DELETE FROM runs WHERE number IN ({ended})")
            db.execute("DELETE FROM epochs WHERE run NOT IN (SELECT number FROM runs)")

    def _set(self, id: str, state: str, values: Mapping[str, Any]) -> bool:
        plain = {name: value for name, value in values.items() if name not in ("epochs", "history")}
        written = [json.dumps(value) if name in _JSON else value for name, value in plain.items()]
        columns = "".join(f"{name} = ?, " for name in plain)
        with self._open("IMMEDIATE") as db:
            found = db.execute(
                f"UPDATE runs SET {columns}changes = changes + 1 WHERE id = ? AND state = ? RETURNING number",
                (*written, id, state),
            ).fetchall()
            for (number,) in found:
                if "history" in values:
                    db.execute("DELETE FROM epochs WHERE run = ?", (number,))
                _add_epochs(db, number, [*values.get("history", ()), *values.get("epochs", ())])
            return len(found) == 1

    @contextlib.contextmanager
    def _open(self, kind: str = "", patience: float = 30.0) -> Iterator[sqlite3.Connection]:
        """Open the file; what is done within is one transaction of a kind, where one is named."""
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=patience, isolation_level=None)) as db:
                db.execute("PRAGMA synchronous = NORMAL")
                if kind:
                    db.execute(f"BEGIN {kind}")
                yield db
                if kind:
                    db.execute("COMMIT")
        except sqlite3.Error as error:
            remedy = "see that its disk has space and can be written, or move the file away to begin anew"
            raise StorageError(f"The table of runs {self.path} cannot be used ({error}); {remedy}.") from error


def new_id() -> str:
    """Give a name for a run that nobody can guess."""
    return secrets.token_hex(8)


def _run(db: sqlite3.Connection, row: tuple[Any, ...], after: int = 0) -> TrainingRun:
    values = dict(zip(_NAMES, row, strict=True))
    told = db.execute(
        "SELECT told FROM epochs WHERE run = ? AND epoch > ? ORDER BY epoch", (values["number"], after)
    ).fetchall()
    found = {name: json.loads(value) if name in _JSON else value for name, value in values.items()}
    return TrainingRun(**found, history=[json.loads(one) for (one,) in told])


def _add_epochs(db: sqlite3.Connection, number: int, rows: Iterable[Mapping[str, Any]]) -> None:
    for row in rows:
        db.execute("DELETE FROM epochs WHERE run = ? AND epoch >= ?", (number, row["epoch"]))
        db.execute("INSERT INTO epochs VALUES (?, ?, ?)", (number, row["epoch"], json.dumps(row)))


def _waiting(db: sqlite3.Connection, asked_by: str | None) -> tuple[int, int]:
    count = "SELECT count(*), count(*) FILTER (WHERE asked_by = ?) FROM runs WHERE state = 'queued'"
    queued, own = db.execute(count, (asked_by,)).fetchone()
    return queued, own


def _update_format(db: sqlite3.Connection) -> None:
    """Bring a table up to date in which each run had all its epochs in one column."""
    if db.execute("PRAGMA user_version").fetchone()[0] == 1:
        for number, history in db.execute("SELECT number, history FROM runs").fetchall():
            _add_epochs(db, number, json.loads(history))
        db.execute("ALTER TABLE runs DROP COLUMN history")
    db.execute(f"PRAGMA user_version = {_VERSION}")
