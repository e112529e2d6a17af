"""Claims about a worker: what it reports and adds to the bank, also when it is started again."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from adapterbank.serving.jobs import worker
from adapterbank.storage.bank import Bank
from adapterbank.tasks import tables
from serving.training import FAST, linux, send, table


def test_an_unexpected_error_is_reported_by_its_place_and_quotes_nothing():
    job = json.dumps({"file": "/nowhere/secret text.csv"}) + "\n"
    words = [sys.executable, "-m", "adapterbank.serving.jobs.worker"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, text=True, **pipes) as child:  # whose input stays open, as the server is alive
        child.stdin.write(job)
        child.stdin.flush()
        failure = next(message["failed"] for line in child.stdout if (message := json.loads(line)))
        assert (child.wait(), child.stderr.read()) == (0, "")
    assert "a bug in adapterbank (KeyError at worker.py:" in failure
    assert "secret" not in failure


def test_a_worker_says_that_it_is_alive_even_while_it_waits(idle):
    job = idle.job(send(idle), resuming=False)
    words = [sys.executable, "-m", "adapterbank.serving.jobs.worker"]
    with open(job["file"]) as file, subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        fcntl.flock(file, fcntl.LOCK_EX)  # as if another process trained this run
        child.stdin.write(json.dumps(job).encode() + b"\n")
        child.stdin.flush()
        assert [child.stdout.readline() for _ in range(3)] == [b"{}\n"] * 3
        child.kill()


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


def test_a_run_that_continues_its_own_task_is_not_added_twice(idle):
    worker.train({**idle.job(send(idle), resuming=False), "newest": 0}, lambda message: None)
    job = {**idle.job(send(idle, start_from="sentiment"), resuming=False), "newest": 1}
    first = worker.train(job, lambda message: None)
    again = worker.train({**job, "resuming": True}, lambda message: None)
    assert (first["version"], again["version"]) == (2, 2)
    manifest = Bank.open(idle.bank).get("sentiment").manifest
    assert manifest.recipe["start_from"]["package"] == "sentiment@1"
    further = worker.train({**job, "resuming": True, "newest": 2}, lambda message: None)
    assert further["version"] == 3


def test_a_run_stands_on_a_task_of_the_bank(idle):
    worker.train({**idle.job(send(idle), resuming=False), "newest": 0}, lambda message: None)
    job = {**idle.job(send(idle, on="sentiment@1"), resuming=False), "newest": 1}
    assert worker.train(job, lambda message: None)["version"] == 2
    base, made = (Bank.open(idle.bank).get(f"sentiment@{version}").manifest for version in (1, 2))
    assert made.requires == [{"name": "sentiment", "version": 1, "weights_sha256": base.weights_sha256}]
    again = worker.train({**job, "resuming": True}, lambda message: None)
    assert again["version"] == 2


def test_a_run_fuses_tasks_of_the_bank(idle):
    for seed in range(2):
        job = {**idle.job(send(idle, seed=seed), resuming=False), "newest": seed}
        worker.train(job, lambda message: None)
    job = {**idle.job(send(idle, fuse="sentiment@1,sentiment@2", size=64), resuming=False), "newest": 2}
    assert worker.train(job, lambda message: None)["version"] == 3
    made = Bank.open(idle.bank).get("sentiment").manifest
    assert [one["version"] for one in made.requires] == [1, 2]
    assert made.method["name"] == "fusion"


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
    job["others"] = {"dev": "/x/ab-dev.csv"}
    assert worker.without_paths("/x/ab-dev.csv: line 3 of ab-dev.csv.", job) == "The dev file: line 3 of the dev file."


def test_dev_and_test_files_are_scored(idle):
    parts = [table(24), table(10), table(6)]
    with idle.upload("csv", train=len(parts[0]), dev=len(parts[1]), test=len(parts[2])) as upload:
        for byte in b"".join(parts).splitlines(keepends=True):
            upload.write(byte)
        run = idle.submit("sentiment", FAST, upload)
    found = worker.train({**idle.job(run, resuming=False), "newest": 0}, lambda message: None)
    assert {split: scores["rows"] for split, scores in found["metrics"].items()} == {"dev": 10, "test": 6}
    (record,) = Bank.open(idle.bank).records_path.glob("*.json")
    assert json.loads(record.read_text())["config"]["data"]["train"]["rows"] == 24


def test_the_data_is_read_once(idle, monkeypatch):
    run, reads, read_csv = send(idle), [], tables.READERS[".csv"]
    monkeypatch.setitem(tables.READERS, ".csv", lambda *given: reads.append(given) or read_csv(*given))
    worker.train({**idle.job(run, resuming=False), "newest": 0}, lambda message: None)
    assert len(reads) == 1


def reports(job):
    """Return what a worker process reports about a job."""
    words = [sys.executable, "-m", "adapterbank.serving.jobs.worker"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        child.stdin.write(json.dumps(job) + "\n")
        child.stdin.flush()
        found = [message for line in child.stdout if (message := json.loads(line))]
        assert child.wait() == 0
    return found


def test_a_file_that_decodes_to_too_much_is_refused_before_that(idle):
    file = idle.bank / "serving" / "data" / "0.parquet"
    text = pyarrow.array(["x" * 1_000_000]).dictionary_encode()
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 40_000, pyarrow.int32()), text.dictionary)
    columns = {"text": rows, "label": pyarrow.array([0, 1] * 20_000)}
    pyarrow.parquet.write_table(pyarrow.table(columns), file, compression="zstd")
    assert file.stat().st_size < 10_000  # 40 GB of text
    (failure,) = reports({**idle.job(send(idle), resuming=False), "newest": 0, "file": str(file)})
    assert failure["failed"].startswith("The data file takes more than 1,073,741,824 bytes once it is decoded")


@linux
def test_a_run_beyond_its_memory_fails_in_one_sentence(idle):
    """The file is within all limits of a table, but its labels need a head of several gigabytes."""
    labels = ",".join(map(str, range(10_000)))
    run = send(idle, labels=f"positive,negative,{labels}", head_hidden=65_536)
    job = {**idle.job(run, resuming=False), "newest": 0}
    job["limits"]["memory"] = 1
    assert reports(job)[-1]["failed"].startswith("The run needs more memory than it may take; try a smaller batch")


@linux
def test_a_worker_limits_its_memory_and_its_cpu_time():
    code = (
        "import resource; from adapterbank.serving.jobs import worker;"
        "worker._limit_resources({'threads': 3, 'limits': {'memory': 5 << 30, 'seconds': 60}});"
        "print(resource.getrlimit(resource.RLIMIT_DATA), resource.getrlimit(resource.RLIMIT_CPU))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found == f"({5 << 30}, {5 << 30}) (300, 300)\n"


def test_a_pipe_in_place_of_the_data_is_refused_and_not_waited_for(idle):
    pipe = idle.bank / "serving" / "data" / "0.csv"
    os.mkfifo(pipe)
    (failure,) = reports({**idle.job(send(idle), resuming=False), "newest": 0, "file": str(pipe)})
    assert failure["failed"].startswith("The data file is not a regular file")
