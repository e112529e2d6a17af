"""Claims about what may be asked of training: options, files and their sizes, the queue, and what is left of them."""

from __future__ import annotations

import errno
import os
from dataclasses import fields
from pathlib import Path

import pytest

from adapterbank.config import Config
from adapterbank.errors import ConfigError, InputError, StorageError
from adapterbank.serving.jobs.options import OPTIONS, check
from adapterbank.serving.jobs.queue import JobQueue, JobQueueFull
from adapterbank.serving.jobs.run_store import UnknownRun
from adapterbank.serving.jobs.uploads import TooLarge
from serving.training import left, new_bank, send


@pytest.fixture
def bank(tmp_path, bert):
    return new_bank(tmp_path / "bank", bert)


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


def test_every_mistake_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        check("a", {"epoch": "3", "lr": "-1", "batch": "many", "train": "/etc/passwd"}, "csv")
    assert [mistake.split()[0] for mistake in caught.value.mistakes] == ["'epoch'", "'train'", "batch", "lr"]
    with pytest.raises(ConfigError) as caught:
        check("a", {"epoch": "3", "method": "automl"}, "csv")
    assert [mistake.split()[0] for mistake in caught.value.mistakes] == ["'epoch'", "method"]


def test_options_are_kept_as_values_and_a_task_of_the_catalog_under_its_name_in_the_bank():
    given = {"epochs": "3", "lr": "1e-3", "max-length": "16", "train_norms": "no"}
    assert check("glue/mrpc", given, "csv") == (
        "glue-mrpc",
        {"epochs": 3, "lr": 0.001, "max_length": 16, "train_norms": False},
    )


def test_a_file_that_is_too_large_or_breaks_off_or_is_empty_leaves_nothing(bank):
    jobs = JobQueue(bank, largest=100)
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
    jobs = JobQueue(bank, waiting=2)
    first = send(jobs)
    send(jobs)
    with pytest.raises(JobQueueFull, match="2 runs are queued already"):
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


def test_runs_that_are_queued_and_cancelled_do_not_pile_up(idle, monkeypatch):
    monkeypatch.setattr("adapterbank.serving.jobs.run_store.KEPT", 2)
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


def test_what_users_sent_is_for_the_servers_own_user_alone(idle):
    folder = idle.bank / "serving"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "data")] == [0o700, 0o700]
