"""Claims about the options of a request: an allow-list, and every mistake reported before anything is queued."""

from __future__ import annotations

from dataclasses import fields

import pytest

from adapterbank.config import Config
from adapterbank.errors import ConfigError, InputError
from adapterbank.serving.jobs.options import OPTIONS, check
from serving.training import left


def test_no_option_of_a_request_names_a_file_or_a_device():
    closed = {"task", "train", "dev", "test", "data_root", "backbone", "device", "precision", "trials", "minutes"}
    assert {f.name for f in fields(Config)} == closed | set(OPTIONS)
    assert not closed & set(OPTIONS)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("../etc", {}, "cannot be a task name"),
        ("sentiment@2", {}, "a run adds a new one; write 'sentiment'"),
        ("a", {"train": "/etc/passwd"}, "'train' is not an option of a request."),
        ("a", {"data-root": "/etc"}, "'data-root' is not an option of a request."),
        ("a", {"epoch": "3"}, "Did you mean 'epochs'?"),
        ("a", {"epochs": "many"}, "epochs is 'many'; it must be a whole number."),
        ("a", {"lr": "0"}, "lr is 0, so nothing would train"),
        ("a", {"method": "automl"}, "produces nothing to serve"),
        ("a", {"start_from": "auto"}, "start_from is 'auto', which a request cannot use"),
        ("a", {"start_from": "../b/tasks/b/1"}, "start_from is '../b/tasks/b/1', a path; name a task"),
        ("a", {"fuse": "a,../b/tasks/b/1"}, "fuse is '../b/tasks/b/1', a path; name a task"),
        ("a", {"fuse": "a"}, "fuse is 'a'; it must name two tasks or more"),
        ("a", {"on": "../b/tasks/b/1"}, "on is '../b/tasks/b/1', a path; name a task"),
        ("a", {"method": "layernorm", "size": "8"}, "does not use it"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_queued(idle, task, options, message):
    with pytest.raises(InputError) as caught:
        check(task, options, "csv")
    assert message in str(caught.value)
    with idle.upload("csv") as upload, pytest.raises(InputError):
        idle.submit(task, options, upload)
    assert (idle.list(), left(idle)) == ([], [])


def test_all_mistakes_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        check("a", {"epoch": "3", "lr": "-1", "batch": "many", "train": "/etc/passwd"}, "csv")
    assert [mistake.split()[0] for mistake in caught.value.mistakes] == ["'epoch'", "'train'", "batch", "lr"]
    with pytest.raises(ConfigError) as caught:
        check("a", {"epoch": "3", "method": "automl"}, "csv")
    assert [mistake.split()[0] for mistake in caught.value.mistakes] == ["'epoch'", "method"]


def test_options_are_parsed_and_a_catalog_task_has_its_name_in_the_bank():
    given = {"epochs": "3", "lr": "1e-3", "max-length": "16", "train_norms": "no"}
    assert check("glue/mrpc", given, "csv") == (
        "glue-mrpc",
        {"epochs": 3, "lr": 0.001, "max_length": 16, "train_norms": False},
    )
