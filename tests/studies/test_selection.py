"""Claims about `adapterbank.studies.selection`: the choice is that of a data frame of the same records."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pandas
import pytest

from adapterbank.errors import ConfigError
from adapterbank.storage.records import config_hash, write
from adapterbank.studies.grid import make
from adapterbank.studies.selection import RULES, choose, mean, score, setting

GRID = {"task": ["mr", "subj"], "lr": [1e-4, 3e-4, 1e-3], "epochs": [3, 20], "seeds": 5}


def record(config, dev, test=None, trained=100):
    metrics = {"dev": {"accuracy": dev, "macro_f1": 0.0}} | ({"test": {"accuracy": test}} if test is not None else {})
    whole = {**config.to_json(), "backbone_sha256": "b" * 64, "data": {"train": {"sha256": str(config.seed)}}}
    return {"config": whole, "task": {"metric": "accuracy"}, "metrics": metrics, "params": {"trained": trained}}


def made(seed=0, **changes):
    """Return a record with random scores for each run of a grid."""
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
def test_the_best_run_on_dev_over_grid_and_seeds_is_chosen_with_its_test_score(per, seed):
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
def test_the_best_mean_over_seeds_has_its_standard_error(seed):
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


def test_all_seeds_of_the_chosen_setting_are_listed_in_order():
    for one in choose(made()):
        assert [mine["config"]["seed"] for mine in one.runs] == [0, 1, 2, 3, 4]
        assert {setting(mine) for mine in one.runs} == {setting(one.record)}
        assert one.score() == max(one.scores())


def test_failed_runs_and_runs_without_a_score_are_ignored():
    good, bad, worst = (record(run, 0.5) for run in make({"task": "mr", "size": [2, 4, 8]}).runs)
    bad = {"config": bad["config"], "failure": "It diverged."}
    worst["metrics"]["dev"]["accuracy"] = float("nan")
    (one,) = choose([worst, bad, good])
    assert one.record == good
    assert choose([bad]) == []
    assert score(bad) is None
    assert score(good, "test") is None
    assert (one.mean("test"), one.sem("test"), one.sem()) == (None, None, None)


def test_between_equal_runs_the_smaller_is_chosen_and_then_the_lower_seed():
    runs = make({"task": "mr", "size": [64, 8], "seeds": [3, 1]}).runs
    (one,) = choose([record(run, 0.9, trained=run.size) for run in runs])
    assert (one.record["config"]["size"], one.record["config"]["seed"]) == (8, 1)


def test_among_the_settings_with_the_most_seeds_the_best_mean_is_chosen():
    scores = {(4, 0): 0.99, (8, 0): 0.5, (8, 1): 0.7, (16, 0): 0.6, (16, 1): 0.55}
    runs = make({"task": "mr", "size": [4, 8, 16], "seeds": 2}).runs
    found = [record(run, scores[run.size, run.seed]) for run in runs if (run.size, run.seed) in scores]
    chosen = {by: choose(found, by=by)[0].record["config"]["size"] for by in RULES}
    assert chosen == {"best": 4, "mean": 4, "repeated": 8}


def test_an_unknown_rule_is_reported_with_the_choices():
    with pytest.raises(ConfigError, match="by is 'luck'; it must be one of best, mean, repeated"):
        choose(made(), by="luck")


def test_runs_of_one_setting_differ_in_seed_and_place_only():
    (run,) = make({"task": "mr"}).runs
    same = {"seed": 3, "device": "cuda", "data_root": "elsewhere", "backbone": "models/minilm"}
    for name, value in same.items():
        assert setting(record(replace(run, **{name: value}), 0.5)) == setting(record(run, 0.5)), name
    for name, value in {"precision": "bf16", "lr": 0.1, "limit": 7, "size": 3}.items():
        assert setting(record(replace(run, **{name: value}), 0.5)) != setting(record(run, 0.5)), name
    other = record(run, 0.5)
    other["config"]["backbone_sha256"] = "c" * 64
    assert setting(other) != setting(record(run, 0.5))


def test_the_mean_has_its_standard_error():
    found = mean([1.0, 2.0, None, 4.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.sem == pytest.approx(math.sqrt(7 / 3) / math.sqrt(3))
    assert found.seeds == 3
    assert mean([1.0]).sem is None


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


def test_the_python_example_of_the_documentation_works(tmp_path, monkeypatch, capsys):
    for one in made():
        write(tmp_path / "bank" / "records", one)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "choose_settings" in code)
    exec(code, {})
    assert len(capsys.readouterr().out.splitlines()) == 2
