"""`adapterbank sweep`: what it lists, prints per run and at the end, and rejects."""

from __future__ import annotations

import json
import re

import pytest

from adapterbank.storage import records
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


def test_a_dry_run_counts_a_run_as_done_that_failed_while_its_data_was_missing(here):
    (here / "a.csv").rename(here / "b.csv")
    assert "4 failed" in shell("sweep", "study.yaml", "--bank", "bank").out
    (here / "b.csv").rename(here / "a.csv")
    assert "4 done" in shell("sweep", "study.yaml", "--bank", "bank").out
    found = shell("sweep", "study.yaml", "--bank", "bank", "--dry-run")
    assert found.out.splitlines()[-1] == "4 runs: 4 done, 0 failed, 0 to run"


def test_each_finished_run_prints_a_line_and_the_end_a_summary(here):
    study(here, select={"per": ["task"], "seeds": 3})
    found = shell("sweep", "study.yaml", "--bank", "bank")
    assert found.code == 0
    assert found.out.splitlines()[0].split() == ["block", "task", "selected", "dev", "test"]
    assert re.search(r"block 1  a +a adapter size \d lr 0.01 .* [01]\.\d{4} ± 0\.\d{4} \(3\) +-", found.out)
    assert found.out.splitlines()[-1] == "5 runs: 0 had records, 5 done, 0 failed, 0 left"
    lines = [line for line in found.err.splitlines() if re.match(r"\d/\d ", line)]  # without the runs' notes
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


def test_failures_are_recorded_and_reported_each_time_with_exit_status_1(here):
    study(here, layers="9")
    for counts in ("0 had records, 0 done, 4 failed", "4 had records (4 of them failed; repeat with --retry-failed"):
        found = shell("sweep", "study.yaml", "--bank", "bank")
        assert found.code == 1
        assert f"4 runs: {counts}" in found.out
        assert len(records.read_all(here / "bank" / "records")) == 4
        last = found.err.splitlines()[-1]
        assert last.startswith("failed: a adapter size 8 lr 0.01 epochs 2 seed 1: layers is '9', but")


def test_a_sweep_stopped_before_the_first_run_has_all_runs_left(here, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("adapterbank.studies.sweep.load", stop)
    found = shell("sweep", "study.yaml", "--bank", "bank")
    assert found.code == 130
    assert "stopped; 0 done, 0 running, 0 failed, 4 left." in found.err


def test_keep_best_stores_the_best_package(here):
    assert shell("sweep", "study.yaml", "--bank", "bank", "--keep", "best").code == 0
    assert [task["name"] for task in shell("tasks", "--bank", "bank", "--json").json] == ["a"]
    assert shell("audit", "--bank", "bank").code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["study.yaml"], "give --bank, or --records"),
        (["none.yaml", "--bank", "bank"], "There is no file none.yaml"),
        (["study.yaml", "--bank", "bank", "--keep", "some"], "keep is 'some'; it must be one of none, best, all"),
        (["study.yaml", "--records", "r", "--keep", "all"], "A sweep needs a bank"),
        (["study.yaml", "--bank", "bank", "--engine", "spark"], "engine is 'spark'; it must be one of local, ray"),
        (["study.yaml", "--bank", "bank", "--precision", "fp8"], "precision is 'fp8'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(here, words, message):
    found = shell("sweep", *words)
    assert (found.code, found.out, len(found.err.splitlines())) == (2, "", 1)
    assert message in found.err


def test_the_notes_of_runs_are_printed_once_with_their_runs_also_for_runs_that_had_records(here):
    study(here, dev=None, seeds=1)
    first, again = (shell("sweep", "study.yaml", "--bank", "bank") for _ in range(2))
    for found in (first, again):
        (line,) = [line for line in found.err.splitlines() if "No dev data" in line]
        assert line.startswith("note: a adapter size 4")
        assert " and 1 more: No dev data given: 2 of 24 training rows are held out for it." in line
    notes = shell("sweep", "study.yaml", "--bank", "bank", "--json").json["notes"]
    assert {"note": "No dev data given: 2 of 24 training rows are held out for it.", "runs": 2} in notes
