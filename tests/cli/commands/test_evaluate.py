"""`adapterbank evaluate`: the metrics of every kind of task, scores per label and the confusion matrix."""

from __future__ import annotations

import pytest

from adapterbank.storage.bank import Bank
from cli.invoke import run
from small_data import answers, pairs, scores, tags, write


def test_evaluate_prints_the_metrics_and_the_confusion_matrix(here):
    found = run("evaluate", "--task", "sentiment", "--data", "test.csv")
    scored = run("evaluate", "--task", "sentiment", "--data", "test.csv", "--json").json
    lines = found.out.splitlines()
    assert lines[0] == "sentiment@3 on 24 rows"
    low, high = (f"{end:.4f}" for end in scored["intervals"]["accuracy"])
    assert lines[1].split() == [
        *("accuracy", f"{scored['accuracy']:.4f}", "95", "%:", low, "to", high),
        *("(the", "task's", "metric)"),
    ]
    assert any(line.startswith(f"  macro_f1           {scored['macro_f1']:.4f}  ") for line in lines)
    assert ["label", "precision", "recall", "f1", "rows"] in [line.split() for line in lines]
    at = lines.index("confusion matrix (rows: true label, columns: predicted label)")
    assert lines[at + 1].split() == ["negative", "positive"]
    for line, label, counts in zip(lines[at + 2 :], ("negative", "positive"), scored["confusion"], strict=True):
        assert line.split() == [label, *map(str, counts)]
    assert sum(map(sum, scored["confusion"])) == scored["rows"] == 24


def test_evaluate_prints_how_reliable_the_probabilities_are(here):
    lines = run("evaluate", "--task", "sentiment", "--data", "test.csv", "--confidence").out.splitlines()
    scored = run("evaluate", "--task", "sentiment", "--data", "test.csv", "--json").json
    assert f"  calibration_error  {scored['calibration_error']:.4f}" in lines
    at = lines.index("reliability (by the top probability)")
    assert lines[at + 1].split() == ["probability", "rows", "mean", "right"]
    for line, one in zip(lines[at + 2 :], scored["reliability"], strict=False):
        assert line.split()[3:] == [str(one["rows"]), f"{one['confidence']:.3f}", f"{one['accuracy']:.3f}"]
    at = lines.index("coverage (answers with --abstain, and how many are right)")
    for line, one in zip(lines[at + 2 :], scored["coverage"], strict=True):
        assert line.split()[-2:] == [f"{one['abstain']:.3f}", f"{one['accuracy']:.4f}"]
    assert scored["coverage"][0]["accuracy"] == pytest.approx(scored["accuracy"])


def test_a_task_without_probabilities_has_intervals_alone(here):
    file = write(here / "data.jsonl", scores())
    found = run("evaluate", "--task", "score", "--data", file, "--json").json
    assert set(found["intervals"]) == {"pearson", "spearman"}
    assert not {"calibration_error", "reliability", "coverage"} & set(found)


@pytest.mark.parametrize(
    ("task", "rows", "columns", "names"),
    [
        ("score", scores(), ("text", "label"), {"pearson", "spearman"}),
        ("pair", pairs(), ("text", "text_pair", "label"), {"accuracy", "macro_f1", "confusion"}),
        ("tags", [list(row.values()) for row in tags()], ("text", "labels"), {"micro_f1", "subset_accuracy"}),
        ("span", [list(row.values()) for row in answers()], ("question", "context", "answer"), {"span_f1"}),
    ],
)
def test_evaluate_scores_every_kind_with_its_own_metrics(here, task, rows, columns, names):
    file = write(here / "data.jsonl", rows, columns)
    found = run("evaluate", "--task", task, "--data", file, "--json").json
    assert names <= set(found)
    assert found[found["metric"]] == Bank.open("bank").get(task).manifest.metrics["dev"][found["metric"]]
    assert f"{found['metric']} " in run("evaluate", "--task", task, "--data", file).out
