"""What a way to train gains over plain runs: by hand, and as a drawing."""

from __future__ import annotations

import pytest
from made import record, write

from adapterbank.analysis import figures
from adapterbank.analysis.run_table import load
from adapterbank.analysis.ways import ways

SCORES = {  # task, options -> the score of seeds 0, 1, …, in hundredths
    ("glue-rte", ()): (60, 62, 70),
    ("glue-rte", (("size", 8),)): (50, 50),
    ("glue-rte", (("mix", 4),)): (61, 65),
    ("glue-rte", (("size", 8), ("average", True))): (51, 52),
    ("glue-rte", (("sigma", 0.1),)): (90, 90),
    ("glue-cola", ()): (30, 30),
    ("glue-cola", (("mix", 4),)): (28, 30),
    ("glue-cola", (("size", "64to32"),)): (31, 31),
    ("glue-cola", (("method", "fusion"), ("fuse", "mnli,sst2"))): (33, 35),
    ("glue-sst2", (("mix", 4),)): (99, 99),
}


@pytest.fixture
def study(tmp_path):
    made = [
        record(task, dev=score / 100, seed=seed, trained=9, **dict(options))
        for (task, options), scores in SCORES.items()
        for seed, score in enumerate(scores)
    ]
    return load([write(tmp_path / "records", *made)])


def test_each_way_is_compared_with_plain_runs_of_its_size_and_seed(study):
    found = {(line["way"], line["task"]): line for line in ways(study)}
    assert {key: round(line["difference"], 6) for key, line in found.items()} == {
        ("adapter 64, mix 4", "glue-rte"): (1 + 3) / 2,
        ("adapter 64, mix 4", "glue-cola"): (-2 + 0) / 2,
        ("adapter 64, mix 4", ""): 0.5,
        ("adapter 8, average", "glue-rte"): 1.5,
        ("adapter 8, average", ""): 1.5,
        ("adapter 64to32", "glue-cola"): 1.0,
        ("adapter 64to32", ""): 1.0,
        ("fusion 8, fuse mnli,sst2", "glue-cola"): 4.0,
        ("fusion 8, fuse mnli,sst2", ""): 4.0,
    }
    assert found["adapter 64, mix 4", ""]["sem"] == pytest.approx((1 + 1) ** 0.5 / 2)  # variances 2 and 2, two seeds
    assert found["adapter 64, mix 4", ""]["pairs"] == 4


def test_the_drawing_has_a_point_for_each_task_and_one_for_all(study):
    pytest.importorskip("matplotlib")
    (drawing,) = [one for one in figures.draw_all(study) if one.name == "ways"]
    (axis,) = drawing.figure.axes
    assert [tick.get_text() for tick in axis.get_yticklabels()] == [
        "adapter 64, mix 4", "adapter 64to32", "adapter 8, average", "fusion 8, fuse mnli,sst2",
    ]  # fmt: skip
    small = [line.get_xdata() for line in axis.get_lines() if line.get_marker() == "."]
    assert [sorted(round(x, 6) for x in points) for points in small] == [[-1.0, 2.0], [1.0], [1.5], [4.0]]
    large = [line.get_xdata() for line in axis.get_lines() if line.get_marker() == "D"]
    assert [round(float(points[0]), 6) for points in large] == [0.5, 1.0, 1.5, 4.0]


def test_without_such_runs_there_is_no_drawing(tmp_path):
    study = load([write(tmp_path / "records", record("glue-rte"), record("glue-rte", sigma=0.1))])
    assert ways(study) == []


def test_all_tasks_are_in_one_panel_so_that_none_is_left_out(tmp_path):
    pytest.importorskip("matplotlib")
    tasks = ("rte", "cola", "sst2", "mrpc", "stsb", "qqp", "qnli")
    made = [record(f"glue-{task}", dev=0.5, trained=9, **way) for task in tasks for way in ({}, {"mix": 4})]
    found = {one.name: one.caption for one in figures.draw_all(load([write(tmp_path / "many", *made)]))}
    assert "tasks are drawn" not in found["ways"]
    assert "6 of 7 tasks are drawn" in found["curves"]
