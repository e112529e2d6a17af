"""Writes down what a worker reports about its run, and how the run ended. Starts no process and reads no data."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any

from adapterbank.errors import StorageError
from adapterbank.serving.jobs.run_row import TrainingRun
from adapterbank.serving.jobs.run_store import RunStore

ATTEMPTS = 3
"""How often a run is started whose worker, or server, is killed before it has finished another epoch."""


class RunRecorder:
    """Records one run while its worker trains it."""

    def __init__(self, store: RunStore, run: TrainingRun) -> None:
        """Take the table and the run as it was started."""
        self.store, self.id = store, run.id
        self.result: dict[str, Any] | None = None
        """What the worker reported at its end, if it finished."""
        self.failure: str | None = None
        """Why the run failed, if the worker reported that."""
        self._spent, self._began = run.spent, time.monotonic()
        self._epoch = run.history[-1]["epoch"] if run.history else 0
        self._notes = run.notes
        self._unwritten: dict[str, Any] = {}

    def record(self, message: Mapping[str, Any]) -> None:
        """Write down one report of the worker."""
        self.result = message.get("done", self.result)
        self.failure = message.get("failed", self.failure)
        values: dict[str, Any] = {name: message[name] for name in ("progress", "kept") if name in message}
        if "note" in message and message["note"] not in self._notes:  # a resumed run repeats some of its notes
            self._notes = values["notes"] = [*self._notes, message["note"]]
        if "epoch" in message:  # a resumed run may repeat an epoch that was reported, but not saved
            row = message["epoch"]
            values |= {"epochs": [row]} | ({"attempts": 1} if row["epoch"] > self._epoch else {})
            self._epoch = row["epoch"]
        self._write(values)

    @property
    def spent(self) -> float:
        """The seconds that the run has taken so far, in all its attempts."""
        return self._spent + time.monotonic() - self._began

    def _write(self, values: dict[str, Any]) -> None:
        if values:
            values = {**values, "spent": self.spent}
        late, self._unwritten = self._unwritten, {}
        epochs = late.get("epochs", []) + values.get("epochs", [])
        values = {**late, **values} | ({"epochs": epochs} if epochs else {})
        try:
            self.store.update(self.id, **values)
        except StorageError:  # it may be temporary: the next report is written together with this one
            self._unwritten = values

    def finish(self, reason: str, code: int) -> None:
        """Decide how the run ended; `reason` is why it was asked to stop, `code` the exit status of its process.

        A `reason` other than `close` and `cancel` is the failure of a run that was stopped for good.
        """
        self._write({"spent": self.spent})
        if self.result is not None:
            self.store.end(self.id, "done", **self.result)
        elif self.failure is not None:
            self.store.end(self.id, "failed", failure=self.failure)
        elif reason and self.store.cancelling(self.id):
            self.store.end(self.id, "cancelled")
        elif reason == "close":
            self.store.put_back(self.id, counts=False)
        elif reason and reason != "cancel":
            self.store.end(self.id, "failed", failure=reason)
        else:
            name = signal.Signals(-code).name if code < 0 else f"status {code}"
            interrupt(self.store, self.id, f"its process ended with {name}")


def interrupt(store: RunStore, id: str, why: str) -> None:
    """Queue a run again that did not end by itself, unless that has happened too often."""
    if store.cancelling(id):
        store.end(id, "cancelled")
    elif (attempts := store.get(id).attempts) < ATTEMPTS:
        store.put_back(id, counts=True)
    else:
        count = f"The run was interrupted {attempts} times before it finished another epoch"
        remedy = "If memory is short, try a smaller batch or fewer rows."
        store.end(id, "failed", failure=f"{count}, the last time because {why}. {remedy}")
