"""Claims about `adapterbank sweep`: what it lists, draws, says at the end, and refuses."""

from __future__ import annotations

import json
import re

import pytest

from adapterbank.cli import live_table
from adapterbank.cli.live_table import LiveTable
from adapterbank.storage import records
from adapterbank.studies.grid import make
from adapterbank.studies.progress import RunEvent, SweepProgress
from small_data import FAST, reviews, shell, write

STUDY = {"task": "a", "train": "a.csv", "dev": "a.csv", **FAST, "size": [4, 8], "seeds": 2}


@pytest.fixture
def here(tmp_path, monkeypatch, checkpoint):
    write(tmp_path / "a.csv", reviews())
    study(tmp_path, backbone=str(checkpoint("bert")[0]), device="cpu")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def study(folder, **changes):
    path = folder / "study.yaml"
    known = json.loads(path.read_text()) if path.exists() else STUDY
    path.write_text(json.dumps({**known, **changes}))


def test_a_dry_run_lists_the_runs_and_which_have_records(here):
    found = shell("sweep", "study.yaml", "--bank", "bank", "--dry-run")
    assert found.code == 0
    assert found.out.splitlines()[1] == "to run  a adapter size 4 lr 0.01 epochs 2 seed 0"
    assert found.out.splitlines()[-1] == "4 runs: 0 done, 0 failed, 4 to run"
    assert not (here / "bank").exists()
    assert shell("sweep", "study.yaml", "--bank", "bank", "--limit-runs", 1).code == 0
    study(here, layers=["all", "9"])
    assert shell("sweep", "study.yaml", "--bank", "bank", "--limit-runs", 6).code == 1
    study(here, seeds=3)
    found = shell("sweep", "study.yaml", "--bank", "bank", "--dry-run")
    assert re.fullmatch(r"12 runs: \d done, [1-4] failed, 5 to run", found.out.splitlines()[-1])


def test_a_dry_run_counts_a_run_as_done_that_failed_before_its_data_were_there(here):
    (here / "a.csv").rename(here / "b.csv")
    assert "4 failed" in shell("sweep", "study.yaml", "--bank", "bank").out
    (here / "b.csv").rename(here / "a.csv")
    assert "4 done" in shell("sweep", "study.yaml", "--bank", "bank").out
    found = shell("sweep", "study.yaml", "--bank", "bank", "--dry-run")
    assert found.out.splitlines()[-1] == "4 runs: 4 done, 0 failed, 0 to run"


def test_each_run_that_ends_is_a_line_and_the_end_is_a_sum(here):
    study(here, select={"per": ["task"], "seeds": 3})
    found = shell("sweep", "study.yaml", "--bank", "bank")
    assert found.code == 0
    assert found.out.splitlines()[0].split() == ["block", "task", "chosen", "dev", "test"]
    assert re.search(r"block 1  a +a adapter size \d lr 0.01 .* [01]\.\d{4} ± 0\.\d{4} \(3\) +-", found.out)
    assert found.out.splitlines()[-1] == "5 runs: 0 had records, 5 done, 0 failed, 0 left"
    lines = found.err.splitlines()
    assert len(lines) == 5
    assert re.fullmatch(r"1/4 a adapter size \d lr 0\.01 epochs 2 seed \d: dev [01]\.\d{4} \(\d+ s left\)", lines[0])


def test_json_is_the_outcome_and_nothing_else(here):
    study(here, layers=["all", "9"], select={"per": ["task"]})
    found = shell("sweep", "study.yaml", "--records", "mine", "--json")
    assert (found.code, found.err) == (1, "")
    assert {name: found.json[name] for name in ("total", "done", "failed", "left", "known")} == {
        "total": 8, "done": 4, "failed": 4, "left": 0, "known": 0
    }  # fmt: skip
    assert "layers is '9'" in found.json["failures"][0]["failure"]
    assert found.json["chosen"][0]["task"] == "a"
    assert len(records.read_all(here / "mine")) == 8
    assert not (here / "bank").exists()


def test_failures_are_told_each_time_with_exit_1_and_are_recorded(here):
    study(here, layers="9")
    for counts in ("0 had records, 0 done, 4 failed", "4 had records (4 of a failure; --retry-failed"):
        found = shell("sweep", "study.yaml", "--bank", "bank")
        assert found.code == 1
        assert f"4 runs: {counts}" in found.out
        assert len(records.read_all(here / "bank" / "records")) == 4
        told = found.err.splitlines()[-1]
        assert told.startswith("failed: a adapter size 8 lr 0.01 epochs 2 seed 1: layers is '9', but")


def test_stopped_before_the_first_run_has_begun_all_are_left(here, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("adapterbank.studies.sweep.load", stop)
    found = shell("sweep", "study.yaml", "--bank", "bank")
    assert found.code == 130
    assert "stopped; 0 done, 0 running, 0 failed, 4 left." in found.err


def test_the_best_goes_into_the_bank_when_asked(here):
    assert shell("sweep", "study.yaml", "--bank", "bank", "--keep", "best").code == 0
    assert [task["name"] for task in shell("tasks", "--bank", "bank", "--json").json] == ["a"]
    assert shell("audit", "--bank", "bank").code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["study.yaml"], "Give --bank, or --records"),
        (["none.yaml", "--bank", "bank"], "There is no file none.yaml"),
        (["study.yaml", "--bank", "bank", "--keep", "some"], "keep is 'some'; it must be one of none, best, all"),
        (["study.yaml", "--records", "r", "--keep", "all"], "A sweep needs a bank"),
        (["study.yaml", "--bank", "bank", "--engine", "spark"], "engine is 'spark'; it must be one of local, ray"),
        (["study.yaml", "--bank", "bank", "--precision", "fp8"], "precision is 'fp8'"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_2(here, words, said):
    found = shell("sweep", *words)
    assert (found.code, found.out, len(found.err.splitlines())) == (2, "", 1)
    assert said in found.err


# --- the table ----------------------------------------------------------------------------------------------


def test_the_live_table_has_all_that_one_waits_for(monkeypatch):
    monkeypatch.setattr(live_table.sys.stderr, "isatty", lambda: True, raising=False)
    runs = make({**STUDY, "select": None}).runs
    drawn = LiveTable(runs)
    tally = SweepProgress(total=4)
    tally.update(RunEvent(runs[0], "running", 0.5))
    tally.update(RunEvent(runs[1], "done", score=0.75))
    tally.update(RunEvent(runs[2], "failed", failure="It diverged."))
    drawn._console.width = 120
    with drawn:
        drawn.watch(tally)
        with drawn._console.capture() as captured:
            drawn._console.print(drawn._table(tally))
    text = captured.get()
    assert "1 done, 1 running, 1 failed, 1 left, of 4;" in text
    assert "0.7500" in text
    assert "50 %" in text
    assert tally.seconds_left() is not None


@pytest.mark.parametrize(("seconds", "said"), [(None, "unknown time"), (5, "5 s"), (600, "10 min"), (7200, "2.0 h")])
def test_time_left_is_told_for_people(seconds, said):
    assert live_table._time(seconds) == said


def test_time_left_is_of_the_runs_that_are_to_be_run(monkeypatch):
    monkeypatch.setattr("adapterbank.studies.progress.time.perf_counter", lambda: 10.0)
    runs = make({**STUDY, "seeds": 4}).runs
    tally = SweepProgress(
        total=100, new=8, began=0.0
    )  # the other 92 have records, and some of those were not come to yet
    for run in runs[:4]:
        tally.update(RunEvent(run, "done", score=0.5))
    assert tally.seconds_left() == 10.0
    for run in runs:
        tally.update(RunEvent(run, "done", score=0.5))
    assert tally.seconds_left() == 0.0
