"""`adapterbank gc`: old versions, leftovers of interrupted writes, and states of unfinished runs on request."""

from __future__ import annotations

import os
import time

from adapterbank.storage import files
from adapterbank.storage.bank import Bank
from cli.invoke import run
from small_data import shell, snapshot


def test_gc_lists_what_it_would_remove_and_then_removes_it(here):
    before = snapshot(here / "bank")
    found = run("gc", "--dry-run")
    assert found.out.startswith("would remove bank/tasks/sentiment/1 (")
    assert found.out.splitlines()[-1].startswith("1 item, ")
    assert snapshot(here / "bank") == before
    assert [item["reason"] for item in run("gc", "--json").json] == ["no pointer leads to it"]
    assert Bank.open("bank").versions("sentiment") == [2, 3]
    assert run("gc").out == "0 items, 0 B\n"
    assert shell("audit", "--bank", "bank").code == 0


def test_gc_removes_what_an_interrupted_write_left(here):
    left = here / "bank" / "tasks" / ".tmp-1234"
    left.mkdir()
    (left / "weights.safetensors").write_bytes(b"x" * 10)
    for path in (left / "weights.safetensors", left):
        os.utime(path, (time.time() - 9999,) * 2)
    run("remove", "--task", "sentiment@1", "--yes")
    assert run("gc").out.splitlines() == [
        f"removed {left.relative_to(here)} (10 B): left by an interrupted write",
        "1 item, 10 B",
    ]
    assert not left.exists()


def test_states_of_unfinished_runs_are_mentioned_and_removed_on_request(here):
    state = here / "bank" / "runs" / "0123456789abcdef"
    state.mkdir(parents=True)
    (state / "state.json").write_text("{}")
    assert "The state of 1 unfinished run is kept; remove it with --runs." in shell("gc", "--bank", "bank").err
    assert "would remove" in run("gc", "--runs", "--dry-run").out
    assert state.exists()
    assert "state of an unfinished run" in run("gc", "--runs").out
    assert not state.exists()


def test_the_state_of_a_run_that_is_going_on_stays(here):
    running, ended = (here / "bank" / "runs" / name for name in ("0123456789abcdef", "fedcba9876543210"))
    for folder in (running, ended):
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
    with files.claimed(running):
        found = shell("gc", "--bank", "bank", "--runs")
        assert f"note: {running.relative_to(here)} is kept, because its run is going on." in found.err
        assert (running / "state.json").exists()
    assert not ended.exists()
    assert "state of an unfinished run" in run("gc", "--runs").out
    assert not running.exists()
