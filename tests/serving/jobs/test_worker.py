"""Claims about a worker: what it reports and adds to the bank, also when it is started again."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from adapterbank.serving.jobs import worker
from adapterbank.storage.bank import Bank
from adapterbank.training import dataset
from serving.training import send


def test_an_unexpected_error_is_reported_by_its_place_and_quotes_nothing():
    job = json.dumps({"file": "/nowhere/secret text.csv"}) + "\n"
    words = [sys.executable, "-m", "adapterbank.serving.jobs.worker"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, text=True, **pipes) as child:  # whose input stays open, as the server is alive
        child.stdin.write(job)
        child.stdin.flush()
        failure = json.loads(child.stdout.readline())["failed"]
        assert (child.wait(), child.stderr.read()) == (0, "")
    assert "a bug in adapterbank (KeyError at worker.py:" in failure
    assert "secret" not in failure


def test_a_version_that_was_added_before_a_kill_is_not_added_twice(idle):
    run = send(idle)
    job = {**idle.job(run, resuming=False), "newest": 0}
    messages = []
    first = worker.train(job, messages.append)
    again = worker.train({**job, "resuming": True}, messages.append)
    assert (first["version"], again["version"]) == (1, 1)
    assert again["metrics"] == first["metrics"]
    assert Bank.open(idle.bank).versions("sentiment") == [1]
    other = worker.train({**job, "resuming": True, "newest": 1}, messages.append)
    assert other["version"] == 2


def test_a_damaged_state_loses_the_epochs_and_not_the_run(idle):
    run = send(idle)
    job = {**idle.job(run, resuming=True), "newest": 0}
    messages = []
    with pytest.raises(KeyboardInterrupt):
        worker.train(job, lambda message: messages.append(message) or ("epoch" in message and stop()))
    hash = next(message["kept"] for message in messages if "kept" in message)
    (idle.bank / "runs" / hash).mkdir(parents=True, exist_ok=True)
    (idle.bank / "runs" / hash / "state.json").write_text("{}")
    assert worker.train(job, messages.append)["version"] == 1


def stop():
    raise KeyboardInterrupt


def test_a_failure_contains_no_path_of_the_server():
    job = {"file": "/x/ab.csv", "bank": "/y/bank"}
    message = "The data file has no rows; see the data file."
    assert worker.without_paths("/x/ab.csv has no rows; see ab.csv.", job) == message
    assert worker.without_paths("/y/bank/records/a.json cannot be used.", job) == "Records/a.json cannot be used."


def test_the_data_is_read_once(idle, monkeypatch):
    run, reads, table_from = send(idle), [], dataset.table_from
    monkeypatch.setattr(dataset, "table_from", lambda *given: reads.append(given) or table_from(*given))
    worker.train({**idle.job(run, resuming=False), "newest": 0}, lambda message: None)
    assert [name for _, name in reads] == ["train"]
