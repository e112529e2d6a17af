"""Claims about training as a service: queue, progress, ends of every kind, and what survives a kill."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from adapterbank.api import open_bank
from adapterbank.bank import Bank
from adapterbank.config import Config
from adapterbank.encoder.shared import share
from adapterbank.errors import InputError, StorageError
from adapterbank.serving import trainee
from adapterbank.serving.child import listen
from adapterbank.serving.jobs import ATTEMPTS, Jobs, QueueFull
from adapterbank.serving.orders import OPTIONS, check
from adapterbank.serving.runs import Runs, UnknownRun
from adapterbank.serving.uploads import TooLarge
from serving.training import FAST, LONG, children, new_bank, send, table, until

linux = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="looks for processes in /proc")

OWNER = """
import sys, time
from serving.training import LONG, send
from adapterbank.serving.jobs import Jobs
jobs = Jobs(sys.argv[1], threads=1)
jobs.begin()
print(send(jobs, **{**LONG, "epochs": int(sys.argv[2])}).id, flush=True)
time.sleep(600)
"""


@pytest.fixture
def bank(tmp_path, bert):
    return new_bank(tmp_path / "bank", bert)


@pytest.fixture
def idle(bank):
    """Give jobs that nobody works on."""
    return Jobs(bank, threads=1)


@pytest.fixture
def jobs(idle):
    """Give jobs that are worked on."""
    idle.begin()
    yield idle
    idle.close()


def left(jobs):
    """Give what lies in the folder of data files."""
    return sorted(path.name for path in (jobs.bank / "serving" / "data").iterdir())


# --- asking -------------------------------------------------------------------------------------------------


def test_a_request_may_set_no_option_that_reaches_outside():
    closed = {"task", "train", "dev", "test", "data_root", "backbone", "device", "precision", "trials", "minutes"}
    assert {f.name for f in fields(Config)} == closed | set(OPTIONS)
    assert not closed & set(OPTIONS)


@pytest.mark.parametrize(
    ("task", "options", "said"),
    [
        ("../etc", {}, "cannot be a task name"),
        ("sentiment@2", {}, "a run makes a new one; write 'sentiment'"),
        ("a", {"train": "/etc/passwd"}, "'train' is not an option of a request."),
        ("a", {"data-root": "/etc"}, "'data-root' is not an option of a request."),
        ("a", {"epoch": "3"}, "Did you mean 'epochs'?"),
        ("a", {"epochs": "many"}, "epochs is 'many'; it must be a whole number."),
        ("a", {"lr": "0"}, "lr is 0, so nothing would train"),
        ("a", {"method": "automl"}, "leaves nothing to serve"),
        ("a", {"method": "layernorm", "size": "8"}, "has no use for it"),
    ],
)
def test_a_mistake_is_told_before_anything_is_queued(idle, task, options, said):
    with pytest.raises(InputError) as caught:
        check(task, options, "csv")
    assert said in str(caught.value)
    with idle.upload("csv") as upload, pytest.raises(InputError):
        idle.submit(task, options, upload)
    assert (idle.list(), left(idle)) == ([], [])


def test_options_are_kept_as_values_and_a_task_of_the_catalog_under_its_name_in_the_bank():
    given = {"epochs": "3", "lr": "1e-3", "max-length": "16", "train_norms": "no"}
    assert check("glue/mrpc", given, "csv") == (
        "glue-mrpc",
        {"epochs": 3, "lr": 0.001, "max_length": 16, "train_norms": False},
    )


def test_a_file_that_is_too_large_or_breaks_off_or_is_empty_leaves_nothing(bank):
    jobs = Jobs(bank, largest=100)
    with jobs.upload("csv") as upload:
        upload.write(b"x" * 100)
        with pytest.raises(TooLarge, match="larger than 100 bytes"):
            upload.write(b"x")
    with jobs.upload("csv") as upload:
        upload.write(b"text,la")
        assert len(left(jobs)) == 1
    with jobs.upload("csv") as upload, pytest.raises(InputError, match="no body"):
        jobs.submit("a", {}, upload)
    assert (jobs.list(), left(jobs)) == ([], [])


def test_no_more_runs_are_queued_than_may_wait(bank):
    jobs = Jobs(bank, waiting=2)
    first = send(jobs)
    send(jobs)
    with pytest.raises(QueueFull, match="2 runs are queued already"):
        send(jobs)
    jobs.cancel(first.id)
    assert send(jobs).state == "queued"


def test_a_queued_run_is_cancelled_at_once_and_its_data_goes(idle):
    kept, gone = send(idle), send(idle)
    assert idle.cancel(gone.id).state == "cancelled"
    assert left(idle) == [f"{kept.id}.csv"]
    assert idle.cancel(gone.id).state == "cancelled"
    with pytest.raises(UnknownRun, match="There is no run 'x'"):
        idle.cancel("x")


def test_files_that_no_run_knows_go_after_an_hour(idle):
    run, ended = send(idle), send(idle)
    idle.runs.cancel(ended.id)  # and killed before it could clear up
    for name in (".tmp-half", "0123.csv", ".tmp-young"):
        Path(idle.bank, "serving", "data", name).write_text("x")
        if "young" not in name:
            os.utime(Path(idle.bank, "serving", "data", name), (0, 0))
    idle._sweep_litter()
    assert left(idle) == [".tmp-young", f"{run.id}.csv"]


# --- the table ----------------------------------------------------------------------------------------------


def test_the_oldest_is_begun_first_and_only_once_and_lists_are_newest_first(tmp_path):
    runs = Runs(tmp_path / "runs.sqlite3")
    made = [runs.add(f"t{i}", {}, {}, None).id for i in range(3)]
    assert [run.id for run in runs.list()] == made[::-1]
    begun = [Runs(runs.path).begin().id for _ in range(3)]
    assert begun == made
    assert runs.begin() is None
    runs.put_back(made[1], counts=False)
    runs.add("t3", {}, {}, None)
    again = runs.begin()
    assert (again.id, again.attempts) == (made[1], 1)


def test_a_run_that_has_ended_stays_as_it_is(tmp_path):
    runs = Runs(tmp_path / "runs.sqlite3")
    id = runs.add("t", {}, {}, "alice").id
    runs.begin()
    assert runs.end(id, "done", version=2)
    assert not runs.end(id, "failed", failure="late")
    runs.update(id, progress={"epoch": 1})
    runs.put_back(id, counts=True)
    run = runs.cancel(id)
    assert (run.state, run.version, run.failure, run.progress, run.asked_by) == ("done", 2, None, None, "alice")


def test_old_runs_are_forgotten_but_none_that_waits(tmp_path, monkeypatch):
    monkeypatch.setattr("adapterbank.serving.runs.KEPT", 2)
    runs = Runs(tmp_path / "runs.sqlite3")
    waits = runs.add("t", {}, {}, None).id
    ended = [runs.add("t", {}, {}, None).id for _ in range(4)]
    for id in ended:
        runs.cancel(id)
    runs.forget_old()
    assert [run.id for run in runs.list()] == [ended[3], ended[2], waits]


def test_a_damaged_table_is_told_in_a_sentence(tmp_path):
    (tmp_path / "runs.sqlite3").write_bytes(b"not a table of runs, by any means " * 100)
    with pytest.raises(StorageError, match=r"table of runs .* cannot be used"):
        Runs(tmp_path / "runs.sqlite3")


# --- training -----------------------------------------------------------------------------------------------


def test_runs_go_one_after_the_other_and_end_as_versions_of_their_tasks(idle, bert):
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
def test_a_running_run_is_low_in_priority_shares_the_encoder_and_stops_when_cancelled(bank, bert):
    shared, descriptor = share(bert)
    assert sum(float(tensor.sum()) for tensor in shared.tensors.values())
    jobs = Jobs(bank, weights=descriptor, threads=1)
    jobs.begin()
    try:
        run = send(jobs, **LONG)
        until(jobs, run.id, lambda run: run.history)
        (child,) = children()
        assert os.getpriority(os.PRIO_PROCESS, child) >= trainee.NICENESS
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


def test_the_tokens_of_a_large_file_go_with_the_file(idle, tmp_path, monkeypatch):
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


def test_a_data_file_that_has_gone_is_told_in_a_sentence(idle):
    run = send(idle)
    (idle.bank / "serving" / "data" / f"{run.id}.csv").unlink()
    idle.begin()
    ended = until(idle, run.id)
    idle.close()
    assert ended.state == "failed"
    assert "data file" in ended.failure
    assert "Traceback" not in ended.failure
    assert str(idle.bank) not in ended.failure


def python(code):
    """Start a process in the place of a run's."""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def test_a_run_that_does_not_stop_when_asked_is_killed(idle, monkeypatch):
    monkeypatch.setattr("adapterbank.serving.child._GRACE", 0.3)
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
    words = [sys.executable, "-m", "adapterbank.serving.trainee"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, text=True, **pipes) as child:  # whose input stays open, as the server is alive
        child.stdin.write(order)
        child.stdin.flush()
        said = json.loads(child.stdout.readline())["failed"]
        assert (child.wait(), child.stderr.read()) == (0, "")
    assert "not the data's fault (KeyError at trainee.py:" in said
    assert "secret" not in said


# --- kills --------------------------------------------------------------------------------------------------


@linux
def test_a_run_whose_process_is_killed_goes_on_unless_that_happens_too_often(jobs, monkeypatch):
    run, reached = send(jobs, **LONG), 0
    for most in (ATTEMPTS, 1):
        now = until(jobs, run.id, lambda run, epoch=reached: len(run.history) > epoch + 3)
        reached = len(now.history)
        assert [row["epoch"] for row in now.history] == [*range(1, reached + 1)]
        assert now.attempts == 1  # since it has done another epoch
        monkeypatch.setattr("adapterbank.serving.jobs.ATTEMPTS", most)
        (child,) = children()
        os.kill(child, signal.SIGKILL)
    ended = until(jobs, run.id)
    assert ended.state == "failed"
    assert "broken off 1 times before another epoch was done; the last time its process ended with SIGKILL." in (
        ended.failure
    )
    assert sum("Going on after epoch" in note for note in ended.notes) == 1
    jobs.close()
    assert Bank.open(jobs.bank).names() == []
    assert (left(jobs), list((jobs.bank / "runs").glob("*"))) == ([], [])


def test_a_run_that_is_killed_at_the_same_place_again_and_again_has_failed(idle, monkeypatch):
    def train(self, run):
        begun.append(run.attempts)
        row = {"epoch": 1, "loss": 0.5, "score": 0.5, "seconds": 1.0}
        self._hear(run.id, {"epoch": row}, {"history": run.history, "notes": []})
        self._broken_off(run, "a test broke it off")

    begun = []
    monkeypatch.setattr(Jobs, "_train", train)
    run = send(idle)
    idle.begin()
    ended = until(idle, run.id)
    idle.close()
    assert begun == [1, 2, 3]
    assert ended.failure.startswith("The run was broken off 3 times before another epoch was done;")


@linux
def test_a_run_whose_server_is_killed_ends_with_it_and_goes_on_with_the_next(bank):
    path = os.pathsep.join(["tests", *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", OWNER, str(bank), "40"]
    jobs = Jobs(bank, threads=1)
    root = Path(__file__).parents[2]
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
    assert any("Going on after epoch" in note for note in ended.notes)
    assert len(set(ended.notes)) == len(ended.notes)
    assert [row["epoch"] for row in ended.history] == [*range(1, 41)]
    assert all(finding.ok for finding in open_bank(bank).audit())


def test_a_server_that_stops_leaves_its_run_queued_and_goes_on_with_it_when_it_starts_again(idle):
    run = send(idle, **LONG)
    idle.begin()
    until(idle, run.id, lambda run: run.history)
    idle.close()
    stopped = idle.get(run.id)
    assert (stopped.state, stopped.attempts, stopped.ended) == ("queued", 0, None)
    assert left(idle) == [f"{run.id}.csv"]
    assert list((idle.bank / "runs").glob("*/state.json"))
    idle.begin()
    until(idle, run.id, lambda run: len(run.history) > len(stopped.history))
    assert any("Going on after epoch" in note for note in idle.get(run.id).notes)
    idle.cancel(run.id)
    assert until(idle, run.id).state == "cancelled"
    idle.close()


def test_of_two_servers_of_a_bank_one_works_and_the_other_takes_over(bank, monkeypatch):
    worked = []
    monkeypatch.setattr(Jobs, "_train", lambda self, run: worked.append(self) or self.runs.end(run.id, "cancelled"))
    first, second = Jobs(bank), Jobs(bank)
    first.begin()
    until(first, send(first).id)
    second.begin()
    until(second, send(second).id)
    assert worked == [first, first]
    first.close()
    until(second, send(second).id)
    assert worked == [first, first, second]
    second.close()


def test_a_worker_outlives_what_hinders_it(idle, monkeypatch):
    calls = []

    def train(self, run):
        calls.append(run.id)
        if len(calls) == 1:
            raise StorageError("the disk is full")
        self.runs.end(run.id, "cancelled")

    monkeypatch.setattr(Jobs, "_train", train)
    run = send(idle)
    idle.begin()
    assert until(idle, run.id).attempts == 2
    idle.close()
    assert calls == [run.id, run.id]


def test_a_table_that_cannot_be_used_for_a_while_costs_a_running_run_nothing(idle, monkeypatch):
    run, heard = send(idle), {"history": [], "notes": []}
    idle.runs.begin()
    row = {"epoch": 1, "loss": 0.5, "score": 0.5, "seconds": 1.0}

    def fail(*given):
        raise StorageError("the table is locked")

    with monkeypatch.context() as broken:
        broken.setattr(Runs, "_open", fail)
        assert idle._wanted(run.id) == ""
        idle._hear(run.id, {"kept": "abc"}, heard)
        idle._hear(run.id, {"epoch": row}, heard)
    idle._hear(run.id, {"progress": {"epoch": 2}}, heard)
    now = idle.get(run.id)
    assert (now.kept, now.history, now.progress) == ("abc", [row], {"epoch": 2})


@pytest.mark.parametrize("place", ["list", "forget_old"])
def test_runs_are_worked_on_once_the_table_can_be_used_again_and_the_log_does_not_grow(
    idle, monkeypatch, caplog, place
):
    failures, original = [], getattr(Runs, place)

    def fail(self, *given):
        if len(failures) < 3:
            failures.append(given)
            raise StorageError("the disk is full")
        return original(self, *given)

    monkeypatch.setattr(Jobs, "_train", lambda self, run: self.runs.end(run.id, "failed"))
    monkeypatch.setattr(Runs, place, fail)
    monkeypatch.setattr(idle._closing, "wait", lambda seconds: None)
    first, second = send(idle), send(idle)
    idle.begin()
    idle.begin()  # once more is once
    until(idle, first.id)
    until(idle, second.id)
    idle.close()
    assert failures
    assert len([r for r in caplog.records if r.message == "hindered"]) == 1


def test_a_file_that_cannot_be_removed_holds_up_no_run(idle, monkeypatch):
    def refuse(path):
        raise StorageError(f"{path} cannot be used: permission is denied.")

    monkeypatch.setattr(Jobs, "_train", lambda self, run: self.runs.end(run.id, "failed"))
    monkeypatch.setattr("adapterbank.storage.discard", refuse)
    sent = [send(idle) for _ in range(2)]
    idle.begin()
    assert [until(idle, run.id).attempts for run in sent] == [1, 1]
    idle.close()
    assert len(left(idle)) == 2
    monkeypatch.undo()
    idle._sweep_litter()
    assert left(idle) == []


def test_runs_that_are_queued_and_cancelled_do_not_pile_up(idle, monkeypatch):
    monkeypatch.setattr("adapterbank.serving.runs.KEPT", 2)
    for _ in range(4):
        idle.cancel(send(idle).id)
    assert len(idle.list()) == 2


def test_a_file_that_a_full_disk_does_not_take_leaves_nothing(idle):
    class Full:
        def close(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    upload = idle.upload("csv")
    upload._file.close()
    upload._file = Full()
    with pytest.raises(StorageError, match="the disk is full"), upload:
        pass
    assert left(idle) == []


def test_what_was_put_into_the_bank_before_a_kill_is_not_put_there_twice(idle):
    run = send(idle)
    order = {**idle._order(run, False), "newest": 0}
    said = []
    first = trainee.teach(order, said.append)
    again = trainee.teach({**order, "again": True}, said.append)
    assert (first["version"], again["version"]) == (1, 1)
    assert again["metrics"] == first["metrics"]
    assert Bank.open(idle.bank).versions("sentiment") == [1]
    other = trainee.teach({**order, "again": True, "newest": 1}, said.append)
    assert other["version"] == 2


def test_a_state_that_cannot_be_read_costs_the_epochs_and_not_the_run(idle):
    run = send(idle)
    order = {**idle._order(run, True), "newest": 0}
    said = []
    with pytest.raises(KeyboardInterrupt):
        trainee.teach(order, lambda message: said.append(message) or ("epoch" in message and stop()))
    hash = next(message["kept"] for message in said if "kept" in message)
    (idle.bank / "runs" / hash).mkdir(parents=True, exist_ok=True)
    (idle.bank / "runs" / hash / "state.json").write_text("{}")
    assert trainee.teach(order, said.append)["version"] == 1


def stop():
    raise KeyboardInterrupt


def test_a_failure_names_no_file_of_the_server():
    order = {"file": "/x/ab.csv", "bank": "/y/bank"}
    told = "The data file has no rows; see the data file."
    assert trainee._shown("/x/ab.csv has no rows; see ab.csv.", order) == told
    assert trainee._shown("/y/bank/records/a.json cannot be used.", order) == "Records/a.json cannot be used."


def test_what_users_sent_is_for_the_servers_own_user_alone(idle):
    folder = idle.bank / "serving"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "data")] == [0o700, 0o700]
