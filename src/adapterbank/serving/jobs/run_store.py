"""The table of training runs, in SQLite: what was requested, the state, the result. Starts no process.

Any number of processes may read and write it. Every call opens the file, so that threads share nothing. Finished epochs
have a table of their own, so that writing the ten-thousandth costs no more than the first.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from adapterbank import schema
from adapterbank.errors import InputError, StorageError
from adapterbank.serving.jobs.run_row import COLUMNS, ENDED, JSON, EpochFields, TrainingRun, is_task, parse, read_row
from adapterbank.storage import files

KEPT = 1000
"""Number of ended runs that are kept, the newest."""
_VERSION = 3
# The names of columns, such as `told` for the JSON of an epoch, are part of the file format.
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
    spent REAL NOT NULL DEFAULT 0,
    turn INTEGER,
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


class UnknownRun(InputError):
    """There is no run with that id. Others are not listed: not every key may see them."""


_COLUMNS = ", ".join(COLUMNS)


class RunStore:
    """The table in one file."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it."""
        self.path = path
        files.make_folder(path.parent)
        with self._open() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if not 0 <= version <= _VERSION:
                raise StorageError(
                    f"{path} has format {version}, but this release reads up to {_VERSION}; update adapterbank."
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
        """Queue a run; `admit` is called with the number of queued runs, in total and of this key, and may raise."""
        row = (id or new_id(), task, json.dumps(options), json.dumps(data), asked_by, files.now())
        with self._open("IMMEDIATE") as db:
            admit(*_waiting(db, asked_by))
            db.execute("INSERT INTO runs (id, task, options, data, asked_by, created) VALUES (?, ?, ?, ?, ?, ?)", row)
        return self.get(row[0])

    def waiting(self, asked_by: str | None) -> tuple[int, int]:
        """Return the number of queued runs, in total and of one key."""
        with self._open() as db:
            return _waiting(db, asked_by)

    def counts(self) -> dict[str, int]:
        """Return the number of runs in each state; does not wait long for a locked table."""
        with self._open(timeout=0.5) as db:
            return dict(db.execute("SELECT state, count(*) FROM runs GROUP BY state").fetchall())

    def get(self, id: str, after: int = 0) -> TrainingRun:
        """Return a run with its epochs after a number."""
        with self._open("DEFERRED") as db:
            row = db.execute(f"SELECT {_COLUMNS} FROM runs WHERE id = ?", (id,)).fetchone()
            if row is None or (run := _run(db, row, after)) is None:
                raise UnknownRun(f"There is no run {id!r}; see GET /v1/runs.")
            return run

    def cancelling(self, id: str) -> bool:
        """Whether a run is to be cancelled; called often, so it reads nothing else."""
        with self._open() as db:
            row = db.execute("SELECT cancelling FROM runs WHERE id = ?", (id,)).fetchone()
        return bool(row and row[0])

    def list(
        self, limit: int = 100, state: str | None = None, may: Callable[[str], bool] = lambda task: True
    ) -> list[TrainingRun]:
        """Return runs, newest first, of the tasks that `may` allows."""
        where, values = ("state = ?", [state]) if state else ("1", [])
        with self._open("DEFERRED") as db:
            tasks = [task for (task,) in db.execute("SELECT DISTINCT task FROM runs") if is_task(task) and may(task)]
            where += f" AND task IN ({', '.join('?' * len(tasks))})"
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM runs WHERE {where} ORDER BY number DESC LIMIT ?", (*values, *tasks, limit)
            ).fetchall()
            found = [run for row in rows if (run := _run(db, row))]
        return [run for run in found if state in (None, run.state)]

    def end_damaged(self) -> None:
        """End the runs whose rows are damaged, so that none of them is started or counted."""
        with self._open("IMMEDIATE") as db:
            rows = db.execute(f"SELECT {_COLUMNS} FROM runs WHERE state NOT IN {ENDED}").fetchall()
            for row in rows:
                _end_damaged(db, row)

    def begin(self) -> TrainingRun | None:
        """Take the next queued run and mark it as running, so that no other worker takes it.

        Keys take turns: the key with the fewest running runs is next, then the one whose last start is longest ago, and
        of its runs the oldest. Runs without a key count as those of one key.
        """
        running = "SELECT count(*) FROM runs AS r WHERE r.asked_by IS q.asked_by AND r.state = 'running'"
        last = "SELECT coalesce(max(r.turn), 0) FROM runs AS r WHERE r.asked_by IS q.asked_by"
        order = f"ORDER BY ({running}), ({last}), q.number LIMIT 1"
        with self._open("IMMEDIATE") as db:
            while rows := db.execute(
                "UPDATE runs SET state = 'running', started = coalesce(started, ?), attempts = attempts + 1,"
                " turn = (SELECT coalesce(max(turn), 0) + 1 FROM runs), changes = changes + 1"
                f" WHERE number = (SELECT q.number FROM runs AS q WHERE q.state = 'queued' {order})"
                f" RETURNING {_COLUMNS}",
                (files.now(),),
            ).fetchall():
                if not _end_damaged(db, rows[0]):
                    return _run(db, rows[0])
            return None

    def update(self, id: str, **values: Any) -> None:
        """Update a running run.

        `epochs` are rows of finished epochs to append; a repeated epoch replaces the old one and all after it.
        `history` are the rows of all epochs, which replace the present ones.
        """
        if values:
            self._set(id, "running", values)

    def end(self, id: str, state: str, **values: Any) -> bool:
        """End a run in a state; return False if it is no longer running."""
        return self._set(id, "running", {"state": state, "ended": files.now(), **values})

    def put_back(self, id: str, *, counts: bool) -> None:
        """Queue a running run again in its old place; `counts` says whether it used up an attempt, and its turn."""
        unused = "" if counts else " attempts = attempts - 1, turn = NULL,"
        with self._open() as db:
            db.execute(
                f"UPDATE runs SET state = 'queued',{unused} changes = changes + 1 WHERE id = ? AND state = 'running'",
                (id,),
            )

    def cancel(self, id: str) -> TrainingRun:
        """Cancel a queued run, or request that a running one stops; one that has ended does not change."""
        with self._open() as db:
            db.execute(
                "UPDATE runs SET state = 'cancelled', ended = ?, cancelling = 1, changes = changes + 1"
                " WHERE id = ? AND state = 'queued'",
                (files.now(), id),
            )
            db.execute("UPDATE runs SET cancelling = 1 WHERE id = ? AND state = 'running'", (id,))
        return self.get(id)

    def forget_old(self) -> None:
        """Delete the ended runs beyond those that are kept."""
        ended = f"SELECT number FROM runs WHERE state IN {ENDED} ORDER BY number DESC LIMIT -1 OFFSET {KEPT}"
        with self._open("IMMEDIATE") as db:
            db.execute(f"DELETE FROM runs WHERE number IN ({ended})")
            db.execute("DELETE FROM epochs WHERE run NOT IN (SELECT number FROM runs)")

    def _set(self, id: str, state: str, values: Mapping[str, Any]) -> bool:
        plain = {name: value for name, value in values.items() if name not in ("epochs", "history")}
        written = [json.dumps(value) if name in JSON else value for name, value in plain.items()]
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
    def _open(self, kind: str = "", timeout: float = 30.0) -> Iterator[sqlite3.Connection]:
        """Open the file; with a `kind` the block is one transaction of that kind."""
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=timeout, isolation_level=None)) as db:
                db.text_factory = lambda text: text.decode(errors="replace")
                db.execute("PRAGMA synchronous = NORMAL")
                if kind:
                    db.execute(f"BEGIN {kind}")
                yield db
                if kind:
                    db.execute("COMMIT")
        except sqlite3.Error as error:
            remedy = "check that the disk has space and is writable, or move the file away to start with an empty table"
            raise StorageError(f"The table of runs {self.path} cannot be used ({error}); {remedy}.") from error


def new_id() -> str:
    """Return an id for a run that cannot be guessed."""
    return secrets.token_hex(8)


def _run(db: sqlite3.Connection, row: tuple[Any, ...], after: int = 0) -> TrainingRun | None:
    values = dict(zip(COLUMNS, row, strict=True))
    epochs = "SELECT told FROM epochs WHERE run = ? AND epoch > ? ORDER BY epoch"
    return read_row(values, [told for (told,) in db.execute(epochs, (values["number"], after))])


def _end_damaged(db: sqlite3.Connection, row: tuple[Any, ...]) -> bool:
    """End the run of a row if the row is damaged; return whether it is."""
    run = _run(db, row)
    if run is not None and run.state != "failed":
        return False
    db.execute(
        "UPDATE runs SET state = 'failed', ended = ?, failure = ?, changes = changes + 1 WHERE number = ?",
        (files.now(), run and run.failure, row[COLUMNS.index("number")]),
    )
    return True


def _add_epochs(db: sqlite3.Connection, number: int, rows: Iterable[Mapping[str, Any]]) -> None:
    for row in rows:
        db.execute("DELETE FROM epochs WHERE run = ? AND epoch >= ?", (number, row["epoch"]))
        db.execute("INSERT INTO epochs VALUES (?, ?, ?)", (number, row["epoch"], json.dumps(row)))


def _waiting(db: sqlite3.Connection, asked_by: str | None) -> tuple[int, int]:
    count = "SELECT count(*), count(*) FILTER (WHERE asked_by = ?) FROM runs WHERE state = 'queued'"
    queued, own = db.execute(count, (asked_by,)).fetchone()
    return queued, own


def _update_format(db: sqlite3.Connection) -> None:
    """Convert a table of an earlier format. In format 1 each run had all its epochs in one column."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == 1:
        for number, history in db.execute("SELECT number, history FROM runs").fetchall():
            with contextlib.suppress(ValueError):  # damaged epochs are no reason to lose the run
                rows = parse(history)
                if schema.problem(list[EpochFields], rows) is None:
                    _add_epochs(db, number, rows)
        db.execute("ALTER TABLE runs DROP COLUMN history")
    there = {name for _, name, *_ in db.execute("PRAGMA table_info(runs)").fetchall()}
    for name, kind in (("spent", "REAL NOT NULL DEFAULT 0"), ("turn", "INTEGER")):  # new in format 3
        if name not in there:
            db.execute(f"ALTER TABLE runs ADD COLUMN {name} {kind}")
    db.execute(f"PRAGMA user_version = {_VERSION}")
