"""Promise: on real data sets, columns, kinds, labels and counts are right without any option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapterbank.errors import DataError
from adapterbank.kinds.scoring import report as score_report
from adapterbank.tasks.columns import find_columns, infer_task
from adapterbank.tasks.examples import read_examples
from adapterbank.tasks.splitting import split
from adapterbank.tasks.tables import read_table
from real_data import DATA, MISSING

pytestmark = pytest.mark.data


def find(name: str) -> Path:
    """A file of the data folder, or a skip that names the remedy."""
    path = DATA / name
    if not path.exists():
        pytest.skip(MISSING)
    return path


@pytest.mark.parametrize(
    ("name", "text", "kind", "rows"),
    [
        ("cola", ("sentence",), "classification", 1043),
        ("sst2", ("sentence",), "classification", 872),
        ("mrpc", ("sentence1", "sentence2"), "classification", 408),
        ("stsb", ("sentence1", "sentence2"), "regression", 1500),
        ("clinc150", ("text",), "classification", 3000),
        ("agnews", ("text",), "classification", 600),
    ],
)
def test_a_dataset_is_read_without_options(name: str, text: tuple[str, ...], kind: str, rows: int) -> None:
    table = read_table(find(f"{name}/dev.parquet"))
    task = infer_task(table, find_columns(table), name=name)
    examples, report = read_examples(table, task)
    assert (task.text, task.kind, len(examples), report.empty) == (text, kind, rows, 0)
    train, dev = split(examples, task=task)
    assert len(train) + len(dev) == rows


def test_integer_labels_are_indices_into_the_stated_names() -> None:
    labels = json.loads(find("sst2/labels.json").read_text())
    table = read_table(find("sst2/dev.parquet"))
    task = infer_task(table, find_columns(table), name="sst2", labels=labels)
    examples, report = read_examples(table, task)
    assert task.labels == ("negative", "positive")
    assert examples.targets == table.columns["label"]
    assert "read as indices into: negative, positive" in report.notes[0]


def test_a_label_that_training_does_not_have_is_named() -> None:
    table = read_table(find("clinc150/dev.parquet"))
    task = infer_task(table, find_columns(table), name="clinc150")
    with pytest.raises(
        DataError, match=r"row 1: the label 'oos' is not one of the task's 150 labels .* 100 of 100 rows"
    ):
        read_examples(read_table(find("clinc150/oos_dev.parquet")), task)


def test_squad_answers_are_at_their_stated_positions() -> None:
    table = read_table(find("squad/dev-v1.1.json.gz"))
    task = infer_task(table, find_columns(table), name="squad")
    examples, report = read_examples(table, task)
    assert (task.kind, len(examples), report.notes) == ("span", 10570, [])
    assert examples.pairs is not None
    assert examples.targets is not None
    found = [context[start:end] for context, (start, end, _) in zip(examples.pairs, examples.targets, strict=True)]
    scores = score_report(task, found, examples.targets)
    assert (scores["exact_match"], scores["span_f1"]) == (1.0, 1.0)
