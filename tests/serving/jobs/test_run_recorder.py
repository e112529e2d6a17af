"""Claims about the recorder: every report of a worker is written, once, and a run ends as it should."""

from __future__ import annotations

import signal
import sqlite3

import pytest

from adapterbank.errors import StorageError
from adapterbank.serving.jobs.run_recorder import RunRecorder
from adapterbank.serving.jobs.run_store import RunStore
from serving.training import send


def row_of(epoch, score=0.5):
    return {"epoch": epoch, "loss": 0.25, "score": score, "seconds": 1.0}


def written(action):
    """Return the number of bytes that the statements of an action write."""
    sizes = []
    original = sqlite3.connect

    class Counting(sqlite3.Connection):
        def execute(self, statement, values=()):
            sizes.append(sum(len(str(value)) for value in values))
            return super().execute(statement, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda *given, **more: original(*given, factory=Counting, **more))
        action()
    return sum(sizes)


def test_the_thousandth_epoch_costs_no_more_to_write_than_the_tenth(idle):
    run = send(idle)
    recorder = RunRecorder(idle.runs, idle.runs.begin())
    sizes = [
        written(lambda e=epoch: recorder.record({"epoch": row_of(e), "progress": {"epoch": e}}))
        for epoch in range(1, 1001)
    ]
    assert sizes[999] - sizes[9] <= 10  # the digits of the epoch
    assert [row["epoch"] for row in idle.get(run.id).history] == [*range(1, 1001)]


def test_the_memory_of_a_recorder_does_not_grow_with_the_epochs(idle):
    send(idle)
    recorder = RunRecorder(idle.runs, idle.runs.begin())
    for epoch in range(1, 50):
        recorder.record({"epoch": row_of(epoch)})
    assert len(str(vars(recorder))) < 400


def test_a_repeated_epoch_does_not_reset_the_attempts(idle):
    run = send(idle)
    recorder = RunRecorder(idle.runs, idle.runs.begin())
    recorder.record({"epoch": row_of(1)})
    idle.runs.put_back(run.id, counts=True)
    again = idle.runs.begin()
    assert again.history == [row_of(1)]
    RunRecorder(idle.runs, again).record({"epoch": row_of(1, 0.75)})
    now = idle.get(run.id)
    assert (now.history, now.attempts) == ([row_of(1, 0.75)], 2)


def test_epochs_that_could_not_be_written_are_written_with_the_next(idle, monkeypatch):
    run = send(idle)
    recorder = RunRecorder(idle.runs, idle.runs.begin())

    def fail(*given):
        raise StorageError("the table is locked")

    with monkeypatch.context() as broken:
        broken.setattr(RunStore, "_open", fail)
        for epoch in (1, 2):
            recorder.record({"epoch": row_of(epoch)})
    recorder.record({"epoch": row_of(3)})
    assert idle.get(run.id).history == [row_of(1), row_of(2), row_of(3)]


def test_a_run_loses_nothing_while_the_table_cannot_be_used(idle, monkeypatch):
    run = send(idle)
    recorder = RunRecorder(idle.runs, idle.runs.begin())
    row = {"epoch": 1, "loss": 0.5, "score": 0.5, "seconds": 1.0}

    def fail(*given):
        raise StorageError("the table is locked")

    with monkeypatch.context() as broken:
        broken.setattr(RunStore, "_open", fail)
        assert idle.stop_reason(run.id) == ""
        recorder.record({"kept": "abc"})
        recorder.record({"epoch": row})
    recorder.record({"progress": {"epoch": 2}})
    now = idle.get(run.id)
    assert (now.kept, now.history, now.progress) == ("abc", [row], {"epoch": 2})


def test_a_run_cancelled_while_the_server_stops_is_cancelled(idle):
    run = send(idle)
    recorder = RunRecorder(idle.runs, idle.runs.begin())
    idle.cancel(run.id)
    recorder.finish("close", -signal.SIGTERM)
    assert idle.get(run.id).state == "cancelled"
