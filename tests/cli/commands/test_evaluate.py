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
    assert lines[1].split() == ["accuracy", f"{scored['accuracy']:.4f}", "(the", "task's", "metric)"]
    assert f"  macro_f1         {scored['macro_f1']:.4f}" in lines
    assert ["label", "precision", "recall", "f1", "rows"] in [line.split() for line in lines]
    at = lines.index("confusion matrix (rows: true label, columns: predicted label)")
    assert lines[at + 1].split() == ["negative", "positive"]
    for line, label, counts in zip(lines[at + 2 :], ("negative", "positive"), scored["confusion"], strict=True):
        assert line.split() == [label, *map(str, counts)]
    assert sum(map(sum, scored["confusion"])) == scored["rows"] == 24


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
