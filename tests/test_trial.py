"""Promise: the trial campaign is repeatable, one bad case ends nothing else, and its trials of files find nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import campaign
from campaign import ROOT, frame

FILES = ("bank_kills", "train_kills", "damage", "forgery", "uploads")
CHILDREN = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
from trials.children import in_child

def print_and(end):
    print("said", flush=True)
    end()

tries = {
    "returned": lambda: 1,
    "raised": lambda: 1 / 0,
    "died": lambda: print_and(os.abort),
    "hung": lambda: print_and(lambda: time.sleep(600)),
    "killed": lambda: time.sleep(600),
    "no memory": lambda: bytearray(2**32),
}
found = {}
for name, function in tries.items():
    outcome = in_child(function, seconds=2 if name == "hung" else 600, kill_after=0.1 if name == "killed" else None)
    found[name] = [outcome.ended, outcome.value, outcome.error, outcome.output]
print(json.dumps(found))
"""


def trial(run, *, name="fake", full=0, weight=1.0):
    return frame.Trial(name, "It holds.", full, run, weight)


def run_all(folder, *trials, minutes=0.0, **options):
    return list(frame.run_all(trials, minutes=minutes, seed=7, failures_to=folder / "failures", **options))


# --- the frame -----------------------------------------------------------------------------------------------------


def test_a_case_follows_from_the_seed_the_trial_and_its_number(tmp_path):
    drawn = []

    def run(stage):
        drawn.append([case.random.random() for case in stage.cases(3)])

    first, second = trial(run), trial(run, name="other")
    run_all(tmp_path, first, second, minutes=1)
    run_all(tmp_path, first, minutes=1)
    assert drawn[0] == drawn[2]
    assert len({*drawn[0], *drawn[1]}) == 6


def test_cases_end_with_the_full_count_or_the_time_and_there_is_always_one(tmp_path):
    def run(stage):
        list(stage.cases())

    (complete,) = run_all(tmp_path, trial(run, full=5), minutes=60)
    (brief,) = run_all(tmp_path, trial(run, full=5), minutes=0)
    assert (complete.tries, brief.tries) == (5, 1)


def test_a_trial_that_is_complete_early_passes_its_time_on(tmp_path):
    def run(stage):
        list(stage.cases())

    first, second = run_all(tmp_path, trial(run, full=1, weight=3), trial(run, full=1), minutes=60)
    assert first.seconds <= 45 * 60 < 59 * 60 < second.seconds


def test_a_failure_is_a_file_that_repeats_its_case_alone(tmp_path):
    numbers = []

    def run(stage):
        for case in stage.cases(4):
            numbers.append((case.number, dict(stage.repeated)))
            if case.number == 2:
                stage.fail(case, "It broke.", found=b"\xff", drawn=[1, 2])

    (stage,) = run_all(tmp_path, trial(run), minutes=60)
    (path,) = (tmp_path / "failures").iterdir()
    told = json.loads(path.read_text())
    assert (told["trial"], told["seed"], told["case"], told["what"]) == ("fake", 7, 2, "It broke.")
    assert told["evidence"] == {"found": {"hex": "ff", "bytes": 1}, "drawn": [1, 2]}
    assert [failure["file"] for failure in stage.failures] == [path.name]
    numbers.clear()
    (again,) = run_all(tmp_path, trial(run), minutes=60, repeat=told)
    assert numbers == [(2, told["evidence"])]
    assert len(again.failures) == 1


def test_an_exception_of_a_trial_is_its_failure_and_the_next_trial_runs(tmp_path):
    def broken(stage):
        raise ValueError("no such thing")

    def run(stage):
        list(stage.cases())

    first, second = run_all(tmp_path, trial(broken), trial(run, full=2), minutes=60)
    assert "ValueError: no such thing" in first.failures[0]["what"]
    assert (second.tries, second.failures) == (2, [])


def test_scratch_folders_and_servers_end_with_their_trial(tmp_path):
    ended = []

    def run(stage):
        stage.closing.callback(ended.append, stage.trial.name)
        (stage.folder / "closed").mkdir(mode=0)
        raise ValueError

    (stage,) = run_all(tmp_path, trial(run))
    assert ended == ["fake"]
    assert not stage.folder.exists()


def test_one_bad_case_ends_its_child_and_nothing_else():
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN, str(ROOT / "bench")], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {
        "returned": ["returned", 1, "", ""],
        "raised": ["raised", None, "ZeroDivisionError", ""],
        "died": ["died", None, "SIGABRT", "said\n"],
        "hung": ["hung", None, "no end after 2 s", "said\n"],
        "killed": ["killed", None, "", ""],
        "no memory": ["raised", None, "MemoryError", ""],
    }


# --- the command ---------------------------------------------------------------------------------------------------


def test_an_unknown_trial_is_refused_with_the_choices():
    done = campaign.run("--only", "bank_kill")
    assert done.returncode == 1
    assert "bank_kill: no such trial. Choose from: bank_kills" in done.stderr


def test_every_promise_stands_in_the_security_policy():
    listed = dict(line.split(": ", 1) for line in campaign.run("--list").stdout.splitlines())
    assert set(FILES) <= listed.keys()
    policy = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert [promise for promise in listed.values() if promise not in policy] == []


def test_ctrl_c_prints_the_table_and_leaves_nothing(tmp_path):
    command = [sys.executable, str(campaign.COMMAND), "--minutes", "60", "--only", "bank_kills"]
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while running.poll() is None and not list(tmp_path.glob("trial-bank_kills-*/bank")):
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate()
    assert running.returncode == 130
    assert "bank_kills" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_short_campaign_against_files_finds_nothing(tmp_path):
    found = campaign.short(tmp_path, *FILES)
    assert [(one["trial"], one["failures"]) for one in found] == [(name, []) for name in FILES]
    assert all(one["tries"] for one in found)
