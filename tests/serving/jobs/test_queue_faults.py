"""Claims about temporary problems of training: another server, a full disk, a locked table, undeletable files."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from adapterbank.errors import StorageError
from adapterbank.serving.jobs import queue
from adapterbank.serving.jobs.queue import JobQueue
from adapterbank.serving.jobs.run_store import RunStore
from serving.training import DATA, left, new_bank, send, until


@pytest.fixture
def bank(tmp_path, bert):
    return new_bank(tmp_path / "bank", bert)


def test_of_two_servers_of_a_bank_one_trains_and_the_other_takes_over(bank, monkeypatch):
    worked = []
    monkeypatch.setattr(JobQueue, "train", lambda self, run: worked.append(self) or self.runs.end(run.id, "cancelled"))
    first, second = JobQueue(bank), JobQueue(bank)
    first.begin()
    until(first, send(first).id)
    second.begin()
    until(second, send(second).id)
    assert worked == [first, first]
    first.close()
    until(second, send(second).id)
    assert worked == [first, first, second]
    second.close()


def test_training_goes_on_after_an_error(idle, monkeypatch):
    calls = []

    def train(self, run):
        calls.append(run.id)
        if len(calls) == 1:
            raise StorageError("the disk is full")
        self.runs.end(run.id, "cancelled")

    monkeypatch.setattr(JobQueue, "train", train)
    run = send(idle)
    idle.begin()
    assert until(idle, run.id).attempts == 2
    idle.close()
    assert calls == [run.id, run.id]


@pytest.mark.parametrize("place", ["list", "forget_old"])
def test_runs_are_trained_once_the_table_can_be_used_again_and_the_log_does_not_grow(idle, monkeypatch, caplog, place):
    failures, original = [], getattr(RunStore, place)

    def fail(self, *given):
        if len(failures) < 3:
            failures.append(given)
            raise StorageError("the disk is full")
        return original(self, *given)

    monkeypatch.setattr(JobQueue, "train", lambda self, run: self.runs.end(run.id, "failed"))
    monkeypatch.setattr(RunStore, place, fail)
    monkeypatch.setattr(queue, "RETRY", 0.0)
    first, second = send(idle), send(idle)
    idle.begin()
    idle.begin()  # a second call has no effect
    until(idle, first.id)
    until(idle, second.id)
    idle.close()
    assert failures
    assert len([r for r in caplog.records if r.message == "training blocked"]) == 1


def test_a_file_that_cannot_be_deleted_delays_no_run(idle, monkeypatch):
    def refuse(path):
        raise StorageError(f"{path} cannot be used: permission is denied.")

    monkeypatch.setattr(JobQueue, "train", lambda self, run: self.runs.end(run.id, "failed"))
    monkeypatch.setattr("adapterbank.storage.files.discard", refuse)
    sent = [send(idle) for _ in range(2)]
    idle.begin()
    assert [until(idle, run.id).attempts for run in sent] == [1, 1]
    idle.close()
    assert len(left(idle)) == 2
    monkeypatch.undo()
    idle.clean_up()
    assert left(idle) == []


def waits_until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_worker_that_hangs_is_named_until_it_goes_on(idle, monkeypatch):
    code = (
        "import os, signal; print('{}', flush=True); os.kill(os.getpid(), signal.SIGSTOP); print('{\"failed\": \"x\"}')"
    )
    started = []

    @contextlib.contextmanager
    def start(*given):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            started.append(process)
            yield process

    monkeypatch.setattr(queue, "start_worker", start)
    monkeypatch.setattr(queue, "_SILENT", 0.3)
    run = send(idle)
    idle.begin()
    waits_until(lambda: any(f"run {run.id}" in work for work in idle.stalled()["training 0"]))
    os.kill(started[0].pid, signal.SIGCONT)
    assert until(idle, run.id).failure == "x"
    waits_until(lambda: not idle.stalled()["training 0"])
    idle.close()


@pytest.mark.parametrize(("place", "part"), [("list", "training"), ("begin", "training 0")])
def test_training_that_is_blocked_stands_still_until_it_goes_on(idle, monkeypatch, place, part):
    monkeypatch.setattr(JobQueue, "train", lambda self, run: self.runs.end(run.id, "failed"))
    monkeypatch.setattr(queue, "RETRY", 0.01)
    run, blocked, original = send(idle), [True], getattr(RunStore, place)
    for beat in (idle._owner, *idle._heartbeats):
        monkeypatch.setattr(beat, "_bound", 0.1)

    def fail(self, *given):
        if blocked:
            raise StorageError("the disk is full")
        return original(self, *given)

    monkeypatch.setattr(RunStore, place, fail)
    idle.begin()
    waits_until(lambda: idle.stalled()[part])
    blocked.clear()
    until(idle, run.id)
    waits_until(lambda: not idle.stalled()[part])
    idle.close()


def test_damaged_rows_delete_nothing_of_the_bank_and_hold_up_no_run(idle, monkeypatch):
    treasure = idle.bank / "tasks" / "t" / "task.json"
    treasure.parent.mkdir(parents=True)
    treasure.write_text("{}")
    for id, state in (("a" * 16, "cancelled"), ("b" * 16, "running"), ("c" * 16, "queued"), ("../../tasks", "running")):
        made = idle.runs.add("t", {}, DATA, None).id
        with sqlite3.connect(idle.runs.path) as db:
            db.execute("UPDATE runs SET id = ?, state = ?, kept = '../tasks' WHERE id = ?", (id, state, made))
    monkeypatch.setattr(JobQueue, "train", lambda self, run: self.runs.end(run.id, "cancelled"))
    run = send(idle)
    idle.begin()
    assert until(idle, run.id).state == "cancelled"
    idle.close()
    assert treasure.read_text() == "{}"
    assert idle.numbers() == {"runs_queued": 0, "runs_running": 0}
