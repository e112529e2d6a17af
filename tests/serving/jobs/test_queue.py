"""Claims about the queue: runs train, end, are cancelled, and survive kills of workers and servers."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from adapterbank.api.opened import open_bank
from adapterbank.encoder.shared_memory import share
from adapterbank.serving.jobs import worker
from adapterbank.serving.jobs.queue import JobQueue, QueueLimits
from adapterbank.serving.jobs.run_recorder import ATTEMPTS
from adapterbank.serving.jobs.run_store import RunStore, UnknownRun
from adapterbank.storage.bank import Bank
from serving.training import FAST, LONG, children, left, linux, new_bank, send, table, until

OWNER = """
import sys, time
from serving.training import LONG, send
from adapterbank.serving.jobs.queue import JobQueue
jobs = JobQueue(sys.argv[1], threads=1)
jobs.begin()
print(send(jobs, **{**LONG, "epochs": int(sys.argv[2])}).id, flush=True)
time.sleep(3600)
"""
EPOCHS = 120
"""Enough that a run is far from its end when a test looks at it, even on a slow machine."""


@pytest.fixture
def bank(tmp_path, bert):
    return new_bank(tmp_path / "bank", bert)


@pytest.fixture
def jobs(idle):
    """A queue that trains its runs."""
    idle.begin()
    yield idle
    idle.close()


def test_runs_train_one_after_the_other_and_add_versions(idle, bert):
    sent = [send(idle, "first", seed=1), send(idle, "first", seed=2), send(idle, "bad", b"text,label\nonly one,row")]
    idle.begin()
    try:
        done = [until(idle, run.id) for run in sent]
    finally:
        idle.close()
    assert [(run.state, run.version) for run in done] == [("done", 1), ("done", 2), ("failed", None)]
    assert done[0].ended <= done[1].started
    assert [row["epoch"] for row in done[0].history] == [1, 2]
    assert set(done[0].history[0]) == {"epoch", "loss", "score", "seconds"}
    assert (done[0].progress["epoch"], done[0].progress["step"]) == (2, done[0].progress["steps"])
    assert any("held out" in note for note in done[0].notes)
    opened = open_bank(idle.bank, bert)
    assert done[1].metrics == opened.bank.get("first@2").manifest.metrics
    assert opened.bank.names() == ["first"]
    assert left(idle) == []
    assert not any((idle.bank / "runs").glob("*"))
    assert done[2].failure
    assert str(idle.bank) not in done[2].failure
    assert done[2].id not in done[2].failure
    # The same as the shell would have made.
    rows = [line.split(",") for line in table().decode().splitlines()[1:]]
    here = opened.train("same", rows, **FAST, seed=1).record
    assert here["metrics"]["dev"]["accuracy"] == done[0].metrics["dev"]["accuracy"]
    assert [row["loss"] for row in here["history"]] == pytest.approx([row["loss"] for row in done[0].history])


@linux
def test_a_worker_has_a_low_priority_shares_the_encoder_and_stops_when_cancelled(bank, bert):
    shared, descriptor = share(bert)
    assert sum(float(tensor.sum()) for tensor in shared.tensors.values())
    jobs = JobQueue(bank, weights=descriptor, threads=1)
    jobs.begin()
    try:
        run = send(jobs, **LONG)
        until(jobs, run.id, lambda run: run.history)
        (child,) = children()
        assert os.getpriority(os.PRIO_PROCESS, child) >= worker.NICENESS
        maps = Path(f"/proc/{child}/smaps").read_text()
        part = maps[maps.index("memfd:adapterbank-encoder") :].split("VmFlags", 1)[0]
        figures = dict(line.split()[:2] for line in part.splitlines()[1:])
        assert int(figures["Pss:"]) < int(figures["Rss:"])
        assert figures["Anonymous:"] == "0"
        assert Path(f"/proc/{child}/oom_score_adj").read_text().strip() == "1000"
        jobs.cancel(run.id)
        ended = until(jobs, run.id)
        assert (ended.state, ended.version, ended.failure) == ("cancelled", None, None)
    finally:
        jobs.close()
        os.close(descriptor)
    assert children() == []
    assert Bank.open(bank).names() == []
    assert (left(jobs), list((bank / "runs").glob("*"))) == ([], [])


def test_the_tokens_of_a_large_file_are_deleted_with_the_file(idle, tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTERBANK_CACHE", str(tmp_path / "cache"))
    run = send(idle, data=table(1500), epochs=300, batch=64)
    idle.begin()
    until(idle, run.id, lambda run: run.history)
    assert any((idle.bank / "serving" / "data" / f"{run.id}.tokens").iterdir())
    idle.cancel(run.id)
    until(idle, run.id)
    idle.close()
    assert left(idle) == []
    assert not (tmp_path / "cache").exists()


def test_a_missing_data_file_is_reported(idle):
    run = send(idle)
    (idle.bank / "serving" / "data" / f"{run.id}.csv").unlink()
    idle.begin()
    ended = until(idle, run.id)
    idle.close()
    assert ended.state == "failed"
    assert "data file" in ended.failure
    assert "Traceback" not in ended.failure
    assert str(idle.bank) not in ended.failure


@linux
def test_a_run_whose_worker_is_killed_resumes_unless_that_happens_too_often(jobs, monkeypatch):
    run, reached = send(jobs, **LONG), 0
    for most in (ATTEMPTS, 1):
        now = until(jobs, run.id, lambda run, epoch=reached: len(run.history) > epoch + 3)
        reached = len(now.history)
        assert [row["epoch"] for row in now.history] == [*range(1, reached + 1)]
        assert now.attempts == 1  # since it has done another epoch
        monkeypatch.setattr("adapterbank.serving.jobs.run_recorder.ATTEMPTS", most)
        (child,) = children()
        os.kill(child, signal.SIGKILL)
    ended = until(jobs, run.id)
    assert ended.state == "failed"
    assert (
        "interrupted 1 times before it finished another epoch, the last time because its process ended with SIGKILL."
        in (ended.failure)
    )
    assert sum("Resuming after epoch" in note for note in ended.notes) == 1
    jobs.close()
    assert Bank.open(jobs.bank).names() == []
    assert (left(jobs), list((jobs.bank / "runs").glob("*"))) == ([], [])


def test_a_run_that_is_killed_repeatedly_at_the_same_place_fails(idle, monkeypatch):
    def train(self, run):
        begun.append(run.attempts)
        row = {"epoch": 1, "loss": 0.5, "score": 0.5, "seconds": 1.0}
        self._hear(run.id, {"epoch": row}, {"history": run.history, "notes": []})
        self._broken_off(run, "a test broke it off")

    begun = []
    monkeypatch.setattr(JobQueue, "train", train)
    run = send(idle)
    idle.begin()
    ended = until(idle, run.id)
    idle.close()
    assert begun == [1, 2, 3]
    assert ended.failure.startswith("The run was interrupted 3 times before it finished another epoch,")


@linux
def test_a_run_whose_server_is_killed_ends_and_resumes_with_the_next_server(bank):
    path = os.pathsep.join(["tests", *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", OWNER, str(bank), str(EPOCHS)]
    jobs = JobQueue(bank, threads=1)
    root = Path(__file__).parents[3]
    with subprocess.Popen(words, env=environment, cwd=root, stdout=subprocess.PIPE, text=True) as owner:
        id = owner.stdout.readline().strip()
        until(jobs, id, lambda run: len(run.history) > 3)
        (child,) = children(owner.pid)
        owner.kill()
    jobs.begin()
    ended = until(jobs, id)
    jobs.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, 0)
        pytest.fail("the killed server's run is still there")
    assert (ended.state, ended.version) == ("done", 1)
    assert any("Resuming after epoch" in note for note in ended.notes)
    assert len(set(ended.notes)) == len(ended.notes)
    assert [row["epoch"] for row in ended.history] == [*range(1, EPOCHS + 1)]
    assert all(finding.ok for finding in open_bank(bank).audit())


def test_a_server_that_stops_queues_its_run_and_resumes_it_when_it_starts_again(idle):
    run = send(idle, **LONG)
    idle.begin()
    until(idle, run.id, lambda run: len(run.history) > 1)  # an epoch is reported before it is saved
    idle.close()
    stopped = idle.get(run.id)
    assert (stopped.state, stopped.attempts, stopped.ended) == ("queued", 0, None)
    assert left(idle) == [f"{run.id}.csv"]
    assert list((idle.bank / "runs").glob("*/state.json"))
    idle.begin()
    until(idle, run.id, lambda run: len(run.history) > len(stopped.history))
    assert any("Resuming after epoch" in note for note in idle.get(run.id).notes)
    idle.cancel(run.id)
    assert until(idle, run.id).state == "cancelled"
    idle.close()


def test_a_queued_run_is_cancelled_at_once_and_its_data_deleted(idle):
    kept, gone = send(idle), send(idle)
    assert idle.cancel(gone.id).state == "cancelled"
    assert left(idle) == [f"{kept.id}.csv"]
    assert idle.cancel(gone.id).state == "cancelled"
    with pytest.raises(UnknownRun, match="There is no run 'x'"):
        idle.cancel("x")


def test_files_without_a_run_are_deleted_after_an_hour(idle):
    run, ended = send(idle), send(idle)
    idle.runs.cancel(ended.id)  # and killed before it could clear up
    for name in (".tmp-half", "0123.csv", ".tmp-young"):
        Path(idle.bank, "serving", "data", name).write_text("x")
        if "young" not in name:
            os.utime(Path(idle.bank, "serving", "data", name), (0, 0))
    idle.clean_up()
    assert left(idle) == [".tmp-young", f"{run.id}.csv"]


def test_cancelled_runs_do_not_accumulate(idle, monkeypatch):
    monkeypatch.setattr("adapterbank.serving.jobs.run_store.KEPT", 2)
    for _ in range(4):
        idle.cancel(send(idle).id)
    assert len(idle.list()) == 2


def test_the_check_for_a_stop_does_not_read_the_epochs(idle, monkeypatch):
    run = send(idle)
    idle.runs.begin()
    monkeypatch.setattr(RunStore, "get", None)
    assert idle.stop_reason(run.id) == ""
    with sqlite3.connect(idle.runs.path) as db:
        db.execute("UPDATE runs SET cancelling = 1")
    assert idle.stop_reason(run.id) == "cancel"


def test_a_run_that_takes_too_long_fails_and_a_restart_does_not_reset_its_time(bank):
    jobs = JobQueue(bank, threads=1, limits=QueueLimits(minutes=10))
    run = send(jobs, **LONG)
    jobs.begin()
    until(jobs, run.id, lambda run: run.history)
    jobs.close()
    stopped = jobs.get(run.id)
    assert (stopped.state, stopped.spent > 0) == ("queued", True)
    again = JobQueue(bank, threads=1, limits=QueueLimits(minutes=stopped.spent / 60))
    again.begin()
    try:
        failed = until(again, run.id)
    finally:
        again.close()
    assert failed.state == "failed"
    assert failed.failure.endswith("minutes, which is the limit; use fewer rows or epochs.")
    assert (failed.spent >= stopped.spent, left(again)) == (True, [])
