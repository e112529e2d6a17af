"""Claims about `adapterbank.studies.selection`: the choice is the one that a data frame of the same records gives."""

from __future__ import annotations

import random

import pandas
import pytest

from adapterbank.storage.records import config_hash
from adapterbank.studies.grid import make
from adapterbank.studies.selection import choose, score, setting

GRID = {"task": ["mr", "subj"], "lr": [1e-4, 3e-4, 1e-3], "epochs": [3, 20], "seeds": 5}


def record(config, dev, test=None, trained=100):
    metrics = {"dev": {"accuracy": dev, "macro_f1": 0.0}} | ({"test": {"accuracy": test}} if test is not None else {})
    whole = {**config.to_json(), "backbone_sha256": "b" * 64, "data": {"train": {"sha256": str(config.seed)}}}
    return {"config": whole, "task": {"metric": "accuracy"}, "metrics": metrics, "params": {"trained": trained}}


def made(seed=0, **changes):
    """Give a record for each run of a grid, with scores of no meaning."""
    draw = random.Random(seed)
    runs = make({**GRID, "size": [8, 64], **changes}).runs
    return [record(run, round(draw.random(), 6), draw.random(), run.size) for run in runs]


def frame(records):
    rows = [
        {**one["config"], "dev": score(one), "test": score(one, "test"), "trained": one["params"]["trained"]}
        for one in records
    ]
    return pandas.DataFrame(rows)


@pytest.mark.parametrize("per", [["task"], ["task", "size"], ["task", "method", "epochs"]])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_run_on_dev_over_grid_and_seeds_and_then_its_test_score(per, seed):
    records = made(seed)
    ordered = frame(records).sort_values(["dev", "trained", "seed"], ascending=[False, True, True])
    expected = ordered.groupby(per).first().reset_index()
    found = choose(records, per)
    assert len(found) == len(expected)
    for one in found:
        row = expected
        for name in per:
            row = row[row[name] == one.group[name]]
        assert (one.score(), one.score("test")) == (row["dev"].item(), row["test"].item())
        assert one.record["config"]["seed"] == row["seed"].item()


@pytest.mark.parametrize("seed", range(3))
def test_the_best_mean_over_seeds_with_its_standard_error(seed):
    records = made(seed)
    table = frame(records)
    means = table.groupby(["task", "size", "lr", "epochs"]).agg(
        dev=("dev", "mean"), test=("test", "mean"), sem=("test", "sem"), runs=("dev", "size")
    )
    for one in choose(records, by="mean"):
        best = means.loc[one.group["task"]]
        row = best.loc[best["dev"].idxmax()]
        assert one.mean() == pytest.approx(row["dev"])
        assert one.mean("test") == pytest.approx(row["test"])
        assert one.sem("test") == pytest.approx(row["sem"])
        assert len(one.runs) == row["runs"] == 5
        assert one.settings == len(best) == 12


def test_all_seeds_of_the_chosen_setting_are_given_in_order():
    for one in choose(made()):
        assert [mine["config"]["seed"] for mine in one.runs] == [0, 1, 2, 3, 4]
        assert {setting(mine) for mine in one.runs} == {setting(one.record)}
        assert one.score() == max(one.scores())


def test_failed_runs_and_runs_without_a_number_are_passed_over():
    good, bad, worst = (record(run, 0.5) for run in make({"task": "mr", "size": [2, 4, 8]}).runs)
    bad = {"config": bad["config"], "failure": "It diverged."}
    worst["metrics"]["dev"]["accuracy"] = float("nan")
    (one,) = choose([worst, bad, good])
    assert one.record == good
    assert choose([bad]) == []
    assert score(bad) is None
    assert score(good, "test") is None
    assert (one.mean("test"), one.sem("test"), one.sem()) == (None, None, None)


def test_of_equals_the_smaller_is_taken_and_then_the_lower_seed():
    runs = make({"task": "mr", "size": [64, 8], "seeds": [3, 1]}).runs
    (one,) = choose([record(run, 0.9, trained=run.size) for run in runs])
    assert (one.record["config"]["size"], one.record["config"]["seed"]) == (8, 1)


def test_the_same_run_twice_counts_once():
    records = made()
    assert [len(one.runs) for one in choose(records + records)] == [5, 5]


def test_the_order_of_records_does_not_matter():
    records = made()
    expected = {one.group["task"]: config_hash(one.record["config"]) for one in choose(records)}
    random.Random(1).shuffle(records)
    assert {one.group["task"]: config_hash(one.record["config"]) for one in choose(records)} == expected
    (short, *_) = (one.to_json() for one in choose(records) if one.group["task"] == "mr")
    assert (short["task"], short["seeds"], short["record"]) == ("mr", 5, expected["mr"])
