"""The live table of a sweep: counts, best scores, running runs and the time left."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from adapterbank.cli.console import format_duration
from adapterbank.cli.live_table import LiveTable
from adapterbank.studies.grid import make
from adapterbank.studies.progress import RunEvent, SweepProgress
from small_data import FAST

STUDY = {"task": "a", "train": "a.csv", "dev": "a.csv", **FAST, "size": [4, 8], "seeds": 2}


class Terminal(io.StringIO):
    """A terminal that keeps what is printed."""

    def isatty(self) -> bool:
        return True


def test_the_live_table_shows_counts_best_scores_and_running_runs():
    terminal, runs = Terminal(), make({**STUDY, "select": None}).runs
    progress = SweepProgress(total=4)
    progress.update(RunEvent(runs[0], "running", 0.5))
    progress.update(RunEvent(runs[1], "done", score=0.75))
    progress.update(RunEvent(runs[2], "failed", failure="It diverged."))
    with LiveTable(runs, console=Console(file=terminal, force_terminal=True, width=120)) as table:
        table.watch(progress)
    text = terminal.getvalue()
    assert "1 done, 1 running, 1 failed, 1 left, of 4;" in text
    assert "0.7500" in text
    assert "50 %" in text
    assert progress.seconds_left() is not None


def test_without_a_terminal_each_finished_run_is_a_line():
    file, runs = io.StringIO(), make(STUDY).runs
    progress = SweepProgress(total=4)
    with LiveTable(runs, console=Console(file=file, width=40)) as table:
        for event in (RunEvent(runs[0], "running", 0.5), RunEvent(runs[0], "done", score=0.75)):
            progress.update(event)
            table.watch(progress)
    (line,) = file.getvalue().splitlines()
    assert line.startswith("1/4 a adapter size 4 lr 0.01 epochs 2 seed 0: dev 0.7500 (")


@pytest.mark.parametrize(("seconds", "text"), [(None, "unknown time"), (5, "5 s"), (600, "10 min"), (7200, "2.0 h")])
def test_durations_have_a_readable_unit(seconds, text):
    assert format_duration(seconds) == text


def test_the_time_left_counts_only_runs_that_are_still_to_run(monkeypatch):
    monkeypatch.setattr("adapterbank.studies.progress.time.perf_counter", lambda: 10.0)
    runs = make({**STUDY, "seeds": 4}).runs
    progress = SweepProgress(total=100, new=8, began=0.0)  # the other 92 have records, some not yet looked at
    for run in runs[:4]:
        progress.update(RunEvent(run, "done", score=0.5))
    assert progress.seconds_left() == 10.0
    for run in runs:
        progress.update(RunEvent(run, "done", score=0.5))
    assert progress.seconds_left() == 0.0
