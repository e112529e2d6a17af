"""Claims about a run's process: what it says, what it leaves, and how it is listened to and stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from adapterbank.serving.jobs import worker
from adapterbank.serving.jobs.worker_process import listen
from adapterbank.storage.bank import Bank
from serving.training import send


def python(code):
    """Start a process in the place of a run's."""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def test_a_run_that_does_not_stop_when_asked_is_killed(idle, monkeypatch):
    monkeypatch.setattr("adapterbank.serving.jobs.worker_process._GRACE", 0.3)
    run = send(idle)
    idle.runs.begin()
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('{}', flush=True); time.sleep(600)"
    with python(deaf) as child:
        assert listen(child, lambda said: idle.cancel(run.id), lambda: idle._wanted(run.id)) == "cancel"
    assert child.returncode == -signal.SIGKILL
    idle._judge(run, {}, "cancel", child.returncode)
    assert idle.get(run.id).state == "cancelled"


def test_what_a_library_prints_is_not_taken_for_a_report():
    heard = []
    with python(r"print('loading...\n3\n[]\n\x00\n{\"done\": 1}\n{\"half')") as child:
        assert listen(child, heard.append, lambda: "") == ""
    assert [said for said in heard if said] == [{"done": 1}]


def test_a_run_has_ended_though_what_it_started_goes_on():
    begin = "import subprocess, sys; print('{}', flush=True); subprocess.Popen([sys.executable, '-c', "
    with python(begin + "'import time; time.sleep(20)'])") as child:
        heard = []
        assert listen(child, heard.append, lambda: "") == ""
        assert (child.poll(), heard) == (0, [{}])


def test_a_run_cancelled_while_the_server_stops_is_cancelled(idle):
    run = send(idle)
    idle.runs.begin()
    idle.cancel(run.id)
    idle._judge(run, {}, "close", -signal.SIGTERM)
    assert idle.get(run.id).state == "cancelled"


def test_an_error_that_nobody_foresaw_is_told_by_its_place_and_quotes_nothing():
    order = json.dumps({"file": "/nowhere/secret text.csv"}) + "\n"
    words = [sys.executable, "-m", "adapterbank.serving.jobs.worker"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, text=True, **pipes) as child:  # whose input stays open, as the server is alive
        child.stdin.write(order)
        child.stdin.flush()
        said = json.loads(child.stdout.readline())["failed"]
        assert (child.wait(), child.stderr.read()) == (0, "")
    assert "not the data's fault (KeyError at worker.py:" in said
    assert "secret" not in said


def test_what_was_put_into_the_bank_before_a_kill_is_not_put_there_twice(idle):
    run = send(idle)
    order = {**idle._order(run, False), "newest": 0}
    said = []
    first = worker.teach(order, said.append)
    again = worker.teach({**order, "again": True}, said.append)
    assert (first["version"], again["version"]) == (1, 1)
    assert again["metrics"] == first["metrics"]
    assert Bank.open(idle.bank).versions("sentiment") == [1]
    other = worker.teach({**order, "again": True, "newest": 1}, said.append)
    assert other["version"] == 2


def test_a_state_that_cannot_be_read_costs_the_epochs_and_not_the_run(idle):
    run = send(idle)
    order = {**idle._order(run, True), "newest": 0}
    said = []
    with pytest.raises(KeyboardInterrupt):
        worker.teach(order, lambda message: said.append(message) or ("epoch" in message and stop()))
    hash = next(message["kept"] for message in said if "kept" in message)
    (idle.bank / "runs" / hash).mkdir(parents=True, exist_ok=True)
    (idle.bank / "runs" / hash / "state.json").write_text("{}")
    assert worker.teach(order, said.append)["version"] == 1


def stop():
    raise KeyboardInterrupt


def test_a_failure_names_no_file_of_the_server():
    order = {"file": "/x/ab.csv", "bank": "/y/bank"}
    told = "The data file has no rows; see the data file."
    assert worker._shown("/x/ab.csv has no rows; see ab.csv.", order) == told
    assert worker._shown("/y/bank/records/a.json cannot be used.", order) == "Records/a.json cannot be used."
