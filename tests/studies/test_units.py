"""Claims about `adapterbank.studies.units`: which runs train together."""

from __future__ import annotations

import pytest

from adapterbank.studies.grid import make
from adapterbank.studies.units import units
from small_data import FAST

TASKS = [{"task": name, "train": f"{name}.csv", "dev": f"{name}.csv"} for name in ("a", "b")]


def study(**options):
    """Return the runs of a grid of eight runs on two tasks."""
    return make({"task": TASKS, **FAST, "size": [4, 8], "seeds": 2, **options}).runs


def test_the_runs_of_a_unit_have_the_required_options_in_common():
    runs = study(dropout=[0.0, 0.1], max_length=[16, 32])
    found = units(runs)
    assert [len(unit) for unit in found] == [4] * 8
    assert [len(unit) for unit in units(runs, at_most=3)] == [3, 1] * 8
    assert {run for unit in found for run in unit} == set(runs)


@pytest.mark.parametrize(("at_most", "sizes"), [(64, [8, 8]), (6, [6, 2] * 2), (3, [2] * 8), (1, [2] * 8)])
def test_runs_that_differ_only_in_whether_they_average_are_in_one_unit(at_most, sizes):
    runs = study(average=[False, True])
    found = units(runs, at_most)
    assert [len(unit) for unit in found] == sizes
    assert sorted(map(repr, runs)) == sorted(repr(run) for unit in found for run in unit)
    for unit in found:
        plain, averaging = ({(run.task, run.size, run.seed) for run in unit if run.average == one} for one in (0, 1))
        assert plain == averaging
